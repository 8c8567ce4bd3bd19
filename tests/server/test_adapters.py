"""Adapters over HTTP: each is a model by its name."""

import http_server
import openai
import pytest
from random_adapters import random_adapter
from scripted_service import anthropics, ask

import ling3
from ling3 import cli
from ling3.server.service import Service

MESSAGES = [{"role": "user", "content": "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"}]
NAMES = ("nano", "a", "b")


@pytest.fixture(scope="module")
def service():
    model = ling3.load("nano")
    adapters = {"a": random_adapter(model, size=0.6, seed=1), "b": random_adapter(model, size=0.6, seed=2)}
    sizes = {"max_running_requests": 4, "max_model_len": 256}
    engine = ling3.Engine(model, ling3.load_tokenizer("nano"), adapters=adapters, **sizes)
    return Service(engine, engine.tokenizer, "nano")


def said(service, name):
    """The engine's answer with the adapter of this name."""
    params = ling3.SamplingParams(max_tokens=16, adapter=None if name == "nano" else name)
    return service.engine.generate([service.tokenizer.apply_chat_template(MESSAGES)], params)[0].text


@pytest.mark.thorough
def test_a_model_of_its_name_answers_with_it(service):
    """In each protocol, and the answer says which model it is of."""

    async def texts(client):
        found = {}
        for name in NAMES:
            how = {"model": name, "temperature": 0}
            chat = await client.chat.completions.create(messages=MESSAGES, max_tokens=16, **how)
            chunks = await client.chat.completions.create(messages=MESSAGES, max_tokens=16, stream=True, **how)
            streamed = [chunk async for chunk in chunks]
            response = await client.responses.create(input=MESSAGES, max_output_tokens=16, **how)
            ids = service.tokenizer.apply_chat_template(MESSAGES)
            text = await client.completions.create(prompt=ids, max_tokens=16, **how)
            message = await anthropics(client._client).messages.create(messages=MESSAGES, max_tokens=16, **how)
            assert {chat.model, response.model, text.model, message.model, *(chunk.model for chunk in streamed)} == {
                name
            }
            joined = "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices)
            found[name] = {chat.choices[0].message.content, joined, response.output_text, text.choices[0].text}
            found[name] |= {message.content[0].text}
        return found

    found = ask(service, texts)
    assert found == {name: {said(service, name)} for name in NAMES}
    assert len({*map(frozenset, found.values())}) == 3


def test_adapters_are_listed_with_their_parent(service):
    async def models(client):
        listed = (await client.models.list()).data
        assert await client.models.retrieve("b") == listed[2]
        return listed

    listed = ask(service, models)
    assert [each.id for each in listed] == list(NAMES)
    assert [getattr(each, "parent", None) for each in listed] == [None, "nano", "nano"]


def test_another_model_is_unknown(service):
    async def unknown(client):
        with pytest.raises(openai.NotFoundError, match="the model 'c' does not exist"):
            await client.chat.completions.create(model="c", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="adapter is not supported"):
            how = {"extra_body": {"adapter": "a"}}
            await client.chat.completions.create(model="nano", messages=MESSAGES, **how)

    ask(service, unknown)


def test_a_name_is_of_one_model_alone(service):
    with pytest.raises(ValueError, match="'a' is the name of the model and of an adapter"):
        Service(service.engine, service.tokenizer, "a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lora-modules", "a"], "--lora-modules: found 'a', expected NAME=DIR"),
        (["--lora-modules", "a=x", "a=y"], "--lora-modules: the name 'a' is given twice"),
        (["--lora-modules", "nano=x"], "--lora-modules: the name 'nano' is given twice, or is the model's"),
        (["--lora-modules", "a=x", "--adapter", "y"], "--lora-modules: --adapter changes the model that they are for"),
    ],
)
def test_a_wrong_option_is_refused_before_any_work(options, message, capsys):
    assert cli.main(["serve", "nano", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.thorough
def test_the_command_serves_adapters(tmp_path):
    adapter = random_adapter(ling3.load("nano"), size=0.6, seed=1)
    ling3.save_adapter(adapter, tmp_path / "a")
    with http_server.process("--chunked-prefill-size", "16", "--lora-modules", f"a={tmp_path / 'a'}") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        assert [each.id for each in client.models.list()] == ["nano", "a"]
        texts = [
            client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=16, temperature=0)
            for name in ("nano", "a")
        ]
        assert texts[0].choices[0].message.content != texts[1].choices[0].message.content
