"""Dataclass fields that are declared with their bounds, and the error that names such a field.

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Params:
        temperature: float = parameter(0.0, ge=0)
        '''0 takes the most likely token each time.'''

The annotation is float, int or bool, or one of them `| None`, and the string after a field is its description. Checks,
the options of the command line and the fields of HTTP requests are generated from these declarations.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import operator
import re
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ling3.runtime.quoting import shown
from ling3.runtime.scalars import is_real, is_whole

_HOLDS = {"ge": operator.ge, "gt": operator.gt, "le": operator.le, "lt": operator.lt}
_NOUNS = {float: "a number", int: "a whole number", bool: "true or false"}


class ParameterError(ValueError):
    """Raised for a parameter, a setting or a prompt that cannot be used.

    `field` is the name of the first one at fault, and `problems` has the name and the message of each.
    """

    def __init__(self, field: str, message: str, problems: Sequence[tuple[str, str]] = ()):
        super().__init__(field, message, tuple(problems))
        self.field, self.message = field, message
        self.problems: list[tuple[str, str]] = list(problems) or [(field, message)]

    @classmethod
    def of(cls, what: str, problems: Sequence[tuple[str, str]]) -> "ParameterError":
        """The error with all the problems of `what` in its message."""
        return cls(problems[0][0], f"{what}: " + "; ".join(text for _, text in problems), problems)

    def __str__(self) -> str:
        return self.message


@dataclasses.dataclass(frozen=True)
class Parameter:
    """The values that one field may hold."""

    kind: type
    """float, int or bool."""
    optional: bool
    """True if the value may be None."""
    default: Any
    bounds: Mapping[str, float]
    """The bounds of a number, by `ge`, `gt`, `le` and `lt`."""
    common: bool
    """False where the commands and the server each declare an option of this name themselves."""

    @property
    def noun(self) -> str:
        """The kind of value, as in messages to a user."""
        return _NOUNS[self.kind] + " or none" * self.optional

    def problem(self, value: Any) -> str | None:
        """Why the field may not hold `value`, as text to follow the field's name; None if it may."""
        return None if self._holds(value) else f"is {shown(value)}, expected {self._expected}"

    def plain(self, value: Any) -> Any:
        """Converts a valid value to a Python float, int or bool."""
        if value is None or self.kind is bool:
            return value
        return float(value) if self.kind is float else operator.index(value)

    def _holds(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if self.kind is bool:
            return type(value) is bool
        known = is_real(value) if self.kind is float else is_whole(value)
        return known and all(_HOLDS[name](value, bound) for name, bound in self.bounds.items())

    @property
    def _expected(self) -> str:
        noun = "True or False" if self.kind is bool else _NOUNS[self.kind]
        said = {name: _short(bound) for name, bound in self.bounds.items()}
        low = [bracket + said[name] for name, bracket in (("ge", "["), ("gt", "(")) if name in said]
        high = [said[name] + bracket for name, bracket in (("le", "]"), ("lt", ")")) if name in said]
        signs = [f"{sign} {said[name]}" for name, sign in zip(_HOLDS, (">=", ">", "<=", "<")) if name in said]
        where = f"in {low[0]}, {high[0]}" if low and high else " and ".join(signs)
        return f"{noun} {where}".strip() + " or None" * self.optional


def parameter(default: Any, *, common: bool = True, **bounds: float) -> Any:
    """A dataclass field with a default and bounds. With `common` the server and commands make an option from it."""
    return dataclasses.field(default=default, metadata={"bounds": bounds, "common": common})


@functools.cache
def parameters(cls: Any) -> Mapping[str, Parameter]:
    """The fields of a dataclass that were declared with `parameter`, by name."""
    found = {}
    for field in dataclasses.fields(cls):
        if "bounds" in field.metadata:
            kinds = {*typing.get_args(field.type)} or {field.type}
            [kind] = kinds - {type(None)}
            found[field.name] = Parameter(kind, len(kinds) > 1, field.default, **field.metadata)
    return found


def problems_of(instance: Any) -> Iterable[tuple[str, str]]:
    """Yields the name of each parameter whose value is invalid, and what is wrong with it."""
    for name, each in parameters(type(instance)).items():
        if (problem := each.problem(getattr(instance, name))) is not None:
            yield name, problem


def make_plain(instance: Any) -> None:
    """Replaces the values of a frozen dataclass, which must be valid, by Python numbers."""
    for name, each in parameters(type(instance)).items():
        object.__setattr__(instance, name, each.plain(getattr(instance, name)))


@functools.cache
def meanings(cls: Any) -> Mapping[str, str]:
    """The docstring of each field in the source of a dataclass, by name, on one line."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef), "a dataclass"
    return {
        ast.unparse(field.target): " ".join(ast.literal_eval(text.value).split())
        for field, text in itertools.pairwise(tree.body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
    }


def _short(bound: float) -> str:
    """The number as text, with a short exponent: 1e9, not 1e+09."""
    return str(bound) if isinstance(bound, int) else re.sub(r"e\+?(-?)0*", r"e\1", f"{bound:g}")
