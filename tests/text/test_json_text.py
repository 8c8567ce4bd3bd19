"""JSON as models write it: valid JSON stays as it is, and anything else becomes strict JSON."""

import json
import random

import pytest

from ling3.text.json_text import StrictJSON, dumped, in_string, loaded, strict, unicode

VALID = [
    '{"a": 1, "b": {"c": "}\\""}}',
    ' [1,2.5e3 ,\ttrue, null,[ ] ,{ }, "\\u00e9\\ud83d\\ude00\\n\\/" ]',
    '{"": [{"x": -0.0}], "é": "a,b:c{[<"}',
]


def refuse(name):
    raise AssertionError(name)


def parsed(text):
    """The value, by a parser that takes no NaN and no half surrogate pairs."""
    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


@pytest.mark.parametrize("text", VALID)
def test_valid_json_stays_as_it_is(text):
    assert strict(text) == text
    for end in range(len(text)):
        writer = StrictJSON()
        said = "".join(map(writer.feed, text[:end]))
        assert text.startswith(said), "a stream says nothing that is taken back"
        if text[:end].strip():
            parsed(said + writer.finish())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"x": 1e999}', {"x": "1e999"}),
        ("[NaN, -Infinity, None, 01, 1.]", ["NaN", "-Infinity", "None", "01", "1."]),
        ('{"k": "\\ud83d"}', {"k": "\ufffd"}),
        (
            '["\\ude00", "\\ud83d\\n", "\\ud83d\\u0041", "\\ud83dx", "\\ud83d"]',
            ["\ufffd", "\ufffd\n", "\ufffdA", "\ufffdx", "\ufffd"],
        ),
        ('["\\x", "\\u12", "\\\'", "a\nb"]', ["\\x", "\\u12", "\\'", "a\nb"]),
        ('{"a": 1,}', {"a": 1}),
        ('{"a" 1 "b": [2 3], c: 4, "d", "e":}', {"a": 1, "b": [2, 3], "c": 4, "d": None, "e": None}),
        ('{"a": [1}}', {"a": [1]}),
        ('{"a": {"b": "c', {"a": {"b": "c"}}),
        ('{{"a": 1}}', {"": {"a": 1}}),
        ("[,,1,,]", [1]),
    ],
)
def test_what_is_none_becomes_json(text, value):
    assert parsed(strict(text)) == value


def test_any_text_becomes_json():
    pieces = [*'{}[],:" \n', '"a"', "\\", "\\u", "d83d", "\\ude00", "1", "e9", "true", "NaN", "é", "\ud83d"]
    draw = random.Random(0)
    for _ in range(3000):
        parsed(strict("".join(draw.choices(pieces, k=draw.randrange(12)))))


def test_values():
    assert dumped({"é": "\ud83d\ude00\ud83d"}) == '{"é": "😀\ufffd"}' and unicode("é") == "é"
    assert loaded(f'[1e308, 1.5, {"9" * 400}, "1e999"]')[3] == "1e999"
    for text in ("NaN", "1e999", "[-1E+999]", f"{'9' * 300}.0e9", f"{'9' * 309}.0", "1e00309", "{"):
        with pytest.raises(ValueError, match=r"\w"):
            loaded(text)
    with pytest.raises(ValueError, match="JSON compliant"):
        dumped(float("inf"))


@pytest.mark.parametrize(
    ("text", "inside"), [('{"a": "b', True), ('"', True), ('"a" ', False), ("a", False), ('[x "', False)]
)
def test_the_middle_of_a_string(text, inside):
    assert in_string(text) == inside
