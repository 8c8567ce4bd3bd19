"""`/v1/messages` by Anthropic's client: whole and streamed, with tools, thinking, results of tools, and errors."""

import asyncio
import json
import pathlib

import anthropic
import httpx
import llm_comply
import pytest
from llm_comply.schema import SpecLoader
from scripted_service import anthropics, recited, transported
from scripted_service import ask as asked_of
from tool_templates import TEMPLATES, tokenizer

import ling3
from ling3.server.anthropic_blocks import conversation
from ling3.server.service import Service

pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")  # the suite's own
SPEC = SpecLoader(str(pathlib.Path(llm_comply.__file__).parent / "specs/anthropic.json"))
EVENTS = {
    "message_start": "MessageStartEvent",
    "content_block_start": "ContentBlockStartEvent",
    "content_block_delta": "ContentBlockDeltaEvent",
    "content_block_stop": "ContentBlockStopEvent",
    "message_delta": "MessageDeltaEvent",
    "message_stop": "MessageStopEvent",
}
"""Events, and their schemas; a `ping` has none."""
PATH = "/v1/messages"
QUESTION = "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"
USER = {"role": "user", "content": QUESTION}
ASKED = {"model": "nano", "messages": [USER], "temperature": 0, "max_tokens": 200}
SAY = {
    "name": "say",
    "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
}
CALL = "<tool_call>say<arg_key>text</arg_key><arg_value>{}</arg_value></tool_call>"
THOUGHT = f"hm\n</think>Now: {CALL.format('é')}\n{CALL.format('two')}"
THINK = {"type": "enabled", "budget_tokens": 1024}
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=1024, chunked_prefill_size=16)


def service_of(engine):
    return Service(engine, engine.tokenizer, "nano")


def ask(service, call, **how):
    return asked_of(service, call, anthropics, **how)


def create(**fields):
    async def call(client):
        return await client.messages.create(**{**ASKED, **fields})

    return call


def posted(service, path=PATH, headers=None, **fields):
    """The answer to a request, and that its error, if it is one, is as the specification has it."""

    async def call():
        async with transported(service) as http:
            return await http.post(f"http://test{path}", json={**ASKED, **fields}, headers=headers)

    answer = asyncio.run(call())
    if answer.status_code != 200:
        assert answer.json()["type"] == "error" and answer.json()["request_id"] == answer.headers["request-id"]
        assert not SPEC.validate(answer.json(), "ErrorResponse")
    return answer


def events_of(service, **fields):
    """The events of a stream, each as the specification has it."""
    lines = posted(service, stream=True, **fields).text.split("\n")
    names = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert names == [event["type"] for event in events] and "[DONE]" not in lines[-3:]
    for event in events:
        if event["type"] in EVENTS:
            assert not SPEC.validate(event, EVENTS[event["type"]])
    return events


def test_the_answer_is_the_engines(engine):
    service = service_of(engine)
    brief = "Be brief. " * 40
    chat = [{"role": "system", "content": brief}, USER]
    expected = engine.generate(chat, ling3.SamplingParams(max_tokens=200))[0]
    blocks = [{"type": "text", "text": QUESTION}]
    for content, system in ((QUESTION, brief), (blocks, [{"type": "text", "text": "Be brief. "}] * 40)):
        whole = ask(service, create(messages=[{"role": "user", "content": content}], system=system))
        assert [block.text for block in whole.content] == [expected.text]
        assert (whole.stop_reason, whole.stop_sequence, whole.model) == ("end_turn", None, "nano")
        known = whole.usage.model_extra["cache_read_input_tokens"]
        assert whole.usage.input_tokens + known == len(expected.prompt_token_ids)
        assert whole.usage.output_tokens == len(expected.token_ids)
    assert known > 0  # the first request's prompt
    cut = ask(service, create(max_tokens=3))
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)


def test_an_answer_may_not_exceed_the_context():
    """Clients ask for as many tokens as the largest models have."""
    service = recited(tokenizer(TEMPLATES["tags"]), "one two", reason="length")
    assert ask(service, create(max_tokens=32000)).stop_reason == "model_context_window_exceeded"
    [prompt], [params] = service.engine.prompts, service.engine.params
    assert params.max_tokens == service.engine.left(len(service.tokenizer.encode(prompt, add_special_tokens=False)))


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_make_up_the_message(size):
    service = recited(tokenizer(TEMPLATES["tags"]), THOUGHT, size=size)
    how = {"tools": [SAY], "thinking": THINK, "max_tokens": 2000}
    whole = posted(service, **how).json()
    assert not SPEC.validate(whole, "Message")
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert (whole["content"][0]["thinking"], whole["content"][1]["text"]) == ("hm", "Now: ")
    assert [block["input"] for block in whole["content"][2:]] == [{"text": "é"}, {"text": "two"}]
    assert whole["stop_reason"] == "tool_use" and whole["content"][0]["signature"]
    thought = whole["usage"]["output_tokens_details"]["thinking_tokens"]
    assert thought == len(service.tokenizer.encode("hm\n</think>"))
    events = events_of(service, **how)
    assert [event["type"] for event in events[:3]] == ["message_start", "ping", "content_block_start"]
    made, usage = events[0]["message"], events[0]["message"]["usage"]
    for event in events[2:]:
        index = event.get("index")
        if event["type"] == "content_block_start":
            assert index == len(made["content"])
            made["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            assert index == len(made["content"]) - 1  # one block at a time
            kind, text = delta.pop("type"), next(iter(delta))
            field = "json" if kind == "input_json_delta" else text
            made["content"][index][field] += delta[text]
        elif event["type"] == "message_delta":
            made |= event["delta"]
            usage |= event["usage"]
    for each in made["content"]:
        arguments = each.pop("json")
        each.update({"input": json.loads(arguments)} if each["type"] == "tool_use" else {})
    for block in (*made["content"], *whole["content"]):
        block.pop("id", None)
    assert {**made, "id": ""} == {**whole, "id": ""}
    ends = [event["type"] for event in events].count("content_block_stop")
    assert ends == 4 and events[-1] == {"type": "message_stop"}


def test_the_clients_stream_accumulates_it():
    service = recited(tokenizer(TEMPLATES["tags"]), f"Now: {CALL.format('é')}")

    async def call(client):
        async with client.messages.stream(**ASKED, tools=[SAY]) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_message()

    final = ask(service, call)
    assert final.content[0].text == "Now: " and final.content[1].input == {"text": "é"}
    assert final.stop_reason == "tool_use" and final.usage.output_tokens > 0


@pytest.mark.parametrize(
    ("thinking", "more", "on"),
    [
        (THINK, {}, True),
        ({"type": "adaptive"}, {}, True),
        ({"type": "adaptive"}, {"output_config": {"effort": "low"}}, True),
        ({"type": "disabled"}, {"output_config": {"effort": "high"}}, False),
        (None, {}, False),
        (None, {"chat_template_kwargs": {"enable_thinking": True}}, True),
    ],
)
def test_thinking_is_the_templates(thinking, more, on):
    service = recited(tokenizer(TEMPLATES["tags"]), "hm</think>7" if on else "7")
    answer = posted(service, thinking=thinking, max_tokens=1025, **more).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"][not on :]
    assert service.engine.prompts[0].endswith("<think>" if on else "</think>")


@pytest.mark.parametrize(
    ("given", "effort"),
    [
        ({"thinking": THINK}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4095}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 4096}}, "high"),
        ({"thinking": THINK, "output_config": {"effort": "max"}}, "max"),
        ({"thinking": {"type": "adaptive"}}, "high"),
        ({"thinking": {"type": "disabled"}}, "none"),
        ({"output_config": {"effort": "low"}}, ""),
    ],
)
def test_a_budget_is_an_effort(given, effort):
    service = recited(tokenizer("{{ messages[0].content }}{{ enable_thinking }}: {{ reasoning_effort }}"), "7")
    posted(service, max_tokens=5000, **given)
    assert service.engine.prompts[0].split(": ")[-1] == effort


def test_a_template_without_a_switch_refuses_thinking_that_has_to_be():
    service = recited(tokenizer("{{ messages[0].content }}:"), "7")
    refused = posted(service, thinking=THINK, max_tokens=1025)
    assert refused.status_code == 400 and refused.json()["error"]["message"].startswith("thinking is low, and this")
    assert posted(service, thinking={"type": "adaptive"}).status_code == 200


def test_thinking_may_be_omitted():
    service = recited(tokenizer(TEMPLATES["tags"]), "hm</think>7")
    how = {"thinking": {"type": "adaptive", "display": "omitted"}}
    thought, text = posted(service, **how).json()["content"]
    assert (thought["thinking"], text["text"]) == ("", "7") and thought["signature"]
    kinds = [event["delta"]["type"] for event in events_of(service, **how) if event["type"] == "content_block_delta"]
    assert kinds == ["signature_delta", "text_delta"]


def test_a_stop_sequence_is_named(engine):
    answer = ask(service_of(engine), create(stop_sequences=["="]))
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "=") and "=" not in answer.content[0].text


def test_an_answer_can_be_begun(engine):
    """A last message of the assistant's is continued, to the bits of the prompt that ends so."""
    begun = [USER, {"role": "assistant", "content": "Sam has 3 pens"}]
    answer = ask(service_of(engine), create(messages=begun))
    prompt = engine.tokenizer.apply_chat_template([USER], tokenize=False) + begun[1]["content"]
    ids = engine.tokenizer.encode(prompt, add_special_tokens=False)
    assert answer.content[0].text == engine.generate([ids], ling3.SamplingParams(max_tokens=200))[0].text


def test_a_call_that_has_to_come_and_its_result(engine):
    service = Service(engine, tokenizer(TEMPLATES["tags"]), "nano")
    properties = {"a": {"type": "integer", "minimum": 0, "maximum": 99}}
    add = {"name": "add", "input_schema": {"type": "object", "properties": properties, "required": ["a"]}}

    async def turns(client):
        how = {"tools": [add, SAY], "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True}}
        first = await client.messages.create(**{**ASKED, **how})
        block = first.content[-1]
        given = [USER, {"role": "assistant", "content": [each.to_dict() for each in first.content]}]
        given.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "7"}]})
        return first, await client.messages.create(**{**ASKED, "messages": given})

    first, second = ask(service, turns)
    block = first.content[-1]
    assert first.stop_reason == "tool_use" and block.name == "add" and isinstance(block.input["a"], int)
    chat = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": block.input}}]},
        {"role": "tool", "content": "7"},
    ]
    prompt = service.tokenizer.apply_chat_template(chat)
    assert second.content[0].text == engine.generate([prompt], ling3.SamplingParams(max_tokens=200))[0].text


def test_blocks_become_messages():
    calls = [{"type": "tool_use", "id": str(i), "name": "say", "input": {"text": "é"}} for i in (1, 2)]
    result = {"type": "tool_result", "is_error": True, "cache_control": {"type": "ephemeral"}}
    given = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "So:"},
                *calls,
            ],
        },
        {
            "role": "user",
            "content": [
                {**result, "tool_use_id": "1"},
                {**result, "tool_use_id": "2", "content": [{"type": "text", "text": "done"}]},
                {"type": "text", "text": "go on"},
            ],
        },
        {"role": "system", "content": "Hurry."},
    ]
    function = {"name": "say", "arguments": '{"text": "é"}'}
    messages, prefill = conversation(given, [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}])
    assert prefill == ""
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "So:",
            "reasoning_content": "hm",
            "tool_calls": [{"id": str(i), "type": "function", "function": function} for i in (1, 2)],
        },
        {"role": "tool", "tool_call_id": "1", "content": ""},
        {"role": "tool", "tool_call_id": "2", "content": "done"},
        {"role": "user", "content": "go on"},
        {"role": "system", "content": "Hurry."},
    ]


def test_tokens_are_counted_as_they_are_read(engine):
    service = Service(engine, tokenizer(TEMPLATES["tags"]), "nano")
    how = {"system": "Be brief.", "tools": [SAY], "thinking": {"type": "adaptive"}}

    async def call(client):
        fields = {name: ASKED[name] for name in ("model", "messages")}
        counted = await client.post(f"{PATH}/count_tokens", body={**fields, **how}, cast_to=httpx.Response)
        answer = await client.messages.create(**{**ASKED, "max_tokens": 1}, extra_body=how)
        return counted.json(), answer.usage.input_tokens + answer.usage.model_extra["cache_read_input_tokens"]

    counted, read = ask(service, call)
    assert counted == {"input_tokens": read}


def block(kind, **more):
    return {"messages": [{"role": "user", "content": [{"type": kind, **more}]}]}


IMAGE = {"source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"temperature": 1.5}, "temperature: "),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences"),
        ({"stop": "a"}, "stop is not supported"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role is not supported"),
        ({"messages": [{"role": "user"}]}, "messages.0.content is neither a text"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages.0.name is not supported"),
        (block("image", **IMAGE), "messages.0.content.0.type is image, which is not supported"),
        (block("document", **IMAGE), "messages.0.content.0.type is document"),
        (block("thinking", thinking="x"), "messages.0.content.0.type is thinking"),
        (block("text", text=1), "messages.0.content.0.text is of another type"),
        (block("text"), "messages.0.content.0.text is missing"),
        (block("text", text="x", other=1), "messages.0.content.0.other is not supported"),
        (block("tool_result", tool_use_id="1", content=[{"type": "image", **IMAGE}]), "messages.0.content.0.content.0"),
        (block("tool_result", tool_use_id="1", content="x"), "messages names no call of a message before"),
        ({"system": [{"type": "image", **IMAGE}]}, "system.0.type is image"),
        ({"messages": [USER, {"role": "assistant", "content": "a "}]}, "messages.1 ends in white space"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type: "),
        ({"tools": [SAY], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice: there is no tool 'x'"),
        ({"tools": [SAY], "tool_choice": {"type": "tool"}}, "tool_choice: "),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"thinking": {"type": "enabled"}}, "thinking: "),
        ({"thinking": {"type": "enabled", "budget_tokens": 2048}}, "thinking.budget_tokens is 2048, expected less"),
        ({"thinking": {"type": "adaptive"}, "messages": [USER, {"role": "assistant", "content": "a"}]}, "messages end"),
        ({"output_config": {"format": {"type": "xml", "schema": {}}}}, "output_config.format.type: "),
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management.edits.0.type: "),
        ({"messages": [{"role": "user", "content": "a " * 3000}]}, "messages has "),
    ],
)
def test_what_is_refused_is_named(engine, fields, said):
    service = Service(engine, tokenizer(TEMPLATES["tags"]), "nano")
    answer = posted(service, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["message"].startswith(said), error["message"]


def test_an_answer_is_held_to_a_schema(engine):
    schema = {"type": "object", "properties": {"unit": {"enum": ["pens"]}}, "required": ["unit"]}
    answer = posted(service_of(engine), output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(answer.json()["content"][0]["text"]) == {"unit": "pens"}


def test_errors_have_the_statuses_that_clients_know(engine):
    service = recited(engine.tokenizer, "one")

    async def call(client):
        for keys, raised in ((("b", "a"), anthropic.AuthenticationError), (("key", "a"), None), (("a", "key"), None)):
            header = {"x-api-key": keys[0], "Authorization": f"Bearer {keys[1]}"}
            try:
                answer = await client.messages.create(**ASKED, extra_headers=header)
            except anthropic.AuthenticationError as error:
                assert raised is not None and error.body["error"]["type"] == "authentication_error"
            else:
                assert raised is None and answer.content[0].text == "one"
        client.api_key = "key"
        with pytest.raises(anthropic.NotFoundError, match="the model 'other' does not exist"):
            await client.messages.create(**{**ASKED, "model": "other"})
        service.draining = True
        with pytest.raises(anthropic.InternalServerError) as caught:
            await client.messages.create(**ASKED)
        assert caught.value.status_code == 529 and caught.value.body["error"]["type"] == "overloaded_error"

    ask(service, call, api_keys=["key"])


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status", "kind"),
    [
        ("GET", PATH, None, {}, 405, "invalid_request_error"),
        ("POST", f"{PATH}/batches", "{}", {}, 404, "not_found_error"),
        ("GET", "/v1/files", None, VERSION, 404, "not_found_error"),
        ("POST", PATH, "{", {}, 400, "invalid_request_error"),
        ("POST", PATH, "{}", {"Content-Type": "text/plain"}, 415, "invalid_request_error"),
        ("POST", PATH, " " * (2**24 + 1), {}, 413, "request_too_large"),
    ],
)
def test_errors_before_a_request_is_read_have_the_form_too(engine, method, path, content, headers, status, kind):
    async def call():
        async with transported(service_of(engine)) as http:
            headers_ = {"Content-Type": "application/json", **headers}
            return await http.request(method, f"http://test{path}", content=content, headers=headers_)

    answer = asyncio.run(call())
    assert answer.status_code == status and answer.json()["error"]["type"] == kind
    assert answer.json()["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank"])
@pytest.mark.parametrize("headers", [{}, VERSION])
def test_what_is_not_served_says_what_is(engine, path, headers):
    async def call():
        async with transported(service_of(engine)) as http:
            return await http.post(f"http://test{path}", json={"model": "nano", "input": "a"}, headers=headers)

    answer = asyncio.run(call())
    message = answer.json()["error"]["message"]
    assert answer.status_code == 404 and answer.json().get("type") == ("error" if headers else None)
    assert message.startswith(f"{path} is not served: the model has no") and "/v1/chat/completions" in message


def test_a_failure_amid_a_stream_is_an_event(engine, monkeypatch):
    service = recited(engine.tokenizer, "one two three")
    complete = service.engine.astream_all

    async def broken(prompts, params, name):
        async for item in complete(prompts, params, name):
            yield item
            raise RuntimeError("/secret/path")

    monkeypatch.setattr(service.engine, "astream_all", broken)
    last = events_of(service)[-1]
    assert last["type"] == "error" and last["error"] == {"type": "api_error", "message": "the engine failed"}
    assert not SPEC.validate(last, "ErrorResponse")
