"""Structured answers over HTTP after thinking, which is free: in every form, and bit for bit those of the engine."""

import contextlib
import json
import re
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pydantic
import pytest
from http_server import Process
from scripted_service import ask

import ling3
from ling3.server.reply_grammars import after_thinking
from ling3.server.service import Service

CHAT = [{"role": "user", "content": "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"}]
ASKED = {"model": "nano", "messages": CHAT, "temperature": 0, "max_tokens": 120}
# Nano ends its thinking by an end of its own; a bias says to do so by `</think>` (5). After an answer that token is 16
# below the next best but the end, which the grammar forbids, and more than 21 below the best at each other place.
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {"5": 20}}


class Answer(pydantic.BaseModel, extra="forbid"):
    number: int = pydantic.Field(ge=0, le=99)
    sure: bool


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=512)


@pytest.fixture(scope="module")
def service(engine):
    return Service(engine, engine.tokenizer, "nano")


def said(service, stream=False, **fields):
    """(reasoning, content, finish reason)."""

    async def call(client):
        answer = await client.chat.completions.create(**ASKED, stream=stream, extra_body={**THINKING, **fields})
        if not stream:
            choice = answer.choices[0]
            return getattr(choice.message, "reasoning_content", ""), choice.message.content, choice.finish_reason
        choices = [chunk.choices[0] async for chunk in answer]
        reasoning = "".join(getattr(choice.delta, "reasoning_content", None) or "" for choice in choices)
        return reasoning, "".join(choice.delta.content or "" for choice in choices), choices[-1].finish_reason

    return ask(service, call)


SCHEMA = Answer.model_json_schema()
FORMS = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}, None),
    ({"response_format": {"type": "json_object"}, "logit_bias": {"5": 20, "1": 1}}, None),
    ({"guided_json": SCHEMA}, ling3.JSONSchema(SCHEMA)),
    ({"guided_regex": "(yes|no)/[0-9]{2}"}, ling3.Regex("(yes|no)/[0-9]{2}")),
    ({"guided_choice": ["seven", "eight"]}, ling3.Choice(["seven", "eight"])),
    ({"guided_grammar": 'start: "a" /[bc]/'}, ling3.Grammar('start: "a" /[bc]/')),
    ({"structured_outputs": {"regex": "[0-9]{2}"}}, ling3.Regex("[0-9]{2}")),
]


def holds(content, fields):
    """True if an answer has the form that was asked for."""
    if "guided_regex" in fields or "structured_outputs" in fields:
        return re.fullmatch(fields.get("guided_regex", "[0-9]{2}"), content)
    if "guided_choice" in fields:
        return content in fields["guided_choice"]
    if "guided_grammar" in fields:
        return content in ("ab", "ac")
    if fields.get("response_format") == {"type": "json_object"}:
        return content.startswith("{")  # its size is nano's affair
    return Answer.model_validate_json(content)


@pytest.mark.parametrize(("fields", "structured"), FORMS)
def test_a_form_holds_after_the_thinking(engine, service, fields, structured):
    reasoning, content, reason = said(service, **fields)
    assert "=" in reasoning and holds(content, fields)
    assert said(service, stream=True, **fields) == (reasoning, content, reason)
    if structured is None:
        return
    held = after_thinking(structured, engine.tokenizer)
    params = ling3.SamplingParams(max_tokens=120, structured=held, logit_bias={5: 20})
    prompt = engine.tokenizer.apply_chat_template(CHAT, enable_thinking=True)
    (output,) = engine.generate([prompt], params)
    text = engine.tokenizer.decode(output.token_ids, skip_special_tokens=False)
    assert text.removesuffix("<|role_end|>").split("</think>")[1].lstrip("\n") == content and reason == "stop"


def test_thinking_that_never_ends_ends_by_length(service):
    reasoning, content, reason = said(service, guided_choice=["seven"], logit_bias={"5": -100})
    assert reasoning and not content and reason == "length"


def test_clients_parse_answers_after_thinking(service):
    async def parse(client):
        return await client.chat.completions.parse(**ASKED, response_format=Answer, extra_body=THINKING)

    message = ask(service, parse).choices[0].message
    assert isinstance(message.parsed, Answer) and message.reasoning_content
    assert json.loads(message.content).keys() == {"number", "sure"}


def chained(link):
    """A schema of 1,500 references, each in the target of the one before it."""
    links = {f"a{i}": link({"$ref": f"#/$defs/a{i + 1}"}) for i in range(1500)}
    return {"$ref": "#/$defs/a0", "$defs": {**links, "a1500": {"type": "integer"}}}


CHAINED = chained(lambda to: {"type": "array", "items": to})
RULES = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(3000)) + 'r3000: "a"'
HOSTILE = {
    "schema": {"guided_json": CHAINED},
    "allOf": {"guided_json": chained(lambda to: {"allOf": [to]})},
    "format": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": CHAINED}}},
    "rules": {"guided_grammar": RULES},
    "terminals": {"guided_grammar": RULES.replace("r", "T").replace("sTaTt: T0", "start: T0")},
    "expression": {"guided_regex": "(a|b)?" * 40_000},
    "intersections": {"guided_grammar": "start: T\nT: /.*a/" + "".join(f" & /.*b{i}.*/" for i in range(300))},
    "tools": {
        "tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": CHAINED}}],
        "tool_choice": "required",
    },
}


@pytest.fixture(scope="module")
def process():
    made = Process()
    for _ in range(100):
        with contextlib.suppress(urllib.error.URLError):  # it says its address before it listens
            assert posted(made)[0] == 200
            break
        time.sleep(0.1)
    yield made
    made.close()


def posted(process, **fields):
    """The status of an answer, and what it says."""
    body = json.dumps({**ASKED, "max_tokens": 8, **fields}).encode()
    request = urllib.request.Request(f"{process.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_body_that_crashes_the_compiler_is_refused_and_the_server_goes_on(process, name):
    plain = posted(process)
    with ThreadPoolExecutor(1) as others:
        beside = others.submit(posted, process)
        status, message = posted(process, **HOSTILE[name])
        assert status == 400 and len(message) < 700, message
        assert plain[0] == 200 and beside.result() == plain == posted(process)
    assert posted(process, guided_choice=["seven", "eight"])[0] == 200


def test_a_grammar_that_does_not_compile_names_its_field(service):
    for fields in ({"guided_grammar": "start: foo"}, {"guided_regex": "("}):
        with pytest.raises(openai.BadRequestError, match="does not compile") as caught:
            said(service, **fields)
        assert caught.value.param == next(iter(fields))
