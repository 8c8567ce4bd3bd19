"""It over HTTP, by the client `openai`."""

import concurrent.futures
import json

import http_server
import openai
import pytest
from real_texts import CHATS, QUESTIONS

import ling3
from ling3.server.app import build
from ling3.server.running import Service
from ling3.text.chat_template import ChatTemplate

MODEL = "SmolLM2-135M-Instruct"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
# Its own template has no place for tools; this is how models of its kind are shown them.
TOOLS = """{%- if tools -%}
<|im_start|>system
You call functions. Answer with <tool_call>{"name": …, "arguments": …}</tool_call>.
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


@pytest.fixture(scope="module")
def client(engine, tokenizer):
    with http_server.listening(build(Service(engine, tokenizer, MODEL, 64))) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def caller(make_engine, directory):
    """The same model behind a template with tools."""
    tokenizer = ling3.load_tokenizer(directory)
    tokenizer.chat_template = ChatTemplate(TOOLS)
    with http_server.listening(build(Service(make_engine(), tokenizer, MODEL, 64))) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


@pytest.mark.parametrize("chat", [CHATS[0], CHATS[7], CHATS[10]])
def test_a_chat_whole_and_streamed(client, engine, chat):
    (expected,) = engine.generate([chat], ling3.SamplingParams(max_tokens=32, logprobs=2))
    asked = {"model": MODEL, "messages": chat, "temperature": 0, "max_tokens": 32}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2).choices[0]
    assert whole.message.content == expected.text and whole.finish_reason == expected.finish_reason
    assert [each.logprob for each in whole.logprobs.content] == [each.logprob for each in expected.logprobs]
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(expected.prompt_token_ids), len(expected.token_ids))


def test_a_completion_whole_and_streamed(client, engine):
    prompts = ["The capital of France is", "1, 2, 3, 4, 5,", "Once upon a time 😀"]
    expected = engine.generate(prompts, ling3.SamplingParams(max_tokens=24))
    asked = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 24}
    whole = client.completions.create(**asked)
    assert [choice.text for choice in whole.choices] == [output.text for output in expected]
    texts = [""] * 3
    for chunk in client.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [output.text for output in expected]


def test_a_prompt_is_scored(client):
    asked = {"model": MODEL, "prompt": "Paris is the capital of France", "max_tokens": 0, "echo": True, "logprobs": 1}
    (choice,) = client.completions.create(**asked).choices
    assert choice.text == asked["prompt"] and "".join(choice.logprobs.tokens) == asked["prompt"]
    assert choice.logprobs.token_logprobs[0] is None and choice.logprobs.token_logprobs[-1] > -1


def test_json_by_schema(client):
    schema = {
        "name": "capital",
        "schema": {"type": "object", "properties": {"capital": {"type": "string", "maxLength": 20}}},
    }
    schema["schema"] |= {"required": ["capital"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": schema}
    asked = {"model": MODEL, "messages": CHATS[0], "temperature": 0, "max_tokens": 48, "response_format": form}
    assert json.loads(client.chat.completions.create(**asked).choices[0].message.content) == {"capital": "Paris"}


def test_its_template_shows_no_tools(client):
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(model=MODEL, messages=CHATS[0], tools=[WEATHER])


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(caller, stream):
    chat = [{"role": "user", "content": "What is the weather in Paris in celsius?"}]
    asked = {"model": MODEL, "messages": chat, "temperature": 0, "max_tokens": 96, "tools": [WEATHER]}
    asked["tool_choice"] = {"type": "function", "function": {"name": "get_weather"}}
    if stream:
        with caller.chat.completions.stream(**asked) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = caller.chat.completions.create(**asked).choices[0]
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and choice.finish_reason == ("tool_calls")
    assert arguments["city"] == "Paris" and arguments["unit"] in ("celsius", "fahrenheit")
    call = {
        "id": call.id,
        "type": "function",
        "function": {"name": "get_weather", "arguments": call.function.arguments},
    }
    chat += [{"role": "assistant", "content": "", "tool_calls": [call]}]
    chat += [{"role": "tool", "tool_call_id": call["id"], "content": "19 degrees"}]
    answer = caller.chat.completions.create(model=MODEL, messages=chat, temperature=0, max_tokens=32, tools=[WEATHER])
    assert answer.choices[0].message.content


def test_many_at_once(client, engine):
    """Twenty streams beside each other, each as alone."""

    def ask(question):
        chat = [{"role": "user", "content": question}]
        chunks = client.chat.completions.create(model=MODEL, messages=chat, temperature=0, max_tokens=16, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    expected = [output.text for output in engine.generate(chats, ling3.SamplingParams(max_tokens=16))]
    with concurrent.futures.ThreadPoolExecutor(len(QUESTIONS)) as threads:
        assert list(threads.map(ask, QUESTIONS)) == expected
