"""Grammars of replies, by what they let through: calls in each form, text between them, answers, thinking before."""

import json
import re

import pytest
import tokenizers
from tool_templates import TEMPLATES, tokenizer

from ling3.engine.grammars import Grammars
from ling3.engine.masks import WORD
from ling3.engine.structured import Grammar, JSONSchema, Regex
from ling3.server.custom_tools import Custom
from ling3.server.reply_grammars import Callable, after_thinking, calls
from ling3.text.replies import Reply

FUNCTIONS = [
    Callable("none", {}, True),
    Callable(
        "set",
        {
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 5},
                "mood": {"$ref": "#/$defs/Mood"},
                "size": {"type": "integer"},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "code": {"type": "string", "pattern": "^[0-9]+/x"},
            },
            "required": ["name"],
            "$defs": {"Mood": {"enum": ["good", "bad"]}},
        },
        True,
    ),
]
ANSWER = JSONSchema({"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False})


def passes(made, structured, text):
    """True if a text, or these tokens, are let through and may end there."""
    grammars = Grammars(made, made.vocab_size, made.eos_token_ids)
    constraint = grammars.constraint(structured, made.eos_token_ids)
    for token in made.encode(text, add_special_tokens=False) if isinstance(text, str) else text:
        allowed = (
            token == constraint.forced[0] if constraint.forced else constraint.mask[token // WORD] >> token % WORD & 1
        )
        if not allowed:
            return False
        constraint.advance(token)
        assert constraint.error is None
    end = made.eos_token_ids[0]
    return not constraint.forced and bool(constraint.whole or constraint.mask[end // WORD] >> end % WORD & 1)


def argument(key, value):
    return f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>"


NONE = "<tool_call>none</tool_call>"
SET = f"<tool_call>set{argument('name', 'a <b')}{argument('mood', 'bad')}\n{argument('size', '-3')}</tool_call>"
NOTED = f"<tool_call>set\n{argument('name', 'é')}{argument('note', 'null')}{argument('code', '12/x, y')}\n</tool_call>"
JSON = '<tool_call>\n{"name": "set", "arguments": {"name": "ab", "size": 1}}\n</tool_call>'
BARE = '{"name": "set", "parameters": {"name": "ab", "size": 1}}'


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(
    ("form", "several", "answer", "good", "bad"),
    [
        ("tags", True, False, [NONE, SET, NOTED, NONE + SET, f"\n{NONE}\n{SET}"], ["", "hi", f"hi {NONE}", JSON, BARE]),
        ("tags", False, False, [NONE, SET], [NONE + NONE]),
        ("tags", True, True, ["", "hi {", f"hi {NONE} so {SET}\n"], ["hi <tool_call>x", SET.replace("set", "get")]),
        ("tags", False, True, ["", "hi {", f"hi {NONE}"], [f"{NONE} so", NONE + NONE]),
        ("tags", True, ANSWER, [NONE + SET, '{"a": 1}'], ["hi", '{"b": 1}']),
        ("json", True, False, [JSON, JSON + JSON], ["hi", NONE, BARE]),
        ("json", False, True, ["hi", f"hi {JSON}"], [JSON + JSON]),
        ("json", True, ANSWER, [JSON, '{"a": 1}'], ["hi"]),
        ("bare", True, False, [BARE], ["hi", BARE + BARE, '{"a": 1}']),
        ("bare", True, True, [BARE, "hi", "", " so {"], ['{"a": 1}', ' {"a": 1}']),
        ("bare", True, ANSWER, [BARE, '{"a": 1}'], ["hi"]),
    ],
)
def test_what_a_reply_may_be(form, several, answer, good, bad, special):
    made = tokenizer(TEMPLATES[form], special)
    structured = calls(FUNCTIONS, form, made, several, answer)
    for text in good:
        assert passes(made, structured, text), text
    for text in bad:
        assert not passes(made, structured, text), text


@pytest.mark.parametrize(
    "wrong",
    [
        argument("size", "1"),  # without the required one
        argument("name", ""),
        argument("name", "abcdef"),
        argument("name", "a\x01"),
        argument("mood", "bad") + argument("name", "a"),  # another order
        argument("name", "a") + argument("mood", "ugly"),
        argument("name", "a") + argument("size", "x"),
        argument("name", "a") + argument("note", "5"),
        argument("name", "a") + argument("code", "x12/x"),
        argument("name", "a") + argument("other", "1"),
    ],
)
def test_arguments_have_their_schemas(wrong):
    made = tokenizer(TEMPLATES["tags"])
    structured = calls(FUNCTIONS, "tags", made, False, False)
    assert not passes(made, structured, f"<tool_call>set{wrong}</tool_call>")


@pytest.mark.parametrize("form", ["tags", "json"])
@pytest.mark.parametrize("inner", [{"type": "string"}, {"type": "integer"}])
def test_an_argument_with_an_overlapping_one_of_is_refused(form, inner):
    """Strings in tags are no JSON, and are looked at apart from it."""
    made = tokenizer(TEMPLATES[form])
    values = ["a", "b", "c"] if inner["type"] == "string" else [1, 2, 3]

    def compiled(*options):
        parameters = {"properties": {"x": {"oneOf": list(options)}}, "required": ["x"]}
        structured = calls([Callable("f", parameters, True)], form, made, False, False)
        return Grammars(made, made.vocab_size, made.eos_token_ids).constraint(structured, made.eos_token_ids)

    assert compiled({"enum": values[:2]}, {"const": values[2]}).error is None
    with pytest.raises(ValueError, match=r"oneOf cannot be enforced, as .* use anyOf"):
        compiled({"enum": values[:2]}, {"enum": values[1:]})
    with pytest.raises(ValueError, match=r"oneOf cannot be enforced, as .* use anyOf"):
        compiled(inner, {**inner, "enum": values})


def test_what_is_let_through_is_read_as_it_was_meant():
    reply = Reply(tools={each.name: each.parameters for each in FUNCTIONS}, form="tags")
    pieces = [*reply.feed(NOTED), *reply.flush()]
    said = json.loads("".join(piece.text for piece in pieces if piece.kind == "arguments"))
    assert said == {"name": "é", "note": None, "code": "12/x, y"}


@pytest.mark.parametrize("special", [False, True])
def test_thinking_is_free_but_for_calls(special):
    made = tokenizer(TEMPLATES["tags"])
    if not special:  # `</think>` as text, as Qwen3's tokenizer has it
        source = json.loads(made.backend.to_str())
        for token in source["added_tokens"]:
            token["special"] &= token["content"] != "</think>"
        made.backend = tokenizers.Tokenizer.from_str(json.dumps(source))
    held = after_thinking(ANSWER, made)
    for text in ('hm {"b" < </thin</think>{"a": 1}', '</think>\n\n{"a": 1}'):
        assert passes(made, held, text)
    for text in ("", "hm", f'{NONE}</think>{{"a": 1}}', "</think>", '</think>\n\n\n{"a": 1}', '</think>hm{"a": 1}'):
        assert not passes(made, held, text), text
    tools = after_thinking(calls(FUNCTIONS, "tags", made, True, True), made)
    either = after_thinking(calls(FUNCTIONS, "tags", made, True, ANSWER), made)
    assert passes(made, either, 'hm</think>{"a": 1}') and passes(made, either, f"hm</think>{NONE}")
    assert passes(made, tools, f"hm</think>\n\nhi {NONE}") and not passes(made, tools, f"hm</think>hi {JSON}")


@pytest.mark.parametrize("form", ["tags", "json"])
def test_tags_that_are_tokens_are_not_spelled_by_others(form):
    """A reply reads them so too: a value, the thinking or a text would end before the grammar's does."""
    plain, made = tokenizer(TEMPLATES[form]), tokenizer(TEMPLATES[form], special=True)
    structured = calls(FUNCTIONS, form, made, True, True)
    call = NONE if form == "tags" else JSON
    assert passes(made, structured, call) and not passes(made, structured, plain.encode(call))
    thought = after_thinking(ANSWER, made)
    spelled = [*plain.encode("hm</thin"), *plain.encode("k>"), *plain.encode('</think>{"a": 1}')]
    assert not passes(made, thought, spelled)
    inner = calls(FUNCTIONS, "tags", made, False, False)
    begin = "<tool_call>set<arg_key>name</arg_key><arg_value>"
    ids = [*made.encode(begin + "a"), *plain.encode("</arg_value>"), *made.encode("</arg_value></tool_call>")]
    assert passes(made, inner, begin + "a</arg_value></tool_call>") and not passes(made, inner, ids)


@pytest.mark.parametrize("special", [False, True])
def test_tags_in_values_are_read_as_they_were_let_through(special):
    plain, made = tokenizer(TEMPLATES["tags"]), tokenizer(TEMPLATES["tags"], special)
    properties = {"text": {"type": "string"}, "what": {"type": ["string", "null"]}}
    function = Callable("say", {"properties": properties, "required": ["text"]}, True)
    structured = calls([function], "tags", made, False, False)
    said = {"text": 'print("</tool_call>")', "what": "</arg_value></tool_call>"}
    text = argument("text", said["text"]) + argument("what", json.dumps(said["what"]))
    whole, ids = f"<tool_call>say{text}</tool_call>", []
    # In values the tags are spelled, also where they are tokens.
    for piece in re.split(r'("</arg_value></tool_call>"|print\("</tool_call>"\))', whole):
        ids += (plain if piece.startswith(('"', "print")) else made).encode(piece, add_special_tokens=False)
    assert passes(made, structured, ids)
    for cut in (1, 5, 1000):
        reply = Reply(tools={"say": function.parameters}, form="tags")
        pieces = [each for at in range(0, len(whole), cut) for each in reply.feed(whole[at : at + cut])]
        pieces += reply.flush()
        assert json.loads("".join(piece.text for piece in pieces if piece.kind == "arguments")) == said


LARK = 'start: "*** Begin Patch\\n" line+ "*** End Patch"\nline: "+" /[^\\n]*/ "\\n"'


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_a_custom_tools_input_has_its_grammar(special, syntax):
    definition = LARK if syntax == "lark" else r"\*{3} Begin Patch(\n|.)*/ End Patch"
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    tool = Custom.model_validate({"name": "patch", "description": "Edits.", "format": grammar}).callable
    assert isinstance(tool.form, Grammar if syntax == "lark" else Regex)
    assert definition in tool.shown["description"]
    made = tokenizer(TEMPLATES["tags"], special)
    held = calls([tool], "tags", made, False, False)
    good = "*** Begin Patch\n+x\n*** End Patch" if syntax == "lark" else "*** Begin Patch\n\n+x / End Patch"
    assert passes(made, held, f"<tool_call>patch{argument('input', good)}</tool_call>")
    assert not passes(made, held, f"<tool_call>patch{argument('input', 'x')}</tool_call>")
    with pytest.raises(ValueError, match="patch: a grammar cannot be held"):
        calls([tool], "json", made, False, False)
