"""`quantization_config`: which matrices of a checkpoint are quantized, and in which format.

`quantization_methods.py` reads the config of each method. Modules are matched by their published names, as in
transformers 5.23 (`should_convert_module`) and compressed-tensors 0.20 (`match_name`).
"""

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, no_type_check

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from ling3.families.config_fields import ConfigError, found
from ling3.families.quantization_methods import METHODS, Scheme, SchemeGroup
from ling3.layers.linear import Linear, Matrix


@dataclasses.dataclass(frozen=True)
class Quantization:
    """A parsed `quantization_config`. `source` is its JSON text, which `save` writes again."""

    source: str
    method: str
    """The `quant_method`, one of `METHODS`; `headers` once the files' headers have given the formats.

    `checkpoint/stored_formats.py` reads them.
    """
    groups: tuple[SchemeGroup, ...]
    ignore: tuple[str, ...]
    """Modules that are not quantized, even if a target names them."""
    rounds: bool = False
    """True if products round activations as the schemes say."""

    @staticmethod
    def read(raw: Any) -> "Quantization | None":
        """Reads the config from a JSON object; None for null or an empty object.

        Raises ConfigError with all problems, and TypeError if `raw` is not an object.
        """
        if isinstance(raw, Quantization) or raw is None or raw == {}:
            return raw or None
        if not isinstance(raw, Mapping):
            raise TypeError("no JSON object")
        method = raw.get("quant_method")
        if not isinstance(method, str) or method not in METHODS:
            problem = f"quant_method: {found(method)}; expected {' or '.join(METHODS)}, which is what ling3 reads"
            raise ConfigError("quantization_config", [problem])
        groups, ignore, problems = METHODS[method](raw)
        if problems:
            raise ConfigError("quantization_config", problems)
        return Quantization(json.dumps(raw), method, groups, ignore)

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


def quantization_of(config: Any) -> Quantization | None:
    """The quantization of a config of any family; None if it has none, or its family knows of none."""
    return getattr(config, "quantization_config", None)


def with_rounding(config: Any) -> Any:
    """The config of the same model, in which products round activations as its format wants.

    Raises ValueError if no format of the model says how.
    """
    own = quantization_of(config)
    if own is None or not any(group.scheme.rounding for group in own.groups):
        raise ValueError(
            "rounded_activations: found True; expected False, since the checkpoint's quantization_config wants no "
            "symmetric rounding of activations to 8 bits by a scale for each token"
        )
    return dataclasses.replace(config, quantization_config=dataclasses.replace(own, rounds=True))


def in_floats(config: Any) -> Any:
    """The config of the same model without quantization."""
    if quantization_of(config) is None:
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
                matrix = scheme.init(linear, key=jax.random.fold_in(key, number), std=std)
                if rounds and scheme.rounding is not None:
                    return dataclasses.replace(matrix, rounding=scheme.rounding)
                return matrix
            except ValueError as error:
                problems.append(f"{modules[0]}: {error}; ignore it, or use another group size")
        return linear

    numbers: list[str] = []
    rounds = quantization.rounds
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
