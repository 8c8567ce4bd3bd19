"""Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): Llama's module tree, always with biases of queries, keys and values."""

import dataclasses

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.gguf import GROUPED, GgufArchitecture, transformer_fields
from ling3.families.transformer import WindowedConfig, build, dense_mlp, family, gqa_config
from ling3.layers.gqa import GQA
from ling3.model import CausalLM


@dataclasses.dataclass(frozen=True)
class Qwen2Config(WindowedConfig):
    """The fields of a Qwen2 config (Qwen Team, arXiv 2407.10671, §2.2). Raises ConfigError."""

    architecture = "Qwen2ForCausalLM"
    model_type = "qwen2"


def init(config: Qwen2Config, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, biases 0."""
    return build(
        config,
        lambda i, own: GQA.init(gqa_config(config, window=config.window(i), bias=True), key=own, dtype=dtype),
        lambda _, own: dense_mlp(config, own, dtype),
        key=key,
        dtype=dtype,
    )


GGUF = GgufArchitecture("qwen2", GROUPED, transformer_fields)
FAMILY = family("Qwen2", Qwen2Config, init, GGUF)
