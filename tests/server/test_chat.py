"""Chats over HTTP: the answers of the engine, errors as OpenAI's, and clients that go away."""

import asyncio
import json
import threading
import time

import httpx
import openai
import pytest
import uvicorn

import ling3
from ling3.server.app import build
from ling3.server.body import parse
from ling3.server.errors import ApiError
from ling3.server.running import Service

CHAT = [{"role": "user", "content": "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"}]
KEY = {"Authorization": "Bearer secret"}
ASKED = {"model": "nano", "messages": CHAT, "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=512)


@pytest.fixture(scope="module")
def url(engine):
    app = build(Service(engine, engine.tokenizer, "nano", 2), ["other", "secret"])
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
        ({"json": {"messages": CHAT}}, 400, "model"),
        ({"json": {**ASKED, "model": "other"}}, 404, "model"),
        ({"json": {**ASKED, "tools": []}}, 400, "tools"),
        ({"json": {**ASKED, "top_p": 2}}, 400, "top_p"),
        ({"json": {**ASKED, "stream": True, "messages": [{"role": "user", "content": "a " * 900}]}}, 400, "messages"),
        ({"json": {**ASKED, "n": 7}}, 429, None),
    ],
)
def test_an_error_is_openais_object(url, body, status, param):
    answer = httpx.post(f"{url}/v1/chat/completions", headers=KEY, **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param) and set(error) == {
        "message",
        "type",
        "param",
        "code",
    }


def test_a_key_is_asked_for(url):
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers=KEY).json()["data"][0]["id"] == "nano"


def test_a_client_that_goes_away_frees_its_slot(engine, url):
    asked, before = {**ASKED, "ignore_eos": True, "max_tokens": 400, "stream": True}, engine.stats().finished["abort"]
    with httpx.stream("POST", f"{url}/v1/chat/completions", headers=KEY, json=asked) as answer:
        next(answer.iter_lines())
    for _ in range(100):
        if engine.stats().finished["abort"] == before + 1:
            break
        time.sleep(0.02)
    assert engine.stats().finished["abort"] == before + 1 and engine.stats().running == 0


@pytest.mark.parametrize(("root", "path"), [("", "/v1/models"), ("/in", "/in/v1/models"), ("/in", "/in/v1/nothing")])
def test_a_key_is_asked_for_wherever_a_proxy_mounts_the_server(engine, root, path):
    app = build(Service(engine, engine.tokenizer, "nano", 2), ["secret"])

    async def ask(headers):
        transport = httpx.ASGITransport(app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.get(path, headers=headers), await client.get(f"{root}/health")

    refused, health = asyncio.run(ask({}))
    assert (refused.status_code, health.status_code) == (401, 200)
    given, _ = asyncio.run(ask(KEY))
    assert given.status_code == (404 if path.endswith("nothing") else 200)


def test_answers_in_company_are_those_alone(engine, url):
    """Six at once over four slots, drawn, with seeds of their own."""
    questions = [f"Sam has {i} pens. He gets {i + 4} more pens. How many pens does Sam have?" for i in range(3, 9)]
    params = [ling3.SamplingParams(temperature=1.5, seed=i, max_tokens=30) for i in range(6)]
    alone = [
        engine.generate([{"role": "user", "content": q}], p)[0].text for q, p in zip(questions, params, strict=True)
    ]

    async def ask(client, i):
        messages = [{"role": "user", "content": questions[i]}]
        asked = {"model": "nano", "messages": messages, "temperature": 1.5, "max_tokens": 30, "seed": i}
        return (await client.chat.completions.create(**asked)).choices[0].message.content

    async def every():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret") as client:
            return await asyncio.gather(*(ask(client, i) for i in range(6)))

    assert asyncio.run(every()) == alone


def test_brackets_inside_strings_are_no_levels():
    assert parse(b'{"a": "[{\\"[", "b": ["]"]}') == {"a": '[{"[', "b": ["]"]}
    deep = json.dumps({"a": "[{" * 100})
    assert parse(deep.encode()) == json.loads(deep)
    with pytest.raises(ApiError, match="more than 64 levels"):
        parse(b"[" * 65 + b"]" * 65)
