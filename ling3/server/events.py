"""Responses in the format of a protocol: one JSON body, or server-sent events."""

import abc
import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ling3.engine.outputs import Delta, RequestOutput
from ling3.server import log
from ling3.server.errors import ApiError
from ling3.server.fields import Fields
from ling3.server.service import Deltas
from ling3.text.json_text import dumped


class ProtocolAnswer(abc.ABC):
    """The answer to one request in the format of its protocol. Events are returned as the text to send."""

    @abc.abstractmethod
    async def whole(self, outputs: list[RequestOutput]) -> str:
        """The JSON body, from the outputs of all prompts."""

    @abc.abstractmethod
    def begin(self) -> str:
        """The events before those of the first token."""

    @abc.abstractmethod
    async def news(self, place: int, delta: Delta) -> str:
        """The events for a delta of the prompt with index `place`."""

    @abc.abstractmethod
    def end(self, outputs: list[RequestOutput]) -> str:
        """The events after those of the last token."""

    @abc.abstractmethod
    def failed(self, error: ApiError) -> str:
        """The last events of a stream that ends in an error."""


async def respond(answer: ProtocolAnswer, deltas: Deltas, stream: bool | None, prompts: int = 1) -> Response:
    """The response: events as the deltas of the prompts arrive, or one body after the last of them."""
    if stream:
        return Events(answer, deltas, prompts)
    async with contextlib.aclosing(deltas):
        outputs = {place: delta.output async for place, delta in deltas if delta.output is not None}
    return Response(await answer.whole(_in_order(outputs)), media_type="application/json")


class Events(Response):
    """A stream of events, at most one write per delta. Errors become events, and a disconnect closes the deltas."""

    media_type = "text/event-stream"

    def __init__(self, answer: ProtocolAnswer, deltas: Deltas, prompts: int):
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._answer, self._deltas, self._prompts = answer, deltas, prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events. The scope gets the answer, for whoever has to end the stream with an error."""
        scope["answer"] = self._answer
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def put(text: str, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

        failed = ""
        try:
            async with contextlib.aclosing(self._deltas):
                text, outputs = self._answer.begin(), dict[int, RequestOutput]()
                async for place, delta in self._deltas:
                    if delta.output is not None:
                        outputs[place] = delta.output
                    text += await self._answer.news(place, delta)
                    if text and len(outputs) < self._prompts:
                        await put(text)
                        text = ""
            await put(text + self._answer.end(_in_order(outputs)))
        except ApiError as error:
            failed = self._answer.failed(error)
        except Exception:
            log.logger.exception("the engine failed")
            failed = self._answer.failed(ApiError(500, "the engine failed"))
        await put(failed, False)


def _in_order(outputs: dict[int, RequestOutput]) -> list[RequestOutput]:
    return [outputs[place] for place in sorted(outputs)]


def event(said: dict[str, Any]) -> str:
    """An object as a server-sent event, named by its `type` if it has one."""
    name = f"event: {said['type']}\n" if "type" in said else ""
    return f"{name}data: {dumped(said)}\n\n"


DONE = "data: [DONE]\n\n"


class Choices(ProtocolAnswer):
    """An answer as OpenAI's `choices`: one body with the usage, or chunks that end in [DONE].

    The usage comes in a last chunk if `stream_options` request it, and the usage so far in every chunk with
    `continuous_usage_stats`. Log-probabilities of a finished prompt are formatted on another thread, as many take
    seconds.
    """

    def __init__(self, head: dict[str, Any], asked: Fields, prompt_tokens: int, scored: bool, chunk: str):
        options = asked.stream_options
        self._usage = options is not None and bool(options.include_usage)
        self._continuous = options is not None and bool(options.continuous_usage_stats)
        self._head, self._prompt, self._new, self._scored = head, prompt_tokens, 0, scored
        self._before = f"data: {dumped({**head, 'object': chunk})[:-1]}, "  # encoded once
        self._after = ', "usage": null}\n\n' if self._usage else "}\n\n"

    @abc.abstractmethod
    def complete(self, place: int, output: RequestOutput) -> Iterable[dict[str, Any]]:
        """The choices of a finished prompt, the one with index `place`."""

    @abc.abstractmethod
    def opening(self) -> Iterable[dict[str, Any]]:
        """The choices of the first chunks, which come before any token."""

    @abc.abstractmethod
    def new(self, place: int, delta: Delta) -> Iterable[dict[str, Any]]:
        """The choices of the chunks for one delta."""

    async def whole(self, outputs: list[RequestOutput]) -> str:
        """The head, the choices and the usage. Choices are encoded one by one, as each encoding holds the GIL."""

        def choices() -> str:
            made = (choice for place, output in enumerate(outputs) for choice in self.complete(place, output))
            return ", ".join(map(dumped, made))

        usage = dumped(usage_of(outputs))
        return f'{dumped(self._head)[:-1]}, "choices": [{await self._made(choices, True)}], "usage": {usage}}}'

    def begin(self) -> str:
        """The chunks that come before any token."""
        return "".join(map(self._chunk, self.opening()))

    async def news(self, place: int, delta: Delta) -> str:
        """The chunks for one delta of the engine."""
        self._new += len(delta.token_ids)
        return await self._made(lambda: "".join(map(self._chunk, self.new(place, delta))), delta.output is not None)

    def end(self, outputs: list[RequestOutput]) -> str:
        """The usage, if it is requested, and [DONE]."""
        usage = f'{self._before}"choices": [], "usage": {dumped(usage_of(outputs))}}}\n\n' if self._usage else ""
        return usage + DONE

    def failed(self, error: ApiError) -> str:
        """The error object and [DONE], which end a stream."""
        return event(error.body) + DONE

    async def _made(self, make: Callable[[], str], answered: bool) -> str:
        return await asyncio.to_thread(make) if self._scored and answered else make()

    def _chunk(self, choice: dict[str, Any]) -> str:
        after = self._after
        if self._continuous:
            after = f', "usage": {dumped(_counts(self._prompt, self._new))}}}\n\n'
        return f'{self._before}"choices": [{dumped(choice)}]{after}'


def head_of(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The first fields of a body and of its chunks."""
    return {"id": identifier(prefix), "object": kind, "created": int(time.time()), "model": model}


def identifier(prefix: str) -> str:
    """A new random id with a prefix."""
    return f"{prefix}-{uuid.uuid4().hex}"


def usage_of(outputs: list[RequestOutput]) -> dict[str, Any]:
    """The `usage` of a request: its prompt, answer and cached tokens."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    new = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    cached = sum(output.cached_tokens for output in outputs)
    return {**_counts(prompt, new), "prompt_tokens_details": {"cached_tokens": cached}}


def _counts(prompt: int, new: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
