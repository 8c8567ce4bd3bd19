"""`/v1/completions`: texts and ids continued, whole or as a stream, and scored with `echo`."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import Response

from ling3.engine.front import SHORT
from ling3.engine.outputs import Delta, RequestOutput
from ling3.server.errors import wrong
from ling3.server.events import Chunks, Events, identifier, outputs_of, streamed, usage_of
from ling3.server.fields import Completion
from ling3.server.scores import Scores, joined
from ling3.server.service import Deltas, Service
from ling3.text.json_text import dumped

MOST_PROMPTS = 128
"""The most prompts of one request."""


async def answer(service: Service, asked: Completion) -> Response:
    """The endpoint."""
    given: Any = asked.prompt
    nested = bool(given) and not isinstance(given, str) and not isinstance(given[0], int)
    several = given if nested else [given]
    if sum(map(len, several)) <= SHORT:
        prompts = _prompts(service, several, asked)
    else:
        prompts = await asyncio.to_thread(_prompts, service, several, asked)
    most = 16 if asked.max_tokens is None else asked.max_tokens
    if asked.max_tokens is None:
        most = min(most, *(service.room(len(prompt), "prompt") for prompt in prompts))
    if most == 0 and not asked.echo:
        raise wrong("max_tokens", "is 0, which needs echo")
    scored = asked.echo and (asked.logprobs is not None or most == 0)
    params = asked.params(most, asked.logprobs, (asked.logprobs or 0) if scored else None)
    head = {"id": identifier("cmpl"), "object": "text_completion", "created": int(time.time()), "model": service.name}
    deltas = await service.start(prompts, params, "prompt", asked.grammar)
    if asked.stream:
        return Events(_events(service, head, deltas, prompts, asked))
    outputs = await outputs_of(deltas)
    made = service, prompts, outputs, asked
    # The scores of many prompts take seconds.
    choices = _choices(*made) if asked.logprobs is None else await asyncio.to_thread(_choices, *made)
    content = f'{dumped(head)[:-1]}, "choices": [{", ".join(choices)}], "usage": {dumped(usage_of(outputs))}}}'
    return Response(content, media_type="application/json")


def _prompts(service: Service, several: Sequence[str | list[int]], asked: Completion) -> list[list[int]]:
    """The ids of each prompt; ApiError 400 for what is none."""
    if len(several) > MOST_PROMPTS:
        raise wrong("prompt", f"has {len(several)} prompts, expected at most {MOST_PROMPTS}")
    ids = []
    for one in several:
        ids.append(service.encode(one, "prompt") if isinstance(one, str) else one)
        service.room(len(ids[-1]), "prompt", least=0 if asked.max_tokens == 0 else 1)
    return ids


def _choices(
    service: Service, prompts: Sequence[list[int]], outputs: Sequence[RequestOutput], asked: Completion
) -> list[str]:
    """The choices as JSON, each encoded by itself, as other threads wait for that."""
    choices: list[str] = []
    for prompt, output in zip(prompts, outputs, strict=True):
        echoed = _echoed(service, prompt, asked)
        for completion in output.outputs:
            logprobs = None
            if asked.logprobs is not None:
                scores = Scores(service.tokenizer, prompt, echoed)
                logprobs = scores.of_answer(completion.logprobs or ())
                if asked.echo:
                    logprobs = joined(scores.of_prompt(output.prompt_logprobs or ()), logprobs)
            choice = {"index": len(choices), "text": echoed + completion.text, "logprobs": logprobs}
            choices.append(dumped({**choice, "finish_reason": completion.finish_reason}))
    return choices


def _echoed(service: Service, prompt: Sequence[int], asked: Completion) -> str:
    """What an answer begins with."""
    return service.tokenizer.decode(prompt, skip_special_tokens=False) if asked.echo else ""


def _events(
    service: Service, head: dict[str, Any], deltas: Deltas, prompts: Sequence[list[int]], asked: Completion
) -> AsyncGenerator[str, None]:
    """The text of the events, those together that are sent at once."""
    chunks, n = Chunks(head, *asked.reports_usage, sum(map(len, prompts))), asked.n or 1
    echoes = [_echoed(service, prompt, asked) for prompt in prompts]
    scores = [
        [Scores(service.tokenizer, prompt, echoed) for _ in range(n if asked.logprobs is not None else 0)]
        for prompt, echoed in zip(prompts, echoes)
    ]
    scored = bool(asked.echo) and asked.logprobs is not None
    begun: set[int] = set()

    def chunk(place: int, index: int, text: str, logprobs: Any, reason: str | None) -> str:
        return chunks.of({"index": place * n + index, "text": text, "logprobs": logprobs, "finish_reason": reason})

    async def news(place: int, delta: Delta) -> str:
        some, index = "", delta.index
        chunks.count(delta)
        if asked.echo and place not in begun:
            begun.add(place)
            prompt_scores = delta.output.prompt_logprobs if delta.output is not None else None
            for i in range(n):
                scorer = scores[place][i].of_prompt if scored else None
                logprobs = scorer and await asyncio.to_thread(scorer, prompt_scores or ())
                some += chunk(place, i, echoes[place], logprobs, None)
        entries = delta.logprobs if asked.logprobs is not None else None
        logprobs = scores[place][index].of_answer(entries) if entries else None
        if delta.text or logprobs or delta.finish_reason is not None:
            some += chunk(place, index, delta.text, logprobs, delta.finish_reason)
        return some

    return streamed(_waiting(deltas) if scored else deltas, len(prompts), "", news, chunks.last)


async def _waiting(deltas: Deltas) -> Deltas:
    """The deltas, each with its request's output, in which the prompt's scores are, and only once that is there."""
    held: dict[int, list[Delta]] = {}
    async with contextlib.aclosing(deltas):
        async for place, delta in deltas:
            held.setdefault(place, []).append(delta)
            if delta.output is not None:
                for each in held.pop(place):
                    yield place, dataclasses.replace(each, output=delta.output)
