"""From the raw `config.json` to `Ling3Config`'s fields: aliases, what identifies Ling-3, and what is refused."""

from collections.abc import Mapping
from typing import Any, Literal

from ling3.families.ling3_fields import (
    ALIASES,
    FIELDS,
    HARMLESS,
    REQUIRED,
    TELLING,
    VARIANTS,
    ConfigError,
    check,
    found,
    normalized,
)
from ling3.runtime.quoting import shown

ABLATED, ABLATED_TYPE = "Ling3AblatedForCausalLM", "ling3_ablated"
"""Architecture and model_type of what no other program should take for a Ling-3: a model with a variant field."""

ARCHITECTURES = ("BailingMoeV3ForCausalLM", "BailingHybridForCausalLM")
"""Ling-3's own name, and the one transformers 5 writes."""

MODEL_TYPE = "bailing_hybrid"

_READS = "ling3 reads Ling-3, and other families once they are registered (ling3.register_family)"

_ABSENT = {"initializer_range": 0.02, **VARIANTS}
_DERIVED = frozenset(
    {
        "kda_safe_gate",
        "layer_types",
        "linear_attn_config",
        "linear_head_dim",
        "linear_num_heads",
        "mla_use_nope",
        "mlp_layer_types",
        "num_key_value_heads",
        "num_kv_heads_for_linear_attn",
        "qk_head_dim",
        "rope_parameters",
        "rope_scaling",
        "rotary_dim",
        "use_mla_nope",
    }
)
_ROPE_KEYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def read(raw: object, source: str) -> dict[str, Any]:
    """`Ling3Config`'s field values from the JSON object of a `config.json`; `source` is the file that errors name.

    Sizes have no defaults: a file that leaves one out is an error. Unknown fields are accepted unless a word of their
    name speaks of the computation (`config_fields.TELLING`) and their value is anything but null, false, 0 or empty.

    Raises ConfigError with every problem found.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(source, [f"found {shown(raw)}; expected a JSON object; is this a config.json?"])
    if problem := _not_ling3(raw):
        raise ConfigError(source, [problem])

    problems: list[str] = []
    values = {name: _pick(raw, (name, *ALIASES.get(name, ())), problems) for name in FIELDS}
    values["head_dim"] = _head_dim(raw, problems)
    values["kda_lower_bound"] = _lower_bound(raw, problems)
    values["mla_rope"] = _mla_rope(raw, problems)
    if values["moe_shared_expert_intermediate_size"] is None:
        values["moe_shared_expert_intermediate_size"] = values["moe_intermediate_size"]
    values |= {name: default for name, default in _ABSENT.items() if values[name] is None}
    values = _without_mtp_limits(normalized(values))

    problems += [*check(values), *_rope_problems(raw), *_refused(raw)]
    if not problems:
        problems += _disagreements(raw, values)
    if problems:
        raise ConfigError(source, problems)
    return values


def attention_kind(values: Mapping[str, Any], layer: int) -> Literal["kda", "mla", "none"]:
    """The attention of 0-based `layer` by a full set of field values; `Ling3Config.attention_kind` has the rule."""
    attention = dict(dict(values["layer_overrides"]).get(layer, ())).get("attention", values["attention"])
    if attention != "scheduled":
        return attention
    return "mla" if (layer + 1) % values["layer_group_size"] == 0 else "kda"


def linear_attn_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """`Ling3Config.linear_attn_config` by a full set of field values."""
    kinds = [attention_kind(values, layer) for layer in range(values["num_hidden_layers"])]
    return {
        "kda_layers": [layer for layer, kind in enumerate(kinds, 1) if kind == "kda"],
        "full_attn_layers": [layer for layer, kind in enumerate(kinds, 1) if kind == "mla"],
        "head_dim": values["head_dim"],
        "num_heads": values["num_attention_heads"],
        "short_conv_kernel_size": values["short_conv_kernel_size"],
    }


def _not_ling3(raw: Mapping[str, Any]) -> str | None:
    """Why this file is another model's. Ling 2.6, with Lightning attention, has the same `model_type`."""
    if _is_ablated(raw):
        return None
    if raw.get("model_type") not in (None, MODEL_TYPE):
        return f"model_type: found {shown(raw['model_type'])}; expected '{MODEL_TYPE}'; {_READS}"
    architectures = raw.get("architectures")
    if architectures is None:
        if any(name.startswith("kda_") for name in raw):
            return None
        what = "absent, and no KDA field either"
    else:
        if isinstance(architectures, list) and architectures and all(name in ARCHITECTURES for name in architectures):
            return None
        what = found(architectures)
    return (
        f"architectures: {what}; expected {' or '.join(ARCHITECTURES)}; {_READS} (Ling 2.6, of the "
        "same model_type, has Lightning attention instead of KDA, which ling3 does not compute)"
    )


def _is_ablated(raw: Mapping[str, Any]) -> bool:
    return raw.get("model_type") == ABLATED_TYPE and raw.get("architectures") == [ABLATED]


def _pick(raw: Mapping[str, Any], names: tuple[str, ...], problems: list[str]) -> Any:
    """The one value under all of `names` (`a.b` is a field of an object); null counts as absent."""
    said = {}
    for name in names:
        outer, _, inner = name.partition(".")
        value = raw.get(outer)
        value = value.get(inner) if inner and isinstance(value, Mapping) else None if inner else value
        if value is not None:
            said[name] = value
    if any(value != next(iter(said.values())) for value in said.values()):
        each = ", ".join(f"{name} {shown(value)}" for name, value in said.items())
        problems.append(
            f"{names[0]}: found {each}; expected one value, as these are names of one field; keep the right one"
        )
    return next(iter(said.values()), None)


def _head_dim(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """KDA's head size. Files of transformers 5 have it in `linear_head_dim`, and the rotary size in `head_dim`."""
    linear, plain = raw.get("linear_head_dim"), raw.get("head_dim")
    if linear is None:
        return plain
    if plain not in (None, linear, raw.get("qk_rope_head_dim")):
        problems.append(
            f"head_dim: found {shown(plain)}; expected linear_head_dim, {shown(linear)}, or qk_rope_head_dim, "
            f"{shown(raw.get('qk_rope_head_dim'))}; correct it or leave it out"
        )
    return linear


def _lower_bound(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """The bound of KDA's decay, or None for the softplus law when the safe gate is off."""
    safe, bound = raw.get("kda_safe_gate"), raw.get("kda_lower_bound")
    if not isinstance(safe, bool):
        problems.append(f"kda_safe_gate: {found(safe)}; expected true or false; it says which law KDA's decay follows")
    elif safe and bound is None:
        problems.append(
            "kda_lower_bound: absent; expected a finite number below 0; add it, or set kda_safe_gate to false"
        )
    return bound if safe else None


def _mla_rope(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """Whether MLA rotates its rotary channels: `use_mla_nope` negated.

    `mla_rope` may only repeat that, but in files of ablated models, which once had `mla_rope: false` beside
    `use_mla_nope: false`.
    """
    nope, rope = _pick(raw, ("use_mla_nope", "mla_use_nope"), problems), raw.get("mla_rope")
    if not isinstance(nope, bool | None):
        problems.append(f"use_mla_nope: found {shown(nope)}; expected true or false; it says if MLA leaves out RoPE")
    rotated = nope is not True
    if rope not in (None, rotated) and not (rope is False and _is_ablated(raw)):
        problems.append(f"mla_rope: found {shown(rope)}; expected {rotated}, from use_mla_nope; leave it out")
    return rotated if rope is None else rope


def _without_mtp_limits(values: dict[str, Any]) -> dict[str, Any]:
    """Per-layer limits without those of the multi-token-prediction layers, where the lists cover these too."""
    layers, extra = values["num_hidden_layers"], values["num_nextn_predict_layers"]
    if type(layers) is int and type(extra) is int and layers > 0 and extra > 0:
        for name in ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list"):
            if isinstance(values[name], tuple) and len(values[name]) == layers + extra:
                values[name] = values[name][:layers]
    return values


def _rope_problems(raw: Mapping[str, Any]) -> list[str]:
    problems = []
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            problems.append(f"{name}: found {shown(rope)}; expected an object or null; remove it")
            continue
        kinds = {str(rope[key]) for key in ("rope_type", "type") if rope.get(key) is not None}
        others = sorted(str(key) for key in rope if key not in _ROPE_KEYS)
        if kinds - {"default"} or others:
            said = ", ".join([*sorted(kinds - {"default"}), *others])
            problems.append(
                f"{name}: found {shown(said)}; expected the rope_type 'default'; ling3 computes unscaled RoPE only"
            )
    return problems


def _refused(raw: Mapping[str, Any]) -> list[str]:
    """Fields whose value means a computation that this code does not do, and unknown ones whose name says it might."""
    known = {*FIELDS, *HARMLESS, *_DERIVED, *(alias for aliases in ALIASES.values() for alias in aliases)}
    problems = []
    for name, value in raw.items():
        if name in VARIANTS and value not in (None, VARIANTS[name], [], {}) and not _is_ablated(raw):
            problems.append(
                f"{name}: found {shown(value)}; expected {shown(VARIANTS[name])}, as in every published Ling-3; only a "
                f"file of the model_type {ABLATED_TYPE}, as `ling3.save` writes it for an ablated model, may differ"
            )
        elif name in REQUIRED:
            allowed, law = REQUIRED[name]
            if not any(type(value) is type(a) and value == a for a in allowed):
                problems.append(f"{name}: found {shown(value)}; expected {shown(allowed[0])}; in ling3 {law}")
        elif name not in known and TELLING.search(name) and value not in (None, False, 0, "", [], {}):
            problems.append(
                f"{name}: found {shown(value)}; expected no such field; its name says that it may change the numbers "
                "and ling3 does not know it: remove it if it does not"
            )
    return problems


def _disagreements(raw: Mapping[str, Any], values: dict[str, Any]) -> list[str]:
    """Fields that repeat what others say, and say something else."""
    heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
    linear = linear_attn_config(values)
    full = [layer in linear["full_attn_layers"] for layer in range(1, layers + 1)]
    expected = {
        "num_key_value_heads": heads,
        "linear_num_heads": heads,
        "qk_head_dim": values["qk_nope_head_dim"] + values["qk_rope_head_dim"],
        "rotary_dim": values["qk_rope_head_dim"],
        "layer_types": ["full_attention" if is_full else "linear_attention" for is_full in full],
        "mlp_layer_types": [
            "dense" if layer < values["first_k_dense_replace"] else "sparse" for layer in range(layers)
        ],
    }
    said = {name: raw.get(name) for name in expected}
    said["num_kv_heads_for_linear_attn"] = raw.get("num_kv_heads_for_linear_attn") or None
    expected["num_kv_heads_for_linear_attn"] = heads
    given = raw.get("linear_attn_config")
    if isinstance(given, Mapping):
        for key, value in given.items():
            said[f"linear_attn_config.{key}"] = value
            expected[f"linear_attn_config.{key}"] = linear.get(key)
    else:
        said["linear_attn_config"], expected["linear_attn_config"] = given, linear
    return [
        f"{name}: found {shown(value)}; expected {shown(expected[name])}, from the other fields; "
        "ling3 computes no other arrangement"
        for name, value in said.items()
        if value is not None and value != expected[name]
    ]
