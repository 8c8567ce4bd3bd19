"""Ugly replies, cut at every character: the pieces joined are those of the whole."""

import json

import pytest
from tool_templates import TEMPLATES, tokenizer

from ling3.text.detokenizer import StopStrings
from ling3.text.replies import Piece, Reply, TokenReply, opens_thinking
from ling3.text.tokenizer import load_tokenizer

TOOLS = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "say": {"properties": {"text": {"type": "string"}, "loud": {"type": "boolean"}}},
    "set": {
        "$defs": {"Mood": {"enum": ["1", "2"]}},
        "properties": {
            "mood": {"$ref": "#/$defs/Mood"},
            "name": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "size": {"type": ["number", "string"]},
            "what": {},
        },
    },
}


def value(key, text):
    """A call of `set` with one argument."""
    return f"<tool_call>set<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"


def read(texts, **how):
    """(reasoning, content, calls as (name, arguments)) of a reply that comes in these texts."""
    reply, said, calls = Reply(**how), {"reasoning": "", "content": ""}, []
    for piece in [*(piece for text in texts for piece in reply.feed(text)), *reply.flush()]:
        if piece.kind == "call":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[piece.call][1] += piece.text
        else:
            said[piece.kind] += piece.text
    return said["reasoning"], said["content"], [tuple(call) for call in calls]


TAGS = {"tools": TOOLS, "form": "tags"}
OPEN = {**TAGS, "thinking": True}
BARE = {"tools": TOOLS, "form": "bare"}
ADD = (
    "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>b</arg_key><arg_value>2</arg_value></tool_call>"
)
LINES = ADD.replace("><", ">\n<").replace("add<", "add\n<").replace("<tool_call>", "<tool_call>\n")
CASES = [
    ("hello\n", {}, ("", "hello\n", [])),
    ("a < b <think> c", {}, ("", "a < b <think> c", [])),
    ("<think>\nhm\n</think>\n\nyes", {}, ("hm", "yes", [])),
    (" <think>hm", {}, ("hm", "", [])),
    ("hm</think>yes", {"thinking": True}, ("hm", "yes", [])),
    ("hm, no end", {"thinking": True}, ("hm, no end", "", [])),
    ("hm</thin", {"thinking": True}, ("hm</thin", "", [])),
    ("yes</think>", {}, ("", "yes</think>", [])),
    (ADD, {}, ("", ADD, [])),
    (ADD, TAGS, ("", "", [("add", '{"a": 1, "b": 2}')])),
    (LINES, TAGS, ("", "", [("add", '{"a": 1, "b": 2}')])),
    (f"Sure.\n{ADD}\n{LINES}\n", TAGS, ("", "Sure.", [("add", '{"a": 1, "b": 2}')] * 2)),
    (f"hm\n{ADD}\nso</think>yes", OPEN, ("hmso", "yes", [("add", '{"a": 1, "b": 2}')])),
    (f"hm {ADD}", OPEN, ("hm ", "", [("add", '{"a": 1, "b": 2}')])),
    ("<tool_call>add</tool_call>", TAGS, ("", "", [("add", "{}")])),
    ("<tool_call>not a call</tool_call>!", TAGS, ("", "<tool_call>not a call</tool_call>!", [])),
    ("<tool_call>ad", TAGS, ("", "<tool_call>ad", [])),
    ("<tool_c", TAGS, ("", "<tool_c", [])),
    (
        '<tool_call>say<arg_key>text</arg_key><arg_value>"x"\n</arg</arg_value></tool_call>',
        TAGS,
        ("", "", [("say", '{"text": "\\"x\\"\\n</arg"}')]),
    ),
    ("<tool_call>say<arg_key>text</arg_key><arg_value>half", TAGS, ("", "", [("say", '{"text": "half')])),
    ("<tool_call>say<arg_key>loud</arg_key><arg_value>True</arg_value>", TAGS, ("", "", [("say", '{"loud": true}')])),
    (value("mood", "1"), TAGS, ("", "", [("set", '{"mood": "1"}')])),
    (value("name", "null"), TAGS, ("", "", [("set", '{"name": null}')])),
    (value("name", "12"), TAGS, ("", "", [("set", '{"name": "12"}')])),
    (value("size", "12"), TAGS, ("", "", [("set", '{"size": 12}')])),
    (value("size", "null"), TAGS, ("", "", [("set", '{"size": "null"}')])),
    (value("what", "12"), TAGS, ("", "", [("set", '{"what": 12}')])),
    (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": "}\\""}}}\n</tool_call>',
        TAGS,
        ("", "", [("add", '{"a": 1, "b": {"c": "}\\""}}')]),
    ),
    ('<tool_call>{"arguments": "{\\"a\\": 1}", "name": "add"}</tool_call>', TAGS, ("", "", [("add", '{"a": 1}')])),
    ('<tool_call>{"name": "add", "arguments": {"a": 1', TAGS, ("", "", [("add", '{"a": 1')])),
    ('<tool_call>{"na', TAGS, ("", '<tool_call>{"na', [])),
    ('{"name": "add", "parameters": {"a": 1}}', BARE, ("", "", [("add", '{"a": 1}')])),
    (
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "say", "parameters": {}}',
        BARE,
        ("", "", [("add", '{"a": 1}'), ("say", "{}")]),
    ),
    ('{"name": "Bob", "age": 3}', BARE, ("", '{"name": "Bob", "age": 3}', [])),
    (' {"x": [1, 2]} and so on', BARE, ("", ' {"x": [1, 2]} and so on', [])),
    ('so: {"name": "add", "parameters": {}}', BARE, ("", 'so: {"name": "add", "parameters": {}}', [])),
]


@pytest.mark.parametrize(("text", "how", "expected"), CASES)
def test_a_reply_is_the_same_however_it_is_cut(text, how, expected):
    assert read([text], **how) == expected
    assert read(list(text), **how) == expected
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]], **how) == expected, cut
    for _, arguments in expected[2]:
        if arguments.endswith("}"):
            json.loads(arguments)


def test_arguments_come_piece_by_piece():
    reply = Reply(**TAGS)
    reply.feed("<tool_call>say<arg_key>text</arg_key><arg_value>one ")
    assert [piece.text for piece in reply.feed("two ")] == ["two "]


def test_what_a_template_says():
    for form, template in TEMPLATES.items():
        assert tokenizer(template).tool_form == form and tokenizer(template).thinking_switch
    forgetful = "{{ tools }}{{ messages[0].content }}"  # it shows no calls
    strange = forgetful + "{% for m in messages %}[CALL]{{ m.tool_calls }}{% endfor %}"
    refusing = "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ tools }}"
    toolless = TEMPLATES["tags"].replace("if tools", "if false")
    for template in (forgetful, strange, refusing, toolless):
        assert tokenizer(template).tool_form is None
    assert load_tokenizer("nano").tool_form is None and load_tokenizer("nano").thinking_switch
    assert not tokenizer("detailed thinking {{ messages }}").thinking_switch
    assert opens_thinking("<role>ASSISTANT</role>\n<think>\n") and not opens_thinking("<think></think>")


@pytest.mark.parametrize("stop", ["", "apples", "6."])
def test_special_tokens_are_tags_wherever_deltas_are_cut(stop):
    tokenizer = load_tokenizer("nano")
    prompt = tokenizer.encode("<role>ASSISTANT</role>\n<think>")
    text = "3 + 3 = 6.</think>\nSix apples é.</think>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text.replace("</think>", ""), "nano's tags are special tokens"
    whole = text.split(stop, maxsplit=1)[0] if stop else text.removesuffix("</think>")
    expected = Reply(thinking=True)
    expected = [*expected.feed(whole), *expected.flush()]
    for size in range(1, len(ids) + 1):
        decoder, stops = tokenizer.stream(prompt), StopStrings([stop] if stop else [])
        reply, said = TokenReply(Reply(thinking=True), tokenizer, prompt), {"reasoning": "", "content": ""}
        for start in range(0, len(ids), size):
            part, last = ids[start : start + size], start + size >= len(ids)
            new = stops.feed(decoder.feed(part)) + (stops.flush() if last else "")
            for piece in reply.feed(new, part, last):
                said[piece.kind] += piece.text
        assert {kind: said for kind, said in said.items() if said} == {piece.kind: piece.text for piece in expected}


def test_a_special_tag_that_is_none_shows_nothing():
    tokenizer = load_tokenizer("nano")
    reply = TokenReply(Reply(), tokenizer, [])
    assert reply.feed("6", tokenizer.encode("6</think>"), True) == [Piece("content", "6")]
    reply = TokenReply(Reply(), tokenizer, [])
    pieces = reply.feed("why6", tokenizer.encode("<think>why</think>6"), True)
    assert pieces == [Piece("reasoning", "why"), Piece("content", "6")]
