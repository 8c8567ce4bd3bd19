"""`/v1/completions`: texts and ids continued, whole or as a stream, and scored with `echo`."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ling3.engine.outputs import Delta
from ling3.server import body
from ling3.server.errors import ApiError
from ling3.server.fields import Completion
from ling3.server.running import (
    SHORT,
    Chunks,
    Deltas,
    Events,
    Service,
    check,
    identifier,
    usage_of,
    while_there,
)
from ling3.server.scores import Scores, joined
from ling3.text.json_text import dumped

MOST_PROMPTS = 128
"""The most prompts of one request."""


async def answer(request: Request) -> Response:
    """The endpoint."""
    service: Service = request.app.state.service
    asked = await body.read(request, Completion)
    service.check_model(asked.model)
    given: Any = asked.prompt
    nested = bool(given) and not isinstance(given, str) and not isinstance(given[0], int)
    if (sum(map(len, given)) if nested else len(given)) <= SHORT:
        prompts = _prompts(service, asked)
    else:
        prompts = await asyncio.to_thread(_prompts, service, asked)
    most = 16 if asked.max_tokens is None else asked.max_tokens
    if asked.max_tokens is None:
        most = min(most, *(service.room(len(prompt), "prompt") for prompt in prompts))
    if most == 0 and not asked.echo:
        raise ApiError(400, "max_tokens is 0, which needs echo", "max_tokens")
    scored = asked.echo and (asked.logprobs is not None or most == 0)
    params = asked.params(most, asked.logprobs, (asked.logprobs or 0) if scored else None)
    head = {"id": identifier("cmpl"), "object": "text_completion", "created": int(time.time()), "model": service.name}
    deltas = await while_there(request, service.start(prompts, params, "prompt", asked.grammar))
    if isinstance(deltas, Response):
        return deltas
    if asked.stream:
        return Events(_chunks(service, head, deltas, prompts, asked))
    return await while_there(request, _whole(service, head, deltas, prompts, asked))


def _prompts(service: Service, asked: Completion) -> list[list[int]]:
    """The ids of each prompt; ApiError 400 for what is none."""
    given: Any = asked.prompt
    several = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not several or len(several) > MOST_PROMPTS:
        raise ApiError(400, f"prompt has {len(several)} prompts, expected 1 to {MOST_PROMPTS}", "prompt")
    ids = []
    for one in several:
        try:
            ids.append(service.encode(one, "prompt") if isinstance(one, str) else one)
        except ValueError as error:
            raise ApiError(400, service.plain(error), "prompt") from None
        service.room(len(ids[-1]), "prompt", least=0 if asked.max_tokens == 0 else 1)
    return ids


async def _whole(
    service: Service, head: dict[str, Any], deltas: Deltas, prompts: Sequence[list[int]], asked: Completion
) -> Response:
    lasts: dict[int, Delta] = {}
    async with contextlib.aclosing(deltas):  # pyright: ignore[reportArgumentType]
        async for place, delta in deltas:
            check(delta)
            lasts[place] = delta
    made = service, prompts, lasts, asked
    # The scores of many prompts take seconds.
    choices = _choices(*made) if asked.logprobs is None else await asyncio.to_thread(_choices, *made)
    usage = dumped(usage_of([lasts[place] for place in sorted(lasts)]))
    content = f'{dumped(head)[:-1]}, "choices": [{", ".join(choices)}], "usage": {usage}}}'
    return Response(content, media_type="application/json")


def _choices(service: Service, prompts: Sequence[list[int]], lasts: dict[int, Delta], asked: Completion) -> list[str]:
    """The choices as JSON, each encoded by itself, as other threads wait for that."""
    choices: list[str] = []
    for place, prompt in enumerate(prompts):
        output = lasts[place].output
        assert output is not None, "the last delta has the output"
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


async def _chunks(
    service: Service, head: dict[str, Any], deltas: Deltas, prompts: Sequence[list[int]], asked: Completion
) -> AsyncIterator[str]:
    """The text of the events, those together that are sent at once."""
    chunks = Chunks(head, *asked.reports_usage, sum(map(len, prompts)))
    lasts, n = {}, asked.n or 1
    echoes = [_echoed(service, prompt, asked) for prompt in prompts]
    scores = [
        [Scores(service.tokenizer, prompt, echoed) for _ in range(n if asked.logprobs is not None else 0)]
        for prompt, echoed in zip(prompts, echoes)
    ]
    scored = bool(asked.echo) and asked.logprobs is not None
    begun: set[int] = set()

    def chunk(place: int, index: int, text: str, logprobs: Any, reason: str | None) -> str:
        return chunks.of({"index": place * n + index, "text": text, "logprobs": logprobs, "finish_reason": reason})

    some, left = "", n * len(prompts)
    async with contextlib.aclosing(_waiting(deltas) if scored else deltas) as ready:  # pyright: ignore[reportArgumentType]
        async for place, delta in ready:
            check(delta)
            lasts[place], index = delta, delta.index
            chunks.count(delta)
            left -= delta.finish_reason is not None
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
            if some and left:  # the last go with the usage
                yield some
                some = ""
    yield some + chunks.last(lasts.values())


async def _waiting(deltas: Deltas) -> Deltas:
    """The deltas, each with its request's output, in which the prompt's scores are, and only once that is there."""
    held: dict[int, list[Delta]] = {}
    async with contextlib.aclosing(deltas):  # pyright: ignore[reportArgumentType]
        async for place, delta in deltas:
            check(delta)
            held.setdefault(place, []).append(delta)
            if delta.output is not None:
                for each in held.pop(place):
                    yield place, dataclasses.replace(each, output=delta.output)
