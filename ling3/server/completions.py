"""`/v1/completions`: texts and ids continued, whole or as a stream, and scored with `echo`."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from ling3.engine.outputs import Delta, Logprob
from ling3.server import body
from ling3.server.errors import ApiError
from ling3.server.fields import Completion
from ling3.server.running import SHORT, Deltas, Events, Service, check, identifier, usage_of, while_there
from ling3.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for smaller ones, which JSON has no number for."""
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
    if asked.echo and asked.stream:
        raise ApiError(400, "echo is not supported with stream", "echo")
    if most == 0 and not asked.echo:
        raise ApiError(400, "max_tokens is 0, which needs echo", "max_tokens")
    scored = asked.echo and (asked.logprobs is not None or most == 0)
    params = asked.params(most, asked.logprobs, (asked.logprobs or 0) if scored else None)
    head = {"id": identifier("cmpl"), "object": "text_completion", "created": int(time.time()), "model": service.name}
    deltas = await while_there(request, service.start(prompts, params, "prompt", asked.grammar))
    if isinstance(deltas, Response):
        return deltas
    if asked.stream:
        usage = asked.stream_options is not None and bool(asked.stream_options.include_usage)
        return Events(_chunks(service, head, deltas, params.n, usage))
    whole = await while_there(request, _whole(service, head, deltas, prompts, asked))
    return whole if isinstance(whole, Response) else JSONResponse(whole)


def _prompts(service: Service, asked: Completion) -> list[list[int]]:
    """The ids of each prompt; ApiError 400 for what is none."""
    given: Any = asked.prompt
    several = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not several or len(several) > MOST_PROMPTS:
        raise ApiError(400, f"prompt has {len(several)} prompts, expected 1 to {MOST_PROMPTS}", "prompt")
    try:
        ids = [service.tokenizer.encode(one) if isinstance(one, str) else one for one in several]
    except ValueError as error:
        raise ApiError(400, service.plain(error), "prompt") from None
    for one in ids:
        service.room(len(one), "prompt")
    return ids


async def _whole(
    service: Service, head: dict[str, Any], deltas: Deltas, prompts: Sequence[list[int]], asked: Completion
) -> dict[str, Any]:
    lasts: dict[int, Delta] = {}
    async with contextlib.aclosing(deltas):  # pyright: ignore[reportArgumentType]
        async for place, delta in deltas:
            check(delta)
            lasts[place] = delta
    choices = []
    for place, prompt in enumerate(prompts):
        output = lasts[place].output
        assert output is not None, "the last delta has the output"
        echoed = service.tokenizer.decode(prompt, skip_special_tokens=False) if asked.echo else ""
        scores = output.prompt_logprobs or () if asked.echo else ()
        shown = [_Shown(token, score) for token, score in zip(prompt, scores)]
        for completion in output.outputs:
            entries = [*shown, *(_Shown(one.token_id, one) for one in completion.logprobs or ())]
            logprobs = None if asked.logprobs is None else _logprobs(service.tokenizer, entries, 0)
            reason = completion.finish_reason
            choice = {"index": len(choices), "text": echoed + completion.text, "logprobs": logprobs}
            choices.append({**choice, "finish_reason": reason})
    return {**head, "choices": choices, "usage": usage_of([lasts[place] for place in sorted(lasts)])}


async def _chunks(
    service: Service, head: dict[str, Any], deltas: Deltas, n: int, usage: bool
) -> AsyncIterator[dict[str, Any]]:
    unset, lasts = {"usage": None} if usage else {}, {}
    offsets: dict[int, int] = {}
    async with contextlib.aclosing(deltas):  # pyright: ignore[reportArgumentType]
        async for place, delta in deltas:
            check(delta)
            lasts[place], index = delta, place * n + delta.index
            shown = [_Shown(one.token_id, one) for one in delta.logprobs or ()]
            logprobs = _logprobs(service.tokenizer, shown, offsets.get(index, 0)) if shown else None
            offsets[index] = offsets.get(index, 0) + sum(len(text) for text in (logprobs or {}).get("tokens", ()))
            choice = {"index": index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish_reason}
            if delta.text or shown or delta.finish_reason is not None:
                yield {**head, "choices": [choice], **unset}
    if usage:
        yield {**head, "choices": [], "usage": usage_of(list(lasts.values()))}


class _Shown:
    """A token with its log-probability; None for a prompt's first."""

    def __init__(self, token: int, score: Logprob | None):
        self.token, self.score = token, score


def _logprobs(tokenizer: Tokenizer, entries: Sequence[_Shown], offset: int) -> dict[str, Any]:
    def text(token: int) -> str:
        return tokenizer.decode([token], skip_special_tokens=False)

    said: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for entry in entries:
        token, score = text(entry.token), entry.score
        top: dict[str, float] | None = None
        if score is not None:
            top = {}
            # Several tokens may have one text, of which the likeliest counts, and the one chosen before it.
            for other, value in [(entry.token, score.logprob), *score.top.items()]:
                top.setdefault(text(other), max(value, LEAST_LOGPROB))
        said["tokens"].append(token)
        said["token_logprobs"].append(None if score is None else max(score.logprob, LEAST_LOGPROB))
        said["top_logprobs"].append(top)
        said["text_offset"].append(offset)
        offset += len(token)
    return said
