"""Fields of requests: what they do, and what is known of those that do nothing."""

import asyncio
import dataclasses
import json

import httpx
import openai
import pytest
from scripted_service import Reciter, ask, recited
from tool_templates import TEMPLATES, tokenizer

import ling3
from ling3.cli import main
from ling3.cli import options as cli_options
from ling3.cli.conversation import SETTABLE
from ling3.engine.sampling_params import MAX_SEED, SamplingParams
from ling3.runtime.parameters import meanings, parameters
from ling3.server.app import build
from ling3.server.fields import COMMON, Completion
from ling3.server.service import Service

CHAT = [{"role": "user", "content": "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"}]
VAGUE = {"messages": [{"role": "user", "content": "Tell me more."}]}
"""What nano is less sure of."""
ASKED = {"model": "nano", "messages": CHAT, "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def engine():
    return ling3.Engine.from_pretrained("nano", max_running_requests=4, max_model_len=128)


@pytest.fixture(scope="module")
def nano(engine):
    return Service(engine, engine.tokenizer, "nano")


def create(**fields):
    async def call(client):
        answer = await client.chat.completions.create(**{**ASKED, **fields})
        return [chunk async for chunk in answer] if fields.get("stream") else answer

    return call


def post(service, path, body):
    async def answer():
        transport = httpx.ASGITransport(build(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            content = body if isinstance(body, str) else json.dumps(body)
            return await http.post(path, content=content, headers={"Content-Type": "application/json"})

    return asyncio.run(answer())


@pytest.mark.parametrize(
    ("seed", "engines"),
    [
        (0, 0),
        (MAX_SEED, MAX_SEED),
        (MAX_SEED + 1, 0),
        (2**31, 128),
        (-1, MAX_SEED),
        (2**63 - 1, None),
        (-(2**63), None),
    ],
)
def test_every_seed_of_64_bits_is_one_of_the_engines(seed, engines):
    service = recited(tokenizer(TEMPLATES["tags"]), "7")
    ask(service, create(seed=seed))
    [params] = service.engine.params
    assert params.seed == (seed % (MAX_SEED + 1) if engines is None else engines)


def test_a_large_seed_repeats_its_answer(nano):
    def said(seed):
        return ask(nano, create(**VAGUE, seed=seed, temperature=2)).choices[0].message.content

    assert said(-(2**63)) == said(-(2**63)) and said(-1) == said(-1) != said(-2)
    with pytest.raises(openai.BadRequestError, match="seed"):
        said(2**63)


def test_a_top_p_of_zero_takes_the_likeliest_token(nano):
    greedy = ask(nano, create(**VAGUE)).choices[0].message.content
    drawn = {"temperature": 2, "seed": 1}
    assert ask(nano, create(**VAGUE, **drawn)).choices[0].message.content != greedy
    assert ask(nano, create(**VAGUE, **drawn, top_p=0)).choices[0].message.content == greedy

    async def respond(client):
        return await client.responses.create(model="nano", input="Tell me more.", top_p=0, max_output_tokens=40)

    assert ask(nano, respond).output_text == greedy


def test_what_clients_add_to_messages_changes_nothing_but_a_name_reaches_the_template():
    named = TEMPLATES["tags"].replace("<role>HUMAN</role>", "<role>HUMAN</role>{{ m.name if m.name else '' }}")
    service = recited(tokenizer(named), "7")
    parts = [{"type": "text", "text": "I "}, {"type": "refusal", "refusal": "won't."}]
    turns = [
        {"role": "assistant", "content": "I won't.", "annotations": [], "audio": None, "function_call": None},
        {"role": "assistant", "content": parts},
        {"role": "assistant", "content": None, "refusal": "I won't."},
    ]
    for turn in turns:
        ask(service, create(messages=[*CHAT, turn, {**CHAT[0], "name": "Ann"}]))
    assert len(set(service.engine.prompts)) == 1
    assert service.engine.prompts[0].count("I won't.") == 1 and "<role>HUMAN</role>AnnSam" in service.engine.prompts[0]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(service, create(messages=[{**CHAT[0], "name": 5}]))
    assert caught.value.param == "messages[0].name"


def test_the_parameters_of_the_engine_are_fields_options_and_settings_of_a_chat():
    """Each that is declared for all of them, by its name alone."""
    options = {each.name: each for each in dataclasses.fields(cli_options.Sampling)}
    for name, each in parameters(SamplingParams).items():
        assert each.common == (name in options) == (name in COMMON)
        if each.common:
            assert (
                Completion.model_fields[name].description == meanings(SamplingParams)[name]
                and SETTABLE[name] == each.noun
            )
            assert options[name].default == each.default
    assert cli_options.Sampling().params() == SamplingParams()


def test_no_tools_are_none(nano):
    plain = ask(nano, create()).choices[0].message
    for fields in ({"tool_choice": "auto", "parallel_tool_calls": False}, {}):
        more = {"tools": [], "modalities": ["text"], "verbosity": "low", **fields}
        assert ask(nano, create(**more)).choices[0].message == plain
    with pytest.raises(openai.BadRequestError) as caught:
        ask(nano, create(modalities=["text", "audio"]))
    assert caught.value.param == "modalities.1"


@pytest.mark.parametrize("last", [False, True])
def test_the_usage_so_far_is_in_every_event(nano, last):
    options = {"continuous_usage_stats": True, "include_usage": last}
    chunks = ask(nano, create(stream=True, stream_options=options, n=2))
    whole = ask(nano, create(n=2)).usage
    used = [chunk.usage for chunk in chunks]
    assert all(each.prompt_tokens == whole.prompt_tokens for each in used) and used[0].completion_tokens == 0
    new = [each.completion_tokens for each in used]
    assert new == sorted(new) and len(set(new)) > 2 and used[-1].total_tokens == whole.total_tokens
    assert bool(chunks[-1].choices) != last

    async def complete(client):
        how = {"model": "nano", "prompt": ["Sam has", "Ann has"], "stream": True, "stream_options": options}
        return [chunk.usage async for chunk in await client.completions.create(**how, extra_body={"ignore_eos": True})]

    used = ask(nano, complete)
    assert used[0].prompt_tokens == used[-1].prompt_tokens and used[-1].completion_tokens == 32


def test_a_prompt_as_long_as_the_context_is_scored(engine, nano):
    ids = (engine.tokenizer.encode(CHAT[0]["content"]) * 8)[: engine.max_model_len]
    assert len(ids) == engine.max_model_len

    def score(ids, **fields):
        async def call(client):
            return await client.completions.create(model="nano", prompt=ids, echo=True, logprobs=1, **fields)

        return ask(nano, call).choices[0].logprobs

    expected = engine.generate([ids], ling3.SamplingParams(max_tokens=0, prompt_logprobs=1))[0].prompt_logprobs
    assert score(ids, max_tokens=0).token_logprobs == [None, *(each.logprob for each in expected[1:])]
    for more, fields in ((ids, {}), (ids, {"max_tokens": 1}), ([*ids, ids[0]], {"max_tokens": 0})):
        with pytest.raises(openai.BadRequestError) as caught:
            score(more, **fields)
        assert caught.value.param == "prompt"


SAY = {"name": "say", "parameters": {"properties": {"text": {"type": "string"}}}}
FRONT_ENDS = [
    ("/v1/chat/completions", {"chat_id": "1"}, "chat_id"),
    ("/v1/chat/completions", {"messages": [{**CHAT[0], "timestamp": 5}]}, "messages[0].timestamp"),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": SAY, "x": 1}]}, "tools.0.x"),
    ("/v1/chat/completions", {"tools": [{"type": "function", "function": {**SAY, "x": 1}}]}, "tools.0.function.x"),
    ("/v1/chat/completions", {"stream_options": {"x": 1}}, "stream_options.x"),
    ("/v1/responses", {"input": [{**CHAT[0], "x": 5}]}, "input[0].x"),
    ("/v1/responses", {"input": "a", "reasoning": {"x": 5}}, "reasoning.x"),
    ("/v1/completions", {"prompt": "a", "x": 5}, "x"),
]


@pytest.mark.parametrize(("path", "fields", "param"), FRONT_ENDS)
def test_unknown_fields_are_refused_unless_they_are_allowed(path, fields, param):
    service = recited(tokenizer(TEMPLATES["tags"]), "7")
    body = {"model": "nano", **({"messages": CHAT} if "chat" in path else {}), **fields}
    refused = post(service, path, body)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param
    service.allow_unknown_fields = True
    assert post(service, path, body).status_code == 200
    changing = {"/v1/responses": "background", "/v1/completions": "suffix"}.get(path, "audio")
    known = post(service, path, {**body, changing: True})
    assert known.status_code == 400 and known.json()["error"]["param"] == changing


def test_the_command_has_an_option_for_unknown_fields(monkeypatch):
    services = []

    def serve(app, service, bound, *how):
        services.append(service)
        bound.close()

    monkeypatch.setattr(Reciter, "warmup", lambda engine: None)
    monkeypatch.setattr("ling3.serve.Engine", lambda model, tokenizer, settings, adapters: Reciter(tokenizer, "7"))
    monkeypatch.setattr("ling3.server.run.run", serve)
    for options in ([], ["--allow-unknown-fields"]):
        assert main(["serve", "nano", "--port", "0", *options]) == 0
    assert [service.allow_unknown_fields for service in services] == [False, True]


def test_what_leaves_is_json_in_utf_8():
    """Also what is said again of a client's own text."""
    service = recited(tokenizer(TEMPLATES["tags"]), "7")
    tool = '{"type": "function", "name": "f", %s}'
    body = '{"model": "nano", "input": "a", "tool_choice": "none", "tools": [' + tool + "]}"
    said = post(service, "/v1/responses", body % '"description": "\\ud83d"')
    assert said.status_code == 200 and said.json()["tools"][0]["description"] == "\ufffd"
    assert post(service, "/v1/responses", body % '"parameters": {"maximum": 1e999}').status_code == 400
