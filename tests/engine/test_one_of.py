"""`oneOf`: enforced where its options exclude each other, and refused where they may not."""

import enum
import time
from typing import Annotated, Literal

import pydantic
import pytest
from small_engine import CONFIG, ENDS, tokenizer

import ling3
from ling3.engine.grammars import Grammars
from ling3.engine.one_of import check_one_of

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def tagged(value, **more):
    """An object that has to say what it is."""
    return {"type": "object", "properties": {"kind": {"const": value}}, "required": ["kind"], **more}


def closed(*names):
    """An object of these properties, all of them required."""
    return {
        "type": "object",
        "properties": dict.fromkeys(names, INTEGER),
        "required": list(names),
        "additionalProperties": False,
    }


APART = {
    "types": [INTEGER, STRING, {"type": "null"}],
    "lists of types": [{"type": ["integer", "null"]}, {"type": ["string", "boolean"]}],
    "values": [{"const": "a"}, {"enum": ["b", 1]}, {"const": 2}],
    "values of other types": [{"enum": [1, 2]}, STRING],
    "true and 1": [{"const": True}, {"const": 1}],
    "fractions": [{"const": 1.5}, INTEGER],
    "a discriminator": [tagged("a"), tagged("b"), tagged(3)],
    "of types": [tagged("a"), tagged("b", properties={"kind": INTEGER})],
    "of enums": [tagged("a"), tagged("b", properties={"kind": {"enum": ["b", "c"]}})],
    "required by one": [tagged("a"), tagged("b", required=[])],
    "other properties": [closed("a"), closed("b"), closed("a", "c")],
    "references": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
    "allOf": [{"allOf": [tagged("a"), {"properties": {"x": INTEGER}}]}, tagged("b")],
    "anyOf": [{"anyOf": [INTEGER, {"type": "null"}]}, STRING],
    "nested": [{"oneOf": [INTEGER, STRING]}, {"type": "null"}],
    "false": [False, STRING],
    "only one": [STRING],
}
TOGETHER = {
    "the same": [STRING, STRING],
    "numbers": [INTEGER, {"type": "number"}],
    "1 and 1.0": [{"const": 1}, {"const": 1.0}],
    "a common value": [{"enum": ["a", "b"]}, {"enum": ["b"]}],
    "ranges": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}],
    "patterns": [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "b$"}],
    "an optional discriminator": [tagged("a", required=[]), tagged("b", required=[])],
    "not objects alone": [{"properties": {"kind": {"const": value}}, "required": ["kind"]} for value in "ab"],
    "open objects": [{**closed("a"), "additionalProperties": True}, {**closed("b"), "additionalProperties": True}],
    "arrays, of which one is empty": [{"type": "array", "items": INTEGER}, {"type": "array", "items": STRING}],
    "any": [True, STRING],
    "a loop": [{"$ref": "#"}, {"$ref": "#"}],
    "elsewhere": [{"$ref": "http://a/b"}, {"$ref": "#/none"}],
}
DEFS = {"$defs": {"a": tagged("a"), "b": {"$ref": "#/$defs/c"}, "c": tagged("c")}}


@pytest.mark.parametrize("name", APART)
def test_options_that_exclude_each_other(name):
    check_one_of({"oneOf": APART[name], **DEFS})


@pytest.mark.parametrize("name", TOGETHER)
def test_options_that_may_not(name):
    with pytest.raises(ValueError, match=r"#/oneOf cannot be enforced, as options 0 and 1 may both hold .*: use anyOf"):
        check_one_of({"oneOf": TOGETHER[name], **DEFS})


def test_what_stands_beside_it_counts():
    options = [{"properties": {"kind": {"const": value}}, "required": ["kind"]} for value in "ab"]
    check_one_of({"type": "object", "oneOf": options})


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"a": {"items": {"oneOf": [STRING, STRING]}}}}, "#/properties/a/items"),
        ({"$defs": {"a": {"anyOf": [STRING, {"oneOf": [INTEGER, {}]}]}}}, "#/\\$defs/a/anyOf/1"),
        ({"$ref": "#/else/where", "else": {"where": {"oneOf": [STRING, {}]}}}, "#/else/where"),
    ],
)
def test_it_is_found_wherever_it_applies(schema, place):
    with pytest.raises(ValueError, match=f"^{place}/oneOf cannot"):
        check_one_of(schema)


def test_a_property_or_a_value_of_that_name_is_none():
    overlapping = {"oneOf": [STRING, STRING]}
    check_one_of({"properties": {"oneOf": STRING}, "const": overlapping, "default": overlapping, "enum": [overlapping]})


def test_a_hostile_one_takes_a_bounded_time():
    deep = {"type": "object", "properties": {}}
    for _ in range(4):
        deep = {"anyOf": [deep] * 9}
    for options in ([{"enum": list(range(i * 99, i * 99 + 99))} for i in range(500)], [deep] * 40):
        begin = time.perf_counter()
        with pytest.raises(ValueError, match="oneOf cannot be enforced"):
            check_one_of({"oneOf": options})
        assert time.perf_counter() - begin < 10  # on a busy machine


class Cat(pydantic.BaseModel, extra="forbid"):
    kind: Literal["cat"]
    lives: int


class Color(enum.StrEnum):
    RED = "red"


class Dog(pydantic.BaseModel, extra="forbid"):
    kind: Literal["dog"]
    color: Color


class Owner(pydantic.BaseModel, extra="forbid"):
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


def test_a_discriminated_union_of_pydantics_is_enforced():
    schema = Owner.model_json_schema()
    assert "oneOf" in schema["properties"]["pet"]
    grammars = Grammars(tokenizer(), CONFIG.vocab_size, ENDS)
    constraint = grammars.constraint(ling3.JSONSchema(schema), ENDS)
    assert tokenizer().decode(list(constraint.forced)).startswith('{"pet":')


def test_a_grammar_is_refused_by_name():
    grammars = Grammars(tokenizer(), CONFIG.vocab_size, ENDS)
    schema = ling3.JSONSchema({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]})
    for structured in (schema, ling3.Grammar('start: "a" @b', {"b": schema})):
        with pytest.raises(
            ValueError, match=r"^structured: the .* does not compile: #/oneOf cannot be enforced, .* use"
        ):
            grammars.constraint(structured, ENDS)
