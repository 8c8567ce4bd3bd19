"""The methods of a `quantization_config`: how each describes which matrices are quantized, and in which format.

    fp8                 E4M3 with blocks of 128 × 128, as in transformers (`FineGrainedFP8Config`)
    compressed-tensors  pack-quantized (integers of 4 or 8 bits with a scale for each 32, 64 or 128 columns or each row,
                        with zero points or without), int-quantized and float-quantized (INT8 and FP8 with a scale for
                        each row), and mxfp4-pack-quantized
    awq, gptq           integers of 4 bits, in GPTQ also of 8, which are read as pack-quantized ones
    gguf                ggml's blocks; the file's headers say which

Any other setting that would change the results is refused by name.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxtyping import PRNGKeyArray

from ling3.families.config_fields import found
from ling3.formats import (
    CompressedTensors,
    Fp4,
    Fp8,
    Fp8Channels,
    Int8Channels,
    KeyValueHalves,
    Mxfp4,
    PackedIntegers,
    QuantizedMatrix,
    fp8,
)
from ling3.formats.integers import GROUPS
from ling3.layers.linear import Linear
from ling3.ops.rounding import Rounding
from ling3.runtime.quoting import shown

COMPRESSED: Mapping[str, type[CompressedTensors]] = {
    kind.FORMAT: kind for kind in (PackedIntegers, Int8Channels, Fp8Channels, Mxfp4)
}
"""The formats of compressed-tensors that ling3 reads, by name."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The format of a matrix, with its options."""

    kind: type[QuantizedMatrix | KeyValueHalves]
    options: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of the format's `init`: for integers their bits and group, for FP8 the kind of scales."""
    rounding: Rounding | None = None
    """How the format wants activations to be rounded, if it does; models do this only on request."""

    def init(self, like: Linear, *, key: PRNGKeyArray, std: float) -> QuantizedMatrix | KeyValueHalves:
        """A random matrix in this format of about the standard deviation `std`, with the shape and bias of `like`.

        Raises ValueError if its columns do not divide into groups.
        """
        return self.kind.init(like, key=key, std=std, **dict(self.options))


@dataclasses.dataclass(frozen=True)
class SchemeGroup:
    """Modules with one scheme. A target is a class (`Linear`), the exact name of a module, or a regex (`re:…`)."""

    targets: tuple[str, ...]
    scheme: Scheme


def _strings(raw: Mapping[str, Any], name: str, problems: list[str], at: str = "") -> tuple[str, ...]:
    """A field's list of module names and regexes; empty for null. Adds to `problems` if it is malformed."""
    value = raw.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        problems.append(f"{at}{name}: {found(value)}; expected a list of names of modules")
        return ()
    for item in value:
        try:
            re.compile(item.removeprefix("re:"))
        except re.error as error:
            problems.append(f"{at}{name}: found {shown(item)}, which is no pattern ({error}); correct it")
            return ()
    return tuple(value)


def _only(
    raw: Mapping[str, Any], values: Mapping[str, tuple[Any, ...]], free: Iterable[str], at: str = ""
) -> Iterator[str]:
    """Problems of fields with a value that is not among their `values`, and of set fields not in `values` or `free`."""
    for name, expected in values.items():
        if not any(type(raw.get(name)) is type(value) and raw.get(name) == value for value in expected):
            these = " or ".join("null" if value is None else shown(value) for value in expected)
            yield f"{at}{name}: {found(raw.get(name))}; expected {these}; ling3 reads no other: use another checkpoint"
    for name in raw.keys() - values.keys() - set(free):
        if raw[name] not in (None, False, {}, []):
            yield (
                f"{at}{name}: found {shown(raw[name])}; unknown field, which may affect results: remove it if it "
                "does not"
            )


Reading = tuple[tuple[SchemeGroup, ...], tuple[str, ...], list[str]]
"""The groups of a config, the modules that it leaves in floats, and its problems."""


def _fp8(raw: Mapping[str, Any]) -> Reading:
    problems = list(_only(raw, fp8.READABLE, ("quant_method", "modules_to_not_convert", "ignored_layers")))
    skips = "modules_to_not_convert" if raw.get("modules_to_not_convert") is not None else "ignored_layers"
    ignore = _strings(raw, skips, problems)
    if raw.get(skips) is None:
        ignore = ("lm_head",)  # the default of transformers
    rounding = Rounding("float", fp8.BLOCK) if raw.get("activation_scheme") == "dynamic" else None
    groups = [SchemeGroup((), Scheme(Fp8, (("powers", raw.get("scale_fmt") == "ue8m0"),), rounding))]
    if raw.get("expert_dtype") == "fp4":
        groups.insert(0, SchemeGroup(("re:.*experts",), Scheme(Fp4)))
    return tuple(groups), ignore, problems


def _compressed_tensors(raw: Mapping[str, Any]) -> Reading:
    values = {
        "format": (*COMPRESSED, "mixed-precision"),
        "kv_cache_scheme": (None,),
        "moe_sparsity_config": (None,),
        "quantization_status": ("compressed", "frozen", None),
        "transform_config": ({}, None),
    }
    free = ("config_groups", "global_compression_ratio", "ignore", "quant_method", "sparsity_config", "version")
    problems = list(_only(raw, values, free))
    sparsity = raw.get("sparsity_config")
    if sparsity and not (isinstance(sparsity, Mapping) and sparsity.get("format") == "dense"):
        problems.append(
            f"sparsity_config: {found(sparsity)}; expected the format 'dense', null or {{}}; ling3 reads no sparse "
            "layout: use another checkpoint"
        )
    ignore, groups, listed = _strings(raw, "ignore", problems), [], raw.get("config_groups")
    if not isinstance(listed, Mapping) or not listed or not all(isinstance(own, Mapping) for own in listed.values()):
        problems.append(f"config_groups: {found(listed)}; expected an object of groups, each with targets and weights")
        listed = {}
    for name, group in listed.items():
        at = f"config_groups.{name}."
        own = raw.get("format") if group.get("format") is None else group["format"]
        scheme = _scheme(group.get("weights"), own, f"{at}weights", problems)
        scheme = dataclasses.replace(scheme, rounding=_rounding(group.get("input_activations")))
        problems += _only(group, {"output_activations": (None,)}, (*_GROUP, "input_activations"), at)
        problems += _activations(group.get("input_activations"), f"{at}input_activations")
        groups.append(SchemeGroup(_strings(group, "targets", problems, at), scheme))
    return tuple(groups), ignore, problems


_CALIBRATION = ("observer", "observer_kwargs", "zp_dtype")
"""Fields that say how scales were found, which does not matter to a reader."""
_GROUP = ("format", "targets", "weights")


def _activations(raw: Any, at: str) -> Iterator[str]:
    """Problems of activations that are not rounded to 8 bits by a scale for each token, computed from that token."""
    if raw is None:
        return
    if not isinstance(raw, Mapping):
        yield f"{at}: {found(raw)}; expected an object or null"
        return
    values = {"num_bits": (8,), "type": ("int", "float"), "strategy": ("token",), "dynamic": (True,)}
    values |= {"group_size": (None,), "block_structure": (None,), "actorder": (None, False), "scale_dtype": (None,)}
    yield from _only(raw, values, ("symmetric", *_CALIBRATION), f"{at}.")


def _rounding(raw: Any) -> Rounding | None:
    """The rounding that the `input_activations` of a config group describe; None if there is none, or zero points."""
    if not isinstance(raw, Mapping) or raw.get("symmetric") is False:
        return None
    return Rounding("int" if raw.get("type") == "int" else "float")


def _scheme(raw: Any, format: Any, at: str, problems: list[str]) -> Scheme:
    """The scheme that the `weights` of a config group describe."""
    if not isinstance(raw, Mapping):
        problems.append(f"{at}: {found(raw)}; expected an object with num_bits, type, strategy and group_size")
        return Scheme(PackedIntegers)
    kind = COMPRESSED.get(format)
    if kind is None:
        problems.append(f"{at.removesuffix('weights')}format: {found(format)}; expected {' or '.join(COMPRESSED)}")
        return Scheme(PackedIntegers)
    values = {
        "symmetric": (True,),
        "dynamic": (False, None),
        "actorder": (None, False, "weight", "static"),  # these change only the order of calibration
        "block_structure": (None,),
        **kind.readable(raw),
    }
    wrong = list(_only(raw, values, _CALIBRATION, f"{at}."))
    problems += wrong
    return Scheme(kind, () if wrong else tuple(kind.options(raw).items()))


def _awq(raw: Mapping[str, Any]) -> Reading:
    values = {
        "bits": (4,),
        "group_size": (*GROUPS, -1),
        "zero_point": (True,),
        "version": ("gemm", "GEMM", None),
        "format": ("gemm", None),
    }
    free = ("quant_method", "backend", "modules_to_not_convert", "do_fuse", "exllama_config", "fuse_max_seq_len")
    return _integers(raw, values, (*free, "modules_to_fuse"))


def _gptq(raw: Mapping[str, Any]) -> Reading:
    values = {
        "bits": (4, 8),
        "group_size": (*GROUPS, -1),
        "desc_act": (False, True, None),
        "format": ("gptq", "gptq_v2", None),
        "checkpoint_format": ("gptq", "gptq_v2", None),
        "pack_dtype": ("int32", None),
    }
    groups, ignore, problems = _integers(raw, values, (*GPTQ_CALIBRATION, "dynamic"))
    rules = raw.get("dynamic") or {}
    if not isinstance(rules, Mapping) or any(own and not name.startswith("-:") for name, own in rules.items()):
        problems.append(
            f"dynamic: {found(rules)}; expected only modules that are left in floats (-:…); ling3 reads one number of "
            "bits and one group size: use another checkpoint"
        )
    return groups, ignore, problems


GPTQ_CALIBRATION = (
    *("quant_method", "sym", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "meta"),
    *("dataset", "tokenizer", "model_name_or_path", "model_file_base_name", "model_seqlen", "lm_head", "batch_size"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "pad_token_id"),
    *("max_input_length", "cache_block_outputs", "use_cuda_fp16", "disable_exllama", "use_exllama", "exllama_config"),
    *("backend", "act_group_aware", "is_marlin_format", "quantizer", "hyb_act", "v2", "v2_alpha", "group_aware"),
)
"""The fields of GPTQ that say how a checkpoint was made or which matrices are quantized, which its files show."""


def _integers(raw: Mapping[str, Any], values: Mapping[str, tuple[Any, ...]], free: Iterable[str]) -> Reading:
    """Packed integers with zero points: the same scheme for all quantized matrices, which the files show."""
    problems = list(_only(raw, values, free))
    if problems:
        return (), (), problems
    options = {
        "bits": raw["bits"],
        "group": None if raw["group_size"] == -1 else raw["group_size"],
        "symmetric": False,
    }
    if raw.get("desc_act") is True and raw["group_size"] != -1:
        options["ordered"] = True
    scheme = Scheme(PackedIntegers, tuple(options.items()))
    return (SchemeGroup(("Linear",), scheme),), ("lm_head",), []


def as_compressed(scheme: Scheme, targets: list[str], ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` of compressed-tensors for one of its formats, which is that of these modules."""
    assert issubclass(scheme.kind, CompressedTensors)
    weights = {"symmetric": True, "strategy": "group", "dynamic": False, **scheme.kind.weights(dict(scheme.options))}
    only = {"targets": targets, "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": scheme.kind.FORMAT,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {"group_0": only | {"format": scheme.kind.FORMAT}},
    }


METHODS: Mapping[str, Callable[[Mapping[str, Any]], Reading]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "gguf": lambda raw: ((), (), list(_only(raw, {}, ("quant_method",)))),
}
"""How the config of each method is read."""
REPACKED = ("awq", "gptq")
"""The methods whose tensors become `pack-quantized` ones while they are read (`checkpoint/repacking.py`)."""
