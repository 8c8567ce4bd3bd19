"""Kimi-Linear (`KimiLinearForCausalLM`): KDA layers with low-rank gates, MLA without positions, and sparse experts."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families import transformer
from ling3.families.config_fields import Only, as_object, check, field, published, read
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
from ling3.families.quantization import Quantization
from ling3.families.transformer import count, size
from ling3.layers.kda import KDA, KDAConfig
from ling3.layers.mla import MLA, MLAConfig
from ling3.layers.moe import MoE, MoEConfig
from ling3.model import CausalLM, FeedForward, Mixer

LATENT_EPS = 1e-6
"""The eps of `kv_a_layernorm` in the authors' code, whatever `rms_norm_eps` is."""


@dataclasses.dataclass(frozen=True)
class LinearAttention:
    """`linear_attn_config`: KDA's sizes, and the 1-based layers of each kind of attention."""

    # The import hook's type check would come before `check`, whose errors name the field to correct.
    __no_type_check__ = True

    kda_layers: tuple[int, ...] = field(ge=1)
    full_attn_layers: tuple[int, ...] = field(ge=1)
    num_heads: int = count()
    head_dim: int = count()
    short_conv_kernel_size: int = field(ge=1, le=64, absent=4)

    def __post_init__(self) -> None:
        check(self, lambda: ())


def misplaced_layers(config: LinearAttention, first: int, last: int) -> Iterable[str]:
    """The problem of lists that do not have each layer from `first` to `last` once."""
    kda, full = config.kda_layers, config.full_attn_layers
    if wrong := sorted({*range(first, last + 1)} ^ {*kda, *full} | {*kda} & {*full}):
        yield (
            f"linear_attn_config: found layers {wrong} in neither list, in both, or beyond the last; expected each "
            f"of {first} to {last} in kda_layers or in full_attn_layers; correct them"
        )


def linear_attention(raw: Mapping[str, Any], problems: list[str], first: int = 1) -> Any:
    """`linear_attn_config`, or the same object from the fields that transformers 5 writes instead.

    Its lists call the lowest layer `first`.
    """
    if raw.get("linear_attn_config") is not None or not isinstance(raw.get("layer_types"), list):
        return raw.get("linear_attn_config")
    kinds = list(enumerate(raw["layer_types"], first))
    return {
        "kda_layers": [layer for layer, kind in kinds if kind == "linear_attention"],
        "full_attn_layers": [layer for layer, kind in kinds if kind != "linear_attention"],
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
    """Kimi-Linear's fields under the published names (Kimi Team, arXiv 2510.26692). Sizes are in channels.

    Raises ConfigError.
    """

    # The import hook's type check would come before `check`, whose errors name the field to correct.
    __no_type_check__ = True

    vocab_size: int = field(ge=1, le=2**24)
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = field(ge=1, le=1000)
    linear_attn_config: LinearAttention = field(
        read=linear_attention, expected="an object with the sizes of KDA and the 1-based layers of either attention"
    )
    num_attention_heads: int = count()
    """The heads of MLA; KDA's are in `linear_attn_config`."""
    kv_lora_rank: int = size()
    qk_nope_head_dim: int = count()
    qk_rope_head_dim: int = count()
    """Channels of a key that all heads share; despite the name, they are not rotated."""
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
    pad_token_id: int | None = field(ge=-1, le=2**31 - 1)
    """Unused, as nothing is padded with it: it may be -1, or an id without a row in the embedding."""
    quantization_config: Quantization | None = field(
        None,
        kw_only=True,
        convert=Quantization.read,
        expected="null, or an object with the quant_method fp8 or compressed-tensors",
    )

    def __post_init__(self) -> None:
        check(self, self._misfits)

    def _misfits(self) -> Iterable[str]:
        """Problems between fields that are valid by themselves."""
        layers = self.num_hidden_layers
        yield from misplaced_layers(self.linear_attn_config, 1, layers)
        if self.first_k_dense_replace > layers:
            yield f"first_k_dense_replace: found {self.first_k_dense_replace}; expected at most {layers}; correct it"
        yield from transformer.routing_misfits(self, "num_experts", "num_expert_group", "num_experts_per_token")

    @property
    def max_position_embeddings(self) -> int:
        """`model_max_length`, under the name that all families share."""
        return self.model_max_length

    def attention_kind(self, layer: int) -> Literal["kda", "mla"]:
        """The kind of attention in the 0-based `layer`."""
        return "kda" if layer + 1 in self.linear_attn_config.kda_layers else "mla"

    def mlp_kind(self, layer: int) -> Literal["dense", "moe"]:
        """The kind of feed-forward in the 0-based `layer`."""
        return "dense" if layer < self.first_k_dense_replace else "moe"

    @staticmethod
    def from_dict(raw: object, source: str = "config.json") -> "KimiLinearConfig":
        """Reads the config from the JSON object `raw`, accounting for every field; errors name `source`."""
        return read(KimiLinearConfig, as_object(raw, source), source, only=ONLY, derived=DERIVED, harmless=UNUSED)

    def to_dict(self) -> dict[str, Any]:
        """The fields as the published `config.json` has them."""
        return {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            **published(self, ONLY),
            "linear_attn_config": published(self.linear_attn_config, {}),
            "num_key_value_heads": self.num_attention_heads,
        }


_OFF = (False, None)

ONLY = {
    **transformer.ONLY,
    "attention_bias": Only(_OFF, "no linear map has a bias"),
    "mla_use_nope": Only((True, None), "nothing is rotated", written=True),
    "moe_layer_freq": Only((1, None), "every layer after the dense ones is sparse", written=True),
    "moe_router_activation_func": Only(("sigmoid", None), "the router's scores are sigmoids", written=True),
    "num_nextn_predict_layers": Only((0, None), "there is no multi-token prediction", written=True),
    "q_lora_rank": Only((None,), "MLA's queries are projected at once", written=True),
    "use_grouped_topk": Only((True, None), "experts are chosen in groups, by biased scores", written=True),
}

_LAYER_TYPES = {"mla": "full_attention", "kda": "linear_attention"}
_MLP_TYPES = {"dense": "dense", "moe": "sparse"}

DERIVED = {
    "layer_types": lambda c: [_LAYER_TYPES[c.attention_kind(i)] for i in range(c.num_hidden_layers)],
    "linear_conv_kernel_dim": lambda c: c.linear_attn_config.short_conv_kernel_size,
    "linear_head_dim": lambda c: c.linear_attn_config.head_dim,
    "linear_num_heads": lambda c: c.linear_attn_config.num_heads,
    "mlp_layer_types": lambda c: [_MLP_TYPES[c.mlp_kind(i)] for i in range(c.num_hidden_layers)],
    "num_key_value_heads": lambda c: c.num_attention_heads,
    "qk_head_dim": lambda c: c.qk_nope_head_dim + c.qk_rope_head_dim,
}
"""Fields that transformers 5 writes beside or instead of the published ones, as functions of the config."""

UNUSED = ("head_dim", "rope_parameters", "rope_scaling", "rope_theta")
"""Ignored fields: no layer has heads of the size `head_dim`, and no layer uses RoPE."""


def kda_config(config: Any, lower_bound: float | None = None) -> KDAConfig:
    """The settings of KDA with low-rank gates, in a config with a `linear_attn_config`."""
    linear = config.linear_attn_config
    return KDAConfig(
        hidden=config.hidden_size,
        heads=linear.num_heads,
        head_dim=linear.head_dim,
        eps=config.rms_norm_eps,
        std=config.initializer_range,
        taps=linear.short_conv_kernel_size,
        lower_bound=lower_bound,
        gate_rank=linear.head_dim,
    )


def init(config: KimiLinearConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, routing biases 0.

    Norms, convolutions, the router and KDA's `A_log` and `dt_bias` are float32 whatever the dtype.
    """
    std = config.initializer_range
    mla = MLAConfig(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        q_rank=None,
        latent=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
        eps=LATENT_EPS,
        std=std,
        gate_law="none",
    )
    moe = MoEConfig(
        hidden=config.hidden_size,
        experts=config.num_experts,
        intermediate=config.moe_intermediate_size,
        shared=config.moe_intermediate_size * config.num_shared_experts,
        top_k=config.num_experts_per_token,
        groups=config.num_expert_group,
        top_groups=config.topk_group,
        normalize=config.moe_renormalize,
        scaling=config.routed_scaling_factor,
        std=std,
    )

    def mixer(layer: int, own: PRNGKeyArray) -> Mixer:
        if config.attention_kind(layer) == "kda":
            return KDA.init(kda_config(config), key=own, dtype=dtype)
        return MLA.init(mla, key=own, dtype=dtype)

    def feed_forward(layer: int, own: PRNGKeyArray) -> FeedForward:
        if config.mlp_kind(layer) == "dense":
            return transformer.dense_mlp(config, own, dtype)
        return MoE.init(moe, key=own, dtype=dtype)

    return transformer.build(config, mixer, feed_forward, key=key, dtype=dtype)


_NAMES = (
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.([fg])_proj\.([ab])_proj\.", r".self_attn.\1_\2_proj."),
    (r"\.mlp\.(gate|experts|shared_experts)\.", r".block_sparse_moe.\1."),
    (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
    (r"(\.experts\.\d+)\.gate_proj\.", r"\1.w1."),
    (r"(\.experts\.\d+)\.up_proj\.", r"\1.w3."),
    (r"(\.experts\.\d+)\.down_proj\.", r"\1.w2."),
)
"""Regexes and replacements that turn the tree's names into the published ones, before those of every transformer."""


def published_name(name: str, config: KimiLinearConfig) -> str:
    """The checkpoint's name of the tensor at the path `name` of the module tree."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return transformer.published_name(name, config)


def module_name(name: str, config: KimiLinearConfig) -> str:
    """The name in transformers of the module with the published name `name`."""
    name = re.sub(r"\.self_attn\.(f_[ab]_proj)$", r".self_attn.forget_gate.\1", name)
    return name.replace(".block_sparse_moe.", ".mlp.")


def _more_fields(contents: Contents, keys: Keys) -> dict[str, Any]:
    """The fields of a GGUF file's config that follow from several keys, or from tensors."""
    fields = latent_fields(keys)
    full = schedule(keys, fields["num_hidden_layers"])
    linear = {
        "kda_layers": [layer for layer, own in enumerate(full, 1) if not own],
        "full_attn_layers": [layer for layer, own in enumerate(full, 1) if own],
        "num_heads": keys.get("attention.head_count"),
        "head_dim": keys.get("kda.head_dim"),
        "short_conv_kernel_size": keys.get("ssm.conv_kernel", 4),
    }
    return {**fields, "linear_attn_config": linear, "tie_word_embeddings": "output.weight" not in contents.tensors}


GGUF = GgufArchitecture(
    "kimi-linear",
    {**ATTENTION, **LATENT, "expert_group_count": "num_expert_group", "expert_weights_norm": "moe_renormalize"},
    _more_fields,
    unused=LATENT_KEYS | {"ssm.conv_kernel", "kda.head_dim"},
    lists=frozenset((SCHEDULE,)),
)
FAMILY = Family(
    name="Kimi-Linear",
    architectures=("KimiLinearForCausalLM",),
    model_types=("kimi_linear",),
    config=KimiLinearConfig,
    read=KimiLinearConfig.from_dict,
    init=init,
    published=published_name,
    module=module_name,
    gguf=(GGUF,),
    published_shape=lambda name, shape: (1, 1, *shape, 1) if name.endswith(".A_log") else shape,
)
