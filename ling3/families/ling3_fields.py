"""What a Ling-3 `config.json` may say: the fields with their ranges and aliases, and what is refused by name."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, Literal

from ling3.runtime.quoting import QuotingError, printable, shown


class ConfigError(QuotingError):
    """No Ling-3 that this code computes: every field at fault, what it held, what was expected, what to do."""

    def __init__(self, source: str, problems: list[str]):
        count = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
        super().__init__("\n  ".join([f"{source}: {count}", *map(printable, problems)]))


@dataclasses.dataclass(frozen=True)
class Field:
    """The type and the range of one field, ends included unless `exclusive`; `optional` ones may be absent or null."""

    kind: Literal["int", "float", "bool", "int list", "float list", "choice", "overrides"]
    low: int | float = 0
    high: int | float = math.inf
    exclusive: bool = False
    optional: bool = False
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        """What is expected, for an error message."""
        if self.kind == "bool":
            return "true or false"
        if self.kind == "choice":
            return f"one of {', '.join(self.choices)}"
        if self.kind == "overrides":
            return "an object of layer numbers, each with an object of fields that may differ there"
        noun = {
            "int": "an integer",
            "float": "a finite number",
            "int list": "integers",
            "float list": "finite numbers",
        }[self.kind]
        above, below = ("above", "below") if self.exclusive else ("from", "to")
        low = f" {above} {self.low:,}" if self.low > -math.inf else ""
        high = f" {below} {self.high:,}" if self.high < math.inf else ""
        return f"{noun}{low}{high}{' or null' if self.optional else ''}"

    def admits(self, value: object) -> bool:
        """Whether `value` is of this type and in this range."""
        if value is None:
            return self.optional
        if self.kind == "bool":
            return isinstance(value, bool)
        if self.kind == "choice":
            return isinstance(value, str) and value in self.choices
        if self.kind == "overrides":
            return isinstance(value, tuple)
        if self.kind.endswith("list"):
            return isinstance(value, tuple) and all(self._number(item) for item in value)
        return self._number(value)

    def _number(self, value: object) -> bool:
        wanted = int if self.kind.startswith("int") else float
        if isinstance(value, bool) or not isinstance(value, wanted):
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return self.low < value < self.high if self.exclusive else self.low <= value <= self.high


_SIZE = Field("int", 1, 2**20)
_POSITIVE = Field("float", 0, exclusive=True)
_LIMITS = Field("float list", 0, optional=True)
_SWITCH = Field("bool")
_GATE = Field("choice", choices=("sigmoid", "swish", "constant", "none"))

FIELDS: dict[str, Field] = {
    "vocab_size": Field("int", 1, 2**24),
    "hidden_size": _SIZE,
    "intermediate_size": _SIZE,
    "num_hidden_layers": Field("int", 1, 1000),
    "layer_group_size": Field("int", 1, 1000),
    "first_k_dense_replace": Field("int", 0, 1000),
    "num_attention_heads": Field("int", 1, 4096),
    "head_dim": Field("int", 1, 4096),
    "q_lora_rank": Field("int", 1, 2**20, optional=True),
    "kv_lora_rank": _SIZE,
    "qk_nope_head_dim": Field("int", 1, 4096),
    "qk_rope_head_dim": Field("int", 2, 4096),
    "v_head_dim": Field("int", 1, 4096),
    "rope_theta": Field("float", 1),
    "max_position_embeddings": Field("int", 1, 2**31 - 1),
    "rms_norm_eps": Field("float", 0, 1, exclusive=True),
    "short_conv_kernel_size": Field("int", 1, 64),
    "kda_lower_bound": Field("float", -math.inf, 0, exclusive=True, optional=True),
    "num_experts": Field("int", 1, 4096),
    "num_experts_per_tok": Field("int", 1, 4096),
    "num_shared_experts": Field("int", 0, 64),
    "moe_intermediate_size": _SIZE,
    "moe_shared_expert_intermediate_size": _SIZE,
    "n_group": Field("int", 1, 4096),
    "topk_group": Field("int", 1, 4096),
    "routed_scaling_factor": _POSITIVE,
    "norm_topk_prob": Field("bool"),
    "expert_swiglu_limit_list": _LIMITS,
    "share_expert_swiglu_limit_list": _LIMITS,
    "num_nextn_predict_layers": Field("int", 0, 64, optional=True),
    "initializer_range": _POSITIVE,
    "eos_token_id": Field("int list", 0, 2**31 - 1),
    "pad_token_id": Field("int", 0, 2**31 - 1, optional=True),
    "attention": Field("choice", choices=("scheduled", "kda", "mla", "none")),
    "kda_output_gate": _GATE,
    "mla_output_gate": _GATE,
    "kda_beta": Field("float", 0, 2, optional=True),
    "kda_allow_neg_eigval": _SWITCH,
    "kda_decay": _SWITCH,
    "kda_short_conv": _SWITCH,
    "mla_rope": _SWITCH,
    "moe_router_enable_expert_bias": _SWITCH,
    "layer_overrides": Field("overrides"),
}
"""Each of `Ling3Config`'s fields. The bounds, far beyond any real model, keep a corrupt file from allocating."""

VARIANTS: dict[str, Any] = {
    "attention": "scheduled",
    "kda_output_gate": "sigmoid",
    "mla_output_gate": "sigmoid",
    "kda_beta": None,
    "kda_allow_neg_eigval": False,
    "kda_decay": True,
    "kda_short_conv": True,
    "moe_router_enable_expert_bias": True,
    "layer_overrides": (),
}
"""The fields in which an ablated model differs from every published one, with the published models' values."""

OVERRIDABLE = frozenset(
    {*VARIANTS, "mla_rope", "kda_lower_bound", "num_experts_per_tok", "num_shared_experts"} - {"layer_overrides"}
)
"""What may be said of one layer, in `layer_overrides`."""

MAX_PARAMETERS = 2**42

ALIASES: dict[str, tuple[str, ...]] = {
    "num_experts": ("num_local_experts",),
    "num_experts_per_tok": ("num_experts_per_token",),
    "num_shared_experts": ("n_shared_experts",),
    "n_group": ("num_expert_group",),
    "norm_topk_prob": ("moe_renormalize",),
    "max_position_embeddings": ("model_max_length",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
    "short_conv_kernel_size": ("linear_conv_kernel_dim",),
    "rope_theta": ("rope_parameters.rope_theta", "rope_scaling.rope_theta"),
}
"""Other names of a field, in Ling's own files and those of transformers 5; for `head_dim`, see `config_reader.py`."""

_FALSE = (False, None)
REQUIRED: dict[str, tuple[tuple[Any, ...], str]] = {
    "score_function": (("sigmoid",), "the router's scores are sigmoids"),
    "scoring_func": (("sigmoid",), "the router's scores are sigmoids"),
    "moe_router_activation_func": (("sigmoid",), "the router's scores are sigmoids"),
    "topk_method": (("noaux_tc",), "experts are chosen in groups, by biased scores"),
    "router_dtype": (("fp32", "float32"), "the router computes in float32"),
    "scale_router_input": (_FALSE, "the router sees its input unscaled"),
    "moe_layer_freq": ((1, None), "every layer after the dense ones is sparse"),
    "hidden_act": (("silu", "swish"), "every MLP is a SwiGLU"),
    "tie_word_embeddings": ((False,), "`lm_head` is a matrix of its own"),
    "attention_bias": (_FALSE, "no linear map has a bias"),
    "use_bias": (_FALSE, "no linear map has a bias"),
    "use_qkv_bias": (_FALSE, "no linear map has a bias"),
    "mlp_bias": (_FALSE, "no linear map has a bias"),
    "rope_interleave": ((True,), "RoPE rotates neighbouring channels"),
    "gated_attention_proj_granularity_type": (("head_wise",), "MLA has one output gate per head"),
    "no_kda_lora": ((True,), "KDA's gates are full-rank projections"),
    "use_kda_lora": (_FALSE, "KDA's gates are full-rank projections"),
    "linear_attention": (("kda", None), "the linear attention is KDA"),
    "linear_silu": ((True,), "KDA's convolutions end in a SiLU"),
    "use_qk_norm": ((True,), "KDA normalizes its queries and keys"),
    "group_norm_size": ((1, None), "KDA's output norm is per head"),
    "value_norm": (_FALSE, "values are not normalized"),
    "up_proj_norm": (_FALSE, "experts have no norm"),
    "use_nGPT": (_FALSE, "the residual stream is not normalized"),
    "sliding_window": ((None, 0), "MLA attends to the whole context"),
    "use_sliding_window": (_FALSE, "MLA attends to the whole context"),
    "quantization_config": ((None, {}), "weights are plain BF16, F16 or F32; use the unquantized checkpoint"),
    "quantization": ((None, {}), "weights are plain BF16, F16 or F32; use the unquantized checkpoint"),
}
"""Fields that may hold only the values for which this code is right, and the law that it computes."""

HARMLESS = frozenset(
    {
        "_attn_implementation",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "auto_map",
        "embedding_dropout",
        "hidden_dropout",
        "max_window_layers",
        "model_type",
        "mtp_loss_scaling_factor",
        "mtp_use_kda",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "partial_rotary_factor",
        "router_aux_loss_coef",
        "router_z_loss_coef",
        "transformers_version",
    }
)
"""Fields that change no logit, though their names may sound so; `partial_rotary_factor` repeats `qk_rope_head_dim`."""

TELLING = re.compile(
    r"(?:^|_)(?:attn|attention|rope|rotary|mrope|yarn|kda|gdn|mla|moe|experts?|router|routed|routing|gate|gated|gating|"
    r"norm|layernorm|linear|conv|bias|swiglu|act|activation|scale|scaling|multiplier|softcap|softcapping|clamp|limit|"
    r"residual|window|sliding|quant|quantized|heads?|layers?|lora|recurrent|state|topk|shared?|hidden|intermediate|"
    r"embeddings?|latent|index|indexer)(?:_|$)",
    re.IGNORECASE,
)
"""Words by which an unknown field speaks of the computation: it is refused unless its value switches it off."""


def normalized(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with lists, or a single end-of-text id, as tuples, and whole numbers as floats where those belong."""

    def real(item: Any) -> Any:
        return float(item) if type(item) is int and abs(item) < 2**1000 else item

    result = dict(values)
    for name, value in values.items():
        kind = FIELDS[name].kind
        if kind == "float":
            result[name] = real(value)
        elif kind == "float list" and isinstance(value, list | tuple):
            result[name] = tuple(real(item) for item in value)
        elif kind == "int list":
            result[name] = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
        elif kind == "overrides":
            result[name] = _as_pairs(value)
    return result


def _as_pairs(value: Any) -> Any:
    """`{1: {"kda_decay": False}}`, or its pairs, as `((1, (("kda_decay", False),)),)`; anything else as it is."""
    try:
        layers = {} if value is None else {_whole(layer): dict(fields) for layer, fields in dict(value).items()}
        order = sorted(layers)
    except (TypeError, ValueError):
        return value if isinstance(value, Mapping) else list(value) if isinstance(value, tuple) else value
    pairs = []
    for layer in order:
        known = normalized({name: item for name, item in layers[layer].items() if name in OVERRIDABLE})
        if layers[layer]:
            pairs.append((layer, tuple(sorted({**layers[layer], **known}.items()))))
    return tuple(pairs)


def _whole(layer: Any) -> Any:
    """A layer's number, which JSON has as a string."""
    return int(layer) if isinstance(layer, str) and layer.isdecimal() else layer


def check(values: Mapping[str, Any]) -> list[str]:
    """The problems of a full set of field values: types and ranges, and only then how they fit together."""
    problems = [
        f"{name}: {found(value)}; expected {FIELDS[name].describe()}; {_advice(name, value)}"
        for name, value in values.items()
        if not FIELDS[name].admits(value)
    ]
    return problems or _misfits(values)


def found(value: object) -> str:
    """What a message says that a field held."""
    return "absent" if value is None else f"found {shown(list(value) if isinstance(value, tuple) else value)}"


def _advice(name: str, value: object) -> str:
    if FIELDS[name].kind in ("choice", "overrides"):
        return "correct it"
    if isinstance(value, str):
        return (
            "write the number without quotes" if FIELDS[name].kind != "bool" else "write true or false without quotes"
        )
    if isinstance(value, bool):
        return "write the number, not true or false"
    if value is None:
        return "add it"
    return "correct it"


def _misfits(v: Mapping[str, Any]) -> list[str]:
    return _misfits_of_all(v) or _override_problems(v)


def _misfits_of_all(v: Mapping[str, Any]) -> list[str]:
    problems = []
    group = v["num_experts"] // v["n_group"]
    if v["qk_rope_head_dim"] % 2:
        problems.append(
            f"qk_rope_head_dim: found {v['qk_rope_head_dim']}; expected an even number; RoPE rotates pairs of channels"
        )
    if v["first_k_dense_replace"] > v["num_hidden_layers"]:
        problems.append(
            f"first_k_dense_replace: found {v['first_k_dense_replace']}; expected at most num_hidden_layers, "
            f"{v['num_hidden_layers']}; correct one of them"
        )
    if v["num_experts"] % v["n_group"]:
        problems.append(
            f"n_group: found {v['n_group']}; expected a divisor of num_experts, {v['num_experts']}; "
            "groups are of one size"
        )
    elif v["n_group"] > 1 and group < 2:
        problems.append(
            f"n_group: found {v['n_group']}; expected groups of two experts or more; "
            "a group's score is the sum of its two best"
        )
    elif v["num_experts_per_tok"] > min(v["topk_group"], v["n_group"]) * group:
        problems.append(
            f"num_experts_per_tok: found {v['num_experts_per_tok']}; expected at most topk_group * num_experts / "
            f"n_group, {min(v['topk_group'], v['n_group']) * group}; only experts of the kept groups can be chosen"
        )
    if v["topk_group"] > v["n_group"]:
        problems.append(
            f"topk_group: found {v['topk_group']}; expected at most n_group, {v['n_group']}; correct one of them"
        )
    for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
        if v[name] is not None and len(v[name]) != v["num_hidden_layers"]:
            problems.append(
                f"{name}: found {len(v[name])} limits; expected one per layer, {v['num_hidden_layers']}; "
                "0 means no clamp"
            )
    if (parameters := _parameters(v)) > MAX_PARAMETERS:
        problems.append(
            f"the sizes together: found about {parameters:,} parameters; expected at most {MAX_PARAMETERS:,}; "
            "correct the sizes"
        )
    return problems


def _override_problems(v: Mapping[str, Any]) -> list[str]:
    problems = []
    for layer, fields in v["layer_overrides"]:
        at = f"layer_overrides.{layer}"
        if type(layer) is not int or not 0 <= layer < v["num_hidden_layers"]:
            last = v["num_hidden_layers"] - 1
            problems.append(f"{at}: found layer {shown(layer)}; expected a layer from 0 to {last}; correct it")
        for name, value in fields:
            if name not in OVERRIDABLE:
                names = ", ".join(sorted(OVERRIDABLE))
                problems.append(f"{at}.{name}: not a field that layers differ in; expected one of {names}")
            elif not FIELDS[name].admits(value):
                problems.append(f"{at}.{name}: {found(value)}; expected {FIELDS[name].describe()}; correct it")
        if not problems:
            problems += [f"{at}.{problem}" for problem in _misfits_of_all({**v, **dict(fields)})]
    return problems


def _parameters(v: Mapping[str, Any]) -> int:
    """The weights of a model of these sizes, counting KDA and MLA, dense and sparse in every layer: an upper bound."""
    hidden, heads = v["hidden_size"], v["num_attention_heads"]
    kda = 6 * hidden * heads * v["head_dim"]
    queries = heads * (v["qk_nope_head_dim"] + v["qk_rope_head_dim"]) * ((v["q_lora_rank"] or 0) + hidden)
    mla = (
        queries
        + v["kv_lora_rank"] * (hidden + heads * (v["qk_nope_head_dim"] + v["v_head_dim"]))
        + hidden * heads * v["v_head_dim"]
    )
    experts = (
        v["num_experts"] * v["moe_intermediate_size"]
        + v["num_shared_experts"] * v["moe_shared_expert_intermediate_size"]
    )
    mlp = 3 * hidden * (v["intermediate_size"] + experts)
    return 2 * v["vocab_size"] * hidden + v["num_hidden_layers"] * (kda + mla + mlp)
