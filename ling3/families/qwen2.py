"""Qwen2 and Qwen2.5 (`Qwen2ForCausalLM`): Llama's tree, with biases of queries, keys and values that no field names."""

import dataclasses
from typing import Any

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.config_fields import read
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
class Qwen2Config(WindowedConfig):
    """Qwen2's fields (Qwen Team, arXiv 2407.10671, §2.2). Raises ConfigError."""

    @staticmethod
    def from_dict(raw: object, source: str = "config.json") -> "Qwen2Config":
        """The config in the JSON object `raw`, every field of which is accounted for; `source` is for errors."""
        return read(Qwen2Config, raw, source, only=ONLY, derived=WINDOWED)

    def to_dict(self) -> dict[str, Any]:
        """The published `config.json`."""
        return self.written("Qwen2ForCausalLM", "qwen2", ONLY)


def init(config: Qwen2Config, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, biases 0."""
    return build(
        config,
        lambda i, own: GQA.init(attention(config, window=config.window(i), bias=True), key=own, dtype=dtype),
        lambda _, own: swiglu(config, own, dtype),
        key=key,
        dtype=dtype,
    )


FAMILY = Family(
    name="Qwen2",
    architectures=("Qwen2ForCausalLM",),
    model_types=("qwen2",),
    config=Qwen2Config,
    read=Qwen2Config.from_dict,
    init=init,
    published=published_name,
    copies=tied_copy,
)
