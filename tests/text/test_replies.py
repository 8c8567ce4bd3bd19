"""Ugly replies, cut at every character: the pieces joined are those of the whole."""

import json

import pytest
from reply_cases import CASES, TAGS
from tool_templates import TEMPLATES, tokenizer

from ling3.text.detokenizer import StopStrings
from ling3.text.replies import Piece, Reply, TokenReply, opens_thinking
from ling3.text.tokenizer import load_tokenizer


def read(texts, **how):
    """(reasoning, content, calls as (name, arguments)) of a reply that comes in these texts."""
    reply = Reply(**how)
    return put_together([*(piece for text in texts for piece in reply.feed(text)), *reply.flush()])


def put_together(pieces):
    said, calls = {"reasoning": "", "content": ""}, []
    for piece in pieces:
        if piece.kind == "call":
            calls.append([piece.text, ""])
        elif piece.kind == "arguments":
            calls[piece.call][1] += piece.text
        else:
            said[piece.kind] += piece.text
    return said["reasoning"], said["content"], [tuple(call) for call in calls]


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


@pytest.mark.parametrize(("text", "how", "expected"), CASES)
def test_tool_tags_may_be_special_tokens(text, how, expected):
    """The engine's text lacks them then; a reply is the same however its tokens come."""
    made = tokenizer(TEMPLATES["tags"], special=True)
    ids, prompt = made.encode(text), made.encode("<think>" if how.get("thinking") else "a")

    def taken(size):
        reply, decoder = TokenReply(Reply(**how), made, prompt), made.stream(prompt)
        pieces = []
        for start in range(0, len(ids), size):
            part, last = ids[start : start + size], start + size >= len(ids)
            pieces += reply.feed(decoder.feed(part) + (decoder.flush() if last else ""), part, last)
        return put_together(pieces)

    whole = taken(len(ids))
    assert whole == expected or not expected[2], "calls are those of tags that are text"
    for size in range(1, len(ids)):
        assert taken(size) == whole, size
