"""Chats over HTTP: the answers of the engine, errors as OpenAI's, and clients that go away."""

import asyncio
import dataclasses
import json
import pathlib
import re
import threading
import time
from typing import Literal

import httpx
import openai
import pydantic
import pytest
import uvicorn

import ling3
from ling3.server.app import build
from ling3.server.body import parse
from ling3.server.errors import ApiError
from ling3.server.service import Service

CHAT = [{"role": "user", "content": "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"}]
KEY = {"Authorization": "Bearer secret"}
ASKED = {"model": "nano", "messages": CHAT, "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=512, max_queue=6)


@pytest.fixture(scope="module")
def url(engine):
    app = build(Service(engine, engine.tokenizer, "nano"), ["other", "secret"])
    config = uvicorn.Config(app, port=0, log_level="warning", ws="none")
    socket, server = config.bind_socket(), uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    server.should_exit = True
    thread.join()
    socket.close()


def test_the_answer_is_the_engines_bit_for_bit(engine, url):
    expected = engine.generate(CHAT, ling3.SamplingParams(max_tokens=40, logprobs=2))[0]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
        whole = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2).choices[0]
        pieces = list(client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True}))
    assert whole.message.content == expected.text and whole.finish_reason == "stop"
    assert [each.logprob for each in whole.logprobs.content] == [each.logprob for each in expected.logprobs]
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == expected.text
    assert pieces[-1].usage.completion_tokens == len(expected.token_ids)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"content": b"\xff"}, 400, None),
        ({"content": b"[" * 100_000}, 400, None),
        ({"content": b'{"model":"nano","messages":[{"role":"user","\\ud800":"a"}]}'}, 400, "messages[0].\\ud800"),
        ({"json": {**ASKED, "logit_bias": {"x": 1}}}, 400, "logit_bias"),
        ({"json": {"messages": CHAT}}, 400, "model"),
        ({"json": {**ASKED, "model": "other"}}, 404, "model"),
        ({"json": {**ASKED, "tools": [{"type": "computer"}]}}, 400, "tools.0.type"),
        ({"json": {**ASKED, "stop": 5}}, 400, "stop"),
        ({"json": {**ASKED, "stop_token_ids": [1, "a"]}}, 400, "stop_token_ids.1"),
        ({"json": {**ASKED, "stream_options": {"include_usage": 1}}}, 400, "stream_options.include_usage"),
        ({"json": {**ASKED, "stream_options": {"other": 1}}}, 400, "stream_options.other"),
        ({"json": {**ASKED, "top_p": 2}}, 400, "top_p"),
        ({"json": {**ASKED, "response_format": {"type": "xml"}}}, 400, "response_format"),
        ({"json": {**ASKED, "response_format": {"type": "json_schema"}}}, 400, "response_format"),
        ({"json": {**ASKED, "guided_regex": "("}}, 400, "guided_regex"),
        ({"json": {**ASKED, "structured_outputs": {"choice": []}}}, 400, "structured_outputs"),
        ({"json": {**ASKED, "guided_regex": "a", "guided_choice": ["a"]}}, 400, "guided_choice"),
        ({"json": {**ASKED, "stream": True, "messages": [{"role": "user", "content": "a " * 900}]}}, 400, "messages"),
        ({"json": {**ASKED, "n": 7}}, 400, "n"),  # more than ever have room in the queue
    ],
)
def test_an_error_is_openais_object(url, body, status, param):
    headers = {**KEY, "Content-Type": "application/json"}
    answer = httpx.post(f"{url}/v1/chat/completions", headers=headers, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param) and set(error) == {
        "message",
        "type",
        "param",
        "code",
    }
    assert param is None or param.split("[")[0] in error["message"], "the message names the field"


def test_a_key_is_asked_for(url):
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=KEY).json()["data"][0]["id"] == "nano"


def test_a_client_that_goes_away_frees_its_slot(engine, url):
    asked, before = {**ASKED, "ignore_eos": True, "max_tokens": 400, "stream": True}, engine.stats().finished["abort"]
    with httpx.stream("POST", f"{url}/v1/chat/completions", headers=KEY, json=asked, timeout=60) as answer:
        next(answer.iter_lines())
    for _ in range(100):
        if engine.stats().finished["abort"] == before + 1:
            break
        time.sleep(0.02)
    assert engine.stats().finished["abort"] == before + 1 and engine.stats().running == 0


def test_thinking_and_answer_come_apart(url):
    """A bias has nano end its thinking by `</think>` (5), a special token, which the engine's text lacks."""
    asked = {**ASKED, "chat_template_kwargs": {"enable_thinking": True}, "logit_bias": {"5": 20}, "max_tokens": 80}
    asked["structured_outputs"] = {"grammar": 'start: "The answer is " /[0-9]/ "."'}
    whole = httpx.post(f"{url}/v1/chat/completions", headers=KEY, json=asked, timeout=60).json()["choices"][0][
        "message"
    ]
    assert "=" in whole["reasoning_content"] and re.fullmatch(r"The answer is \d\.", whole["content"])
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
        extra = {name: asked.pop(name) for name in ("chat_template_kwargs", "structured_outputs")}
        pieces = [
            chunk.choices[0].delta for chunk in client.chat.completions.create(**asked, stream=True, extra_body=extra)
        ]
    reasoning = "".join(getattr(piece, "reasoning_content", None) or "" for piece in pieces)
    assert (reasoning, "".join(piece.content or "" for piece in pieces)) == (
        whole["reasoning_content"],
        whole["content"],
    )


class Answer(pydantic.BaseModel):
    unit: Literal["pens", "eggs"]
    right: bool


def test_an_answer_is_held_to_a_schema(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client:
        parsed = client.chat.completions.parse(**ASKED, response_format=Answer).choices[0]
        assert isinstance(parsed.message.parsed, Answer) and parsed.finish_reason == "stop"
        extra = {"guided_choice": ["seven", "eight"]}
        chosen = client.chat.completions.create(**ASKED, extra_body=extra).choices[0].message.content
    assert chosen in extra["guided_choice"]


def test_without_max_tokens_an_answer_has_the_pages_that_there_are():
    engine = ling3.Engine.from_pretrained("nano", max_running_requests=1, page_size=16, num_pages=8, max_model_len=512)
    prompt = engine.tokenizer.apply_chat_template(CHAT)
    most = engine.left(len(prompt))
    engine.check(prompt, ling3.SamplingParams(max_tokens=most))
    with pytest.raises(ValueError, match="pages"):
        engine.check(prompt, ling3.SamplingParams(max_tokens=most + 1))
    assert most == 8 * 16 + 1 - len(prompt)
    service = Service(engine, engine.tokenizer, "nano")
    assert ask(service, {"model": "nano", "messages": CHAT}).status_code == 200


def ask(service, body=None, path="/v1/chat/completions", root="", key=None):
    """What an app of its own answers, without a socket."""

    async def answer():
        transport = httpx.ASGITransport(build(service, ["secret"] if key else []), False, root)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            # As uvicorn has it, the path begins with the root path.
            return await client.request("GET" if body is None else "POST", root + path, headers=headers, json=body)

    return asyncio.run(answer())


@pytest.mark.parametrize("root", ["", "/proxy/nano", "/health"])
def test_a_key_is_asked_for_wherever_a_proxy_mounts_the_server(engine, root):
    service = Service(engine, engine.tokenizer, "nano")
    for path, status in (("/v1/models", 401), ("/health/", 401), ("/other", 401), ("/health", 200)):
        assert ask(service, path=path, root=root, key="other").status_code == status
    assert ask(service, path="/v1/models", root=root, key="secret").status_code == 200


@pytest.mark.parametrize("where", ["refusal", "first", "later", "error"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_path_and_no_trace_reach_a_client(engine, monkeypatch, where, stream):
    begin = engine.astream_all

    async def astream_all(prompts, params, name):
        if where == "refusal":
            raise ling3.ParameterError("messages", f"{engine.tokenizer.directory}/secret: no")
        if where == "first":
            raise RuntimeError("/secret/path")
        async for place, delta in begin(prompts, params, name=name):
            fault = {"finish_reason": "error", "output": None} if where == "error" else {}
            yield place, dataclasses.replace(delta, **fault)
            raise RuntimeError("/secret/path")

    monkeypatch.setattr(engine, "astream_all", astream_all)
    answer = ask(Service(engine, engine.tokenizer, "nano"), {**ASKED, "stream": stream})
    begun = stream and where in ("later", "error")
    assert answer.status_code == (400 if where == "refusal" else 200 if begun else 500)
    assert '"message"' in answer.text and "Traceback" not in answer.text
    assert "/secret/path" not in answer.text and str(engine.tokenizer.directory) not in answer.text


def test_the_documentations_example_is_answered(url):
    page = (pathlib.Path(__file__).parents[2] / "docs/reference/http.md").read_text(encoding="utf-8")
    body = re.search(r"curl \S+ -H '\S+ \S+' -d '(.*?)'", page, re.DOTALL).group(1)
    answer = httpx.post(f"{url}/v1/chat/completions", headers=KEY, json=json.loads(body)).json()
    assert answer["choices"][0]["message"]["content"] == "3 + 4 = 7. The answer is 7."


def test_brackets_inside_strings_are_no_levels():
    assert parse(b'{"a": "[{\\"[", "b": ["]"]}') == {"a": '[{"[', "b": ["]"]}
    deep = json.dumps({"a": "[{" * 100})
    assert parse(deep.encode()) == json.loads(deep)
    with pytest.raises(ApiError, match="more than 64 levels"):
        parse(b"[" * 65 + b"]" * 65)
