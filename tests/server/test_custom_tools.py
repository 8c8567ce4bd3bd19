"""Custom tools, whose input is text, over HTTP: as Codex and others send them."""

import json

import openai
import pytest
from scripted_service import ask, recited
from tool_templates import TEMPLATES, tokenizer

from ling3.server.service import Service
from ling3.text.replies import Reply

INPUT = '*** Begin Patch\n+x = "</arg_value>" # é\\n\n*** End Patch'
LARK = 'start: "*** Begin Patch\\n" line+ "*** End Patch"\nline: "+" /[^\\n]*/ "\\n"'
PATCH = {"name": "apply_patch", "description": "Edits files."}
WRITTEN = {
    "tags": "<tool_call>apply_patch<arg_key>input</arg_key><arg_value>{}</arg_value></tool_call>",
    "json": '<tool_call>\n{{"name": "apply_patch", "arguments": {{"input": {}}}}}\n</tool_call>',
    "bare": '{{"name": "apply_patch", "parameters": {{"input": {}}}}}',
}
CHAT = [{"role": "user", "content": "Set x."}]


def written(form, text=INPUT):
    return WRITTEN[form].format(text if form == "tags" else json.dumps(text))


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chats_call_custom_tools(form, size):
    service = recited(tokenizer(TEMPLATES[form]), written(form), size=size)
    tool = {"type": "custom", "custom": PATCH}

    async def call(client):
        how = {"model": "nano", "messages": CHAT, "tools": [tool]}
        whole = (await client.chat.completions.create(**how)).choices[0]
        chunks = [each.choices[0] async for each in await client.chat.completions.create(**how, stream=True)]
        return whole, [call for chunk in chunks for call in chunk.delta.tool_calls or []]

    whole, (begin, *more) = ask(service, call)
    [called] = whole.message.tool_calls
    assert (called.type, called.custom.name, called.custom.input) == ("custom", "apply_patch", INPUT)
    assert whole.finish_reason == "tool_calls" and begin.type == "custom" and begin.custom["name"] == "apply_patch"
    assert "".join(each.custom["input"] for each in more) == INPUT
    assert '"name": "apply_patch"' in service.engine.prompts[0]

    async def go_on(client):
        result = {"role": "tool", "tool_call_id": called.id, "content": "done"}
        await client.chat.completions.create(model="nano", messages=[*CHAT, whole.message, result], tools=[tool])

    ask(service, go_on)
    assert (INPUT if form == "tags" else json.dumps(INPUT, ensure_ascii=False)) in service.engine.prompts[-1]


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_responses_have_items_of_custom_tools(form, size):
    service = recited(tokenizer(TEMPLATES[form]), written(form), size=size)
    tools = [{"type": "custom", **PATCH}, {"type": "function", "name": "shell", "strict": False, "parameters": {}}]
    codex = {
        "model": "nano",
        "instructions": "You are a coding agent.",
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Set x."}]}],
        "tools": tools,
        "tool_choice": "auto",
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
        "prompt_cache_key": "1",
        "extra_body": {"client_metadata": {"session": "1"}, "chat_template_kwargs": {"enable_thinking": False}},
    }

    async def call(client):
        whole = await client.responses.create(**codex)
        events = [each async for each in await client.responses.create(**codex, stream=True)]
        again = {**codex, "input": [*codex["input"], *(each.to_dict() for each in whole.output)]}
        again["input"].append({"type": "custom_tool_call_output", "call_id": whole.output[0].call_id, "output": "done"})
        await client.responses.create(**again)
        return whole, events

    whole, events = ask(service, call)
    [item] = whole.output
    assert (item.type, item.name, item.input, item.status) == ("custom_tool_call", "apply_patch", INPUT, "completed")
    deltas = [each.delta for each in events if each.type == "response.custom_tool_call_input.delta"]
    [done] = [each for each in events if each.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == INPUT == done.input and (size == 1000 or len(deltas) > 1)
    assert events[-1].response.output[0].input == INPUT and whole.tools[0].type == "custom"
    assert "<role>OBSERVATION</role>done" in service.engine.prompts[-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "apply_patch", "arguments": "raw"}', "raw"),
        ('{"name": "apply_patch", "arguments": {"patch": "raw"}}', "raw"),
        ('{"name": "apply_patch", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"name": "apply_patch", "arguments": {"input": "ra', "ra"),
        ('{"name": "apply_patch"}', "{}"),
    ],
)
def test_arguments_of_another_form_are_the_input(text, expected):
    end = "</tool_call>" if text.endswith("}") else ""
    for pieces in ([text], text):
        reply = Reply(tools={"apply_patch": {}}, form="tags", customs={"apply_patch"})
        said = [each for piece in ["<tool_call>", *pieces, end] for each in reply.feed(piece)]
        said += reply.flush()
        assert (said[0].kind, "".join(each.text for each in said[1:])) == ("custom", expected)


@pytest.mark.parametrize("form", ["json", "bare"])
def test_a_grammar_that_cannot_be_held_is_refused_by_name(form):
    service = recited(tokenizer(TEMPLATES[form]), "7")
    tool = {"type": "custom", **PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}

    async def call(client):
        await client.responses.create(model="nano", input="a", tools=[tool])

    with pytest.raises(openai.BadRequestError, match="apply_patch: a grammar cannot be held") as caught:
        ask(service, call)
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "grammar"}, "tools.0.format"),
        ({"type": "grammar", "syntax": "lark"}, "tools.0.format"),
        ({"type": "text", "definition": "x"}, "tools.0.format"),
        ({"type": "grammar", "syntax": "peg", "definition": "x"}, "tools.0.format.syntax"),
        ({"type": "grammar", "syntax": "lark", "definition": ""}, "tools"),
        ({"type": "grammar", "syntax": "lark", "definition": "start: nothing"}, "tools"),
    ],
)
def test_a_format_that_is_none_is_refused_by_name(nano, form, param):
    service = Service(nano, tokenizer(TEMPLATES["tags"]), "nano")

    async def call(client):
        await client.responses.create(model="nano", input="a", tools=[{"type": "custom", **PATCH, "format": form}])

    with pytest.raises(openai.BadRequestError) as caught:
        ask(service, call)
    assert caught.value.param == param
