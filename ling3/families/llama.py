"""Llama 2, 3, 3.1 and 3.2, and Yi (`LlamaForCausalLM`): grouped-query attention and SwiGLU."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.config_fields import field
from ling3.families.gguf import AS_STORED, GROUPED, Arrangement, GgufArchitecture, transformer_fields
from ling3.families.transformer import TransformerConfig, build, dense_mlp, family, gqa_config
from ling3.layers.gqa import GQA
from ling3.model import CausalLM


@dataclasses.dataclass(frozen=True)
class LlamaConfig(TransformerConfig):
    """The fields of a Llama config (Grattafiori et al., arXiv 2407.21783, §3.2). Raises ConfigError."""

    architecture = "LlamaForCausalLM"
    model_type = "llama"

    attention_bias: bool = field(absent=False)
    """True if all four projections of attention have biases."""
    mlp_bias: bool = field(absent=False)


def init(config: LlamaConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, biases 0."""
    options = gqa_config(config, bias=config.attention_bias, output_bias=config.attention_bias)
    return build(
        config,
        lambda _, own: GQA.init(options, key=own, dtype=dtype),
        lambda _, own: dense_mlp(config, own, dtype, config.mlp_bias),
        key=key,
        dtype=dtype,
    )


_ROTATED = tuple(f".{name}_proj.{field}" for name in ("q", "k") for field in ("weight", "bias"))


def _in_halves(path: str, stored: Sequence[str], config: LlamaConfig) -> Arrangement:
    """The rows of q and k, which alternate in files between the two halves of a head that RoPE rotates."""
    if not path.endswith(_ROTATED):
        return AS_STORED
    heads = config.num_attention_heads if ".q_proj." in path else config.num_key_value_heads
    places = np.arange(heads * config.head_dim).reshape(heads, -1, 2)
    return Arrangement(rows=places.swapaxes(1, 2).reshape(-1))


GGUF = GgufArchitecture("llama", GROUPED, transformer_fields, arrangement=_in_halves)
FAMILY = family("Llama", LlamaConfig, init, GGUF)
