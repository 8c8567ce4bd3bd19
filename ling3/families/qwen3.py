"""Qwen3 (`Qwen3ForCausalLM`): no biases, but norms of queries and keys, and heads of a size of their own."""

import dataclasses
from typing import Any

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.config_fields import field, read
from ling3.families.family import Family
from ling3.families.transformer import (
    ONLY,
    WINDOWED,
    WindowedConfig,
    attention,
    build,
    published_name,
    swiglu,
    tied_copy,
)
from ling3.layers.gqa import GQA
from ling3.model import CausalLM


@dataclasses.dataclass(frozen=True)
class Qwen3Fields(WindowedConfig):
    """The fields of Qwen3's attention (Qwen Team, arXiv 2505.09388, §2)."""

    attention_bias: bool = field(absent=False)
    """Biases of all four projections of attention."""

    def mixer(self, layer: int, *, key: PRNGKeyArray, dtype: DTypeLike) -> GQA:
        """The attention of 0-based `layer`, with random weights."""
        biases = {"bias": self.attention_bias, "output_bias": self.attention_bias}
        options = attention(self, window=self.window(layer), norm_eps=self.rms_norm_eps, **biases)
        return GQA.init(options, key=key, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Qwen3Config(Qwen3Fields):
    """A dense Qwen3's config. Raises ConfigError."""

    @staticmethod
    def from_dict(raw: object, source: str = "config.json") -> "Qwen3Config":
        """The config in the JSON object `raw`, every field of which is accounted for; `source` is for errors."""
        return read(Qwen3Config, raw, source, only=ONLY, derived=WINDOWED)

    def to_dict(self) -> dict[str, Any]:
        """The published `config.json`."""
        return self.written("Qwen3ForCausalLM", "qwen3", ONLY)


def init(config: Qwen3Config, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, biases 0."""
    return build(
        config,
        lambda i, own: config.mixer(i, key=own, dtype=dtype),
        lambda _, own: swiglu(config, own, dtype),
        key=key,
        dtype=dtype,
    )


FAMILY = Family(
    name="Qwen3",
    architectures=("Qwen3ForCausalLM",),
    model_types=("qwen3",),
    config=Qwen3Config,
    read=Qwen3Config.from_dict,
    init=init,
    published=published_name,
    copies=tied_copy,
)
