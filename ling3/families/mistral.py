"""Mistral 7B (`MistralForCausalLM`): Llama's tree, with attention to a sliding window in every layer."""

import dataclasses
from typing import Any

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.config_fields import field, read
from ling3.families.family import Family
from ling3.families.transformer import ONLY, TransformerConfig, attention, build, published_name, swiglu, tied_copy
from ling3.layers.gqa import GQA
from ling3.model import CausalLM


@dataclasses.dataclass(frozen=True)
class MistralConfig(TransformerConfig):
    """Mistral's fields (Jiang et al., arXiv 2310.06825, §2). Raises ConfigError."""

    sliding_window: int | None = field(ge=1)
    """A token attends to itself and the sliding_window - 1 tokens before it; None: to all of them."""

    @staticmethod
    def from_dict(raw: object, source: str = "config.json") -> "MistralConfig":
        """The config in the JSON object `raw`, every field of which is accounted for; `source` is for errors."""
        return read(MistralConfig, raw, source, only=ONLY)

    def to_dict(self) -> dict[str, Any]:
        """The published `config.json`."""
        return self.written("MistralForCausalLM", "mistral", ONLY)


def init(config: MistralConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, and norms 1."""
    options = attention(config, window=config.sliding_window)
    return build(
        config,
        lambda _, own: GQA.init(options, key=own, dtype=dtype),
        lambda _, own: swiglu(config, own, dtype),
        key=key,
        dtype=dtype,
    )


FAMILY = Family(
    name="Mistral",
    architectures=("MistralForCausalLM",),
    model_types=("mistral",),
    config=MistralConfig,
    read=MistralConfig.from_dict,
    init=init,
    published=published_name,
    copies=tied_copy,
)
