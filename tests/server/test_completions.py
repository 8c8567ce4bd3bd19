"""Completions over HTTP: texts and ids, one or several, streamed, echoed and scored, alone and in company."""

import asyncio
import contextlib
import math

import httpx
import openai
import pytest

import ling3
from ling3.server.app import build
from ling3.server.running import Service

PROMPTS = [
    f"<role>HUMAN</role>Sam has {n} pens. He gets 4 more pens. How many pens does Sam have?" for n in range(2, 18)
]


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=512)


@pytest.fixture
def client(engine):
    app = build(Service(engine, engine.tokenizer, "nano", 64))

    @contextlib.asynccontextmanager
    async def made():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        http = httpx.AsyncClient(transport=transport)
        async with openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http) as made:
            yield made

    return made


def asked(client, **fields):
    async def answer():
        async with client() as made:
            return await made.completions.create(model="nano", **{"temperature": 0, **fields})

    return asyncio.run(answer())


def test_texts_and_ids_alone_or_in_lists_are_the_engines(engine, client):
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS[:2]]
    expected = [output.text for output in engine.generate(ids, ling3.SamplingParams(max_tokens=16, ignore_eos=True))]
    for prompt in (PROMPTS[:2], ids):
        answer = asked(client, prompt=prompt, extra_body={"ignore_eos": True})
        assert [choice.text for choice in answer.choices] == expected and answer.usage.completion_tokens == 32
        answer = asked(client, prompt=prompt[0], extra_body={"ignore_eos": True})
        assert [choice.text for choice in answer.choices] == expected[:1]


def test_echo_scores_a_prompt_without_a_token_more(engine, client):
    ids = engine.tokenizer.encode(PROMPTS[0])
    expected = engine.generate([ids], ling3.SamplingParams(max_tokens=0, prompt_logprobs=1))[0].prompt_logprobs
    answer = asked(client, prompt=PROMPTS[0], echo=True, logprobs=1, max_tokens=0)
    choice, scores = answer.choices[0], answer.choices[0].logprobs
    assert choice.text == PROMPTS[0] == "".join(scores.tokens) and answer.usage.completion_tokens == 0
    assert scores.token_logprobs == [None, *(score.logprob for score in expected[1:])]
    assert all(max(top.values()) >= value for top, value in zip(scores.top_logprobs[1:], scores.token_logprobs[1:]))
    more = asked(client, prompt=PROMPTS[0], echo=True, logprobs=1, max_tokens=1).choices[0]
    assert more.text.startswith(PROMPTS[0]) and more.logprobs.token_logprobs[: len(ids)] == scores.token_logprobs
    assert len(more.logprobs.tokens) == len(ids) + 1 and math.isfinite(more.logprobs.token_logprobs[-1])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "a"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": True, "stream": True}, "echo"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": [10**9]}, "prompt"),
        ({"prompt": "a " * 900}, "prompt"),
        ({"best_of": 2}, "best_of"),
    ],
)
def test_what_is_refused_is_named(client, fields, param):
    with pytest.raises(openai.BadRequestError) as caught:
        asked(client, **{"prompt": "a", **fields})
    assert caught.value.param == param


def test_answers_in_company_are_those_alone(engine, client):
    params = [ling3.SamplingParams(temperature=1, seed=i, max_tokens=24) for i in range(len(PROMPTS))]
    expected = [engine.generate([prompt], own)[0].text for prompt, own in zip(PROMPTS, params)]

    async def all_at_once():
        async with client() as made:

            async def one(i):
                how = {"model": "nano", "prompt": PROMPTS[i], "temperature": 1, "seed": i, "max_tokens": 24}
                if i % 2:
                    return (await made.completions.create(**how)).choices[0].text
                chunks = [chunk async for chunk in await made.completions.create(**how, stream=True)]
                return "".join(chunk.choices[0].text for chunk in chunks)

            return await asyncio.gather(*(one(i) for i in range(len(PROMPTS))))

    assert asyncio.run(all_at_once()) == expected


def test_texts_become_ids_and_ids_texts(engine):
    async def answers():
        transport = httpx.ASGITransport(build(Service(engine, engine.tokenizer, "nano", 64)), False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            chat = {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": {"enable_thinking": True}}
            bodies = ({"prompt": PROMPTS[0]}, chat, {"prompt": "a", **chat})
            ids = [(await http.post("/tokenize", json={"model": "nano", **body})).json() for body in bodies]
            lists = (ids[0]["tokens"], [-1], [2**40])
            texts = [(await http.post("/detokenize", json={"model": "nano", "tokens": each})).json() for each in lists]
        return ids, texts

    (text, chat, both), (back, *wrong) = asyncio.run(answers())
    assert text["tokens"] == engine.tokenizer.encode(PROMPTS[0]) and text["count"] == len(text["tokens"])
    assert chat["tokens"][-1] == engine.tokenizer.encode("<think>")[0] and both["error"]["param"] == "prompt"
    assert back == {"prompt": PROMPTS[0]} and all("error" in each for each in wrong)
