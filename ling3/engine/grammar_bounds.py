"""Checks of a grammar by its text alone, before anything compiles it."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ling3.engine.one_of import check_one_of, target
from ling3.engine.structured import Grammar, JSONSchema, Regex, Structured

MOST_RULES = 10_000
"""Rules and terminals of a grammar and its parts."""
LONGEST_PATTERN = 2**16
"""Characters of one regular expression: the time that it takes may grow with the square of its length."""
MOST_REFERENCES = 64
"""References of a schema, each inside the target of the one before it."""
RULE = re.compile(r"^[ \t]*[?!]?[A-Za-z_]\w*(?:\[[^\]\n]*\])?(?:\.-?\d+)?[ \t]*:", re.MULTILINE)


def check(structured: Structured) -> None:
    """ValueError for a grammar beyond the bounds, and for an `oneOf` that cannot be enforced."""
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
    """It and, of a grammar, all its parts and theirs."""
    yield structured
    for part in dict(structured.parts).values() if isinstance(structured, Grammar) else ():
        yield from _parts(part)


def _rules(structured: Structured) -> int:
    return sum(len(RULE.findall(part.lark)) for part in _parts(structured) if isinstance(part, Grammar))


def _check_pattern(pattern: str, name: str) -> None:
    if len(pattern) > LONGEST_PATTERN:
        raise ValueError(f"{name} has {len(pattern)} characters, expected at most {LONGEST_PATTERN}")


def _check_schema(root: Any) -> None:
    """Follows the references from the root, all those of one depth at a time."""
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
    """The keys with strings as values, but those of definitions, which only a reference applies."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            yield from ((key, x) for key, x in value.items() if isinstance(x, str))
            left += [x for key, x in value.items() if key not in ("$defs", "definitions")]
        elif isinstance(value, list):
            left += value
