"""Kimi-Linear (`KimiLinearForCausalLM`): KDA layers with low-rank gates, MLA without positions, and sparse experts."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families import transformer
from ling3.families.config_fields import Only, as_object, check, field, published, read
from ling3.families.family import Family
from ling3.families.transformer import count, size
from ling3.layers.kda import KDA, KDAConfig
from ling3.layers.mla import MLA, MLAConfig
from ling3.layers.mlp import MLP
from ling3.layers.moe import MoE, MoEConfig
from ling3.model import CausalLM

LATENT_EPS = 1e-6
"""Of `kv_a_layernorm` in the authors' code, whatever `rms_norm_eps` says."""


@dataclasses.dataclass(frozen=True)
class LinearAttention:
    """`linear_attn_config`: KDA's sizes, and the 1-based layers of either attention."""

    # `check` names what is wrong; the import hook's type check would come before it.
    __no_type_check__ = True

    kda_layers: tuple[int, ...] = field(ge=1)
    full_attn_layers: tuple[int, ...] = field(ge=1)
    num_heads: int = count()
    head_dim: int = count()
    short_conv_kernel_size: int = field(ge=1, le=64, absent=4)

    def __post_init__(self) -> None:
        check(self, tuple)


def _linear_attention(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """The object, or what transformers 5 writes instead of it."""
    if raw.get("linear_attn_config") is not None or raw.get("layer_types") is None:
        return raw.get("linear_attn_config")
    kinds = list(enumerate(raw["layer_types"], 1))
    return {
        "kda_layers": [layer for layer, kind in kinds if kind == "linear_attention"],
        "full_attn_layers": [layer for layer, kind in kinds if kind == "full_attention"],
        "num_heads": raw.get("linear_num_heads"),
        "head_dim": raw.get("linear_head_dim"),
        "short_conv_kernel_size": raw.get("linear_conv_kernel_dim"),
    }


def _dense_layers(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """`first_k_dense_replace`, or the number of dense layers that transformers 5 lists."""
    listed = raw.get("mlp_layer_types")
    return raw.get("first_k_dense_replace", listed.count("dense") if isinstance(listed, list) else None)


@dataclasses.dataclass(frozen=True)
class KimiLinearConfig:
    """Kimi-Linear's fields in the published names (Kimi Team, arXiv 2510.26692). Sizes are in channels.

    Raises ConfigError.
    """

    # `check` names what is wrong; the import hook's type check would come before it.
    __no_type_check__ = True

    vocab_size: int = field(ge=1, le=2**24)
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = field(ge=1, le=1000)
    linear_attn_config: LinearAttention = field(
        read=_linear_attention,
        aliases=("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim", "layer_types"),
    )
    num_attention_heads: int = count()
    """MLA's; KDA's are in `linear_attn_config`."""
    kv_lora_rank: int = size()
    qk_nope_head_dim: int = count()
    qk_rope_head_dim: int = count()
    """Channels of a key that all heads share; they are not rotated."""
    v_head_dim: int = count()
    model_max_length: int = field(ge=1, le=2**31 - 1, aliases=("max_position_embeddings",))
    rms_norm_eps: float = field(gt=0, lt=1, absent=1e-6)
    first_k_dense_replace: int = field(ge=0, le=1000, read=_dense_layers)
    num_experts: int = count(aliases=("num_local_experts", "n_routed_experts"))
    num_experts_per_token: int = count(aliases=("num_experts_per_tok",))
    num_shared_experts: int = field(ge=0, le=64, aliases=("n_shared_experts",))
    moe_intermediate_size: int = size()
    num_expert_group: int = count(absent=1, aliases=("n_group",))
    topk_group: int = count(absent=1)
    moe_renormalize: bool = field(absent=True, aliases=("norm_topk_prob",))
    routed_scaling_factor: float = field(gt=0)
    tie_word_embeddings: bool = field(absent=False)
    initializer_range: float = field(gt=0, absent=0.02)
    bos_token_id: int | None = field(ge=0, le=2**31 - 1)
    eos_token_id: tuple[int, ...] = field(ge=0, le=2**31 - 1, single=True, absent=())
    pad_token_id: int | None = field(ge=0, le=2**31 - 1)

    def __post_init__(self) -> None:
        check(self, self._misfits)

    def _misfits(self) -> Iterable[str]:
        """Problems of fields that are valid by themselves and do not fit together."""
        kda, full = self.linear_attn_config.kda_layers, self.linear_attn_config.full_attn_layers
        layers, groups = self.num_hidden_layers, self.num_expert_group
        if wrong := sorted({*range(1, layers + 1)} ^ {*kda, *full} | {*kda} & {*full}):
            yield (
                f"linear_attn_config: found layers {wrong} in neither list, in both, or beyond the last; expected each "
                f"of 1 to {layers} in kda_layers or in full_attn_layers; correct them"
            )
        if self.first_k_dense_replace > layers:
            yield f"first_k_dense_replace: found {self.first_k_dense_replace}; expected at most {layers}; correct it"
        if self.num_experts % groups or (groups > 1 and self.num_experts < 2 * groups):
            yield f"num_expert_group: found {groups}; expected equal groups of two or more of {self.num_experts} experts"
        elif self.topk_group > groups:
            yield f"topk_group: found {self.topk_group}; expected at most num_expert_group, {groups}; correct it"
        elif self.num_experts_per_token > (most := self.topk_group * self.num_experts // groups):
            yield f"num_experts_per_token: found {self.num_experts_per_token}; expected at most {most}; correct it"

    @property
    def max_position_embeddings(self) -> int:
        """`model_max_length` under the name that every family has."""
        return self.model_max_length

    def is_kda(self, layer: int) -> bool:
        """True if 0-based `layer` is a KDA layer."""
        return layer + 1 in self.linear_attn_config.kda_layers

    @staticmethod
    def from_dict(raw: object, source: str = "config.json") -> "KimiLinearConfig":
        """The config in the JSON object `raw`, every field of which is accounted for; `source` is for errors."""
        return read(KimiLinearConfig, as_object(raw, source), source, only=ONLY, derived=DERIVED, harmless=UNUSED)

    def to_dict(self) -> dict[str, Any]:
        """The published `config.json`."""
        return {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", **published(self, ONLY)}


_ONE_MASK = Only((True, None), "experts are chosen by groups and biased scores", written=True)
