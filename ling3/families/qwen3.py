"""Qwen3 (`Qwen3ForCausalLM`): no biases, but norms of queries and keys, and a head size set by the config."""

import dataclasses

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.config_fields import Only, field
from ling3.families.gguf import GROUPED, GgufArchitecture, transformer_fields
from ling3.families.transformer import ONLY, WindowedConfig, build, dense_mlp, family, gqa_config
from ling3.layers.gqa import GQA
from ling3.model import CausalLM


@dataclasses.dataclass(frozen=True)
class Qwen3Fields(WindowedConfig):
    """The fields of Qwen3's attention (Qwen Team, arXiv 2505.09388, §2)."""

    only = ONLY | {"use_qk_norm": Only((True, None), "queries and keys have norms")}

    attention_bias: bool = field(absent=False)
    """True if all four projections of attention have biases."""

    def mixer(self, layer: int, *, key: PRNGKeyArray, dtype: DTypeLike) -> GQA:
        """The attention of 0-based `layer`, with random weights."""
        biases = {"bias": self.attention_bias, "output_bias": self.attention_bias}
        options = gqa_config(self, window=self.window(layer), norm_eps=self.rms_norm_eps, **biases)
        return GQA.init(options, key=key, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Qwen3Fields):
    """The config of a dense Qwen3. Raises ConfigError."""

    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"


def init(config: Qwen3Config, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, biases 0."""
    return build(
        config,
        lambda i, own: config.mixer(i, key=own, dtype=dtype),
        lambda _, own: dense_mlp(config, own, dtype),
        key=key,
        dtype=dtype,
    )


GGUF = GgufArchitecture("qwen3", GROUPED, transformer_fields)
FAMILY = family("Qwen3", Qwen3Config, init, GGUF)
