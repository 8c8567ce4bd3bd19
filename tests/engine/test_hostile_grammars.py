"""Grammars that crash llguidance, or take minutes or gigabytes of it: each is refused, and costs no one else."""

import sys
import time

import pytest
from small_engine import CONFIG, ENDS, tokenizer

import ling3
from ling3.engine import grammars as compiling
from ling3.engine.grammars import Grammars

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="memory is bounded on Linux")
DEEP = "it is nested too deeply, and overflows the stack"


def chain(link, count=1500):
    """A schema whose references lead to one another."""
    links = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(count)}
    return ling3.JSONSchema({"$ref": "#/$defs/a0", "$defs": {**links, f"a{count}": {"type": "integer"}}})


def inside(link, count):
    """The same in another's place, where the references of each are one: no chain of them by their text."""
    links = [f'r{i}: "a" r{i + 1}' for i in range(count)]
    return ling3.Grammar(f"start: {link}\n" + "\n".join([*links, f'r{count}: "b"']))


def terminals(count):
    lines = [f'T{i}: "x" T{i + 1}' for i in range(count)]
    return ling3.Grammar("\n".join(["start: T0", *lines, f'T{count}: "a"']))


REFERENCES = "its references lead to others, more than 64 deep"
MEMORY = "it takes more than 128 MiB of memory"
HOSTILE = {
    "references": (chain(lambda to: {"type": "array", "items": to}), REFERENCES),
    "bare references": (chain(lambda to: to, 3000), REFERENCES),
    "allOf": (chain(lambda to: {"allOf": [to]}), REFERENCES),
    "anyOf": (chain(lambda to: {"anyOf": [to, {"type": "null"}]}), REFERENCES),
    "references in a part": (
        ling3.Grammar("start: @a", {"a": chain(lambda to: {"properties": {"x": to}})}),
        REFERENCES,
    ),
    "rules": (inside("r0", 3000), DEEP),
    "more rules": (inside("r0", 10_000), "it has 10002 rules and terminals, expected at most 10000"),
    "terminals": (terminals(3000), DEEP),
    "an expression": (ling3.Regex("(a|b)?" * 40_000), "it has 240000 characters, expected at most 65536"),
    "a pattern": (
        ling3.JSONSchema({"properties": {"a": {"type": "string", "pattern": "(a|b)?" * 40_000}}}),
        "a pattern of it has 240000 characters, expected at most 65536",
    ),
}
HEAVY = {
    "intersections": ling3.Grammar("start: T\nT: /.*a/" + "".join(f" & /.*b{i}.*/" for i in range(300))),
    "as a terminal": ling3.Grammar("start: T\nT: /" + "(a|b)?" * 20_000 + "/"),
}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(tokenizer(), CONFIG.vocab_size, ENDS)


@pytest.mark.parametrize("name", HOSTILE)
def test_what_would_crash_is_refused(grammars, name):
    structured, message = HOSTILE[name]
    with pytest.raises(ValueError, match=rf"^structured: the .* (cannot be used|does not compile): {message}"):
        grammars.constraint(structured, ENDS)


@LINUX
@pytest.mark.parametrize("name", HEAVY)
def test_what_would_take_gigabytes_is_refused(grammars, name):
    with pytest.raises(ValueError, match=rf"cannot be used: ({MEMORY}|it takes more than 3 seconds)$"):
        grammars.constraint(HEAVY[name], ENDS)


def test_what_would_take_minutes_is_refused(grammars, monkeypatch):
    monkeypatch.setattr(compiling, "SECONDS", 0.2)
    begin = time.perf_counter()
    with pytest.raises(ValueError, match=r"cannot be used: it takes more than (0.2 seconds|128 MiB)"):
        grammars.constraint(HEAVY["intersections"], ENDS)
    assert time.perf_counter() - begin < 5  # on a busy machine


def test_references_that_are_many_or_in_a_circle_are_none_too_deep(grammars):
    node = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}
    wide = {f"a{i}": {"$ref": f"#/$defs/a{i}"} for i in range(100)}
    kinds = {f"a{i}": {"type": "integer"} for i in range(100)}
    for schema in (
        {"$ref": "#/$defs/node", "$defs": {"node": node}},
        {"properties": wide, "required": sorted(wide), "$defs": kinds},
    ):
        assert grammars.constraint(ling3.JSONSchema(schema), ENDS).error is None


def test_a_process_is_kept_and_started_again_after_a_death(grammars):
    grammars.constraint(ling3.Regex("a|bc"), ENDS)
    first = grammars._process._process
    grammars.constraint(ling3.Regex("a|bcd"), ENDS)
    assert grammars._process._process is first
    with pytest.raises(ValueError, match=DEEP):
        grammars.constraint(terminals(2000), ENDS)
    assert first.returncode is not None
    grammars.constraint(ling3.Regex("a|bce"), ENDS)
    assert grammars._process._process.pid != first.pid


def test_the_process_ends_with_its_grammars():
    made = Grammars(tokenizer(), CONFIG.vocab_size, ENDS)
    made.constraint(ling3.Regex("a|bc"), ENDS)
    process = made._process._process
    del made
    assert process.returncode is not None
