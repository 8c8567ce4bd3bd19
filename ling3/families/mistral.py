"""Mistral 7B (`MistralForCausalLM`): Llama's module tree, with sliding-window attention in every layer."""

import dataclasses

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.config_fields import field
from ling3.families.transformer import TransformerConfig, build, dense_mlp, family, gqa_config
from ling3.layers.gqa import GQA
from ling3.model import CausalLM


@dataclasses.dataclass(frozen=True)
class MistralConfig(TransformerConfig):
    """The fields of a Mistral config (Jiang et al., arXiv 2310.06825, §2). Raises ConfigError."""

    architecture = "MistralForCausalLM"
    model_type = "mistral"

    sliding_window: int | None = field(ge=1)
    """A token attends to itself and the sliding_window - 1 tokens before it; None means all tokens before it."""


def init(config: MistralConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, and norms 1."""
    options = gqa_config(config, window=config.sliding_window)
    return build(
        config,
        lambda _, own: GQA.init(options, key=own, dtype=dtype),
        lambda _, own: dense_mlp(config, own, dtype),
        key=key,
        dtype=dtype,
    )


FAMILY = family("Mistral", MistralConfig, init)
