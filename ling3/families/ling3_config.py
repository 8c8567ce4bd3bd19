"""Ling-3's configuration: what the model *is*, read from a checkpoint's `config.json`."""

import dataclasses
import functools
import operator
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ling3.families.config_fields import (
    ConfigError,
    Only,
    as_object,
    check,
    field,
    found,
    pick,
    published,
    read,
    read_json,
    rules,
    too_large,
)
from ling3.families.quantization import Quantization
from ling3.layers.gate import OutputGate
from ling3.runtime.quoting import shown

__all__ = ["ConfigError", "Ling3Config"]

ARCHITECTURES = ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")
"""The published name of Ling-3, and the one that transformers 5 writes."""
MODEL_TYPE = "bailing_hybrid"
PUBLISHED = pathlib.Path(__file__).parent.parent / "checkpoints"
"""The directory with the `config.json` files of published models."""
ABLATED, ABLATED_TYPE = "Ling3AblatedForCausalLM", "ling3_ablated"
"""The architecture and model_type of a model with a variant field, so that no other program takes it for a Ling-3."""


def _head_dim(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """KDA's head size. transformers 5 writes it as `linear_head_dim`, and the rotary size as `head_dim`."""
    linear, plain, rotary = raw.get("linear_head_dim"), raw.get("head_dim"), raw.get("qk_rope_head_dim")
    if linear is not None and plain not in (None, linear, rotary):
        problems.append(
            f"head_dim: found {shown(plain)}; expected linear_head_dim, {shown(linear)}, or qk_rope_head_dim, "
            f"{shown(rotary)}; correct it or leave it out"
        )
    return plain if linear is None else linear


def _lower_bound(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """The bound of KDA's log decay, or None for the softplus law if `kda_safe_gate` is false."""
    safe, bound = raw.get("kda_safe_gate"), raw.get("kda_lower_bound")
    if not isinstance(safe, bool):
        problems.append(f"kda_safe_gate: {found(safe)}; expected true or false; it says which law KDA's decay follows")
    elif safe and bound is None:
        problems.append(
            "kda_lower_bound: not in this config; expected a number below 0; add it, or set kda_safe_gate to false"
        )
    return bound if safe else None


def _mla_rope(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """`use_mla_nope` negated. A file's `mla_rope` must agree with that, except in old files of ablated models."""
    nope, rope = pick(raw, ("use_mla_nope", "mla_use_nope"), problems), raw.get("mla_rope")
    if not isinstance(nope, bool | None):
        problems.append(f"use_mla_nope: found {shown(nope)}; expected true or false; it says if MLA leaves out RoPE")
    rotated = nope is not True
    if rope not in (None, rotated) and not (rope is False and _is_ablated(raw)):
        problems.append(f"mla_rope: found {shown(rope)}; expected {rotated}, from use_mla_nope; leave it out")
    return rotated if rope is None else rope


def _as_pairs(overrides: Any) -> Any:
    """Turns `{1: {"kda_decay": False}}` into hashable `((1, (("kda_decay", False),)),)`; JSON has layers as strings."""
    layers = {
        int(layer) if isinstance(layer, str) and layer.isdecimal() else layer: tuple(sorted(dict(fields).items()))
        for layer, fields in dict(() if overrides is None else overrides).items()
    }
    return tuple((layer, layers[layer]) for layer in sorted(layers) if layers[layer])


# The bounds are far beyond any real model, and keep a corrupt file from huge allocations.
size = functools.partial(field, ge=1, le=2**20)
count = functools.partial(field, ge=1, le=4096)
token_id = functools.partial(field, ge=0, le=2**31 - 1)


def variant_field(default: Any, **rule: Any) -> Any:
    """A field that is `default` in all published models, and differs only in ablated models or some of their layers."""
    return field(default, absent=default, tags=("variant", "layer"), **rule)


@dataclasses.dataclass(frozen=True)
class Ling3Config:
    """The sizes and equations of a Ling-3 model (`BailingMoeV3ForCausalLM`), under the published field names.

    Defaults are Ling-3.0-tiny's. Lengths are in tokens, sizes in channels. `kda_lower_bound` is None for the softplus
    decay (`kda_safe_gate: false` in config.json); the two limit lists have one number per layer, 0 for no clamp, maybe
    MTP layers too. Raises ConfigError, naming every field of the wrong type, out of range or at odds with the rest.
    """

    # The import hook's type check would come before `__post_init__`, with an error that names no field to correct.
    __no_type_check__ = True

    vocab_size: int = field(157184, ge=1, le=2**24)
    hidden_size: int = size(1536)
    intermediate_size: int = size(4608)
    num_hidden_layers: int = field(24, ge=1, le=1000)
    layer_group_size: int = field(4, ge=1, le=1000)
    first_k_dense_replace: int = field(1, ge=0, le=1000)
    num_attention_heads: int = count(16)
    head_dim: int = count(128, read=_head_dim, aliases=("linear_head_dim",))
    """KDA's key and value head size; MLA's are `qk_head_dim` and `v_head_dim`."""
    q_lora_rank: int | None = size(256)
    kv_lora_rank: int = size(512)
    qk_nope_head_dim: int = count(128)
    qk_rope_head_dim: int = field(64, ge=2, le=4096)
    v_head_dim: int = count(128)
    rope_theta: float = field(6000000.0, ge=1, aliases=("rope_parameters.rope_theta", "rope_scaling.rope_theta"))
    max_position_embeddings: int = field(131072, ge=1, le=2**31 - 1, aliases=("model_max_length",))
    rms_norm_eps: float = field(1e-6, gt=0, lt=1)
    short_conv_kernel_size: int = field(4, ge=1, le=64, aliases=("linear_conv_kernel_dim",))
    kda_lower_bound: float | None = field(-5.0, lt=0, read=_lower_bound, aliases=("kda_safe_gate",), tags=("layer",))
    num_experts: int = count(128, aliases=("num_local_experts",))
    num_experts_per_tok: int = count(8, aliases=("num_experts_per_token",), tags=("layer",))
    num_shared_experts: int = field(1, ge=0, le=64, aliases=("n_shared_experts",), tags=("layer",))
    moe_intermediate_size: int = size(512)
    moe_shared_expert_intermediate_size: int = size(512, absent=lambda values: values["moe_intermediate_size"])
    n_group: int = count(8, aliases=("num_expert_group",))
    topk_group: int = count(4)
    routed_scaling_factor: float = field(2.5, gt=0)
    norm_topk_prob: bool = field(True, aliases=("moe_renormalize",))
    expert_swiglu_limit_list: tuple[float, ...] | None = field(None, ge=0, per_layer=True)
    share_expert_swiglu_limit_list: tuple[float, ...] | None = field(None, ge=0, per_layer=True)
    num_nextn_predict_layers: int | None = field(0, ge=0, le=64, aliases=("num_mtp_layers",))
    """The number of multi-token-prediction layers, which `load` skips by default; None if config.json does not say."""
    initializer_range: float = field(0.02, gt=0, absent=0.02)
    eos_token_id: tuple[int, ...] = token_id((156895,), single=True)
    pad_token_id: int | None = field(156892, ge=-1, le=2**31 - 1)
    """Unused, as nothing is padded with it: it may be -1, or an id without a row in the embedding."""
    quantization_config: Quantization | None = field(
        None, convert=Quantization.read, expected="null, or an object with the quant_method fp8 or compressed-tensors"
    )
    """Which matrices are stored in 8 or 4 bits; None for no quantization."""
    attention: Literal["scheduled", "kda", "mla", "none"] = variant_field("scheduled")
    """`scheduled`: by `layer_group_size`; `kda` or `mla`: that kind in all layers; `none`: no attention, h = x."""
    kda_output_gate: OutputGate = variant_field("sigmoid")  # noqa: RUF009
    mla_output_gate: OutputGate = variant_field("sigmoid")  # noqa: RUF009
    kda_beta: float | None = variant_field(None, ge=0, le=2)
    """A fixed writing strength b, instead of sigmoid(b_proj(x)) or twice that."""
    kda_allow_neg_eigval: bool = variant_field(False)
    """b = 2 sigmoid(b_proj(x)): the state's transition may have eigenvalues down to -1 (arXiv 2411.12537)."""
    kda_decay: bool = variant_field(True)
    """False: no decay, g = 0, the plain delta rule."""
    kda_short_conv: bool = variant_field(True)
    """False: no convolution, q, k, v = silu(W x)."""
    mla_rope: bool = field(True, read=_mla_rope, aliases=("use_mla_nope", "mla_use_nope"), tags=("layer",))
    """False, `use_mla_nope: true` in config.json: queries and keys keep their rotary channels, unrotated (NoPE)."""
    moe_router_enable_expert_bias: bool = variant_field(True)
    """False: no bias, c = s, so experts are chosen by their scores alone."""
    layer_overrides: Mapping[int, Mapping[str, Any]] | tuple[tuple[int, tuple[tuple[str, Any], ...]], ...] = field(
        (),
        absent=(),
        convert=_as_pairs,
        expected="an object of layer numbers, each with an object of fields that may differ there",
        tags=("variant",),
    )

    def __post_init__(self) -> None:
        check(self, lambda: [*_misfits(self)] or [*_override_problems(self)])

    @staticmethod
    def tiny() -> "Ling3Config":
        """The configuration of the published Ling-3.0-tiny."""
        return Ling3Config.from_file(PUBLISHED / "tiny")

    @staticmethod
    def flash() -> "Ling3Config":
        """The configuration of the published Ling-3.0-flash."""
        return Ling3Config.from_file(PUBLISHED / "flash")

    @staticmethod
    def from_file(path: str | os.PathLike[str]) -> "Ling3Config":
        """The configuration in `path`, a `config.json` or a directory that holds one. Raises ConfigError."""
        return Ling3Config.from_dict(*read_json(path))

    @staticmethod
    def from_dict(raw: object, source: str = "config.json") -> "Ling3Config":
        """Reads the JSON object `raw`, with the field names of Ling or of transformers 5; errors name `source`.

        Raises ConfigError for a field that would change results and that ling3 does not compute, and for another model,
        Ling 2.6 included. Fields that change no result are accepted (the rule: `config_fields.read`).
        """
        fields = as_object(raw, source)
        if problem := _not_ling3(fields):
            raise ConfigError(source, [problem])
        fields["num_kv_heads_for_linear_attn"] = fields.get("num_kv_heads_for_linear_attn") or None  # 0: one per head
        only = ONLY if _is_ablated(fields) else ONLY | UNVARIED
        return read(Ling3Config, fields, source, only=only, derived=DERIVED, harmless=HARMLESS)

    def to_dict(self) -> dict[str, Any]:
        """The published `config.json`: `from_dict(config.to_dict()) == config`."""
        variant = self.variant()
        return {
            "architectures": [ABLATED if variant else ARCHITECTURES[0]],
            "model_type": ABLATED_TYPE if variant else MODEL_TYPE,
            **{name: value for name, value in published(self, ONLY).items() if name not in (*VARIANTS, "mla_rope")},
            "kda_safe_gate": self.kda_lower_bound is not None,
            "linear_attn_config": self.linear_attn_config,
            "moe_router_enable_expert_bias": True,
            "num_key_value_heads": self.num_attention_heads,
            "use_mla_nope": not self.mla_rope,
            **variant,
        }

    @property
    def qk_head_dim(self) -> int:
        """MLA's query and key head size, qk_nope_head_dim + qk_rope_head_dim: 192 in the published models."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_entry_dim(self) -> int:
        """The size of MLA's cache entry of a token, kv_lora_rank + qk_rope_head_dim: 576 in the published models."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def linear_attn_config(self) -> dict[str, Any]:
        """The layer schedule and KDA's sizes as Kimi-Linear's `config.json` has them; layers are 1-based."""
        kinds = [self.attention_kind(layer) for layer in range(self.num_hidden_layers)]
        return {
            "kda_layers": [layer for layer, kind in enumerate(kinds, 1) if kind == "kda"],
            "full_attn_layers": [layer for layer, kind in enumerate(kinds, 1) if kind == "mla"],
            "head_dim": self.head_dim,
            "num_heads": self.num_attention_heads,
            "short_conv_kernel_size": self.short_conv_kernel_size,
        }

    def variant(self) -> dict[str, Any]:
        """The fields in which this model differs from every published one, as `config.json` has them."""
        changed = {name: getattr(self, name) for name in VARIANTS}
        changed = {name: value for name, value in changed.items() if value != VARIANTS[name]}
        if "layer_overrides" in changed:
            changed["layer_overrides"] = {str(layer): dict(fields) for layer, fields in changed["layer_overrides"]}
        return changed

    def at(self, layer: int) -> "Ling3Config":
        """This configuration with the overrides of 0-based `layer` applied, and no `layer_overrides`."""
        fields = dict(dict(self.layer_overrides).get(layer, ()))
        return dataclasses.replace(self, layer_overrides=(), **fields) if fields else self

    def attention_kind(self, layer: int) -> Literal["kda", "mla", "none"]:
        """The attention of 0-based `layer`: MLA in the last layer of each group of `layer_group_size`, else KDA.

        So layers after the last full group are KDA, as in transformers. `attention` and `layer_overrides` override it.
        """
        attention = dict(dict(self.layer_overrides).get(layer, ())).get("attention", self.attention)
        if attention != "scheduled":
            return attention
        return "mla" if (layer + 1) % self.layer_group_size == 0 else "kda"

    def mlp_kind(self, layer: int) -> Literal["dense", "moe"]:
        """The feed-forward of 0-based `layer`: dense in the first `first_k_dense_replace`, then sparse experts."""
        return "dense" if layer < self.first_k_dense_replace else "moe"


VARIANTS = {name: rule.absent for name, rule in rules(Ling3Config).items() if "variant" in rule.tags}
"""The fields in which only ablated models differ from the published ones, with the published models' values."""
UNVARIED = {
    name: Only((value, None, [], {}), f"a model differs here only in files of the model_type {ABLATED_TYPE}")
    for name, value in VARIANTS.items()
}


def _unscaled(rope: Any) -> bool:
    """True for `rope_parameters` or `rope_scaling` that mean RoPE's default kind, without scaling."""
    if not isinstance(rope, Mapping) or rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}:
        return False
    return {rope.get("rope_type"), rope.get("type")} <= {None, "default"}


_OFF = (False, None)
_ROPE = Only((None,), "RoPE is of the default kind, unscaled", accepts=_unscaled)
_SIGMOID = Only(("sigmoid",), "the router's scores are sigmoids")

ONLY = {
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "use_qkv_bias"), Only(_OFF, "no linear map has a bias")),
    "quantization": Only((None, {}), "`quantization_config` says how weights are stored; use another checkpoint"),
    **dict.fromkeys(("moe_router_activation_func", "scoring_func"), _SIGMOID),
    "score_function": dataclasses.replace(_SIGMOID, written=True),
    "rope_parameters": _ROPE,
    "rope_scaling": dataclasses.replace(_ROPE, written=True),
    "gated_attention_proj_granularity_type": Only(("head_wise",), "MLA has one output gate per head", written=True),
    "group_norm_size": Only((1, None), "KDA's output norm is per head"),
    "hidden_act": Only(("silu", "swish"), "every MLP is a SwiGLU", written=True),
    "linear_attention": Only(("kda", None), "the linear attention is KDA"),
    "linear_silu": Only((True,), "KDA's convolutions end in a SiLU"),
    "moe_layer_freq": Only((1, None), "every layer after the dense ones is sparse"),
    "no_kda_lora": Only((True,), "KDA's gates are full-rank projections", written=True),
    "rope_interleave": Only((True,), "RoPE rotates neighbouring channels", written=True),
    "router_dtype": Only(("fp32", "float32"), "the router computes in float32", written=True),
    "scale_router_input": Only(_OFF, "the router sees its input unscaled"),
    "tie_word_embeddings": Only((False,), "`lm_head` is a matrix of its own", written=True),
    "topk_method": Only(("noaux_tc",), "experts are chosen in groups, by biased scores", written=True),
    **dict.fromkeys(("up_proj_norm", "value_norm"), Only(_OFF, "neither experts nor values are normalized")),
    "use_kda_lora": Only(_OFF, "KDA's gates are full-rank projections"),
    "use_nGPT": Only(_OFF, "the residual stream is not normalized"),
    "use_qk_norm": Only((True,), "KDA normalizes its queries and keys"),
    **dict.fromkeys(("sliding_window", "use_sliding_window"), Only((*_OFF, 0), "MLA attends to the whole context")),
}

_LAYER_TYPES = {"mla": "full_attention", "kda": "linear_attention", "none": "linear_attention"}
_MLP_TYPES = {"dense": "dense", "moe": "sparse"}
_heads = operator.attrgetter("num_attention_heads")

DERIVED = {
    "layer_types": lambda c: [_LAYER_TYPES[c.attention_kind(i)] for i in range(c.num_hidden_layers)],
    "linear_attn_config": lambda c: c.linear_attn_config,
    "mlp_layer_types": lambda c: [_MLP_TYPES[c.mlp_kind(i)] for i in range(c.num_hidden_layers)],
    **dict.fromkeys(("linear_num_heads", "num_key_value_heads", "num_kv_heads_for_linear_attn"), _heads),
    "qk_head_dim": lambda c: c.qk_head_dim,
    "rotary_dim": lambda c: c.qk_rope_head_dim,
}

HARMLESS = ("max_window_layers", "mtp_loss_scaling_factor", "mtp_use_kda", "partial_rotary_factor")
"""`partial_rotary_factor` repeats `qk_rope_head_dim`, and `max_window_layers` has no effect without a window."""


def _not_ling3(raw: Mapping[str, Any]) -> str | None:
    """Why this file is another model's, or None. Ling 2.6, with Lightning attention, has the same `model_type`."""
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    if _is_ablated(raw):
        return None
    if model_type not in (None, MODEL_TYPE):
        return f"model_type: found {shown(model_type)}; expected '{MODEL_TYPE}'; this reads Ling-3 alone"
    if architectures is None and any(name.startswith("kda_") for name in raw):
        return None
    if isinstance(architectures, list) and architectures and all(name in ARCHITECTURES for name in architectures):
        return None
    said = "not in this config, nor is a KDA field" if architectures is None else found(architectures)
    return (
        f"architectures: {said}; expected {' or '.join(ARCHITECTURES)} (Ling 2.6, of the same model_type, "
        "has Lightning attention instead of KDA, which ling3 does not compute)"
    )


def _is_ablated(raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") == ABLATED_TYPE and raw.get("architectures") == [ABLATED]


def _misfits(c: Ling3Config) -> Iterable[str]:
    """Problems between fields that are valid by themselves."""
    group = c.num_experts // c.n_group
    choosable = min(c.topk_group, c.n_group) * group
    if c.qk_rope_head_dim % 2:
        yield _misfit(c, "qk_rope_head_dim", "an even number, as RoPE rotates pairs of channels")
    if c.first_k_dense_replace > c.num_hidden_layers:
        yield _misfit(c, "first_k_dense_replace", f"at most num_hidden_layers, {c.num_hidden_layers}")
    if c.num_experts % c.n_group:
        yield _misfit(c, "n_group", f"a divisor of num_experts, {c.num_experts}, as groups are of one size")
    elif c.n_group > 1 and group < 2:
        yield _misfit(c, "n_group", "groups of two experts or more, as a group's score is the sum of its two best")
    elif c.num_experts_per_tok > choosable:
        yield _misfit(c, "num_experts_per_tok", f"at most {choosable}, topk_group * num_experts / n_group")
    if c.topk_group > c.n_group:
        yield _misfit(c, "topk_group", f"at most n_group, {c.n_group}")
    yield from too_large(_parameters(c))


def _misfit(c: Ling3Config, name: str, expected: str) -> str:
    return f"{name}: found {getattr(c, name)}; expected {expected}; correct one of them"


def _override_problems(c: Ling3Config) -> Iterable[str]:
    allowed = sorted(name for name, rule in rules(Ling3Config).items() if "layer" in rule.tags)
    pairs: Any = c.layer_overrides
    for layer, fields in pairs:
        at, last = f"layer_overrides.{layer}", c.num_hidden_layers - 1
        if type(layer) is not int or not 0 <= layer <= last:
            yield f"{at}: found layer {shown(layer)}; expected a layer from 0 to {last}; correct it"
        unknown = [name for name, _ in fields if name not in allowed]
        for name in unknown:
            yield f"{at}.{name}: not a field that layers differ in; expected one of {', '.join(allowed)}"
        if not unknown:
            try:
                c.at(layer)
            except ConfigError as error:
                yield from (f"{at}.{problem}" for problem in error.problems)


def _parameters(c: Ling3Config) -> int:
    """An upper bound on the number of parameters: counts KDA and MLA, dense and sparse in every layer."""
    hidden, heads = c.hidden_size, c.num_attention_heads
    kda = 6 * hidden * heads * c.head_dim
    queries = heads * c.qk_head_dim * ((c.q_lora_rank or 0) + hidden)
    latent = c.kv_lora_rank * (hidden + heads * (c.qk_nope_head_dim + c.v_head_dim))
    mla = queries + latent + hidden * heads * c.v_head_dim
    experts = c.num_experts * c.moe_intermediate_size + c.num_shared_experts * c.moe_shared_expert_intermediate_size
    mlp = 3 * hidden * (c.intermediate_size + experts)
    return 2 * c.vocab_size * hidden + (c.num_hidden_layers + (c.num_nextn_predict_layers or 0)) * (kda + mla + mlp)
