"""Completions over HTTP: texts and ids, one or several, streamed, echoed and scored, alone and in company."""

import asyncio
import contextlib
import math

import httpx
import openai
import pytest

import ling3
from ling3.server.app import build
from ling3.server.service import Service

PROMPTS = [
    f"<role>HUMAN</role>Sam has {n} pens. He gets 4 more pens. How many pens does Sam have?" for n in range(2, 18)
]


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=512)


@pytest.fixture
def client(engine):
    app = build(Service(engine, engine.tokenizer, "nano"))

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


def streamed(client, **fields):
    async def chunks():
        async with client() as made:
            answer = await made.completions.create(model="nano", stream=True, **{"temperature": 0, **fields})
            return [chunk.choices[0] async for chunk in answer]

    return asyncio.run(chunks())


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"max_tokens": 0, "logprobs": 0}, {"max_tokens": 0}])
def test_a_streamed_echo_is_that_of_the_whole(client, fields):
    how = {"prompt": PROMPTS[:2], "echo": True, "n": 1 + (fields == {}), **fields}
    whole, pieces = asked(client, **how).choices, streamed(client, **how)
    assert len(whole) == 2 * how["n"]
    for choice in whole:
        own = [piece for piece in pieces if piece.index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text and own[-1].finish_reason == choice.finish_reason
        for name in ("tokens", "token_logprobs", "text_offset"):
            joined = [x for piece in own if piece.logprobs for x in getattr(piece.logprobs, name)]
            assert joined == (getattr(choice.logprobs, name) if choice.logprobs else [])


def test_parts_of_characters_have_their_bytes_and_their_characters_place(engine, client):
    """Nano writes each of these characters in several tokens."""
    text, how = "aé😀b", {"extra_body": {"guided_choice": ["aé😀b"]}, "logprobs": 1}
    prompt = "ñ: "
    for echoed, fields in (("", {}), (prompt, {"echo": True})):
        choice = asked(client, prompt=prompt, **how, **fields).choices[0]
        scores = choice.logprobs
        ids = [*(engine.tokenizer.encode(prompt) if echoed else []), *engine.tokenizer.encode(text)]
        own = [engine.tokenizer.token_bytes(token) for token in ids]
        assert choice.text == echoed + text and b"".join(own).decode() == choice.text
        places = [len(b"".join(own[:i]).decode(errors="ignore")) for i in range(len(own))]
        assert scores.text_offset[: len(ids)] == places and len(set(places)) < len(places)
        assert any(name.startswith("bytes:\\x") for name in scores.tokens)
        pieces = [piece for piece in streamed(client, prompt=prompt, **how, **fields) if piece.logprobs]
        assert [place for piece in pieces for place in piece.logprobs.text_offset] == scores.text_offset

    async def chat():
        async with client() as made:
            how = {"model": "nano", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
            return await made.chat.completions.create(**how, extra_body={"guided_choice": [text]})

    entries = asyncio.run(chat()).choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode().removesuffix("<|role_end|>") == text


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
        transport = httpx.ASGITransport(build(Service(engine, engine.tokenizer, "nano")), False)
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
