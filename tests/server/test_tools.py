"""Tools over HTTP, by OpenAI's client: calls are read where a model writes them, and held to their schemas if asked."""

import asyncio
import json
import threading
from typing import Literal

import openai
import pydantic
import pytest
import uvicorn
from reply_cases import CASES, TOOLS
from scripted_service import ask, joined, recited
from tool_templates import TEMPLATES, tokenizer

import ling3
from ling3.server.app import build
from ling3.server.service import Service

CHAT = [{"role": "user", "content": "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"}]
ASKED = {"model": "nano", "messages": CHAT, "temperature": 0, "max_tokens": 200}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "integer", "minimum": 0, "maximum": 99},
                "unit": {"enum": ["pens", "eggs"]},
            },
            "required": ["a", "b", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
SAY = {
    "type": "function",
    "function": {"name": "say", "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]}},
}
WRITTEN = {
    "tags": "<tool_call>say<arg_key>text</arg_key>\n<arg_value>{}</arg_value></tool_call>",
    "json": '<tool_call>\n{{"name": "say", "arguments": {{"text": "{}"}}}}\n</tool_call>',
    "bare": '{{"name": "say", "parameters": {{"text": "{}"}}}}',
}


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=1024)


def create(**fields):
    """A call of the client's: the answer, or all chunks of a stream."""

    async def call(client):
        answer = await client.chat.completions.create(**{**ASKED, **fields})
        return [chunk async for chunk in answer] if fields.get("stream") else answer

    return call


def arguments(message):
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_calls_are_read_in_the_models_form(form, size):
    service = recited(tokenizer(TEMPLATES[form]), WRITTEN[form].format("é < 1"), size=size)
    choice = ask(service, create(tools=[SAY])).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert arguments(choice.message) == [("say", {"text": "é < 1"})] and choice.logprobs is None
    reasoning, content, [(name_id, name, said)], reason = joined(ask(service, create(tools=[SAY], stream=True)))
    assert (reasoning, content, name, reason) == ("", "", "say", "tool_calls") and name_id.startswith("call")
    assert said == choice.message.tool_calls[0].function.arguments
    assert service.engine.params[0].structured is None and '"name": "say"' in service.engine.prompts[0]


def test_calls_stand_amid_thinking_and_text():
    call = WRITTEN["tags"]
    text = f"hm\n{call.format('one')}\nso</think>Now: {call.format('two')}\n{call.format('three')}"
    service = recited(tokenizer(TEMPLATES["tags"]), text)
    how = {"tools": [SAY], "extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    message = ask(service, create(**how)).choices[0].message
    assert (message.reasoning_content, message.content) == ("hmso", "Now: ")
    assert [said["text"] for _, said in arguments(message)] == ["one", "two", "three"]
    reasoning, content, calls, _ = joined(ask(service, create(**how, stream=True)))
    assert (reasoning, content, len(calls)) == ("hmso", "Now: ", 3) and len({call[0] for call in calls}) == 3


def test_a_call_that_is_cut_off_stays_so():
    service = recited(tokenizer(TEMPLATES["tags"]), WRITTEN["tags"].split("{}")[0] + "half", reason="length")
    choice = ask(service, create(tools=[SAY])).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == ("length", '{"text": "half')


def test_without_tools_tags_are_text():
    service = recited(tokenizer(TEMPLATES["tags"]), WRITTEN["tags"].format("x"))
    for fields in ({}, {"tools": [SAY], "tool_choice": "none"}):
        choice = ask(service, create(**fields)).choices[0]
        assert choice.message.content == WRITTEN["tags"].format("x") and choice.finish_reason == "stop"
        assert choice.message.tool_calls is None and "say" not in service.engine.prompts[-1]


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("think", [False, True])
def test_a_call_that_has_to_come_is_held_to_its_schema(engine, form, think):
    """Nano knows no tools: the grammar alone makes it call them."""
    service = Service(engine, tokenizer(TEMPLATES[form]), "nano")
    how = {"tools": [ADD, SAY], "extra_body": {"chat_template_kwargs": {"enable_thinking": think}}}
    how["tool_choice"] = {"type": "function", "function": {"name": "add"}}
    how["logit_bias"] = {"5": 20}  # else nano never ends its thinking by `</think>`
    choice = ask(service, create(**how, parallel_tool_calls=False)).choices[0]
    [(name, said)] = arguments(choice.message)
    assert choice.finish_reason == "tool_calls" and name == "add" and said.keys() == {"a", "b", "unit"}
    assert 0 <= said["a"] <= 99 and said["unit"] in ("pens", "eggs") and choice.message.content is None
    assert bool(getattr(choice.message, "reasoning_content", None)) == think
    _, _, [(_, name, streamed)], reason = joined(ask(service, create(**how, parallel_tool_calls=False, stream=True)))
    assert (name, json.loads(streamed), reason) == ("add", said, "tool_calls")


def test_several_calls_may_have_to_come(engine):
    service = Service(engine, tokenizer(TEMPLATES["tags"]), "nano")
    ends = dict.fromkeys(map(str, engine.tokenizer.eos_token_ids), -1e9)
    choice = ask(service, create(tools=[ADD], tool_choice="required", logit_bias=ends)).choices[0]
    assert len(choice.message.tool_calls) > 1 and choice.finish_reason == "length"
    for call in choice.message.tool_calls[:-1]:
        assert json.loads(call.function.arguments).keys() == {"a", "b", "unit"}


def test_a_strict_tool_leaves_the_model_its_text(engine):
    service = Service(engine, tokenizer(TEMPLATES["tags"]), "nano")
    choice = ask(service, create(tools=[ADD])).choices[0]
    assert choice.finish_reason == "stop" and choice.message.tool_calls is None and choice.message.content
    held = {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}}
    held["tool_choice"]["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "add"}}]
    assert ask(service, create(**held, parallel_tool_calls=False)).choices[0].message.tool_calls


class Sum(pydantic.BaseModel):
    """Adds."""

    a: int = pydantic.Field(ge=0, le=99)
    unit: Literal["pens", "eggs"]


class Reply(pydantic.BaseModel):
    right: bool


@pytest.mark.parametrize("form", TEMPLATES)
def test_tools_and_answers_are_parsed_into_pydantic_models(engine, form):
    service = Service(engine, tokenizer(TEMPLATES[form]), "nano")
    tool = openai.pydantic_function_tool(Sum)

    def parse(**fields):
        return ask(service, lambda client: client.chat.completions.parse(**ASKED, **fields)).choices[0].message

    called = parse(tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert isinstance(called.tool_calls[0].function.parsed_arguments, Sum)
    either = parse(tools=[tool], response_format=Reply, parallel_tool_calls=False)
    assert either.tool_calls or isinstance(either.parsed, Reply)
    only = parse(tools=[tool], response_format=Reply, tool_choice="none")
    assert isinstance(only.parsed, Reply)


@pytest.mark.parametrize("form", TEMPLATES)
def test_a_result_goes_back_to_the_model(form):
    """Two turns: the call's arguments reach the template as an object, and the result after it."""
    service = recited(tokenizer(TEMPLATES[form]), WRITTEN[form].format("7"), "It is 7.")
    call = ask(service, create(tools=[SAY])).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": [{"type": "text", "text": "said 7"}]}
    messages = [*CHAT, call.model_dump(), result]
    answer = ask(service, create(tools=[SAY], messages=messages)).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("It is 7.", "stop")
    assert WRITTEN[form].format("7") in service.engine.prompts[1]
    assert "<role>OBSERVATION</role>said 7<|role_end|>" in service.engine.prompts[1]


def test_a_round_trip_over_a_socket_in_both_clients(engine):
    """As scripts have it: a call that the grammar holds, its result, and the answer, which is the engine's."""
    service = Service(engine, tokenizer(TEMPLATES["tags"]), "nano")
    config = uvicorn.Config(build(service), port=0, log_level="warning", ws="none")
    socket, server = config.bind_socket(), uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    where = {"base_url": f"http://127.0.0.1:{socket.getsockname()[1]}/v1", "api_key": "none"}
    held = {**ASKED, "tools": [ADD], "tool_choice": "required", "parallel_tool_calls": False}

    def turn(message):
        call = message.tool_calls[0]
        said = json.loads(call.function.arguments)
        result = {"role": "tool", "tool_call_id": call.id, "content": str(said["a"] + said["b"])}
        return {**ASKED, "tools": [ADD], "tool_choice": "none", "messages": [*CHAT, message, result]}

    async def alike():
        async with openai.AsyncOpenAI(**where) as client:
            first = (await client.chat.completions.create(**held)).choices[0].message
            return first, (await client.chat.completions.create(**turn(first))).choices[0].message.content

    try:
        with openai.OpenAI(**where) as client:
            first = client.chat.completions.create(**held).choices[0].message
            second = client.chat.completions.create(**turn(first)).choices[0].message.content
            with client.chat.completions.stream(**held) as stream:
                final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls[0].function.arguments == first.tool_calls[0].function.arguments
        again, also = asyncio.run(alike())
    finally:
        server.should_exit = True
        thread.join()
        socket.close()
    messages = turn(first)["messages"]
    call = {"function": {"name": "add", "arguments": json.loads(first.tool_calls[0].function.arguments)}}
    messages[1] = {"role": "assistant", "content": "", "tool_calls": [call]}
    prompt = service.tokenizer.apply_chat_template(messages)
    assert second == also == engine.generate([prompt], ling3.SamplingParams(max_tokens=200))[0].text
    assert again.tool_calls[0].function.arguments == first.tool_calls[0].function.arguments


def broken(**function):
    """A conversation with a call that has these fields."""
    call = {"id": "1", "type": "function", "function": {"name": "say", "arguments": "{}", **function}}
    return {"messages": [*CHAT, {"role": "assistant", "tool_calls": [call]}]}


def with_schema(**schema):
    """A strict tool with one argument of this schema."""
    parameters = {"properties": {"x": schema}, "required": ["x"]}
    tool = {"name": "f", "parameters": parameters, "strict": True}
    return {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "x": 1}}]}, "tools.0.function.x"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [SAY, SAY]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({"tools": [SAY], "tool_choice": "perhaps"}, "tool_choice"),
        ({"tools": [SAY], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        (broken(arguments="[1]"), "messages[1].tool_calls[0].function.arguments"),
        (broken(arguments="{"), "messages[1].tool_calls[0].function.arguments"),
        (broken(name=None), "messages[1].tool_calls[0].function.name"),
        ({"messages": [*CHAT, {"role": "tool", "content": "7"}]}, "messages[1].tool_call_id"),
        ({"messages": [*CHAT, {"role": "tool", "tool_call_id": "1", "content": "7"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        (with_schema(type="string", format="date"), "tools"),
        (with_schema(type="integer", multipleOf="x"), "tools"),
        (with_schema(type="string", pattern="("), "tools"),
        (with_schema(type="string", enum=5), "tools"),
    ],
)
def test_what_is_refused_is_named(engine, fields, param):
    service = Service(engine, tokenizer(TEMPLATES["tags"]), "nano")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(service, create(**fields))
    assert caught.value.param == param


def test_a_model_without_tools_refuses_them(engine):
    service = Service(engine, engine.tokenizer, "nano")
    for fields, param in (({"tools": [SAY]}, "tools"), (broken(), "messages")):
        with pytest.raises(openai.BadRequestError, match="template has no tools") as caught:
            ask(service, create(**fields))
        assert caught.value.param == param


@pytest.mark.parametrize(("effort", "opens"), [("none", False), ("minimal", False), ("low", True), ("high", True)])
def test_effort_switches_thinking_by_the_template(effort, opens):
    service = recited(ling3.load_tokenizer("nano"), "hm</think>7")
    choice = ask(service, create(reasoning_effort=effort)).choices[0]
    assert service.engine.prompts[0].endswith("<think>") == opens
    assert getattr(choice.message, "reasoning_content", None) == ("hm" if opens else None)


def test_effort_without_a_switch_is_refused():
    plain = tokenizer("{{ messages[0].content }}")
    assert ask(recited(plain, "7"), create(reasoning_effort="none")).choices[0].message.content == "7"
    for template, effort in (("{{ messages[0].content }}", "high"), ("{{ messages[0].content }}<think>", "none")):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(recited(tokenizer(template), "7"), create(reasoning_effort=effort))
        assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize(("text", "how", "expected"), CASES)
def test_chunks_make_up_the_whole_however_tokens_come(text, how, expected, special):
    form = how.get("form", "tags")
    functions = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
    fields = {"tools": functions} if "tools" in how else {}
    fields["extra_body"] = {"chat_template_kwargs": {"enable_thinking": how.get("thinking", False)}}
    made = tokenizer(TEMPLATES[form], special)
    whole = ask(recited(made, text), create(**fields)).choices[0]
    said = getattr(whole.message, "reasoning_content", None) or "", whole.message.content or ""
    calls = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    plain = not special and "think>" not in "".join(expected[:2])  # a special token is no text
    assert (*said, calls) == expected or not plain
    for size in (1, 2, 3, 5, 1000):
        reasoning, content, streamed, reason = joined(
            ask(recited(made, text, size=size), create(**fields, stream=True))
        )
        assert (reasoning, content, reason) == (*said, whole.finish_reason)
        assert [call[1:] for call in streamed] == calls
