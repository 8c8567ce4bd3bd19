"""Constraints on the text of an answer, the values for `SamplingParams(structured=…)`.

These are plain values, checked as far as possible without a tokenizer. `ling3.engine.grammars` compiles them.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ling3.runtime.quoting import shown

LONGEST = 2**18
"""The most characters of a schema, a pattern, a grammar, or of all the strings of a choice."""
MAX_CHOICES = 4096
"""The most strings of a choice."""
DEEPEST = 64
"""The most levels of nesting in a schema."""
PART = re.compile(r"[a-z][a-z0-9_]{0,63}")
"""The pattern of the names of a grammar's parts."""


@dataclasses.dataclass(frozen=True)
class JSONSchema:
    """JSON that satisfies a schema, given as a dict (or a boolean) or as its text.

    A comma or a colon may be followed by one space, unless `compact`; other white space is not allowed, since a model
    may write it for ever. Strings hold no control characters, partial UTF-8 characters or surrogates, escaped or not.
    Only the schema limits how long numbers and strings are: `maxLength` bounds a string. Raises ValueError for an
    invalid schema. Keywords that cannot be enforced are refused, by name, when the request is submitted, and so is a
    `oneOf` unless its options exclude each other.
    """

    # Any, as the import hook's type check would come before `__post_init__`, whose errors say what to do.
    schema: Any
    """Stored as text, so that the caller's later changes do not reach a running request."""
    compact: bool = False
    """True allows no white space at all."""

    def __post_init__(self) -> None:
        if type(self.compact) is not bool:
            raise ValueError(f"compact is {shown(self.compact)}, expected True or False")
        text, value = self.schema, self.schema
        try:
            if isinstance(text, str):
                value = json.loads(_text(text, "JSON schema"))
            else:
                text = json.dumps(value, allow_nan=False)
            deep = _depth(value) > DEEPEST
        except RecursionError:
            deep = True
        except (TypeError, ValueError) as error:
            raise ValueError(f"the JSON schema is {shown(self.schema)}, expected JSON: {error}") from None
        if deep:
            raise ValueError(f"the JSON schema has more than {DEEPEST} levels")
        if not isinstance(value, (dict, bool)):
            raise ValueError(f"the JSON schema is {shown(value)}, expected an object (or true, for any JSON)")
        object.__setattr__(self, "schema", _text(text, "JSON schema"))  # the class is frozen


@dataclasses.dataclass(frozen=True)
class JSONObject:
    """Any JSON object, with white space and strings as in `JSONSchema`. Only `max_tokens` limits its size."""

    compact: bool = False
    """True allows no white space at all."""

    def __post_init__(self) -> None:
        if type(self.compact) is not bool:
            raise ValueError(f"compact is {shown(self.compact)}, expected True or False")


@dataclasses.dataclass(frozen=True)
class Regex:
    """A text that a regular expression matches as a whole, in the syntax of Rust's `regex`, without look-around."""

    pattern: str

    def __post_init__(self) -> None:
        _text(self.pattern, "regex")


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of several strings, none of them empty."""

    strings: Sequence[str]

    def __post_init__(self) -> None:
        strings = self.strings
        if not isinstance(strings, (list, tuple)) or not strings or not all(isinstance(x, str) and x for x in strings):
            raise ValueError(f"the choice is {shown(strings)}, expected a list of strings that are not empty")
        if len(strings) > MAX_CHOICES:
            raise ValueError(f"the choice has {len(strings)} strings, expected at most {MAX_CHOICES}")
        _text("".join(strings), "choice")
        object.__setattr__(self, "strings", tuple(strings))


@dataclasses.dataclass(frozen=True)
class Grammar:
    """A text that a context-free grammar derives from its rule `start`, in llguidance's dialect of Lark.

    In the grammar, `@name` means a text of `parts[name]`: `Grammar('start: "x = " @x', {"x": JSONSchema(…)})`. Parts
    may have parts of their own; all names must differ.
    """

    lark: str
    parts: Mapping[str, "Structured"] | Sequence[tuple[str, "Structured"]] = ()
    """Stored as pairs of name and constraint."""

    def __post_init__(self) -> None:
        _text(self.lark, "grammar")
        parts = tuple(dict(self.parts).items())
        for name, part in parts:
            if not isinstance(name, str) or not PART.fullmatch(name):
                raise ValueError(f"the grammar has a part {shown(name)}, expected a name that matches {PART.pattern}")
            if not isinstance(part, tuple(KINDS.values())):
                raise ValueError(f"the grammar's part {name} is {shown(part)}, expected a {', a '.join(KINDS)}")
        object.__setattr__(self, "parts", parts)


Structured = JSONSchema | JSONObject | Regex | Choice | Grammar
KINDS = {kind.__name__: kind for kind in (JSONSchema, JSONObject, Regex, Choice, Grammar)}


def written(structured: Structured | None) -> list[Any] | None:
    """A constraint as JSON values, which `read` turns back."""
    if structured is None:
        return None
    fields = {field.name: getattr(structured, field.name) for field in dataclasses.fields(structured)}
    if isinstance(structured, Grammar):
        fields["parts"] = [[name, written(part)] for name, part in fields["parts"]]
    return [type(structured).__name__, fields]


def read(what: Sequence[Any] | None) -> Structured | None:
    """Turns the JSON values of `written` back into a constraint."""
    if what is None:
        return None
    kind, fields = what
    if kind == Grammar.__name__:
        fields = {**fields, "parts": [(name, read(part)) for name, part in fields["parts"]]}
    return KINDS[kind](**fields)


def _text(text: Any, name: str) -> str:
    """Returns the text; raises ValueError if it is no string, empty, too long, or has no UTF-8 form."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"the {name} is {shown(text)}, expected a text that is not empty")
    if len(text) > LONGEST:
        raise ValueError(f"the {name} has {len(text)} characters, expected at most {LONGEST}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the {name} has a lone surrogate at position {error.start}") from None
    return text


def _depth(value: Any) -> int:
    """The levels of a JSON value, whose objects and lists count one each."""
    levels, layer = 0, [value]
    while layer := [x for x in layer if isinstance(x, (dict, list)) and x]:
        levels += 1
        layer = [item for x in layer for item in (x.values() if isinstance(x, dict) else x)]
        if levels > DEEPEST:
            break
    return levels
