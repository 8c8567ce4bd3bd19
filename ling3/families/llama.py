"""Llama 2, 3, 3.1 and 3.2, and Yi (`LlamaForCausalLM`): grouped-query attention and SwiGLU."""

import dataclasses
from typing import Any

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.config_fields import field, read
from ling3.families.family import Family
from ling3.families.transformer import ONLY, TransformerConfig, attention, build, published_name, swiglu, tied_copy
from ling3.layers.gqa import GQA
from ling3.model import CausalLM


@dataclasses.dataclass(frozen=True)
class LlamaConfig(TransformerConfig):
    """Llama's fields (Grattafiori et al., arXiv 2407.21783, §3.2). Raises ConfigError."""

    attention_bias: bool = field(absent=False)
    """Biases of all four projections of attention."""
    mlp_bias: bool = field(absent=False)

    @staticmethod
    def from_dict(raw: object, source: str = "config.json") -> "LlamaConfig":
        """The config in the JSON object `raw`, every field of which is accounted for; `source` is for errors."""
        return read(LlamaConfig, raw, source, only=ONLY)

    def to_dict(self) -> dict[str, Any]:
        """The published `config.json`."""
        return self.written("LlamaForCausalLM", "llama", ONLY)


def init(config: LlamaConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, biases 0."""
    options = attention(config, bias=config.attention_bias, output_bias=config.attention_bias)
    return build(
        config,
        lambda _, own: GQA.init(options, key=own, dtype=dtype),
        lambda _, own: swiglu(config, own, dtype, config.mlp_bias),
        key=key,
        dtype=dtype,
    )


FAMILY = Family(
    name="Llama",
    architectures=("LlamaForCausalLM",),
    model_types=("llama",),
    config=LlamaConfig,
    read=LlamaConfig.from_dict,
    init=init,
    published=published_name,
    copies=tied_copy,
)
