"""Limits on the size of a grammar, checked on its text before anything compiles it."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ling3.engine.one_of import check_one_of, target
from ling3.engine.structured import Grammar, JSONSchema, Regex, Structured

MOST_RULES = 10_000
"""The most rules and terminals of a grammar and its parts together."""
LONGEST_PATTERN = 2**16
"""The most characters of a regular expression, whose cost may grow with the square of its length."""
MOST_REFERENCES = 64
"""The most references of a schema that follow one another, each inside the target of the one before."""
RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_]\w*(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:", re.MULTILINE)


def check(structured: Structured) -> None:
    """Raises ValueError for a grammar beyond the limits, and for a `oneOf` that cannot be enforced."""
    if (rules := _rules(structured)) > MOST_RULES:
        raise ValueError(f"it has {rules} rules and terminals, expected at most {MOST_RULES}")
    for part in _parts(structured):
        if isinstance(part, Regex):
            _check_pattern(part.pattern, "it")
        elif isinstance(part, JSONSchema):
            schema = json.loads(part.schema)
            _check_schema(schema)
            check_one_of(schema)


def _parts(structured: Structured) -> Iterator[Structured]:
    """Yields the constraint and, if it is a `Grammar`, all its parts, recursively."""
    yield structured
    for part in dict(structured.parts).values() if isinstance(structured, Grammar) else ():
        yield from _parts(part)


def _rules(structured: Structured) -> int:
    return sum(len(RULE.findall(part.lark)) for part in _parts(structured) if isinstance(part, Grammar))


def _check_pattern(pattern: str, name: str) -> None:
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"{name} has {len(pattern)} characters, expected at most {LONGEST_PATTERN}")


def _check_schema(root: Any) -> None:
    """Checks all patterns of a schema, and how deep its references go, level by level from the root."""
    seen, layer, depth = set[str](), [root], 0
    while layer:
        found = set[str]()
        for schema in layer:
            for key, value in _keywords(schema):
                if key == "$ref":
                    found.add(value)
                elif key == "pattern":
                    _check_pattern(value, "a pattern of it")
        depth += 1
        if depth > MOST_REFERENCES and found - seen:
            raise ValueError(f"its references lead to others, more than {MOST_REFERENCES} deep; put schemas in place")
        layer = [target(root, reference) for reference in sorted(found - seen)]
        seen |= found


def _keywords(value: Any) -> Iterator[tuple[str, str]]:
    """Yields (key, value) for string values of a schema, except in definitions, which only references apply."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            yield from ((key, x) for key, x in value.items() if isinstance(x, str))
            left += [x for key, x in value.items() if key not in ("$defs", "definitions")]
        elif isinstance(value, list):
            left += value
