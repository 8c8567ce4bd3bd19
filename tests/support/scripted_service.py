"""A service whose engine says what a test gives it, token by token, and clients of its app without a socket."""

import asyncio
import types

import anthropic
import httpx
import openai

import ling3
from ling3.engine.outputs import Completion, Delta, RequestOutput, Timings
from ling3.server.app import build
from ling3.server.service import Service


class Reciter(ling3.Engine):
    """What the service needs of an engine; each request is answered with the next text, the last one over and over."""

    max_model_len, alive, adapters = 2048, True, ()
    settings = types.SimpleNamespace(max_running_requests=8)

    def __init__(self, tokenizer, *texts, size=1, reason="stop", stop=None):
        self.tokenizer, self.texts, self.size, self.reason, self.stop = tokenizer, list(texts), size, reason, stop
        self.prompts, self.params = [], []

    def left(self, tokens):
        return self.max_model_len - tokens

    async def astream_all(self, prompts, params, name):
        """Deltas of `size` tokens."""
        [prompt] = prompts
        self.prompts.append(self.tokenizer.decode(prompt, skip_special_tokens=False))
        self.params.append(params)
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        ids, decoder, said = self.tokenizer.encode(text), self.tokenizer.stream(prompt), ""
        for start in range(0, max(len(ids), 1), self.size):
            part, last = ids[start : start + self.size], start + self.size >= len(ids)
            new = decoder.feed(part) + (decoder.flush() if last else "")
            said, output = said + new, None
            if last:
                timings = Timings(0.0, 0.0, None, 0.0, 0)
                completion = Completion(0, said, ids, None, self.reason, self.stop, None, 0, timings)
                output = RequestOutput(0, None, prompt, [completion])
            yield 0, Delta(0, 0, new, part, None, self.reason if last else None, output)
            await asyncio.sleep(0)


def recited(tokenizer, *texts, **how):
    """A service with such an engine."""
    return Service(Reciter(tokenizer, *texts, **how), tokenizer, "nano")


def transported(service, **how):
    """An HTTP client of the service's app, built as `how` says."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(build(service, **how), raise_app_exceptions=False))


def client(http):
    """OpenAI's client, asynchronous."""
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="none", http_client=http, max_retries=0)


def anthropics(http):
    """Anthropic's client, asynchronous."""
    return anthropic.AsyncAnthropic(base_url="http://test", api_key="none", http_client=http, max_retries=0)


def ask(service, call, made=client, **how):
    """What `call` makes of a client."""

    async def answer():
        async with made(transported(service, **how)) as speaker:
            return await call(speaker)

    return asyncio.run(answer())


def joined(chunks):
    """A chat's chunks put together: (reasoning, content, calls as (id, name, arguments), finish reason)."""
    reasoning, content, calls, reason = "", "", [], None
    for chunk in chunks:
        choice = chunk.choices[0]
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            if call.id is not None:
                assert call.index == len(calls) and call.type == "function"
                calls.append([call.id, call.function.name, call.function.arguments])
            else:
                calls[call.index][2] += call.function.arguments
        reason = choice.finish_reason or reason
    return reasoning, content, [tuple(call) for call in calls], reason
