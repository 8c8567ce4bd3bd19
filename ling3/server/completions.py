"""`/v1/completions`: continues texts or token ids, in one body or as a stream, and scores prompts with `echo`."""

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from starlette.responses import Response

from ling3.engine.front import SHORT
from ling3.engine.outputs import Delta, RequestOutput
from ling3.server.errors import wrong
from ling3.server.events import Choices, head_of, respond
from ling3.server.fields import Completion
from ling3.server.scores import Scores, joined
from ling3.server.service import Service

MOST_PROMPTS = 128
"""The most prompts of one request."""


async def answer(service: Service, asked: Completion) -> Response:
    """Answers a request for `/v1/completions`, in one body or as a stream."""
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
    params = dataclasses.replace(params, adapter=service.adapter(asked.model))
    deltas = await service.start(prompts, params, "prompt", asked.grammar)
    return await respond(_Texts(service, asked, prompts), deltas, asked.stream, len(prompts))


def _prompts(service: Service, several: Sequence[str | list[int]], asked: Completion) -> list[list[int]]:
    """The token ids of each prompt. Raises ApiError 400 for too many prompts, and for one that cannot be answered."""
    if len(several) > MOST_PROMPTS:
        raise wrong("prompt", f"has {len(several)} prompts, expected at most {MOST_PROMPTS}")
    ids = []
    for one in several:
        ids.append(service.encode(one, "prompt") if isinstance(one, str) else one)
        service.room(len(ids[-1]), "prompt", least=0 if asked.max_tokens == 0 else 1)
    return ids


class _Texts(Choices):
    """Choices whose answers are texts, which begin with the prompt's text if that is echoed."""

    def __init__(self, service: Service, asked: Completion, prompts: Sequence[list[int]]):
        head, tokens = head_of("cmpl", "text_completion", asked.model), sum(map(len, prompts))
        super().__init__(head, asked, tokens, asked.logprobs is not None, "text_completion")
        self._tokenizer, self._asked, self._prompts, self._n = service.tokenizer, asked, prompts, asked.n or 1
        self._scores: dict[tuple[int, int], Scores] = {}

    def complete(self, place: int, output: RequestOutput) -> Iterator[dict[str, Any]]:
        echoed = self._echoed(place)
        for completion in output.outputs:
            logprobs = None
            if self._asked.logprobs is not None:
                scores = Scores(self._tokenizer, self._prompts[place], echoed)
                logprobs = scores.of_answer(completion.logprobs or ())
                if self._asked.echo:
                    logprobs = joined(scores.of_prompt(output.prompt_logprobs or ()), logprobs)
            yield self._choice(place, completion.index, echoed + completion.text, logprobs, completion.finish_reason)

    def opening(self) -> Iterator[dict[str, Any]]:
        if self._asked.echo and self._asked.logprobs is None:
            for place in range(len(self._prompts)):
                echoed = self._echoed(place)
                yield from (self._choice(place, index, echoed) for index in range(self._n))

    def new(self, place: int, delta: Delta) -> Iterator[dict[str, Any]]:
        # The prompt's scores come first in the answer but are known only at its end, so everything waits for them.
        if self._asked.echo and self._asked.logprobs is not None:
            if delta.output is not None:
                yield from self.complete(place, delta.output)
            return
        logprobs, key = None, (place, delta.index)
        if self._asked.logprobs is not None and delta.logprobs:
            if key not in self._scores:
                self._scores[key] = Scores(self._tokenizer, self._prompts[place], "")
            logprobs = self._scores[key].of_answer(delta.logprobs)
        if delta.text or logprobs or delta.finish_reason is not None:
            yield self._choice(*key, delta.text, logprobs, delta.finish_reason)

    def _choice(
        self, place: int, index: int, text: str, logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        return {"index": place * self._n + index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _echoed(self, place: int) -> str:
        """The prompt's text, if it is echoed; else an empty text."""
        return self._tokenizer.decode(self._prompts[place], skip_special_tokens=False) if self._asked.echo else ""
