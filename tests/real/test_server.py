"""SmolLM2 behind the server, by OpenAI's client."""

import copy
import json

import pytest

pytest.importorskip("gguf", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("torch", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("transformers", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("openai", reason="these tests need the extra `real`: `make real` installs it")

import http_server
import openai

import ling3
from ling3.server.app import build
from ling3.server.service import Service
from ling3.text.chat_template import ChatTemplate

CHAT = [{"role": "user", "content": "What is the capital of France?"}]
ASKED = {"model": "smollm2", "messages": CHAT, "temperature": 0, "max_tokens": 24}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
FORCED = {"type": "function", "function": {"name": "get_weather"}}
# The published template shows no tools; this one does, in the form of the tags that larger models were trained on.
WITH_TOOLS = """
{%- if tools %}{{ '<|im_start|>system\\nYou may call these tools:\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def serve(engine):
    """A client of a server with a tokenizer."""

    def client(tokenizer):
        return http_server.listening(build(Service(engine, tokenizer, "smollm2")))

    return client


@pytest.fixture(scope="module")
def client(serve, tokenizer):
    with serve(tokenizer) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as found:
        yield found


def test_a_chat_and_its_stream(client, engine):
    expected = engine.generate(CHAT, ling3.SamplingParams(max_tokens=24, logprobs=2))[0]
    choice = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2).choices[0]
    assert choice.message.content == expected.text == "The capital of France is Paris."
    assert choice.finish_reason == "stop"
    assert [each.logprob for each in choice.logprobs.content] == [each.logprob for each in expected.logprobs]
    chunks = list(client.chat.completions.create(**ASKED, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text


def test_a_completion_and_its_stream(client, engine):
    prompt = "Once upon a time, in a small village, there"
    (expected,) = engine.generate([prompt], ling3.SamplingParams(max_tokens=24, logprobs=1))
    asked = {"model": "smollm2", "prompt": prompt, "temperature": 0, "max_tokens": 24}
    choice = client.completions.create(**asked, logprobs=1).choices[0]
    assert choice.text == expected.text
    assert choice.logprobs.token_logprobs == [each.logprob for each in expected.logprobs]
    chunks = list(client.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text


def test_json_by_schema(client):
    form = {"name": "weather", "strict": True, "schema": WEATHER["function"]["parameters"]}
    how = {"response_format": {"type": "json_schema", "json_schema": form}}
    found = json.loads(client.chat.completions.create(**{**ASKED, "max_tokens": 64}, **how).choices[0].message.content)
    assert list(found) == ["city", "unit"] and found["unit"] in ("celsius", "fahrenheit")


def test_its_template_has_no_tools(client):
    with pytest.raises(openai.BadRequestError, match="this model's chat template has no tools"):
        client.chat.completions.create(**ASKED, tools=[WEATHER], tool_choice=FORCED)


def test_a_call_that_is_forced(serve, tokenizer):
    """By a template with tools: whatever the model would say, it is a call that satisfies the schema."""
    with_tools = copy.copy(tokenizer)
    with_tools.chat_templates = {"default": ChatTemplate(WITH_TOOLS)}
    vars(with_tools).pop("tool_form", None)
    assert with_tools.tool_form == "json"
    asked = {**ASKED, "max_tokens": 96, "tools": [WEATHER], "tool_choice": FORCED, "parallel_tool_calls": False}
    with serve(with_tools) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        choice = client.chat.completions.create(**asked).choices[0]
        chunks = list(client.chat.completions.create(**asked, stream=True))
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    found = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and found["unit"] in ("celsius", "fahrenheit") and "city" in found
    pieces = [call.function.arguments or "" for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join(pieces) == call.function.arguments
