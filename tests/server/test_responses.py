"""`/v1/responses` by OpenAI's client: whole and streamed, with tools, thinking and structured answers."""

import asyncio
import json
from typing import Literal

import openai
import pydantic
import pytest
from scripted_service import ask, recited
from tool_templates import TEMPLATES, tokenizer

import ling3
from ling3.server.service import Service

QUESTION = "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"
ASKED = {"model": "nano", "input": QUESTION, "temperature": 0, "max_output_tokens": 200}
SAY = {
    "type": "function",
    "name": "say",
    "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]},
}
CALL = "<tool_call>say<arg_key>text</arg_key><arg_value>{}</arg_value></tool_call>"


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=1024)


def create(**fields):
    async def call(client):
        answer = await client.responses.create(**{**ASKED, **fields})
        return [event async for event in answer] if fields.get("stream") else answer

    return call


def test_the_answer_is_the_engines(engine):
    service = Service(engine, engine.tokenizer, "nano")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    expected = engine.generate(chat, ling3.SamplingParams(max_tokens=200))[0]
    for given in (QUESTION, [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]):
        whole = ask(service, create(input=given, instructions="Be brief."))
        assert (whole.output_text, whole.status, whole.error) == (expected.text, "completed", None)
        assert (
            whole.usage.output_tokens == len(expected.token_ids) == whole.usage.total_tokens - whole.usage.input_tokens
        )
    cut = ask(service, create(max_output_tokens=3))
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert cut.output[0].status == "incomplete" and cut.usage.output_tokens == 3
    assert whole.completed_at >= whole.created_at and cut.completed_at is None


THOUGHT = f"hm\n</think>Now: {CALL.format('é')}\n{CALL.format('two')}"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_events_make_up_the_response(size):
    """Every event has the next number and its official type, and the pieces are those of the whole."""
    service = recited(tokenizer(TEMPLATES["tags"]), THOUGHT, size=size)
    how = {"tools": [SAY], "reasoning": {"effort": "low"}}
    whole = ask(service, create(**how))
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert (whole.output[0].content[0].text, whole.output_text) == ("hm", "Now: ")
    assert [json.loads(item.arguments)["text"] for item in whole.output[2:]] == ["é", "two"]
    assert whole.usage.output_tokens_details.reasoning_tokens == len(service.tokenizer.encode("hm\n</think>"))
    events = ask(service, create(**how, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert events[-1].type == "response.completed"
    made = {}
    for event in events:
        if event.type.endswith(".delta"):
            made[event.output_index] = made.get(event.output_index, "") + event.delta
    texts = ["hm", "Now: ", *(item.arguments for item in whole.output[2:])]
    assert [made[i] for i in range(4)] == texts
    final = events[-1].response
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == final.output and [item.status for item in done] == ["completed"] * 4
    kinds = {event.type for event in events}
    for name in ("content_part.added", "content_part.done", "output_text.done", "reasoning_text.delta"):
        assert f"response.{name}" in kinds
    assert {"response.function_call_arguments.done", "response.reasoning_text.done"} <= kinds


def test_the_clients_stream_accumulates_it():
    service = recited(tokenizer(TEMPLATES["tags"]), THOUGHT)

    async def call(client):
        async with client.responses.stream(**ASKED, tools=[SAY], reasoning={"effort": "low"}) as stream:
            async for _ in stream:
                pass
            return await stream.get_final_response()

    final = ask(service, call)
    assert final.output_text == "Now: " and final.output[2].arguments == '{"text": "é"}'


class Answer(pydantic.BaseModel):
    unit: Literal["pens", "eggs"]
    sure: bool


@pytest.mark.parametrize("think", [False, True])
def test_answers_are_parsed_into_pydantic_models(engine, think):
    service = Service(engine, tokenizer(TEMPLATES["tags"]), "nano")
    effort = {"effort": "low" if think else "none"}

    async def call(client):
        bias = {"logit_bias": {"5": 20}}  # else nano never ends its thinking by `</think>`
        return await client.responses.parse(**ASKED, text_format=Answer, reasoning=effort, extra_body=bias)

    answer = ask(service, call)
    assert isinstance(answer.output_parsed, Answer)
    assert [item.type for item in answer.output] == ["reasoning", "message"][not think :]


class Sum(pydantic.BaseModel):
    """Adds."""

    a: int = pydantic.Field(ge=0, le=99)
    b: int = pydantic.Field(ge=0, le=99)


def test_a_call_that_has_to_come_and_its_result(engine):
    service = Service(engine, tokenizer(TEMPLATES["tags"]), "nano")

    async def turns(client):
        how = {**ASKED, "tools": [openai.pydantic_function_tool(Sum)], "parallel_tool_calls": False}
        first = await client.responses.parse(**how, tool_choice={"type": "function", "name": "Sum"})
        call = first.output[-1]
        given = [{"role": "user", "content": QUESTION}, *[item.to_dict() for item in first.output]]
        for item in given:
            item.pop("parsed_arguments", None)
        given.append({"type": "function_call_output", "call_id": call.call_id, "output": "7"})
        how = {**ASKED, "input": given}
        return call, await client.responses.create(**how)

    call, second = ask(service, turns)
    assert isinstance(call.parsed_arguments, Sum) and second.output_text
    arguments = json.loads(call.arguments)
    chat = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "Sum", "arguments": arguments}}]},
        {"role": "tool", "content": "7"},
    ]
    prompt = service.tokenizer.apply_chat_template(chat)
    assert second.output_text == engine.generate([prompt], ling3.SamplingParams(max_tokens=200))[0].text


def test_items_of_one_turn_are_one_message():
    service = recited(tokenizer(TEMPLATES["tags"]), "7")
    given = [
        {"type": "message", "role": "developer", "content": "Be brief."},
        {"role": "user", "content": "one?"},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "content": [{"type": "output_text", "text": "So:"}]},
        {"type": "function_call", "call_id": "1", "name": "say", "arguments": '{"text": "1"}'},
        {"type": "function_call", "call_id": "2", "name": "say", "arguments": '{"text": "2"}'},
        {"type": "function_call_output", "call_id": "1", "output": "done"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "done too"}]},
    ]
    ask(service, create(input=given))
    calls = [{"id": str(i), "function": {"name": "say", "arguments": {"text": str(i)}}} for i in (1, 2)]
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
        {"role": "assistant", "content": "So:", "tool_calls": calls},
        {"role": "tool", "content": "done"},
        {"role": "tool", "content": "done too"},
    ]
    assert service.engine.prompts == [service.tokenizer.apply_chat_template(chat, tokenize=False)]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"tools": [SAY], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"other": "low"}}, "text.other"),
        ({"reasoning": {"effort": "low", "summary": "detailed"}}, "reasoning.summary"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10**6}, "input"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include.0"),
        ({"input": []}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"extra_body": {"model": None}}, "model"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, "input"),
        ({"input": "a " * 3000}, "input"),
    ],
)
def test_what_is_refused_is_named(engine, fields, param):
    service = Service(engine, tokenizer(TEMPLATES["tags"]), "nano")
    with pytest.raises(openai.BadRequestError) as caught:
        ask(service, create(**fields))
    assert caught.value.param == param and "messages" not in caught.value.message


def test_a_failure_amid_a_stream_is_an_event(engine, monkeypatch):
    service = recited(engine.tokenizer, "one two three")
    whole = service.engine.astream_all

    async def broken(prompts, params, name):
        async for item in whole(prompts, params, name):
            yield item
            raise RuntimeError("/secret/path")

    monkeypatch.setattr(service.engine, "astream_all", broken)
    events = ask(service, create(stream=True))
    assert events[-1].type == "response.failed" and events[-1].response.status == "failed"
    assert events[-1].sequence_number == len(events) - 1 and "secret" not in str(events[-1])
    with pytest.raises(openai.InternalServerError):
        ask(service, create())


def test_a_stream_that_takes_too_long_ends_in_a_failed_response(engine, monkeypatch):
    service = recited(engine.tokenizer, "one two three")
    whole = service.engine.astream_all

    async def slow(prompts, params, name):
        async for item in whole(prompts, params, name):
            yield item
            await asyncio.sleep(60)

    monkeypatch.setattr(service.engine, "astream_all", slow)
    events = ask(service, create(stream=True), timeout=0.5)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events].count("response.output_text.delta") == 1
    assert events[-1].type == "response.failed" and "0.5 seconds" in events[-1].response.error.message
