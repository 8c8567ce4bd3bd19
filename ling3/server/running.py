"""Requests on the engine: refused when the queue is full, and aborted when the client goes away."""

# pyright: reportMissingImports=false
# What it takes is an extra, and types are checked without it too.

import asyncio
import contextlib
import dataclasses
import operator
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from ling3.engine.outputs import Delta, Stats
from ling3.engine.sampling_params import SamplingParams
from ling3.serve import Engine, QueueFull
from ling3.server import log
from ling3.server.errors import ApiError
from ling3.server.metrics import Metrics
from ling3.text.json_text import dumped
from ling3.text.tokenizer import Tokenizer

SHORT = 4096
"""Tokens or characters up to which preparing a prompt takes less than handing it to another thread and back."""
LONG, ONE_LONG = 2**18, threading.Lock()
"""Characters above which a text is tokenized alone, as some 300 bytes per token are needed meanwhile."""
LONGEST_TEXT, PER_TOKEN = 2**20, 8
"""Characters of a prompt: the most, or so many for each token of the context if they are more."""

Result = TypeVar("Result")
Deltas = AsyncIterator[tuple[int, Delta]]

ANSWER = 1.0
"""Seconds that the engine has to tell its counts."""
PATIENCE = 120.0
"""Seconds of silence, as while a program compiles, after which it counts as hung."""


@dataclasses.dataclass
class Service:
    """The engine and what the endpoints know of it."""

    engine: Engine
    tokenizer: Tokenizer
    name: str
    """The model's name for clients."""
    max_queue: int
    """How many completions may wait beyond those in slots."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    unfinished: int = 0
    """Completions under way, waiting or running."""
    large_bytes: int = 0
    """Bytes of large bodies whose requests are under way, beyond the first `LARGE` of each."""
    draining: bool = False
    """True once the server is to end: it takes no more requests for completions."""
    allow_unknown_fields: bool = False
    """Whether fields of requests that are unknown are ignored, and not refused."""
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    _silent: float | None = None

    def check_model(self, name: str) -> None:
        """ApiError 404 for another model than the one that is served."""
        if name != self.name:
            raise ApiError(404, f"the model {name!r:.80} does not exist", "model", "model_not_found")

    def room(self, tokens: int, param: str, least: int = 1) -> int:
        """How many tokens an answer to so many may have; ApiError 400 if fewer than `least`."""
        room = self.engine.left(tokens)
        if tokens == 0:
            raise ApiError(400, f"{param} is empty", param)
        if room < least:
            limit = self.engine.left(0)
            message = f"{param} has {tokens} tokens, and the context has room for {limit} with the answer"
            raise ApiError(400, message, param, "context_length_exceeded")
        return room

    def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, of long ones one at a time; ApiError 400 if it is far too long for the context."""
        longest = max(LONGEST_TEXT, PER_TOKEN * self.engine.max_model_len)
        if len(text) > longest:
            message = f"{param} is a text of {len(text)} characters, expected at most {longest}"
            raise ApiError(400, message, param, "context_length_exceeded")
        with contextlib.nullcontext() if len(text) <= LONG else ONE_LONG:
            return self.tokenizer.encode(text, add_special_tokens)

    def plain(self, error: Exception) -> str:
        """An error's message without paths."""
        message = str(error)
        for template in self.tokenizer.chat_templates.values():
            message = message.replace(template.origin, "the chat template")
        return message.replace(str(self.tokenizer.directory), "the model")

    async def start(
        self, prompts: Sequence[list[int]], params: SamplingParams, name: str, grammar: str | None = None
    ) -> Deltas:
        """The deltas of all prompts, with the first one at hand; ApiError where the engine refuses any of them.

        Errors call the prompts by `name`, and those of `params.structured` name the field `grammar`.
        """
        count = params.n * len(prompts)
        self._check_takes(count)
        try:
            if params.structured is None and sum(map(len, prompts)) <= SHORT:
                self._check(prompts, params, name)
            else:
                await asyncio.to_thread(self._check, prompts, params, name)
        except ValueError as error:
            message = self.plain(error)
            fields = {
                "structured": grammar,
                name: name,
                **{each: each for each in ("stop_token_ids", "logit_bias", "n")},
            }
            words = message.removeprefix("sampling parameters: ").replace(":", " ").replace(",", " ").split()
            if grammar is not None and words and words[0] == "structured":
                message = message.replace("structured", grammar, 1)
            raise ApiError(400, message, fields.get(words[0]) if words else None) from None
        self._check_takes(count)  # others have come meanwhile
        deltas = self._merged(prompts, params)
        try:
            first = await anext(deltas)
        except QueueFull:
            raise ApiError(429, "the queue is full: try again", None, "queue_full", {"Retry-After": "1"}) from None
        entry = log.current.get() or log.Entry("")
        entry.prompt_tokens += sum(map(len, prompts))
        return self._counted(first, deltas, entry)

    async def _counted(self, first: tuple[int, Delta], rest: Deltas, entry: log.Entry) -> Deltas:
        item: tuple[int, Delta] | None = first
        async with contextlib.aclosing(rest):  # pyright: ignore[reportArgumentType]
            while item is not None:
                _, delta = item
                entry.completion_tokens += len(delta.token_ids)
                if delta.output is not None:
                    self.metrics.ended(delta.output)
                yield item
                item = await anext(rest, None)

    def _check_takes(self, count: int) -> None:
        """ApiError where so many completions more are not taken: 503 at the end, 429 where the queue is full."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", None, "shutting_down", {"Retry-After": "1"})
        if not self.engine.alive:
            raise ApiError(503, "the engine has ended", None, "engine_ended")
        if count and self.unfinished + count > self.engine.settings.max_running_requests + self.max_queue:
            raise ApiError(429, "the queue is full: try again", None, "queue_full", {"Retry-After": "1"})

    async def stats(self) -> Stats | None:
        """The engine's counts; None if it does not answer within `ANSWER` seconds, as while it compiles."""
        if self.engine.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER):
                    return await self.engine.astats()
        return None

    async def check_health(self) -> None:
        """ApiError 503 if requests had better go elsewhere."""
        self._check_takes(0)
        now, answered = time.monotonic(), await self.stats() is not None
        self._silent = None if answered else self._silent or now
        if self._silent is not None and now - self._silent > PATIENCE:
            raise ApiError(503, "the engine does not answer", code="engine_silent")

    def _check(self, prompts: Sequence[list[int]], params: SamplingParams, name: str) -> None:
        for prompt in prompts:
            self.engine.check(prompt, params, name=name)

    async def _merged(self, prompts: Sequence[list[int]], params: SamplingParams) -> Deltas:
        if len(prompts) == 1:
            self.unfinished += params.n
            try:
                async with contextlib.aclosing(self.engine.astream(prompts[0], params)) as only:  # pyright: ignore[reportArgumentType]
                    async for delta in only:
                        yield 0, delta
            finally:
                self.unfinished -= params.n
            return
        news: asyncio.Queue[Any] = asyncio.Queue()

        async def follow(index: int, prompt: list[int]) -> None:
            try:
                async for delta in self.engine.astream(prompt, params):
                    news.put_nowait((index, delta))
            except Exception as error:
                news.put_nowait(error)

        left = params.n * len(prompts)
        self.unfinished += left
        count = left
        tasks = [asyncio.create_task(follow(i, prompt)) for i, prompt in enumerate(prompts)]
        try:
            while left:
                item = await news.get()
                if isinstance(item, Exception):
                    raise item
                left -= item[1].finish_reason is not None
                yield item
        finally:
            self.unfinished -= count
            for task in tasks:
                task.cancel()  # leaving `astream` aborts its request


async def while_there(request: Request, work: Awaitable[Result]) -> Result | Response:
    """What comes of the work, which is cancelled if the client goes away."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else Response(status_code=499)
    finally:
        for each in (task, watch):
            each.cancel()


class Events(Response):
    """Server-sent events, then [DONE]; errors are an event, and leaving ends the events.

    An item of `events` is the text of those that are sent at once. `failed` makes the object of an event of an error,
    by default OpenAI's; without `done` there is no [DONE].
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[str],
        failed: Callable[[ApiError], dict[str, Any]] = operator.attrgetter("body"),
        done: bool = True,
    ):
        super().__init__(headers={"Cache-Control": "no-store"})
        del self.headers["content-length"]
        self._events, self._failed, self._end = events, failed, "data: [DONE]\n\n" if done else ""

    def failure(self, error: ApiError) -> str:
        """What ends the stream in an error."""
        return event(self._failed(error)) + self._end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them; whoever ends the stream early finds it as the scope's `events`."""
        scope["events"] = self
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})

        async def body() -> None:
            async def put(text: str, more: bool = True) -> None:
                await send({"type": "http.response.body", "body": text.encode(), "more_body": more})

            end = self._end
            async with contextlib.aclosing(self._events) as events:  # pyright: ignore[reportArgumentType]
                try:
                    async for some in events:
                        await put(some)
                except ApiError as error:
                    end = self.failure(error)
                except Exception:
                    log.logger.exception("the engine failed")
                    end = self.failure(ApiError(500, "the engine failed"))
            await put(end, False)

        await while_there(Request(scope, receive), body())


def event(said: dict[str, Any]) -> str:
    """An object as a server-sent event, with the name that it has as `type`, if any."""
    name = f"event: {said['type']}\n" if "type" in said else ""
    return f"{name}data: {dumped(said)}\n\n"


class StrictResponse(JSONResponse):
    """An answer as strict JSON in UTF-8."""

    def render(self, content: Any) -> bytes:
        """The body; ValueError for numbers that are not finite."""
        return dumped(content).encode()


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

    def last(self, lasts: Iterable[Delta]) -> str:
        """The event of the usage, if it is asked for, by the last delta of each request."""
        return f'{self._before}"choices": [], "usage": {dumped(usage_of(lasts))}}}\n\n' if self._usage else ""


def identifier(prefix: str) -> str:
    """A new id."""
    return f"{prefix}-{uuid.uuid4().hex}"


def check(delta: Delta) -> None:
    """ApiError 500 for a completion that ended in an error."""
    if delta.finish_reason == "error":
        # Its own words may be those of a fault, which are the server's affair.
        raise ApiError(500, "the engine ended this request in an error", code="engine_error")


def usage_of(lasts: Iterable[Delta]) -> dict[str, Any]:
    """The tokens of requests, by the last delta of each."""
    outputs = [delta.output for delta in lasts if delta.output is not None]
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    new = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    cached = sum(output.cached_tokens for output in outputs)
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {**_counts(prompt, new), **details}


def _counts(prompt: int, new: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
