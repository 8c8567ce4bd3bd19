"""The engine as the endpoints use it: requests started, refused and counted."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncGenerator, Sequence

from ling3.engine.outputs import Delta, Stats
from ling3.engine.sampling_params import SamplingParams
from ling3.runtime.parameters import ParameterError
from ling3.serve import Engine, QueueFull
from ling3.server import log
from ling3.server.errors import ApiError, wrong
from ling3.server.metrics import Metrics
from ling3.text.tokenizer import Tokenizer

LONG, ONE_LONG = 2**18, threading.Lock()
"""Characters above which a text is tokenized alone, as some 300 bytes per token are needed meanwhile."""
LONGEST_TEXT, PER_TOKEN = 2**20, 8
"""Characters of a prompt: the most, or so many for each token of the context if they are more."""
ANSWER = 1.0
"""Seconds that the engine has to tell its counts."""
PATIENCE = 120.0
"""Seconds of silence, as while a program compiles, after which it counts as hung."""

Deltas = AsyncGenerator[tuple[int, Delta], None]


@dataclasses.dataclass
class Service:
    """The engine and what the endpoints know of it."""

    engine: Engine
    tokenizer: Tokenizer
    name: str
    """The model's name for clients."""
    allow_unknown_fields: bool = False
    """Whether fields of requests that are unknown are ignored, and not refused."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    large_bytes: int = 0
    """Bytes of large bodies whose requests are under way, beyond the first `LARGE` of each."""
    draining: bool = False
    """True once the server is to end: it takes no more requests for completions."""
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    _silent: float | None = None

    def check_model(self, name: str | None) -> None:
        """ApiError 404 for another model than the one that is served."""
        if name is not None and name != self.name:
            raise ApiError(404, f"the model {name!r:.80} does not exist", "model", "model_not_found")

    def room(self, tokens: int, param: str, least: int = 1) -> int:
        """How many tokens an answer to so many may have; ApiError 400 if fewer than `least`."""
        room = self.engine.left(tokens)
        if tokens == 0:
            raise wrong(param, "is empty")
        if room < least:
            limit = f"the context has room for {self.engine.left(0)} with the answer"
            raise wrong(param, f"has {tokens} tokens, and {limit}", "context_length_exceeded")
        return room

    def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text, of long ones one at a time; ApiError 400 for what is far too long or cannot be encoded."""
        longest = max(LONGEST_TEXT, PER_TOKEN * self.engine.max_model_len)
        if len(text) > longest:
            message = f"is a text of {len(text)} characters, expected at most {longest}"
            raise wrong(param, message, "context_length_exceeded")
        try:
            with contextlib.nullcontext() if len(text) <= LONG else ONE_LONG:
                return self.tokenizer.encode(text, add_special_tokens)
        except ValueError as error:
            raise ApiError(400, self.plain(error), param) from None

    def plain(self, error: Exception) -> str:
        """An error's message without paths of this machine."""
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
        self._check_open()
        deltas = self.engine.astream_all(prompts, params, name=name)
        try:
            first = await anext(deltas)
        except ParameterError as error:
            message, field = self.plain(error), error.field
            if field == "structured" and grammar is not None:
                message, field = message.replace(field, grammar, 1), grammar
            raise ApiError(400, message, field) from None
        except QueueFull:
            raise ApiError(429, "the queue is full: try again", None, "queue_full", {"Retry-After": "1"}) from None
        entry = log.current.get() or log.Entry("")
        entry.prompt_tokens += sum(map(len, prompts))
        return self._counted(first, deltas, entry)

    async def _counted(self, first: tuple[int, Delta], rest: Deltas, entry: log.Entry) -> Deltas:
        """The deltas, counted; ApiError 500 for a completion that ended in an error."""
        item: tuple[int, Delta] | None = first
        async with contextlib.aclosing(rest):
            while item is not None:
                _, delta = item
                entry.completion_tokens += len(delta.token_ids)
                if delta.output is not None:
                    self.metrics.ended(delta.output)
                if delta.finish_reason == "error":
                    # Its own words may be those of a fault, which are the server's affair.
                    raise ApiError(500, "the engine ended this request in an error", code="engine_error")
                yield item
                item = await anext(rest, None)

    def _check_open(self) -> None:
        """ApiError 503 once the server or its engine ends."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", None, "shutting_down", {"Retry-After": "1"})
        if not self.engine.alive:
            raise ApiError(503, "the engine has ended", None, "engine_ended")

    async def stats(self) -> Stats | None:
        """The engine's counts; None if it does not answer within `ANSWER` seconds, as while it compiles."""
        if self.engine.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER):
                    return await self.engine.astats()
        return None

    async def check_health(self) -> None:
        """ApiError 503 if requests had better go elsewhere."""
        self._check_open()
        now, answered = time.monotonic(), await self.stats() is not None
        self._silent = None if answered else self._silent or now
        if self._silent is not None and now - self._silent > PATIENCE:
            raise ApiError(503, "the engine does not answer", code="engine_silent")
