"""`quantization_config`: which matrices of a checkpoint are quantized, and in which format.

Reads the two methods in which Ling-3 and related models are published:

    quant_method  fp8                 E4M3 with blocks of 128 × 128, as in transformers (`FineGrainedFP8Config`)
    quant_method  compressed-tensors  format pack-quantized: symmetric integers of 4 or 8 bits in groups of 32 or 128,
                                      or with a scale for each row; and format mxfp4-pack-quantized

Any other setting that would change the results is refused by name. Modules are matched by their published names, as in
transformers 5.23 (`should_convert_module`) and compressed-tensors 0.20 (`match_name`).
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, no_type_check

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from ling3.families.config_fields import ConfigError, found
from ling3.formats import CompressedTensors, Fp4, Fp8, Mxfp4, PackedIntegers, QuantizedMatrix, fp8
from ling3.layers.linear import Linear, Matrix
from ling3.runtime.quoting import shown

COMPRESSED: Mapping[str, type[CompressedTensors]] = {kind.FORMAT: kind for kind in (PackedIntegers, Mxfp4)}
"""The formats of compressed-tensors that ling3 reads, by name."""


@dataclasses.dataclass(frozen=True)
class Scheme:
    """The format of a matrix, with its options."""

    kind: type[QuantizedMatrix]
    options: tuple[tuple[str, Any], ...] = ()
    """Keyword arguments of the format's `init`: for integers their bits and group, for FP8 the kind of scales."""

    def init(self, like: Linear, *, key: PRNGKeyArray, std: float) -> QuantizedMatrix:
        """A random matrix in this format of about the standard deviation `std`, with the shape and bias of `like`.

        Raises ValueError if its columns do not divide into groups.
        """
        return self.kind.init(like, key=key, std=std, **dict(self.options))


@dataclasses.dataclass(frozen=True)
class SchemeGroup:
    """Modules with one scheme. A target is a class (`Linear`), the exact name of a module, or a regex (`re:…`)."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A parsed `quantization_config`. `source` is its JSON text, which `save` writes again."""

    source: str
    method: Literal["fp8", "compressed-tensors", "gguf", "headers"]
    """The `quant_method`; `headers` once the files' headers have given the formats (`checkpoint/stored_formats.py`)."""
    groups: tuple[SchemeGroup, ...]
    ignore: tuple[str, ...]
    """Modules that are not quantized, even if a target names them."""

    @staticmethod
    def read(raw: Any) -> "Quantization | None":
        """Reads the config from a JSON object; None for null or an empty object.

        Raises ConfigError with all problems, and TypeError if `raw` is not an object.
        """
        if isinstance(raw, Quantization) or raw is None or raw == {}:
            return raw or None
        if not isinstance(raw, Mapping):
            raise TypeError("no JSON object")
        readers: dict[
            Any, Callable[[Mapping[str, Any]], tuple[tuple[SchemeGroup, ...], tuple[str, ...], list[str]]]
        ] = {
            "fp8": _fp8,
            "compressed-tensors": _compressed_tensors,
            "gguf": lambda raw: ((), (), list(_only(raw, {}, ("quant_method",)))),
        }
        method = raw.get("quant_method")
        if not isinstance(method, str) or method not in readers:
            problem = f"quant_method: {found(method)}; expected {' or '.join(readers)}, which is what ling3 reads"
            raise ConfigError("quantization_config", [problem])
        groups, ignore, problems = readers[method](raw)
        if problems:
            raise ConfigError("quantization_config", problems)
        return Quantization(json.dumps(raw), method, groups, ignore)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """The fields as a published `quantization_config` has them."""
        return json.loads(self.source)

    @no_type_check  # called for every expert, as is _names
    def scheme(self, module: str, kind: str = "Linear") -> Scheme | None:
        """The scheme of the module with this published name and this class in torch; None if it is not quantized."""
        if self.method == "fp8":
            skipped = any(_names_for_fp8(pattern, module) for pattern in self.ignore)
            own = [group.scheme for group in self.groups if group.targets == () or _ROUTED.search(module)]
            return None if skipped or kind != "Linear" else own[0]
        if any(_names(target, module, kind) for target in self.ignore):
            return None
        # An exact name has precedence over a regex, and a regex over a class.
        ranked = (
            sorted(
                (2 if target == kind else int(target.startswith("re:")), i, group.scheme)
                for i, group in enumerate(self.groups)
                for target in group.targets
                if _names(target, module, kind)
            )
            if len(self.groups) > 1
            else [(0, 0, group.scheme) for group in self.groups if any(_names(t, module, kind) for t in group.targets)]
        )
        return ranked[0][2] if ranked else None


_ROUTED = re.compile(r"\.experts\.\d+\.")


@no_type_check
def _names(target: str, module: str, kind: str) -> bool:
    """True if the target is the class, or matches the name as `match_name` would (tests/parity/test_names.py)."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target in (module, kind)


@no_type_check
def _names_for_fp8(pattern: str, module: str) -> bool:
    """True if the pattern matches from the start up to the end of a part of the name, or is a suffix: transformers'
    `should_convert_module`, negated (tests/parity/test_names.py)."""
    return module.endswith(pattern) or re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module) is not None


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


def _fp8(raw: Mapping[str, Any]) -> tuple[tuple[SchemeGroup, ...], tuple[str, ...], list[str]]:
    problems = list(_only(raw, fp8.READABLE, ("quant_method", "modules_to_not_convert", "ignored_layers")))
    skips = "modules_to_not_convert" if raw.get("modules_to_not_convert") is not None else "ignored_layers"
    ignore = _strings(raw, skips, problems)
    if raw.get(skips) is None:
        ignore = ("lm_head",)  # the default of transformers
    groups = [SchemeGroup((), Scheme(Fp8, (("powers", raw.get("scale_fmt") == "ue8m0"),)))]
    if raw.get("expert_dtype") == "fp4":
        groups.insert(0, SchemeGroup(("re:.*experts",), Scheme(Fp4)))
    return tuple(groups), ignore, problems


def _compressed_tensors(raw: Mapping[str, Any]) -> tuple[tuple[SchemeGroup, ...], tuple[str, ...], list[str]]:
    values = {
        "format": (*COMPRESSED, "mixed-precision"),
        "kv_cache_scheme": (None,),
        "moe_sparsity_config": (None,),
        "quantization_status": ("compressed", None),
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
        problems += _only(group, {"input_activations": (None,), "output_activations": (None,)}, _GROUP, at)
        groups.append(SchemeGroup(_strings(group, "targets", problems, at), scheme))
    return tuple(groups), ignore, problems


_GROUP = ("format", "targets", "weights")


def _scheme(raw: Any, format: Any, at: str, problems: list[str]) -> Scheme:
    """The scheme that the `weights` of a config group describe."""
    if not isinstance(raw, Mapping):
        problems.append(f"{at}: {found(raw)}; expected an object with num_bits, type, strategy and group_size")
        return Scheme(PackedIntegers)
    kind = COMPRESSED.get(format)
    if kind is None:
        problems.append(f"{at.removesuffix('weights')}format: {found(format)}; expected {' or '.join(COMPRESSED)}")
        return Scheme(PackedIntegers)
    values = kind.readable(raw) | {
        "symmetric": (True,),
        "dynamic": (False, None),
        "actorder": (None, False, "weight", "static"),  # these change only the order of calibration
        "block_structure": (None,),
    }
    wrong = list(_only(raw, values, ("observer", "observer_kwargs", "zp_dtype"), f"{at}."))
    problems += wrong
    return Scheme(kind, () if wrong else tuple(kind.options(raw).items()))


def in_floats(config: Any) -> Any:
    """The config of the same model without quantization."""
    if getattr(config, "quantization_config", None) is None:
        return config
    return dataclasses.replace(config, quantization_config=None)


def quantized(
    model: Any, quantization: Quantization, published: Callable[[str], str], *, key: PRNGKeyArray, std: float
) -> Any:
    """The tree with a random quantized matrix in place of each matrix that `quantization` selects.

    `published(name)` is the checkpoint's name of the tensor at the path `name` of the tree. Raises ConfigError for a
    matrix that its scheme cannot store, and for experts of one layer with several schemes.
    """
    problems: list[str] = []

    def visit(node: Any, path: str) -> Any:
        if isinstance(node, tuple):
            return tuple(visit(item, f"{path}.{i}") for i, item in enumerate(node))
        if isinstance(node, Linear):
            return replaced(node, path.lstrip("."))
        if not isinstance(node, eqx.Module):
            return node
        fields = [field.name for field in dataclasses.fields(node) if not field.metadata.get("static")]
        changed = {name: visit(getattr(node, name), f"{path}.{name}") for name in fields}
        return dataclasses.replace(node, **changed) if any(changed[n] is not getattr(node, n) for n in fields) else node

    def replaced(linear: Linear, path: str) -> Matrix:
        embeds, modules = linear.axes[:1] == ("vocab",) and path != "lm_head", _modules(linear, path, published)
        schemes = {quantization.scheme(module, "Embedding" if embeds else "Linear") for module in modules}
        if schemes == {None}:
            return linear
        if embeds and not all(scheme is not None and scheme.kind.EMBEDS for scheme in schemes):
            problems.append(f"{modules[0]}: found a quantized embedding; expected it in floats; ignore it")
        elif len(schemes) > 1:
            problems.append(f"{modules[0]} and its neighbours: found several schemes; expected one for these experts")
        else:
            [scheme], number = schemes, len(numbers)
            numbers.append(path)
            assert scheme is not None
            try:
                return scheme.init(linear, key=jax.random.fold_in(key, number), std=std)
            except ValueError as error:
                problems.append(f"{modules[0]}: {error}; ignore it, or use another group size")
        return linear

    numbers: list[str] = []
    tree = visit(model, "")
    if problems:
        raise ConfigError("quantization_config", problems)
    return tree


def _modules(matrix: Matrix, path: str, published: Callable[[str], str]) -> list[str]:
    """The published names of the modules that make up a matrix of the tree: one per expert for a stack."""
    if matrix.axes[:1] != ("experts",):
        return [published(f"{path}.weight").removesuffix(".weight")]
    experts, projection = path.rsplit(".", 1)
    names = (f"{experts}.{expert}.{projection}.weight" for expert in range(matrix.shape[0]))
    return [published(name).removesuffix(".weight") for name in names]
