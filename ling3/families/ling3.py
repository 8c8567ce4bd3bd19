"""Ling-3 (`BailingMoeV3ForCausalLM`): three KDA layers to one gated MLA layer, over a sparse mixture of experts."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, no_type_check

import jax
from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.family import Family
from ling3.families.gguf import (
    ATTENTION,
    LATENT,
    LATENT_KEYS,
    SCHEDULE,
    Contents,
    GgufArchitecture,
    Keys,
    latent_fields,
    schedule,
)
from ling3.families.ling3_config import ABLATED, ABLATED_TYPE, ARCHITECTURES, MODEL_TYPE, Ling3Config
from ling3.layers.draw import Draw
from ling3.layers.kda import KDA, KDAConfig
from ling3.layers.linear import Linear
from ling3.layers.mla import MLA, MLAConfig
from ling3.layers.mlp import MLP
from ling3.layers.moe import MoE, MoEConfig, Router
from ling3.layers.norm import RMSNorm
from ling3.layers.rope import Rope
from ling3.model import CausalLM, Decoder, DecoderLayer
from ling3.mtp import MTP
from ling3.ops.swiglu import SWIGLU, SwiGLU


def kda_config(config: Ling3Config) -> KDAConfig:
    """The settings of the config's KDA layers; for a single layer, pass `config.at(layer)`."""
    return KDAConfig(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        std=config.initializer_range,
        taps=config.short_conv_kernel_size if config.kda_short_conv else None,
        lower_bound=config.kda_lower_bound,
        decays=config.kda_decay,
        beta=config.kda_beta,
        neg_eigval=config.kda_allow_neg_eigval,
        gate_law=config.kda_output_gate,
    )


def mla_config(config: Ling3Config) -> MLAConfig:
    """The settings of the config's MLA layers; for a single layer, pass `config.at(layer)`."""
    return MLAConfig(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        q_rank=config.q_lora_rank,
        latent=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
        eps=config.rms_norm_eps,
        std=config.initializer_range,
        rotation=Rope.plain(config.rope_theta, config.qk_rope_head_dim, interleaved=True) if config.mla_rope else None,
        gate_law=config.mla_output_gate,
    )


def moe_config(config: Ling3Config, layer: int) -> MoEConfig:
    """The settings of the experts of 0-based `layer`, with its overrides and clamps."""
    config = config.at(layer)
    return MoEConfig(
        hidden=config.hidden_size,
        experts=config.num_experts,
        intermediate=config.moe_intermediate_size,
        shared=config.moe_shared_expert_intermediate_size * config.num_shared_experts,
        top_k=config.num_experts_per_tok,
        groups=config.n_group,
        top_groups=config.topk_group,
        normalize=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        std=config.initializer_range,
        expert_bias=config.moe_router_enable_expert_bias,
        swiglu=_swiglu(config.expert_swiglu_limit_list, layer),
        shared_swiglu=_swiglu(config.share_expert_swiglu_limit_list, layer),
    )


def _swiglu(limits: Sequence[float] | None, layer: int) -> SwiGLU:
    """The unit of a layer, clamped at its entry of a limit list; lists may lack multi-token-prediction layers."""
    return SwiGLU(limits[layer]) if limits and layer < len(limits) else SWIGLU


def init(config: Ling3Config, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, routing biases 0.

    Norms, convolutions, the router and KDA's `A_log` and `dt_bias` are float32 whatever the dtype.
    """
    model_key, head_key = jax.random.split(key)
    embedding_key, layers_key = jax.random.split(model_key)
    sizes, axes = (config.vocab_size, config.hidden_size), ("vocab", "hidden")
    options = {"dtype": dtype, "std": config.initializer_range, "axes": axes}
    keys = jax.random.split(layers_key, config.num_hidden_layers)
    model = Decoder(
        Linear.init(*sizes, key=embedding_key, **options),
        tuple(_layer(config, i, key=k, dtype=dtype) for i, k in enumerate(keys)),
        RMSNorm.init(config.hidden_size, config.rms_norm_eps),
    )
    return CausalLM(model, Linear.init(*sizes, key=head_key, **options), config)


def _layer(config: Ling3Config, layer: int, *, key: PRNGKeyArray, dtype: DTypeLike) -> DecoderLayer:
    """0-based `layer` of the config's schedule."""
    own, kind = config.at(layer), config.attention_kind(layer)
    attention_key, mlp_key = jax.random.split(key)
    hidden, eps = own.hidden_size, own.rms_norm_eps
    attention = None
    if kind == "kda":
        attention = KDA.init(kda_config(own), key=attention_key, dtype=dtype)
    elif kind == "mla":
        attention = MLA.init(mla_config(own), key=attention_key, dtype=dtype)
    if config.mlp_kind(layer) == "dense":
        mlp = MLP.init(hidden, own.intermediate_size, key=mlp_key, dtype=dtype, std=own.initializer_range)
    else:
        mlp = MoE.init(moe_config(config, layer), key=mlp_key, dtype=dtype)
    return DecoderLayer(RMSNorm.init(hidden, eps), attention, RMSNorm.init(hidden, eps), mlp)


def mtp_layer(config: Ling3Config, number: int, *, key: PRNGKeyArray, dtype: DTypeLike) -> MTP:
    """Multi-token-prediction layer `number`, with gated MLA and experts whatever the schedule of the decoder layers.

    Its clamps are the entries of the limit lists after those of the decoder layers.
    """
    attention_key, mlp_key, projection_key = jax.random.split(key, 3)
    hidden, eps = config.hidden_size, config.rms_norm_eps
    return MTP(
        enorm=RMSNorm.init(hidden, eps),
        hnorm=RMSNorm.init(hidden, eps),
        eh_proj=Draw(MTP, {"hidden": hidden}, iter([projection_key]), dtype, config.initializer_range)("eh_proj"),
        input_layernorm=RMSNorm.init(hidden, eps),
        attention=MLA.init(mla_config(config), key=attention_key, dtype=dtype),
        post_attention_layernorm=RMSNorm.init(hidden, eps),
        mlp=MoE.init(moe_config(config, config.num_hidden_layers + number), key=mlp_key, dtype=dtype),
        final_layernorm=RMSNorm.init(hidden, eps),
    )


def mtp_layers(config: Ling3Config) -> int:
    """The number of multi-token-prediction layers; one if the config does not say."""
    return 1 if config.num_nextn_predict_layers is None else config.num_nextn_predict_layers


def with_mtp_layers(config: Ling3Config, count: int) -> Ling3Config:
    """The config of a model with `count` multi-token-prediction layers, without limits for any others."""
    names, layers = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"), config.num_hidden_layers + count
    limits = {name: own[:layers] for name in names if (own := getattr(config, name)) is not None}
    return dataclasses.replace(config, num_nextn_predict_layers=count, **limits)


@no_type_check  # called for every tensor
def published_name(name: str, config: Ling3Config) -> str:
    """The checkpoint's name of the tensor at the path `name`: MTP layers are numbered after the decoder layers."""
    match name.split(".", 2):
        case ["mtp", number, within]:
            return f"model.layers.{config.num_hidden_layers + int(number)}.{within}"
    return name


_MODULES = (
    (r"\.attention\.dense$", ".self_attn.o_proj"),
    (r"\.attention\.f_proj$", ".self_attn.forget_gate.f_proj"),
    (r"\.attention\.", ".self_attn."),
)
"""Regexes and replacements that turn the published names of modules into those of transformers."""


def module_name(name: str, config: Ling3Config) -> str:
    """The name in transformers of the module with the published name `name`."""
    for pattern, replacement in _MODULES:
        name = re.sub(pattern, replacement, name)
    return name


_MTP = frozenset(
    {
        "attention",
        "mlp",
        "input_layernorm",
        "post_attention_layernorm",
        "eh_proj",
        "enorm",
        "hnorm",
        "final_layernorm",
    }
)


def is_mtp(name: str, config: Ling3Config) -> bool:
    """True for a tensor of one of the config's multi-token-prediction layers."""
    match name.split("."):
        case ["model", "layers", layer, part, *_] if part in _MTP and layer.isdecimal():
            return 0 <= int(layer) - config.num_hidden_layers < mtp_layers(config)
    return False


def vary(config: Ling3Config, layers: Sequence[int] | None, fields: Mapping[str, Any]) -> Ling3Config:
    """The config with `fields` changed in these layers, or in all, which also replaces overrides of single layers."""
    pairs: Any = config.layer_overrides
    overrides = {layer: dict(own) for layer, own in pairs}
    if layers is None or set(layers) == set(range(config.num_hidden_layers)):
        kept = {layer: {n: v for n, v in own.items() if n not in fields} for layer, own in overrides.items()}
        return dataclasses.replace(config, layer_overrides={i: own for i, own in kept.items() if own}, **fields)
    for layer in layers:
        own = {**overrides.get(layer, {}), **fields}
        overrides[layer] = {name: value for name, value in own.items() if value != getattr(config, name)}
    return dataclasses.replace(config, layer_overrides=overrides)


def _more_fields(contents: Contents, keys: Keys) -> dict[str, Any]:
    """The fields of a GGUF file's config that follow from several keys, or from tensors."""
    fields = latent_fields(keys)
    full = schedule(keys, fields["num_hidden_layers"])
    size = 1 + full.index(True) if True in full else len(full) + 1
    if full != [(layer + 1) % size == 0 for layer in range(len(full))]:
        raise ValueError(
            f"attention.head_count_kv: found full attention in the layers {[i for i, own in enumerate(full) if own]}; "
            f"expected the last of each group of {size}, and no others"
        )
    return {
        **fields,
        "kda_safe_gate": keys.get("kda.safe_gate", True),
        "layer_group_size": size,
        "num_nextn_predict_layers": keys.get("nextn_predict_layers", 0),
        "tie_word_embeddings": "output.weight" not in contents.tensors,
    }


_KEYS = {
    **ATTENTION,
    **LATENT,
    "attention.q_lora_rank": "q_lora_rank",
    "ssm.conv_kernel": "short_conv_kernel_size",
    "kda.head_dim": "head_dim",
    "kda.safe_gate": "kda_safe_gate",
    "kda.gate_lower_bound": "kda_lower_bound",
    "expert_group_count": "n_group",
    "expert_weights_norm": "norm_topk_prob",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "swiglu_clamp_exp": "expert_swiglu_limit_list",
    "swiglu_clamp_shexp": "share_expert_swiglu_limit_list",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_LISTS = frozenset((SCHEDULE, "swiglu_clamp_exp", "swiglu_clamp_shexp"))
GGUF = tuple(
    GgufArchitecture(name, _KEYS, _more_fields, unused=LATENT_KEYS, lists=_LISTS)
    for name in ("bailingmoe3", "bailing-hybrid")
)

ABLATIONS: dict[type, dict[str, str]] = {
    DecoderLayer: {"attention": "attention"},
    KDA: {
        "output gate": "kda_output_gate",
        "decay": "kda_decay",
        "decay bound": "kda_lower_bound",
        "writing strength": "kda_beta",
        "short convolution": "kda_short_conv",
    },
    MLA: {"output gate": "mla_output_gate", "rotary embedding": "mla_rope"},
    Router: {"experts per token": "num_experts_per_tok", "routing bias": "moe_router_enable_expert_bias"},
    MoE: {"shared expert": "num_shared_experts"},
}

FAMILY = Family(
    name="Ling-3",
    architectures=(*ARCHITECTURES, ABLATED),
    model_types=(MODEL_TYPE, ABLATED_TYPE),
    config=Ling3Config,
    read=Ling3Config.from_dict,
    init=init,
    published=published_name,
    module=module_name,
    skips=is_mtp,
    mtp=mtp_layer,
    mtp_layers=mtp_layers,
    with_mtp_layers=with_mtp_layers,
    vary=vary,
    gguf=GGUF,
    ablations=ABLATIONS,
)
