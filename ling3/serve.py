"""The engine: continuous batching over one model, in this process, from scripts, threads and asyncio.

What runs when is `loop.py`'s affair, and the device `runner.py`'s; here requests come in and answers go out.
"""

import asyncio
import atexit
import contextlib
import functools
import itertools
import math
import os
import queue
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import jax

from ling3 import checkpoint
from ling3.checkpoint import hub
from ling3.engine.actor import Actor, Reader, join_abandoned, result
from ling3.engine.intake import Intake, Truncate, listed
from ling3.engine.journal import Journal, follow, shared
from ling3.engine.loop import Loop, QueueFull
from ling3.engine.origins import origin
from ling3.engine.outputs import Delta, RequestOutput, Stats
from ling3.engine.passes import Passes
from ling3.engine.request import Request
from ling3.engine.runner import Extra, Runner
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings, changed
from ling3.engine.shapes import settle
from ling3.engine.snapshot_layout import Layout
from ling3.execution import Execution
from ling3.intervention import sites
from ling3.model import CausalLM
from ling3.runtime import compilation_cache
from ling3.runtime.entry_checks import refuse_fork
from ling3.runtime.processes import Wire
from ling3.runtime.progress import progress
from ling3.runtime.quoting import shown
from ling3.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Engine", "QueueFull", "Server"]


@runtime_checkable
class Server(Protocol):
    """What answers many prompts: an engine, or a fleet of them."""

    @property
    def settings(self) -> EngineSettings:
        """What it runs with, every None replaced by its number."""
        ...

    @property
    def max_model_len(self) -> int:
        """The most tokens of a request."""
        ...

    @property
    def device_kind(self) -> str:
        """What it runs on, as JAX names it."""
        ...

    def warmup(self, first_token: bool = False) -> None:
        """Compiles what is needed, or what a first token needs."""
        ...

    def stream_all(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate: Truncate = None,
    ) -> Generator[tuple[int, Delta], None, None]:
        """What is new of the answers as it comes, each with the index of its prompt."""
        ...

    def stats(self) -> Stats:
        """The counts at this moment."""
        ...


class Engine:
    """Continuous batching over one model, in this process.

    Slots hold the running requests' states and pages their paged caches; `settings` says how many, and how prompts and
    decode steps are batched. Requests have the same bits in any company.

    Methods may be called from any thread. The engine has a thread of its own, which runs all requests while a caller
    waits for the deltas of any, and does one turn for each `step`. It calls the callbacks of `submit`, which may submit
    and abort, but not wait for the thread that calls them (RuntimeError). KeyboardInterrupt or SystemExit raised there
    is raised in the `step` or `abort` under way, or else in all who wait for deltas.

    Ctrl-C interrupts a caller's wait at once, and the turn under way is completed, so that no request is lost.
    A fault of the engine's own, such as a device out of memory, ends every request in `error` and is raised in everyone
    who waits for one; the engine begins anew. Memory and thread are freed as soon as the engine is dropped, and the
    interpreter's exit waits for the turn under way.

    JAX's context managers are local to a thread. The engine takes over `jax.default_device` and
    `jax.default_matmul_precision` as they are when it is made, and no others; `jax.config.update` holds in all threads.

    `settings` may be given whole, by name (`Engine(model, tokenizer, page_size=16)`), or both, where a name changes a
    single one; `engine.settings` is what it runs with, every None replaced by its number. `execution` is how the model
    runs (chunk sizes, kernels), by default as suits the platform. `passes` are its forward passes over the pool, by
    default `model.step` in one program (`ling3.afd` has others). Compiled programs are kept for later processes, see
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
        passes: Passes | None = None,
        **changes: Any,
    ):
        refuse_fork()
        join_abandoned()
        compilation_cache.switch_on()
        config = model.config
        if tokenizer is not None:
            tokenizer.check_fits(config.vocab_size)
        execution = Execution.default() if execution is None else execution
        settings = changed(settings, changes)
        self._wire = Wire() if model.placement is not None and model.placement.processes > 1 else None
        self._leads = self._wire is None or jax.process_index() == 0
        if self._wire is not None:
            settings = shared(settings, self._wire, self._leads)
        settings, shapes = settle(settings, model, execution)
        length = settings.max_model_len
        assert length is not None, "settled"
        self.settings, self.tokenizer, self.max_model_len = settings, tokenizer, length
        self.device_kind = jax.devices()[0].device_kind
        watches = model.placement is None and (passes is None or passes.watch is not None)
        self._intake = Intake(
            tokenizer=tokenizer,
            vocab=config.vocab_size,
            ends=sorted({*config.eos_token_id, *(tokenizer.eos_token_ids if tokenizer else ())}),
            room=length,
            pages=shapes.pages // shapes.groups,
            page_size=shapes.page_size,
            most_pages=shapes.most_pages,
            max_queue=settings.max_queue,
            leads=self._leads,
            structured=passes is None or passes.constrained is not None,
            prompt_logprobs=passes is None or passes.score is not None,
            sites=functools.partial(sites, model) if watches else None,
        )
        if model.placement is None and (passes is None or passes.prompt_end is not None):
            self._intake.origin = functools.cache(lambda: origin(model, settings, shapes, execution))
        runner = Runner(model, shapes, execution, settings.cache_dtype, passes)
        how = (settings.chunked_prefill_size, settings.decode_steps, settings.max_queue, settings.overlap)
        journal = Journal(self._wire) if self._wire is not None and self._leads else None
        self._loop = Loop(runner, *how, journal)
        self._intake.layout = Layout.of(runner.pool, config.vocab_size, shapes.page_size, self._loop.first_page)
        if journal is not None:
            weakref.finalize(self, journal.close).atexit = False
            atexit.register(journal.close)  # before JAX's own end, which waits for the others
        self._actor = Actor(self._loop, owner=self)
        self._ids = itertools.count()
        self._outbox: deque[Delta] = deque()

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
        settings = changed(settings, changes)
        commit = hub.pin(path, revision)
        tokenizer = load_tokenizer(path, revision=commit)
        return cls(checkpoint.load(path, dtype, revision=commit), tokenizer, settings, execution=execution)

    # Requests

    def check(
        self, prompt: Any, params: SamplingParams | None = None, *, truncate: Truncate = None, name: str = "prompt"
    ) -> None:
        """Raises ValueError where `submit` would, calling the prompt by its `name`; nothing is queued."""
        refuse_fork()
        self._check_leads()
        self._intake.check(prompt, params, truncate, name)

    def left(self, tokens: int) -> int:
        """The largest `max_tokens` that a prompt of so many tokens may have; less than 1 if it is too long."""
        return self._intake.left(tokens)

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        truncate: Truncate = None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> int:
        """Puts a request in the queue and returns its id; `step` moves it on and returns its deltas.

        `prompt` is a text, a list of token ids, a list of chat messages (dicts with `role` and `content`), or a
        `ling3.Snapshot` of an earlier request, also with something appended (`Snapshot.then`). With `on_delta` the
        deltas go there instead, in the engine's thread; if it raises, the request ends in `error`.
        Raises QueueFull, and ValueError for what can never be answered.
        """
        request = self._request(prompt, params, truncate, "prompt")
        request.report = self._outbox.append
        request.deliver = request.report if on_delta is None else on_delta
        withdraw = self._actor.last_message(Loop.abort, request)
        try:
            self._actor.call(Loop.enqueue, request)
        except BaseException:
            withdraw()
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
        checked before the first runs, and as many wait at once as the queue holds. `on_delta` is called with each
        delta, in the caller's thread; if it raises, that request ends in `error`. On Ctrl-C every slot is freed;
        `on_interrupt="return"` then returns what there is, with `abort` for what was not finished.
        """
        requests = self._requests(listed(prompts), params, truncate)
        failed = set()
        with progress("generating", sum(request.params.n for request in requests)) as advance:
            deltas = self._deltas(requests, itertools.repeat(0.0), whole=on_delta is None)
            try:
                try:
                    for i, delta in deltas:
                        advance(int(delta.finish_reason is not None))
                        if on_delta is None or i in failed:
                            continue
                        try:
                            on_delta(delta)
                        except Exception as error:
                            failed.add(i)
                            self._actor.call(Loop.give_up, requests[i].sequences[delta.index], error)
                finally:
                    deltas.close()
            except KeyboardInterrupt:
                if on_interrupt == "raise":
                    raise
                self.stats()  # an answer: what was sent before, the end of these requests, has been done
        return [output for request in requests if (output := request.output()) is not None]

    def stream(
        self, prompt: Any, params: SamplingParams | None = None, *, truncate: Truncate = None
    ) -> Iterator[Delta]:
        """A request's deltas as they come; leaving the iterator aborts it. Checked and queued when this is called."""
        request = self._request(prompt, params, truncate, "prompt")
        deltas = self._deltas([request], (), queued=True)
        next(deltas)  # a generator that was never begun would not notice that it is dropped
        self._actor.call(Loop.enqueue, request)
        return (delta for _, delta in deltas)

    def stream_all(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        arrivals: Sequence[float] | None = None,
        truncate: Truncate = None,
    ) -> Generator[tuple[int, Delta], None, None]:
        """The deltas of many requests as they come, each with the index of its prompt.

        `prompts`, `params` and `truncate` are as for `generate`, but for a single prompt, which goes into a list. A
        request's last delta has its output. `arrivals`, ascending, are the times at which the requests are submitted,
        in seconds after the first delta is asked for; by default that is at once for all. Leaving the iterator aborts
        what is unfinished.
        """
        requests = self._requests(list(prompts), params, truncate)
        times = [0.0] * len(requests) if arrivals is None else [float(time) for time in arrivals]
        if len(times) != len(requests) or times != sorted(times) or not all(map(math.isfinite, times)):
            raise ValueError(
                f"arrivals are {shown(arrivals)}, expected a time for each of {len(requests)} prompts, ascending"
            )
        return self._deltas(requests, times)

    async def astream(
        self, prompt: Any, params: SamplingParams | None = None, *, truncate: Truncate = None
    ) -> AsyncIterator[Delta]:
        """`stream` for asyncio, any number of them at once. Checked and queued when the first delta is asked for."""
        events, news = asyncio.get_running_loop(), asyncio.Queue()
        asked = (prompt, params, truncate, "prompt")
        if isinstance(params, SamplingParams) and params.structured is not None:  # a grammar takes up to seconds
            request = await asyncio.to_thread(self._request, *asked)
        else:
            request = self._request(*asked)
        put = functools.partial(events.call_soon_threadsafe, news.put_nowait)
        reader = Reader([request], put)
        leave = self._actor.last_message(reader.leave)
        try:
            self._actor.send(put, Loop.enqueue, request)
            result(await news.get())
            while reader.unfinished:
                if news.empty():
                    self._actor.wait(reader)
                yield reader.take(await news.get())[1]
            if reader.fault is not None:
                raise reader.fault
        finally:
            leave()

    def abort(self, request_id: int) -> bool:
        """Ends a request with `abort`, wherever it is; False if there is none of this id (any more)."""
        return self._actor.call(Loop.abort_id, request_id)

    @property
    def has_work(self) -> bool:
        """True if there is queued or running work, or `step` has anything to return."""
        return self._actor.call(lambda loop: loop.has_work) or bool(self._outbox)

    def step(self) -> list[Delta]:
        """One turn of the loop; returns the deltas of submitted requests that are new since the last step."""
        self._actor.turn()
        deltas = []
        with contextlib.suppress(IndexError):
            while True:
                deltas.append(self._outbox.popleft())
        return deltas

    def warmup(self, first_token: bool = False, *, also: Sequence[Extra] = ()) -> None:
        """Compiles every program, with a progress bar; none is compiled after that. Ctrl-C leaves out those not begun.

        With `first_token` only what a request's first token needs: it comes sooner, and the second waits for the rest.
        What requests with `structured`, `prompt_logprobs` or snapshots (`keep`) take is compiled here if `also` names
        it, else with the first of them.
        """
        total = self._loop.runner.warmup_size(first_token, also)
        self._check_leads()
        self._actor.call(Loop.begin_warmup, first_token, also)
        end = self._actor.last_message(Loop.end_warmup)
        with progress("compiling", total) as advance:
            try:
                while self._actor.ask(Loop.compile_next) is not None:
                    advance(1)
            finally:
                end()

    def forget_prefixes(self) -> None:
        """Frees all known prefixes but those in use: later prompts are computed anew, with the same bits."""
        self._actor.call(Loop.forget_prefixes)

    def follow(self) -> None:
        """This process's part in what the first one has this engine do, until that one's engine ends.

        For a model over the devices of several processes: all make the same engine, and all but the first then follow.
        Raises RuntimeError in the first process, and whatever fails here.
        """
        if self._wire is None or self._leads:
            raise RuntimeError("only an engine over several processes is followed, by all of them but the first")
        follow(self._loop, self._intake, self._wire)

    def stats(self) -> Stats:
        """The counts at this moment."""
        return self._actor.call(Loop.stats)

    async def astats(self) -> Stats:
        """`stats` for asyncio."""
        events = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = events.create_future()

        def put(outcome: Any) -> None:
            if not answer.done():  # nobody waits any more
                answer.set_result(outcome)

        self._actor.send(functools.partial(events.call_soon_threadsafe, put), Loop.stats)
        return result(await answer)

    @property
    def alive(self) -> bool:
        """True while the engine's thread runs, which answers every call."""
        return self._actor.alive

    def __repr__(self) -> str:
        # Read as they are, without a message: the engine's thread may be compiling.
        runner, scheduler = self._loop.runner, self._loop.scheduler
        size = runner.model.parameters
        return (
            f"<Engine: {size:,} parameters, {len(scheduler.running)} of {scheduler.slots} slots running, "
            f"{scheduler.waiting} waiting, {scheduler.pages - scheduler.free_pages} of {scheduler.pages} pages in use>"
        )

    def _request(self, prompt: Any, params: SamplingParams | None, truncate: Truncate, name: str) -> Request:
        """The checked request, not yet in the queue."""
        refuse_fork()
        self._check_leads()
        return self._intake.request(next(self._ids), prompt, params, truncate, name)

    def _check_leads(self) -> None:
        if not self._leads:
            raise RuntimeError(
                f"this is process {jax.process_index()} of {jax.process_count()}, and the first one asks the engine: "
                "call engine.follow() here"
            )

    def _requests(
        self, prompts: list[Any], params: SamplingParams | Sequence[SamplingParams] | None, truncate: Truncate
    ) -> list[Request]:
        """The checked requests, not yet in the queue."""
        refuse_fork()
        return self._intake.requests(self._ids, prompts, params, truncate)

    def _deltas(
        self, requests: Sequence[Request], times: Iterable[float], *, whole: bool = False, queued: bool = False
    ) -> Generator[Any, None, None]:
        """The deltas of requests with their indices, with `whole` only the last of each sequence.

        Submits the requests at `times`, unless the caller does: with `queued`, after a first item that is None.
        """
        actor, news = self._actor, queue.SimpleQueue()
        reader = Reader(requests, news.put, whole)
        leave, coming = actor.last_message(reader.leave), deque(zip(times, requests, strict=False))
        try:
            if queued:
                yield None
            begin = time.perf_counter()
            while reader.unfinished:
                now, due = time.perf_counter() - begin, []
                while coming and coming[0][0] <= now:
                    due.append(coming.popleft()[1])
                if due:
                    actor.send(None, Loop.enqueue_all, due)
                try:
                    item = news.get_nowait()
                except queue.Empty:
                    actor.wait(reader)
                    try:
                        item = news.get(timeout=coming[0][0] - now if coming else None)
                    except queue.Empty:
                        continue
                yield reader.take(item)
            if reader.fault is not None:
                raise reader.fault
        finally:
            leave()
