"""The engine as the endpoints use it: starts, refuses and counts requests."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from ling3.engine.outputs import Delta, Stats
from ling3.engine.sampling_params import SamplingParams
from ling3.runtime.parameters import ParameterError
from ling3.runtime.quoting import named
from ling3.serve import QueueFull
from ling3.server import log
from ling3.server.answering import Answering, Deltas
from ling3.server.errors import ApiError, wrong
from ling3.server.metrics import Metrics
from ling3.text.tokenizer import Tokenizer

LONG, ONE_LONG = 2**18, threading.Lock()
"""Texts of more characters are tokenized one at a time, as this takes some 300 bytes per token."""
LONGEST_TEXT, PER_TOKEN = 2**20, 8
"""The most characters of a prompt: the larger of `LONGEST_TEXT` and `PER_TOKEN` for each token of the context."""
ANSWER = 1.0
"""Seconds that the engine has to report its counts."""
PATIENCE = 120.0
"""Seconds without an answer, for instance during a compilation, after which the engine counts as hung."""


@dataclasses.dataclass
class Service:
    """The engine, and the state of the server that the endpoints share."""

    engine: Answering
    tokenizer: Tokenizer
    name: str
    """The model's name for clients."""
    allow_unknown_fields: bool = False
    """Whether unknown fields of requests are ignored instead of refused."""
    condition: Callable[[], Mapping[str, object]] = dict
    """Returns further fields for the answer of `/health`."""
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    large_bytes: int = 0
    """Bytes of large bodies of running requests, beyond the first `LARGE` of each."""
    draining: bool = False
    """True once the server shuts down: it refuses new completions."""
    metrics: Metrics = dataclasses.field(default_factory=Metrics)
    _silent: float | None = None

    def __post_init__(self) -> None:
        if self.name in self.engine.adapters:
            raise ValueError(f"{self.name!r} is the name of the model and of an adapter: clients need two names")

    @property
    def names(self) -> tuple[str, ...]:
        """The names that clients may give as `model`: the model's, and those of its adapters."""
        return (self.name, *self.engine.adapters)

    def adapter(self, name: str) -> str | None:
        """The adapter of the model that a client names; None for the model alone."""
        return None if name == self.name else name

    def check_model(self, name: str | None) -> None:
        """Raises ApiError 404 for a name that is neither the served model's nor an adapter's."""
        if name is not None and name not in self.names:
            raise ApiError(404, f"the model {name!r:.80} does not exist", "model", "model_not_found")

    def room(self, tokens: int, param: str, least: int = 1) -> int:
        """The most tokens that the answer to a prompt of `tokens` tokens may have.

        Raises ApiError 400 for an empty prompt, and if there is room for fewer than `least`.
        """
        room = self.engine.left(tokens)
        if tokens == 0:
            raise wrong(param, "is empty")
        if room < least:
            limit = f"the context has room for {self.engine.left(0)} with the answer"
            raise wrong(param, f"has {tokens} tokens, and {limit}", "context_length_exceeded")
        return room

    def encode(self, text: str, param: str, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; long texts are encoded one at a time.

        Raises ApiError 400 for a text that is far too long or cannot be encoded.
        """
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
        """An error's message without file paths of this machine."""
        message = str(error)
        for template in self.tokenizer.chat_templates.values():
            message = message.replace(named(template.origin), "the chat template")
        return message.replace(self.tokenizer.name, "the model")

    async def start(
        self, prompts: Sequence[list[int]], params: SamplingParams, name: str, grammar: str | None = None
    ) -> Deltas:
        """Starts requests and returns their deltas, once the first has arrived.

        Errors name the prompts by `name`, and `params.structured` by `grammar`. Raises ApiError if the engine refuses
        any of the prompts.
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
        """Passes on the deltas and counts them. Raises ApiError 500 for a completion that ended in an error."""
        item: tuple[int, Delta] | None = first
        async with contextlib.aclosing(rest):
            while item is not None:
                _, delta = item
                entry.completion_tokens += len(delta.token_ids)
                if delta.output is not None:
                    self.metrics.ended(delta.output)
                if delta.finish_reason == "error":
                    # Its message may describe an internal fault, which is not for clients.
                    raise ApiError(500, "the engine ended this request in an error", code="engine_error")
                yield item
                item = await anext(rest, None)

    def _check_open(self) -> None:
        """Raises ApiError 503 if the server is shutting down or the engine has ended."""
        if self.draining:
            raise ApiError(503, "the server is shutting down", None, "shutting_down", {"Retry-After": "1"})
        if not self.engine.alive:
            raise ApiError(503, "the engine has ended", None, "engine_ended")

    async def stats(self) -> Stats | None:
        """The engine's counts; None if it does not answer within `ANSWER` seconds, for instance while it compiles."""
        if self.engine.alive:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER):
                    return await self.engine.astats()
        return None

    async def check_health(self) -> None:
        """Raises ApiError 503 if clients should use another server: it is shutting down, or the engine hangs."""
        self._check_open()
        now, answered = time.monotonic(), await self.stats() is not None
        self._silent = None if answered else self._silent or now
        if self._silent is not None and now - self._silent > PATIENCE:
            raise ApiError(503, "the engine does not answer", code="engine_silent")
