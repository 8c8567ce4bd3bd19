"""The engine: continuous batching over one model, in this process, from scripts, threads and asyncio.

What runs when is `loop.py`'s affair, and the device `runner.py`'s; here requests come in and answers go out.
"""

import asyncio
import functools
import itertools
import os
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Literal

import jax

from ling3 import checkpoint
from ling3.checkpoint import hub
from ling3.engine.guard import Guard
from ling3.engine.intake import (
    MAX_PADDINGS,
    MAX_PAGES,
    MAX_SLOTS,
    MAX_TOKENS,
    Intake,
    Truncate,
    check_settings,
    listed,
)
from ling3.engine.loop import Loop
from ling3.engine.outputs import Delta, RequestOutput, Stats
from ling3.engine.pool import DECODE_STEPS
from ling3.engine.request import Request
from ling3.engine.runner import Runner, Shapes, check_memory, pages_that_fit, smallest
from ling3.engine.sampling_params import SamplingParams
from ling3.execution import Execution
from ling3.model import CausalLM
from ling3.runtime import compilation_cache
from ling3.runtime.entry_checks import refuse_fork
from ling3.runtime.interrupts import held_back
from ling3.runtime.progress import progress
from ling3.text.tokenizer import Tokenizer, load_tokenizer


class QueueFull(RuntimeError):
    """`max_queue` requests are waiting already: let some finish first."""


class Engine:
    """Continuous batching over one model, in this process.

    `max_running_requests` slots hold the running requests' states; pages of `page_size` tokens hold their latents, as
    many as fit into `mem_fraction` of the memory that the weights leave free, or `num_pages`. Prompts go in by chunks
    at multiples of `chunked_prefill_size` tokens, padded to the smallest of `token_paddings` that holds them. A request
    may have `max_model_len` tokens (the config's max_position_embeddings without it), and `max_queue` may wait.

    `decode_rows` requests share a decode call of `decode_steps` tokens: all slots, but at most 16 on a CPU. The last
    bits of an answer may depend on this number, and engines of different sizes agree where it is given. With
    `batch_invariant=False` few running requests share a smaller call instead, which is faster for them; then the last
    bits of an answer may depend on how many there are.

    Methods may be called from any thread; one at a time moves the loop. A callback may submit and abort, but cannot
    move the loop that called it. Ctrl-C waits for the end of a turn. A fault of the engine's own, such as a device out
    of memory, ends every request in `error` and is raised in everyone who waits for one; the engine begins anew.

    `execution` is how the model runs (chunk sizes, kernels), by default as suits the platform.

    What it compiles is kept for later processes, as `ling3.runtime.compilation_cache` says.

    `settings` is what it runs with. Raises ValueError for senseless settings, for more slots and pages than there is
    memory for, and if tokenizer and model do not fit.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None = None,
        max_running_requests: int = 64,
        page_size: int = 256,
        chunked_prefill_size: int = 512,
        token_paddings: Sequence[int] = (16, 128, 512),
        max_model_len: int | None = None,
        mem_fraction: float = 0.6,
        max_queue: int = 1024,
        num_pages: int | None = None,
        decode_rows: int | None = None,
        decode_steps: int = 8,
        batch_invariant: bool = True,
        execution: Execution | None = None,
    ):
        refuse_fork()
        compilation_cache.switch_on()
        config = model.config
        if tokenizer is not None:
            tokenizer.check_fits(config.vocab_size)
        max_model_len = int(config.max_position_embeddings) if max_model_len is None else max_model_len
        optional = {"num_pages": (num_pages, 1, MAX_PAGES), "decode_rows": (decode_rows, 1, MAX_SLOTS)}
        check_settings(
            max_running_requests=(max_running_requests, 1, MAX_SLOTS),
            page_size=(page_size, 1, MAX_TOKENS),
            chunked_prefill_size=(chunked_prefill_size, 1, MAX_TOKENS),
            max_model_len=(max_model_len, 1, config.max_position_embeddings),
            max_queue=(max_queue, 1, None),
            decode_steps=(decode_steps, 1, DECODE_STEPS),
            **{"the number of token_paddings": (len(token_paddings), 0, MAX_PADDINGS)},
            **{f"token_paddings[{i}]": (width, 1, MAX_TOKENS) for i, width in enumerate(token_paddings[:MAX_PADDINGS])},
            **{name: setting for name, setting in optional.items() if setting[0] is not None},
        )
        if max(token_paddings, default=0) < chunked_prefill_size:
            raise ValueError(
                f"token_paddings are {tuple(token_paddings)}, expected one of at least chunked_prefill_size, which is "
                f"{chunked_prefill_size}"
            )
        if not 0 < mem_fraction <= 1:
            raise ValueError(f"engine settings: mem_fraction is {mem_fraction!r}, expected a number in (0, 1]")
        if decode_rows is None:
            decode_rows = min(max_running_requests, 16) if jax.default_backend() == "cpu" else max_running_requests
        columns = -(-max_model_len // page_size)
        if num_pages is None:
            num_pages = pages_that_fit(model, max_running_requests, columns, page_size, float(mem_fraction))
            num_pages = min(num_pages, MAX_PAGES)
        else:
            check_memory(model, max_running_requests, num_pages, page_size)
        widths = sorted(set(token_paddings))
        self.settings = {
            "max_running_requests": max_running_requests,
            "page_size": page_size,
            "chunked_prefill_size": chunked_prefill_size,
            "token_paddings": tuple(widths),
            "max_model_len": max_model_len,
            "max_queue": max_queue,
            "num_pages": num_pages,
            "decode_rows": decode_rows,
            "decode_steps": decode_steps,
            "batch_invariant": batch_invariant,
        }
        self.tokenizer, self.max_model_len = tokenizer, max_model_len
        self._intake = Intake(
            tokenizer=tokenizer,
            vocab=config.vocab_size,
            ends=sorted({*config.eos_token_id, *(tokenizer.eos_token_ids if tokenizer else ())}),
            room=max_model_len,
            pages=num_pages,
            page_size=page_size,
            max_queue=max_queue,
        )
        shapes = Shapes(
            slots=max_running_requests,
            pages=num_pages,
            page_size=page_size,
            columns=columns,
            widths=tuple(widths[: widths.index(smallest(widths, chunked_prefill_size)) + 1]),
            rows=(decode_rows,) if batch_invariant else _doublings(max_running_requests),
        )
        self._guard = Guard()
        self._loop = Loop(Runner(model, shapes, execution), chunked_prefill_size, decode_steps, self._guard.hand_out)
        self._ids = itertools.count()
        self._outbox: list[Delta] = []
        self._drivers: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], dtype: Any = None, *, revision: str | None = None, **settings: Any
    ) -> "Engine":
        """The engine over a checkpoint directory, a hub id, or `"nano"`, with its tokenizer, of the same commit.

        `dtype` and `revision` are `ling3.load`'s; `settings` are the constructor's.
        """
        commit = hub.pin(path, revision)
        tokenizer = load_tokenizer(path, revision=commit)
        return cls(checkpoint.load(path, dtype, revision=commit), tokenizer, **settings)

    # Asking

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        truncate: Truncate = None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> int:
        """Puts a request in the queue and returns its id; `step` moves it on and returns its deltas.

        `prompt` is a text, a list of token ids, or a list of chat messages (dicts with `role` and `content`). With
        `on_delta` the deltas go there instead; if it raises, the request ends in `error`. Raises QueueFull, and
        ValueError for what can never be answered.
        """
        request = self._request(prompt, params, truncate, "prompt")
        request.report = self._outbox.append
        request.deliver = request.report if on_delta is None else on_delta
        try:
            self._enqueue(request)
        except BaseException:
            self._abort(request)
            raise
        return request.request_id

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate: Truncate = None,
        on_delta: Callable[[Delta], None] | None = None,
        on_interrupt: Literal["raise", "return"] = "raise",
    ) -> list[RequestOutput]:
        """The answers to prompts, in their order, with a progress bar once it takes over two seconds.

        `prompts` is a list of what `submit` takes, or just one of them; `params` are for all, or one for each. All are
        checked before the first runs, and as many wait at once as the queue holds. On Ctrl-C every slot is freed;
        `on_interrupt="return"` then returns what there is, with `abort` for what was not finished.
        """
        prompts = listed(prompts)
        several = isinstance(params, Sequence)
        each = list(params) if several else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params for {len(prompts)} prompts, expected one for all or one for each")
        requests = [
            self._request(prompt, p, truncate, f"prompt {i}")
            for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))
        ]
        with held_back() as interrupt, progress("generating", sum(r.params.n for r in requests)) as advance:
            for request in requests:
                request.deliver = _counted(on_delta, advance)
            coming, unfinished = deque(requests), deque(requests)
            try:
                while unfinished:
                    while coming and self._enqueued(coming[0]):
                        coming.popleft()
                    self._move()
                    interrupt.pass_on()
                    while unfinished and unfinished[0].finished:
                        unfinished.popleft()
            except KeyboardInterrupt:
                if on_interrupt == "raise":
                    raise
            finally:
                with self._guard.books():
                    for request in requests:
                        self._abort(request)
                    self._guard.forget()
        fault = next((request.fault for request in requests if request.fault is not None), None)
        if fault is not None:
            raise fault
        return [output for request in requests if (output := request.output()) is not None]

    def stream(
        self, prompt: Any, params: SamplingParams | None = None, *, truncate: Truncate = None
    ) -> Iterator[Delta]:
        """A request's deltas as they come; leaving the loop aborts it. Checked and queued when called."""
        deltas: deque[Delta] = deque()
        request = self._request(prompt, params, truncate, "prompt")
        request.deliver = deltas.append
        reader = self._stream(request, deltas)
        next(reader)  # an iterator that was never begun would not notice that it is dropped
        self._enqueue(request)
        return reader

    def _stream(self, request: Request, deltas: deque[Delta]) -> Iterator[Any]:
        end = functools.partial(self._abort, request)
        try:
            yield None
            finished = 0
            while finished < request.params.n:
                if not deltas:
                    self._move()
                while deltas:
                    delta = deltas.popleft()
                    finished += delta.finish_reason is not None
                    yield delta
            if request.fault is not None:
                raise request.fault
        finally:
            self._guard.dropped.append(end)  # one call into C: no Ctrl-C comes before it
            self._guard.sweep()

    async def astream(
        self, prompt: Any, params: SamplingParams | None = None, *, truncate: Truncate = None
    ) -> AsyncIterator[Delta]:
        """The same for asyncio, any number of them at once; the loop moves in a thread, and leaving it aborts.

        Checked and queued when the first delta is asked for.
        """
        events, news, deltas = asyncio.get_running_loop(), asyncio.Event(), deque[Delta]()

        def deliver(delta: Delta) -> None:
            deltas.append(delta)
            events.call_soon_threadsafe(news.set)

        request = self._request(prompt, params, truncate, "prompt")
        request.deliver = deliver
        end = functools.partial(self._abort, request)
        try:
            await asyncio.to_thread(self._enqueue, request)  # the books may be in use for as long as a program compiles
            finished, driver = 0, None
            while finished < request.params.n:
                if driver is None or driver.done():
                    driver = self._drive(events)
                    driver.add_done_callback(lambda _: news.set())
                await news.wait()
                news.clear()
                while deltas:
                    delta = deltas.popleft()
                    finished += delta.finish_reason is not None
                    yield delta
            if request.fault is not None:
                raise request.fault
        finally:
            self._guard.dropped.append(end)  # one call into C: no Ctrl-C comes before it
            self._guard.sweep()

    def _drive(self, events: asyncio.AbstractEventLoop) -> "asyncio.Task[None]":
        """The task that moves the loop for all streams of an event loop, while there is work."""

        async def drive() -> None:
            while self._loop.has_work:
                await asyncio.to_thread(self._move)

        def driven(driver: "asyncio.Task[None]") -> None:
            if self._drivers.get(events) is driver:
                del self._drivers[events]
            if not driver.cancelled():
                driver.exception()  # every reader raises it

        if events not in self._drivers or self._drivers[events].done():
            self._drivers[events] = events.create_task(drive())
            self._drivers[events].add_done_callback(driven)
        return self._drivers[events]

    def abort(self, request_id: int) -> bool:
        """Ends a request with `abort`, wherever it is; False if there is none of this id (any more)."""
        with self._guard.books():
            request = self._loop.requests.get(request_id)
            aborted = request is not None and self._abort(request)
        self._guard.pass_on()
        return aborted

    # The loop

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything, or has anything to return."""
        with self._guard.books():
            return bool(self._loop.has_work or self._outbox)

    def step(self) -> list[Delta]:
        """One turn of the loop; returns the deltas of submitted requests that are new since the last step."""
        self._move()
        with self._guard.books():
            deltas = list(self._outbox)
            self._outbox.clear()
        return deltas

    def _move(self) -> None:
        """One turn of the loop."""
        with self._guard.moving():
            try:
                with self._guard.books():
                    before = self._loop.launch()
                jax.block_until_ready([call.choice for call in before])  # meanwhile others may submit and abort
                with self._guard.books():
                    self._loop.read(before)
            except Exception as error:
                self._fail(error)
                raise
            self._guard.pass_on()

    def _fail(self, error: Exception) -> None:
        with self._guard.books():
            self._loop.fail(error)

    # Around it

    def warmup(self, first_token: bool = False) -> None:
        """Compiles every program, with a progress bar; none is compiled after that. Ctrl-C waits for those begun.

        With `first_token` only what a request's first token needs: it comes sooner, and the second waits for the rest.
        """
        shapes = self._loop.runner.shapes
        total = len(shapes.widths) + (1 if first_token else len(shapes.rows) + 4)
        with self._guard.moving() as interrupt, progress("compiling", total) as advance:
            programs, compiled = self._loop.runner.warmup(first_token), ""
            while compiled is not None:
                try:
                    with self._guard.books():
                        compiled = next(programs, None)
                except Exception as error:
                    self._fail(error)
                    raise
                advance(int(compiled is not None))
                interrupt.pass_on()

    def __repr__(self) -> str:
        runner, scheduler = self._loop.runner, self._loop.scheduler  # as they are: the books may be in use for long
        size = sum(leaf.size for leaf in jax.tree.leaves(runner.model))
        return (
            f"<Engine: {size:,} parameters, {len(scheduler.running)} of {scheduler.slots} slots running, "
            f"{scheduler.waiting} waiting, {scheduler.pages - scheduler.free_pages} of {scheduler.pages} pages in use>"
        )

    def stats(self) -> Stats:
        """The books, at this moment."""
        with self._guard.books():
            return self._loop.stats()

    def _request(self, prompt: Any, params: SamplingParams | None, truncate: Truncate, name: str) -> Request:
        """The checked request, not yet in the queue."""
        refuse_fork()
        return self._intake.request(next(self._ids), prompt, params, truncate, name)

    def _enqueued(self, request: Request) -> bool:
        """Puts a request in the queue if there is room."""
        with self._guard.books():
            room = self._has_room(request)
            if room:
                self._enqueue(request)
            return room

    def _enqueue(self, request: Request) -> None:
        with self._guard.books():
            if request.finished:  # its reader has left
                return
            if not self._has_room(request):
                raise QueueFull(
                    f"{self._loop.scheduler.waiting} requests are waiting and max_queue is {self._intake.max_queue}: "
                    "step until some have finished, or give the engine a larger max_queue"
                )
            self._loop.enqueue(request)

    def _has_room(self, request: Request) -> bool:
        return self._loop.scheduler.waiting + request.params.n <= self._intake.max_queue

    def _abort(self, request: Request) -> bool:
        """Ends what is unfinished of a request with `abort`; whether anything was."""
        with self._guard.books():
            return self._loop.abort(request)


def _doublings(most: int) -> tuple[int, ...]:
    """2, 4, 8, … and `most`."""
    return tuple(sorted({most, *(2**i for i in range(1, most.bit_length()) if 2**i < most)}))


def _counted(on_delta: Callable[[Delta], None] | None, advance: Callable[[int], None]) -> Callable[[Delta], None]:
    def deliver(delta: Delta) -> None:
        advance(int(delta.finish_reason is not None))
        if on_delta is not None:
            on_delta(delta)

    return deliver
