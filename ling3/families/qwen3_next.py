"""Qwen3-Next (`Qwen3NextForCausalLM`): three Gated DeltaNet layers to one of gated attention, over sparse experts."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Literal, no_type_check

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families import transformer
from ling3.families.config_fields import Only, field, found
from ling3.families.gated_deltanet_gguf import architecture
from ling3.families.qwen3_moe import SparseFields
from ling3.families.rope_scaling import RopeScaling, read_partial_scaling
from ling3.families.transformer import build, count, size
from ling3.layers.gated_deltanet import GatedDeltaNet, GatedDeltaNetConfig
from ling3.layers.gqa import GQA
from ling3.model import CausalLM, FeedForward, Mixer
from ling3.mtp import MTP

LINEAR, FULL = "linear_attention", "full_attention"


def _layer_types(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """`layer_types`, or by the `full_attention_interval`, 4 by default: the last layer of each group is full."""
    layers, interval = raw.get("num_hidden_layers"), raw.get("full_attention_interval", 4)
    if raw.get("layer_types") is not None or type(layers) is not int or not 0 < layers <= 1000:
        return raw.get("layer_types")
    if type(interval) is not int or interval < 1:
        problems.append(f"full_attention_interval: {found(interval)}; expected an integer from 1; correct it")
        return None
    return [FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers)]


@dataclasses.dataclass(frozen=True)
class HybridFields(transformer.TransformerConfig):
    """The fields of Qwen's hybrids of Gated DeltaNet and gated attention with partial RoPE."""

    only: ClassVar[Mapping[str, Only]] = {
        **{name: own for name, own in transformer.ONLY.items() if name != "partial_rotary_factor"},
        "attn_output_gate": Only((True, None), "full attention has an output gate"),
        "use_sliding_window": Only((False, None), "attention is to the whole context"),
    }

    attention_bias: bool = field(absent=False)
    """True if all four projections of full attention have biases."""
    rope_scaling: RopeScaling | None = field(read=read_partial_scaling, aliases=("rope_parameters",))
    partial_rotary_factor: float = field(
        gt=0,
        le=1,
        absent=0.25,
        aliases=("rope_parameters.partial_rotary_factor", "rope_scaling.partial_rotary_factor"),
    )
    """The share of a head's channels, the first ones, that are rotated."""
    layer_types: tuple[Literal["linear_attention", "full_attention"], ...] = field(
        per_layer=True, read=_layer_types, aliases=("full_attention_interval",)
    )
    linear_conv_kernel_dim: int = field(ge=1, le=64, absent=4)
    linear_key_head_dim: int = count()
    linear_value_head_dim: int = count()
    linear_num_key_heads: int = count()
    linear_num_value_heads: int = count()

    def misfits(self) -> Iterable[str]:
        """Problems between fields that are valid by themselves."""
        heads, keys = self.linear_num_value_heads, self.linear_num_key_heads
        if heads % keys:
            yield f"linear_num_key_heads: found {keys}; expected a divisor of linear_num_value_heads, {heads}"
        if self.rotary_dim % 2 or not self.rotary_dim:
            expected = f"a share of head_dim, {self.head_dim}, that is an even number of channels"
            yield f"partial_rotary_factor: found {self.partial_rotary_factor}; expected {expected}; correct it"

    @property
    def rotary_dim(self) -> int:
        """The number of channels of a head that are rotated."""
        return int(self.head_dim * self.partial_rotary_factor)

    def mixer(self, layer: int, *, key: PRNGKeyArray, dtype: DTypeLike, grouped: bool) -> Mixer:
        """The attention of 0-based `layer`, with random weights; `grouped` as in `GatedDeltaNetConfig`."""
        if self.layer_types[layer] == FULL:
            return self.full_attention(key=key, dtype=dtype)
        config = GatedDeltaNetConfig(
            hidden=self.hidden_size,
            heads=self.linear_num_value_heads,
            key_heads=self.linear_num_key_heads,
            key=self.linear_key_head_dim,
            value=self.linear_value_head_dim,
            eps=self.rms_norm_eps,
            std=self.initializer_range,
            taps=self.linear_conv_kernel_dim,
            grouped=grouped,
        )
        return GatedDeltaNet.init(config, key=key, dtype=dtype)

    def full_attention(self, *, key: PRNGKeyArray, dtype: DTypeLike) -> GQA:
        """The gated attention of a layer, with random weights."""
        options = {"norm_eps": self.rms_norm_eps, "zero_centered": True, "gated": True}
        biases = {"bias": self.attention_bias, "output_bias": self.attention_bias}
        return GQA.init(transformer.gqa_config(self, **options, **biases), key=key, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class Qwen3NextConfig(HybridFields, SparseFields):
    """The fields of a Qwen3-Next config. Raises ConfigError."""

    architecture = "Qwen3NextForCausalLM"
    model_type = "qwen3_next"

    shared_expert_intermediate_size: int = size()
    norm_topk_prob: bool = field(absent=True)
    num_nextn_predict_layers: int = field(ge=0, le=1, absent=1)
    """The number of multi-token-prediction layers, which `load` skips by default; published configs do not say."""

    def misfits(self) -> Iterable[str]:
        """Problems between fields that are valid by themselves."""
        return [*SparseFields.misfits(self), *HybridFields.misfits(self)]


def init(config: Qwen3NextConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, routers in float32, norms that multiply by 1.

    Convolutions, `A_log` and `dt_bias` are float32 whatever the dtype.
    """
    shared = config.shared_expert_intermediate_size
    return build(
        config,
        lambda i, own: config.mixer(i, key=own, dtype=dtype, grouped=True),
        lambda i, own: config.feed_forward(i, key=own, dtype=dtype, shared=shared),
        key=key,
        dtype=dtype,
        zero_centered=True,
    )


def mtp_layer(config: Qwen3NextConfig, number: int, *, key: PRNGKeyArray, dtype: DTypeLike) -> MTP:
    """The multi-token-prediction layer: a decoder layer of gated attention and experts, as vLLM loads it."""
    shared = config.shared_expert_intermediate_size
    return predictor(
        config,
        lambda own: config.moe(key=own, dtype=dtype, normalize=config.norm_topk_prob, shared=shared),
        key=key,
        dtype=dtype,
    )


def predictor(
    config: HybridFields, feed_forward: Callable[[PRNGKeyArray], FeedForward], *, key: PRNGKeyArray, dtype: DTypeLike
) -> MTP:
    """A multi-token-prediction layer of gated attention and `feed_forward(key)`."""
    mixer = functools.partial(config.full_attention, dtype=dtype)
    return transformer.mtp_layer(
        config, lambda own: mixer(key=own), feed_forward, key=key, dtype=dtype, zero_centered=True
    )


_LAYER = re.compile(r"(model\.layers\.(\d+)\.)attention\.")


_AROUND = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "final_layernorm": "norm",
}
"""The checkpoint's names of what stands around the decoder layer of multi-token prediction."""


@no_type_check  # called for every tensor
def published_name(name: str, config: HybridFields) -> str:
    """The checkpoint's name of the tensor at the path `name` of the module tree."""
    if (layer := _LAYER.match(name)) is not None and config.layer_types[int(layer[2])] == LINEAR:
        name = f"{layer[1]}linear_attn.{name[layer.end() :]}"
    match name.split(".", 3):
        case ["mtp", number, part, within]:
            name = f"mtp.{_AROUND.get(part, f'layers.{number}.{part}')}.{within}"
    return transformer.published_name(name.replace(".shared_experts.", ".shared_expert."), config)


GGUF = architecture("qwen3next", "num_nextn_predict_layers", sparse=True, grouped=True, more={"norm_topk_prob": True})
FAMILY = dataclasses.replace(
    transformer.family("Qwen3-Next", Qwen3NextConfig, init, GGUF),
    published=published_name,
    skips=lambda name, config: name.startswith("mtp."),
    mtp=mtp_layer,
    mtp_layers=lambda config: config.num_nextn_predict_layers,
    with_mtp_layers=lambda config, count: dataclasses.replace(config, num_nextn_predict_layers=count),
)
