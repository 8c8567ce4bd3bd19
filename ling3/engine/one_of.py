"""Proves that the options of a schema's `oneOf` exclude each other.

A grammar can enforce `anyOf`, but not that exactly one option holds. The two are the same if no value satisfies two
options, which is proven here where possible: by types, by `const` and `enum`, and by properties that one option
requires and the other forbids or allows only with other values.
"""

import json
import re
from collections.abc import Iterator, Mapping
from itertools import combinations, product
from typing import Any

DEEPEST = 4
"""The most levels of properties, and of options within options, that are compared."""
MOST_FOLLOWED = 64
"""The most references and `allOf`s of an option that are followed."""
MOST_COMPARISONS = 100_000
"""The most comparisons of schemas, of their values and of their properties: about a second."""
TYPES = frozenset({"null", "boolean", "integer", "fraction", "string", "array", "object"})
MAPPINGS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE = ("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames")
INDEX = re.compile("0|[1-9][0-9]{0,8}")
REMEDY = (
    "use anyOf, or tell the options apart by their types, or by a property that they require with another const (or "
    "enum) in each"
)


def check_one_of(root: Any) -> None:
    """Raises ValueError for a `oneOf` in a schema unless its options provably exclude each other."""
    comparison = _Comparison(root)
    for place, schema in _schemas(root):
        if not isinstance(options := schema.get("oneOf"), list):
            continue
        beside = {key: value for key, value in schema.items() if key != "oneOf"}
        for (i, one), (j, other) in combinations(enumerate(options), 2):
            if not comparison.exclude({"allOf": [beside, one]}, other, DEEPEST):
                reason = "may both hold of one value" if comparison.left >= 0 else "are too large to compare"
                raise ValueError(f"{place}/oneOf cannot be enforced, as options {i} and {j} {reason}: {REMEDY}")


def target(root: Any, reference: str) -> Any:
    """The schema that a reference into its own document points to; None if there is none, or it is elsewhere."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    found = root
    for part in reference.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if INDEX.fullmatch(name) and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _schemas(root: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields (place, schema) for every schema of a document that can apply."""
    left, followed = [("#", root)], set[str]()
    while left:
        place, schema = left.pop()
        if not isinstance(schema, Mapping):
            continue
        yield place, schema
        for key in MAPPINGS:
            if isinstance(inner := schema.get(key), Mapping):
                left += [(f"{place}/{key}/{name}", each) for name, each in inner.items()]
        for key in LISTS:
            if isinstance(inner := schema.get(key), list):
                left += [(f"{place}/{key}/{i}", each) for i, each in enumerate(inner)]
        left += [(f"{place}/{key}", schema[key]) for key in SINGLE if key in schema]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in followed:  # its target may be outside the keywords above
            followed.add(reference)
            left.append((reference, target(root, reference)))


class _Comparison:
    """Compares schemas of one document; after too many comparisons it proves nothing any more."""

    def __init__(self, root: Any):
        self._root, self.left = root, MOST_COMPARISONS

    def exclude(self, one: Any, other: Any, depth: int) -> bool:
        """True if no value provably satisfies both schemas."""
        ones, others = self._facts(one), self._facts(other)
        self.left -= 1 + sum(_size(fact) for fact in (*ones, *others))
        if depth == 0 or self.left < 0:
            return False
        pairs = list(product(ones, others))
        if any(_types(x).isdisjoint(_types(y)) or _other_values(x, y) for x, y in pairs):
            return True
        if any(_types(x) & _types(y) == {"object"} for x, y in pairs) and any(
            self._by_property(x, y, depth) or self._by_property(y, x, depth) for x, y in pairs
        ):
            return True
        return any(
            isinstance(options := fact.get(key), list)
            and all(self.exclude(option, opposite, depth - 1) for option in options)
            for facts, opposite in ((ones, other), (others, one))
            for fact in facts
            for key in ("anyOf", "oneOf")
        )

    def _facts(self, schema: Any) -> list[Mapping[str, Any]]:
        """The schema and those that its references and `allOf` add; a value must satisfy all of them."""
        facts, left = [], [schema]
        for _ in range(MOST_FOLLOWED):
            if not left:
                break
            schema = left.pop(0)
            if schema is False:
                facts.append({"enum": []})
            elif isinstance(schema, Mapping):
                facts.append(schema)
                left += [target(self._root, schema["$ref"])] if isinstance(schema.get("$ref"), str) else []
                left += schema["allOf"] if isinstance(schema.get("allOf"), list) else []
        return facts

    def _by_property(self, one: Mapping[str, Any], other: Mapping[str, Any], depth: int) -> bool:
        """True if `one` requires a property that the `other` forbids, or allows only with other values."""
        required, (mine, theirs) = one.get("required"), map(_properties, (one, other))
        others = True if "patternProperties" in other else other.get("additionalProperties", True)
        return isinstance(required, list) and any(
            self.exclude(mine.get(name, True), theirs.get(name, others), depth - 1)
            for name in required
            if isinstance(name, str)
        )


def _size(schema: Mapping[str, Any]) -> int:
    """The cost of comparing a schema, in comparisons."""
    required = schema.get("required")
    return len(_values(schema) or ()) + (len(required) if isinstance(required, list) else 0)


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _types(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types of the values that a schema may allow; a number is an integer or a fraction."""
    if (values := _values(schema)) is not None:
        return frozenset(map(_type, values))
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list):
        return TYPES
    named = {each for each in types if isinstance(each, str)}
    return frozenset(named | ({"integer", "fraction"} if "number" in named else set()))


def _type(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (str, "string"), (list, "array"), (dict, "object"), (int, "integer")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "integer" if value.is_integer() else "fraction"


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of a `const` or an `enum`; None where a schema has neither."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _other_values(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if both have lists of values, and none in common."""
    values, others = _values(one), _values(other)
    if values is None or others is None:
        return False
    return set(map(_written, values)).isdisjoint(map(_written, others))


def _written(value: Any) -> str:
    """A value as canonical JSON: 1.0 equals 1, and keys are sorted."""
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number
