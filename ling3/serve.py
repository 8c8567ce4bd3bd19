"""The engine: continuous batching over one model, in this process, from scripts, threads and asyncio.

What runs when is `loop.py`'s affair, and the device `runner.py`'s; here requests come in and answers go out.
"""

import asyncio
import dataclasses
import functools
import itertools
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Literal

import jax

from ling3 import checkpoint
from ling3.checkpoint import hub
from ling3.engine.guard import Guard
from ling3.engine.intake import Intake, Truncate, listed
from ling3.engine.loop import Loop
from ling3.engine.outputs import Delta, RequestOutput, Stats
from ling3.engine.request import Request
from ling3.engine.runner import Runner, Shapes, smallest
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings
from ling3.execution import Execution
from ling3.model import CausalLM
from ling3.runtime import compilation_cache
from ling3.runtime.entry_checks import refuse_fork
from ling3.runtime.interrupts import held_back
from ling3.runtime.progress import progress
from ling3.runtime.quoting import shown
from ling3.text.tokenizer import Tokenizer, load_tokenizer


class QueueFull(RuntimeError):
    """`max_queue` requests are waiting already: let some finish first."""


class Engine:
    """Continuous batching over one model, in this process.

    Slots hold the running requests' states and pages their paged caches; `settings` says how many, and how prompts and
    decode steps are batched. Requests have the same bits in any company.

    Methods may be called from any thread; one at a time moves the loop. A callback may submit and abort, but cannot
    move the loop that called it. Ctrl-C waits for the end of a turn. A fault of the engine's own, such as a device out
    of memory, ends every request in `error` and is raised in everyone who waits for one; the engine begins anew.

    `settings` may be given whole, by name (`Engine(model, tokenizer, page_size=16)`), or both, where a name changes a
    single one; `engine.settings` is what it runs with, every None replaced by its number. `execution` is how the model
    runs (chunk sizes, kernels), by default as suits the platform. Compiled programs are kept for later processes, see
    `ling3.runtime.compilation_cache`.

    Raises TypeError for settings that there are not, ValueError for senseless ones and for more slots and pages than
    there is memory for, TokenizerError if tokenizer and model do not fit.
    """

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Tokenizer | None = None,
        settings: EngineSettings | None = None,
        *,
        execution: Execution | None = None,
        **changes: Any,
    ):
        refuse_fork()
        compilation_cache.switch_on()
        config = model.config
        if tokenizer is not None:
            tokenizer.check_fits(config.vocab_size)
        settings = _changed(settings, changes).resolve(model)
        length, pages, decode_rows = settings.max_model_len, settings.num_pages, settings.decode_rows
        assert length is not None and pages is not None and decode_rows is not None, "resolved"
        self.settings, self.tokenizer, self.max_model_len = settings, tokenizer, length
        self._intake = Intake(
            tokenizer=tokenizer,
            vocab=config.vocab_size,
            ends=sorted({*config.eos_token_id, *(tokenizer.eos_token_ids if tokenizer else ())}),
            room=length,
            pages=pages,
            page_size=settings.page_size,
            max_queue=settings.max_queue,
        )
        widths, chunk = settings.token_paddings, settings.chunked_prefill_size
        shapes = Shapes(
            slots=settings.max_running_requests,
            pages=pages,
            page_size=settings.page_size,
            columns=-(-length // settings.page_size),
            widths=tuple(width for width in widths if width <= smallest(widths, chunk)),
            rows=(decode_rows,) if settings.batch_invariant else _doublings(settings.max_running_requests),
        )
        self._guard = Guard()
        self._loop = Loop(Runner(model, shapes, execution), chunk, settings.decode_steps, self._guard.hand_out)
        self._ids = itertools.count()
        self._outbox: list[Delta] = []
        self._drivers: dict[asyncio.AbstractEventLoop, asyncio.Task[None]] = {}

    @classmethod
    def from_pretrained(
        cls,
        path: str | os.PathLike[str],
        dtype: Any = None,
        settings: EngineSettings | None = None,
        *,
        revision: str | None = None,
        execution: Execution | None = None,
        **changes: Any,
    ) -> "Engine":
        """The engine over a checkpoint directory, a hub id, or `"nano"`, with its tokenizer, of the same commit.

        `dtype` and `revision` are `ling3.load`'s; the others are the constructor's.
        """
        settings = _changed(settings, changes)
        commit = hub.pin(path, revision)
        tokenizer = load_tokenizer(path, revision=commit)
        return cls(checkpoint.load(path, dtype, revision=commit), tokenizer, settings, execution=execution)

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
        requests = self._requests(prompts, params, truncate)
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

    def stream_all(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        arrivals: Sequence[float] | None = None,
        truncate: Truncate = None,
    ) -> Generator[tuple[int, Delta], None, None]:
        """The deltas of many requests as they come, each with the index of its prompt.

        A request's last delta has its output. All prompts are checked when this is called, and as many wait at once as
        the queue holds. `arrivals[i]`, ascending, is when request i comes, in seconds after the first delta is asked
        for; without it all come at once. Leaving the iterator aborts what is unfinished.
        """
        requests = self._requests(prompts, params, truncate)
        if arrivals is not None and len(arrivals) != len(requests):
            raise ValueError(f"{len(arrivals)} arrivals for {len(requests)} prompts, expected one for each")
        return self._stream_all(requests, [0.0] * len(requests) if arrivals is None else arrivals)

    def _stream_all(
        self, requests: list[Request], arrivals: Sequence[float]
    ) -> Generator[tuple[int, Delta], None, None]:
        deltas: deque[tuple[int, Delta]] = deque()
        for index, request in enumerate(requests):
            request.deliver = lambda delta, index=index: deltas.append((index, delta))
        coming, finished, begin = deque(zip(arrivals, requests, strict=True)), 0, time.perf_counter()

        def end() -> None:
            for request in requests:
                self._abort(request)

        try:
            while finished < len(requests):
                while coming and coming[0][0] <= time.perf_counter() - begin and self._enqueued(coming[0][1]):
                    coming.popleft()
                if self._loop.has_work:
                    self._move()
                elif coming:
                    time.sleep(max(0.0, coming[0][0] - (time.perf_counter() - begin)))
                while deltas:
                    finished += deltas[0][1].output is not None
                    yield deltas.popleft()
            fault = next((request.fault for request in requests if request.fault is not None), None)
            if fault is not None:
                raise fault
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

    def _requests(
        self, prompts: Any, params: SamplingParams | Sequence[SamplingParams] | None, truncate: Truncate
    ) -> list[Request]:
        """The checked requests of some prompts, not yet in the queue."""
        prompts = listed(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} params for {len(prompts)} prompts, expected one for all or one for each")
        pairs = zip(prompts, each, strict=True)
        return [self._request(prompt, p, truncate, f"prompt {i}") for i, (prompt, p) in enumerate(pairs)]

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


def _changed(settings: EngineSettings | None, changes: dict[str, Any]) -> EngineSettings:
    """The settings with some of them changed; TypeError for a name that none of them has."""
    if settings is not None and not isinstance(settings, EngineSettings):
        raise TypeError(f"settings is {shown(settings)}, expected EngineSettings; give single ones by name")
    names = [field.name for field in dataclasses.fields(EngineSettings)]
    unknown = [name for name in changes if name not in names]
    if unknown:
        raise TypeError(f"no engine setting is called {', '.join(unknown)}; there are {', '.join(names)}")
    return dataclasses.replace(settings or EngineSettings(), **changes)


def _doublings(most: int) -> tuple[int, ...]:
    """2, 4, 8, … and `most`."""
    return tuple(sorted({most, *(2**i for i in range(1, most.bit_length()) if 2**i < most)}))


def _counted(on_delta: Callable[[Delta], None] | None, advance: Callable[[int], None]) -> Callable[[Delta], None]:
    def deliver(delta: Delta) -> None:
        advance(int(delta.finish_reason is not None))
        if on_delta is not None:
            on_delta(delta)

    return deliver
