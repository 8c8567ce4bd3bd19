"""Answers as server-sent events, and as one body of JSON."""

import contextlib
import operator
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ling3.engine.outputs import Delta, RequestOutput
from ling3.server import log
from ling3.server.errors import ApiError
from ling3.server.service import Deltas
from ling3.text.json_text import dumped


class StrictResponse(JSONResponse):
    """An answer as strict JSON in UTF-8."""

    def render(self, content: Any) -> bytes:
        """The body; ValueError for numbers that are not finite."""
        return dumped(content).encode()


class Events(Response):
    """Server-sent events, then [DONE]; errors are an event, and leaving ends the events.

    An item of `events` is the text of those that are sent at once. `failed` makes the object of an event of an error,
    by default OpenAI's; without `done` there is no [DONE].
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        failed: Callable[[ApiError], dict[str, Any]] = operator.attrgetter("body"),
        done: bool = True,
    ):
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._events, self._failed, self._end = events, failed, "data: [DONE]\n\n" if done else ""

    def failure(self, error: ApiError) -> str:
        """The last events of a stream that ends in an error."""
        return event(self._failed(error)) + self._end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them; whoever ends the stream early finds it as the scope's `events`."""
        scope["events"] = self
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def put(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        end = self._end
        async with contextlib.aclosing(self._events) as events:
            try:
                async for some in events:
                    await put(some)
            except ApiError as error:
                end = self.failure(error)
            except Exception:
                log.logger.exception("the engine failed")
                end = self.failure(ApiError(500, "the engine failed"))
        await put(end, False)


async def streamed(
    deltas: Deltas,
    prompts: int,
    begin: str,
    news: Callable[[int, Delta], Awaitable[str]],
    end: Callable[[list[RequestOutput]], str],
) -> AsyncGenerator[str, None]:
    """The text of events, those together that are sent at once: the first with `begin`, and the last with the `end`."""
    some, outputs = begin, dict[int, RequestOutput]()
    async with contextlib.aclosing(deltas):
        async for place, delta in deltas:
            some += await news(place, delta)
            if delta.output is not None:
                outputs[place] = delta.output
            if some and len(outputs) < prompts:
                yield some
                some = ""
    yield some + end([outputs[place] for place in sorted(outputs)])


async def outputs_of(deltas: Deltas) -> list[RequestOutput]:
    """The answers to all prompts, in their order."""
    async with contextlib.aclosing(deltas):
        outputs = {place: delta.output async for place, delta in deltas if delta.output is not None}
    return [outputs[place] for place in sorted(outputs)]


def event(said: dict[str, Any]) -> str:
    """An object as a server-sent event, with the name that it has as `type`, if any."""
    name = f"event: {said['type']}\n" if "type" in said else ""
    return f"{name}data: {dumped(said)}\n\n"


class Chunks:
    """The events of one stream of OpenAI's chunks, whose `head` is encoded once.

    They say the `usage` last, and each says it so far if it is `continuous`.
    """

    def __init__(self, head: dict[str, Any], usage: bool, continuous: bool, prompt: int):
        self._usage, self._continuous, self._prompt, self._new = usage, continuous, prompt, 0
        self._before, self._after = f"data: {dumped(head)[:-1]}, ", ', "usage": null}\n\n' if usage else "}\n\n"

    def count(self, delta: Delta) -> None:
        """Adds a delta's tokens to the usage so far."""
        self._new += len(delta.token_ids)

    def of(self, choice: dict[str, Any]) -> str:
        """The event of a chunk with this choice."""
        after = self._after
        if self._continuous:
            after = f', "usage": {dumped(_counts(self._prompt, self._new))}}}\n\n'
        return f'{self._before}"choices": [{dumped(choice)}]{after}'

    def last(self, outputs: list[RequestOutput]) -> str:
        """The event of the usage, if it is asked for."""
        return f'{self._before}"choices": [], "usage": {dumped(usage_of(outputs))}}}\n\n' if self._usage else ""


def identifier(prefix: str) -> str:
    """A new id."""
    return f"{prefix}-{uuid.uuid4().hex}"


def usage_of(outputs: list[RequestOutput]) -> dict[str, Any]:
    """The tokens of requests."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    new = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    cached = sum(output.cached_tokens for output in outputs)
    return {**_counts(prompt, new), "prompt_tokens_details": {"cached_tokens": cached}}


def _counts(prompt: int, new: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
