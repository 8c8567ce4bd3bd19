"""Reads, checks and writes the `config.json` of any family, by rules that the fields of its config class declare.

A config is a frozen dataclass. Annotations give the types of its fields, and `field` their other rules:

    @dataclasses.dataclass(frozen=True)
    class Config:
        vocab_size: int = field(ge=1)
        num_experts: int = field(ge=1, aliases=("num_local_experts",))
        head_dim: int = field(ge=1, absent=lambda v: v["hidden_size"] // v["num_attention_heads"])
        sliding_window: int | None = field(ge=1)
        layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = field(per_layer=True)

        def __post_init__(self):
            check(self, lambda: [])

`read` makes a config from a file's content, `published` the reverse. Types are int, float, bool, str, a Literal of
strings, another such dataclass (an object in the file), or a tuple of these; `| None` allows null and an absent field.
"""

import contextlib
import dataclasses
import functools
import inspect
import json
import math
import operator
import os
import pathlib
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ling3.runtime import strict_json
from ling3.runtime.quoting import QuotingError, printable, shown

_Config = TypeVar("_Config")

HARMLESS = frozenset(
    (
        *("_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "attn_implementation"),
        *("attention_dropout", "embedding_dropout", "hidden_dropout", "output_hidden_states", "output_router_logits"),
        *("router_aux_loss_coef", "router_z_loss_coef"),
    )
)
"""Fields that change no logit in any family, though their names have `TELLING` words."""

TELLING = re.compile(
    r"(?:^|_)(?:attn|attention|rope|rotary|mrope|yarn|kda|gdn|mla|moe|experts?|router|routed|routing|gate|gated|gating|"
    r"norm|layernorm|linear|conv|bias|swiglu|act|activation|scale|scaling|multiplier|softcap|softcapping|clamp|limit|"
    r"residual|window|sliding|quant|quantized|heads?|layers?|lora|recurrent|state|topk|shared?|hidden|intermediate|"
    r"embeddings?|latent|index|indexer)(?:_|$)",
    re.IGNORECASE,
)
"""Words suggesting that an unknown field changes the results: it is refused unless it is null, false, 0 or empty."""

MAX_PARAMETERS = 2**42
"""The most parameters that a config may describe, so that a damaged file causes no absurd allocation."""

_BOUNDS = {
    "ge": ("from", operator.ge),
    "gt": ("above", operator.gt),
    "le": ("to", operator.le),
    "lt": ("below", operator.lt),
}
_NOUNS = {int: ("an integer", "integers"), float: ("a finite number", "finite numbers"), str: ("a string", "strings")}


class ConfigError(QuotingError):
    """Raised for an invalid config; lists every wrong field, what it held, what was expected and what to do."""

    def __init__(self, source: str, problems: Iterable[str]):
        self.problems = list(problems)
        count = f"{len(self.problems)} problems" if len(self.problems) > 1 else "1 problem"
        super().__init__("\n  ".join([f"{source}: {count}", *map(printable, self.problems)]))


@dataclasses.dataclass(frozen=True)
class Rule:
    """The rules of one field: which values it may have, and how files write it."""

    item: Any
    """The type of the value, or of each entry of a list."""
    many: bool
    """True for a list in the file, which is a tuple in the config."""
    optional: bool
    """True if the value may be None."""
    bounds: Mapping[str, float]
    """The bounds of the number, or of each number of a list: `ge`, `gt`, `le` and `lt`."""
    aliases: tuple[str, ...] = ()
    """Other names of the field in a file; `a.b` is the field `b` of the object `a`."""
    absent: Any = None
    """The value if a file lacks the field, or a function of the other values; if None, the field is required."""
    per_layer: bool = False
    """True for a list with one entry per layer, which may also have one for each multi-token-prediction layer."""
    single: bool = False
    """True if a file may have a single entry instead of a list of one, and null instead of an empty list."""
    read: Callable[[Mapping[str, Any], list[str]], Any] | None = None
    """`read(raw, problems)` returns a value that depends on several fields of a file, which `aliases` names."""
    convert: Callable[[Any], Any] | None = None
    """Converts a value of any other type to what the config keeps. Raises TypeError or ValueError."""
    expected: str = ""
    """The expected values in words, for messages, instead of the type and the bounds."""
    tags: tuple[str, ...] = ()
    """Labels that a family gives to its fields and reads itself."""

    def describe(self) -> str:
        """The expected values in words, for an error message."""
        if self.expected:
            return self.expected
        if choices := typing.get_args(self.item):
            text = ", ".join(choices) if self.many else f"one of {', '.join(choices)}"
        elif self.item is bool:
            text = "true or false"
        else:
            text = _NOUNS.get(self.item, ("an object", "objects"))[self.many]
        bounds = "".join(f" {_BOUNDS[name][0]} {bound:,}" for name, bound in self.bounds.items())
        return f"{'a list of ' * self.many}{text}{bounds}{' or null' * self.optional}"

    def own(self, value: Any) -> Any:
        """Converts `value` to the field's type: lists to tuples, integers to floats if need be, objects to dataclasses.

        Raises TypeError or ValueError if it has another type or is out of bounds.
        """
        if self.convert is not None:
            value = self.convert(value)
        elif self.single and not isinstance(value, list | tuple):
            value = () if value is None else (value,)
        if value is None and not self.optional:
            raise TypeError("a field without a value")
        if value is None or self.convert is not None:
            return value
        if self.many and not isinstance(value, list | tuple):
            raise TypeError("no list")
        return tuple(map(self._item, value)) if self.many else self._item(value)

    def _item(self, value: Any) -> Any:
        if self.item is float and type(value) is int and abs(value) < 2**1000:
            value = float(value)
        elif dataclasses.is_dataclass(self.item) and isinstance(value, Mapping):
            value = read(typing.cast(type, self.item), value, "", telling=re.compile(""))
        if choices := typing.get_args(self.item):
            admitted = value in choices
        else:
            admitted = isinstance(value, self.item) and (self.item is bool or not isinstance(value, bool))
            admitted &= not isinstance(value, float) or math.isfinite(value)
        if not admitted or not all(_BOUNDS[name][1](value, bound) for name, bound in self.bounds.items()):
            raise TypeError("another type, or out of bounds")
        return value


def field(default: Any = dataclasses.MISSING, *, kw_only: bool = False, **rule: Any) -> Any:
    """A dataclass field with a `Rule`: `rule` gives its bounds and what does not follow from the annotation."""
    return dataclasses.field(default=default, kw_only=kw_only, metadata=rule)


@functools.cache
def rules(config: type) -> dict[str, Rule]:
    """The rule of each field of a config class, by name."""
    hints = {name: hint for base in config.__mro__[::-1] for name, hint in inspect.get_annotations(base).items()}
    return {f.name: _rule(hints[f.name], f.metadata) for f in dataclasses.fields(config)}


def _rule(hint: Any, options: Mapping[str, Any]) -> Rule:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    parts = typing.get_args(hint) if is_union else (hint,)
    hint = next(part for part in parts if part is not types.NoneType)
    many = typing.get_origin(hint) is tuple
    bounds = {name: options[name] for name in _BOUNDS if name in options}
    others = {name: option for name, option in options.items() if name not in _BOUNDS}
    return Rule(typing.get_args(hint)[0] if many else hint, many, types.NoneType in parts, bounds, **others)


def check(config: Any, misfits: Callable[[], Iterable[str]]) -> None:
    """Checks a new config and converts its values to the types of its fields; to be called from `__post_init__`.

    `misfits()` returns the problems between fields, and is called only if each field by itself is valid. Raises
    ConfigError with all problems.
    """
    problems = []
    for name, rule in rules(type(config)).items():
        value = getattr(config, name)
        try:
            object.__setattr__(config, name, rule.own(value))
        except ConfigError as error:
            problems += [f"{name}.{problem}" for problem in error.problems]
        except (TypeError, ValueError):
            advice = "add it" if value is None else "correct it"
            problems.append(f"{name}: {found(value)}; expected {rule.describe()}; {advice}")
    if not problems:
        for name, rule in rules(type(config)).items():
            entries = getattr(config, name)
            if rule.per_layer and entries is not None and len(entries) not in _lengths(config):
                layers = getattr(config, "num_hidden_layers", None)
                problems.append(f"{name}: found {len(entries)} entries; expected one per layer, {layers}; correct it")
        problems += misfits()
    if problems:
        raise ConfigError(type(config).__name__, problems)


@dataclasses.dataclass(frozen=True)
class Only:
    """A published field that the config does not have, because ling3 computes only what some `values` of it mean."""

    values: tuple[Any, ...]
    law: str
    """In words, for messages: what ling3 computes."""
    written: bool = False
    """True if `published` writes the field, with the first of `values`."""
    accepts: Callable[[Any], bool] = lambda value: False
    """A function that returns True for further values to accept."""

    def admits(self, value: Any) -> bool:
        """True if `value` is accepted; 1, 1.0 and true are different values."""
        return self.accepts(value) or any(type(value) is type(known) and value == known for known in self.values)


def read(
    config: type[_Config],
    raw: object,
    source: str,
    *,
    only: Mapping[str, Only] = types.MappingProxyType({}),
    derived: Mapping[str, Callable[[Any], Any]] = types.MappingProxyType({}),
    harmless: Iterable[str] = (),
    telling: re.Pattern[str] = TELLING,
) -> _Config:
    """Makes a `config` from `raw`, the JSON object in the file `source`, and accounts for each of its fields.

    Fields in `only` must have an accepted value. Fields in `derived` repeat others, and must equal this function of the
    config. Fields in `harmless` and `HARMLESS` are ignored. Any other field is ignored too, unless its name has a
    `telling` word and its value is not null, false, 0 or empty.

    Raises ConfigError with all problems.
    """
    raw, fields, problems, made = as_object(raw, source), rules(config), [], None
    values = {
        name: rule.read(raw, problems) if rule.read else pick(raw, (name, *rule.aliases), problems)
        for name, rule in fields.items()
    }
    for name, rule in fields.items():
        if values[name] is None:
            with contextlib.suppress(TypeError, ZeroDivisionError):  # if the other values are wrong themselves
                values[name] = rule.absent(values) if callable(rule.absent) else rule.absent
    try:
        made = config(**values)
    except ConfigError as error:
        problems += error.problems
    named = {name.partition(".")[0] for own, rule in fields.items() for name in (own, *rule.aliases)}
    problems += _refused(raw, only, {*named, *derived, *harmless, *HARMLESS}, telling)
    if not problems:
        problems = list(_disagreements(raw, {name: value_of(made) for name, value_of in derived.items()}))
    if problems or made is None:
        raise ConfigError(source, problems)
    return made


def as_object(raw: object, source: str) -> dict[str, Any]:
    """A copy of the JSON object `raw`. Raises ConfigError if it is not an object."""
    if not isinstance(raw, Mapping):
        raise ConfigError(source, [f"found {shown(raw)}; expected a JSON object; is this a config.json?"])
    return dict(raw)


def pick(raw: Mapping[str, Any], names: Sequence[str], problems: list[str]) -> Any:
    """The value of those fields of `names` that are present and not null; if they disagree, adds to `problems`."""
    said = {}
    for name in names:
        value: Any = raw
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            said[name] = value
    values = list(said.values())
    if any(value != values[0] for value in values):
        each = ", ".join(f"{name} {shown(value)}" for name, value in said.items())
        problems.append(f"{names[0]}: found {each}; expected one value, as these are names of one field")
    return values[0] if values else None


def published(config: Any, only: Mapping[str, Only]) -> dict[str, Any]:
    """The fields of a config as in a `config.json`, and those of `only` that are `written`."""
    raw = dataclasses.asdict(config)
    for name, rule in rules(type(config)).items():
        if rule.many and raw[name] is not None:
            entries = list(raw[name])
            raw[name] = entries if not rule.single or len(entries) > 1 else entries[0] if entries else None
    if (quantization := raw.pop("quantization_config", None)) is not None:
        raw["quantization_config"] = json.loads(quantization["source"])
    return raw | {name: rule.values[0] for name, rule in only.items() if rule.written}


def read_json(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """The content and the name of a `config.json`, given by itself or by its directory. Raises ConfigError."""
    file = pathlib.Path(path)
    file = file / "config.json" if file.is_dir() else file
    try:
        return strict_json.read(file), str(file)
    except OSError as error:
        raise ConfigError(str(file), [f"cannot be read ({error}); expected a checkpoint's config.json"]) from error
    except ValueError as error:
        raise ConfigError(str(file), [str(error).removeprefix(f"{file}: ")]) from error


def too_large(parameters: int) -> Iterable[str]:
    """The problem of sizes that are plausible one by one, but together exceed `MAX_PARAMETERS`."""
    if parameters > MAX_PARAMETERS:
        yield f"the sizes together: found about {parameters:,} parameters; expected at most {MAX_PARAMETERS:,}"


def found(value: object) -> str:
    """The value found in a field, in words for a message."""
    return (
        "not in this config" if value is None else f"found {shown(list(value) if isinstance(value, tuple) else value)}"
    )


def _lengths(config: Any) -> tuple[int, int]:
    """The lengths of a list with one entry per layer: without and with multi-token-prediction layers."""
    layers = getattr(config, "num_hidden_layers", 0)
    return layers, layers + (getattr(config, "num_nextn_predict_layers", 0) or 0)


def _refused(
    raw: Mapping[str, Any], only: Mapping[str, Only], known: set[str], telling: re.Pattern[str]
) -> Iterable[str]:
    for name, value in raw.items():
        if name in only:
            if not only[name].admits(value):
                yield f"{name}: found {shown(value)}; expected {shown(only[name].values[0])}; in ling3 {only[name].law}"
        elif name not in known and telling.search(name) and value not in (None, False, 0, "", [], {}):
            yield (f"{name}: found {shown(value)}; unknown field, which may affect results: remove it if it does not")


def _disagreements(raw: Mapping[str, Any], expected: Mapping[str, Any], at: str = "") -> Iterable[str]:
    """Problems of fields that should repeat other fields and differ from them."""
    for name, value in raw.items():
        if value is None or (name not in expected and not at):
            continue
        if isinstance(value, Mapping) and isinstance(expected.get(name), Mapping):
            yield from _disagreements(value, expected[name], f"{at}{name}.")
        elif value != expected.get(name):
            yield (
                f"{at}{name}: found {shown(value)}; expected {shown(expected.get(name))}, from the other fields; "
                "ling3 computes no other arrangement"
            )
