"""The engine's public methods: they take requests from scripts, threads and asyncio, and hand out the answers."""

import asyncio
import atexit
import contextlib
import functools
import itertools
import math
import queue
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import jax

from ling3.engine import lockstep
from ling3.engine.actor import Actor, Reader
from ling3.engine.intake import Intake, Truncate, listed
from ling3.engine.outputs import Delta, RequestOutput, Stats
from ling3.engine.request import Request
from ling3.engine.requests import Requests
from ling3.engine.runner import Extra
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.settings import EngineSettings
from ling3.engine.updates import check_update
from ling3.model import CausalLM
from ling3.runtime import heap
from ling3.runtime.entry_checks import refuse_fork
from ling3.runtime.processes import Wire
from ling3.runtime.progress import progress
from ling3.runtime.quoting import shown

SHORT = 4096
"""Up to this many tokens or characters, prompts are checked in place: passing them to a thread takes longer."""
Checked = TypeVar("Checked")


async def unblocked(check: Callable[..., Checked], prompts: list[Any], params: Any, *how: Any) -> Checked:
    """Calls `check` with the prompts and parameters: in a thread, if it may take longer than an event loop can wait."""
    each = params if isinstance(params, Sequence) else (params,)
    slow = any(isinstance(one, SamplingParams) and one.structured is not None for one in each)  # takes seconds
    if slow or sum(len(prompt) for prompt in prompts if isinstance(prompt, Sequence)) > SHORT:
        return await asyncio.to_thread(check, prompts, params, *how)
    return check(prompts, params, *how)


@runtime_checkable
class Server(Protocol):
    """The methods that an engine and a fleet of engines share."""

    settings: EngineSettings
    max_model_len: int
    device_kind: str

    def warmup(self, first_token: bool = False) -> None:
        """Compiles all programs, or with `first_token` only those that a first token needs."""
        ...

    def stream_all(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate: Truncate = None,
    ) -> Generator[tuple[int, Delta], None, None]:
        """Yields the deltas of the answers as they come, each with the index of its prompt."""
        ...

    def stats(self) -> Stats:
        """The engine's counts at the time of the call."""
        ...


class Front:
    """The methods of an engine, whose loop runs in a thread of the engine. `ling3.Engine` documents the guarantees."""

    def __init__(self, intake: Intake, loop: Requests, wire: Wire | None = None):
        self.settings, self.tokenizer, self.max_model_len = intake.settings, intake.tokenizer, intake.room
        self.device_kind = jax.devices()[0].device_kind
        self.adapters: tuple[str, ...] = () if intake.adapters is None else tuple(intake.adapters.each)
        self._intake, self._loop, self._wire = intake, loop, wire
        leader = None
        if wire is not None and intake.leads:
            leader = lockstep.Leader(loop, wire)
            weakref.finalize(self, leader.close).atexit = False
            atexit.register(leader.close)  # before JAX shuts down, which waits for the other processes
        self._actor = Actor(loop, leader, owner=self)
        self._ids = itertools.count()

    def check(
        self, prompt: Any, params: SamplingParams | None = None, *, truncate: Truncate = None, name: str = "prompt"
    ) -> None:
        """Raises ValueError where `submit` would, but queues nothing; errors call the prompt by its `name`."""
        self._check_asks()
        self._intake.check(prompt, params, truncate, name)

    def left(self, tokens: int) -> int:
        """The largest `max_tokens` for a prompt of `tokens` tokens; less than 1 if the prompt is too long."""
        return self._intake.left(tokens)

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        truncate: Truncate = None,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> int:
        """Puts a request in the queue and returns its id; calls of `step` run it and return its deltas.

        `prompt` is a text, a list of token ids, a list of chat messages (dicts with `role` and `content`), or a
        `ling3.Snapshot` of an earlier request, also with something appended (`Snapshot.then`). With `on_delta`, the
        deltas go to this function instead, in the engine's thread; if it raises, the request ends in `error`. Raises
        QueueFull, and ValueError for a request that can never be answered.
        """
        (request,) = self._requests([prompt], params, truncate, "prompt")
        request.fallback = self._loop.outbox.append
        request.deliver = request.fallback if on_delta is None else on_delta
        withdraw = self._actor.last_message(Actor.do, Requests.abort, request.request_id)
        try:
            self._actor.call(Requests.enqueue, [request], False)
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
        **unknown: Any,
    ) -> list[RequestOutput]:
        """Returns the answers to prompts, in their order; shows a progress bar once it takes over two seconds.

        `prompts` is a list of what `submit` takes, or just one of them; `params` are for all, or one for each. All
        prompts are checked before the first runs, and those for which the queue has no room wait. `on_delta` is called
        with each delta, in the caller's thread; if it raises, that request ends in `error`. Ctrl-C frees every slot;
        `on_interrupt="return"` then returns the outputs so far, in which unfinished completions end in `abort`. Raises
        TypeError for an argument of another name, also for one of `SamplingParams`, which `params` takes.
        """
        if unknown:
            names = ", ".join(f"{name}=…" for name in unknown)
            raise TypeError(f"Engine.generate takes no {names}: give sampling parameters as SamplingParams({names})")
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
                            self._actor.call(Requests.give_up, requests[i].sequences[delta.index], error)
                finally:
                    deltas.close()
            except KeyboardInterrupt:
                if on_interrupt == "raise":
                    raise
                self.stats()  # its answer says that the abort, which was sent before, has been handled
        return [output for request in requests if (output := request.output()) is not None]

    def stream(
        self, prompt: Any, params: SamplingParams | None = None, *, truncate: Truncate = None
    ) -> Iterator[Delta]:
        """Yields a request's deltas. Checks and queues the request at the call; leaving the iterator aborts it."""
        (request,) = self._requests([prompt], params, truncate, "prompt")
        deltas = self._deltas([request], None)
        next(deltas)  # starts the generator: one that never started would skip its `finally` when dropped
        return (delta for _, delta in deltas)

    def stream_all(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        arrivals: Sequence[float] | None = None,
        truncate: Truncate = None,
    ) -> Generator[tuple[int, Delta], None, None]:
        """Yields the deltas of many requests as they come, each with the index of its prompt.

        `prompts`, `params` and `truncate` are as for `generate`, except that a single prompt has to be in a list. A
        request's last delta has its output. `arrivals`, ascending, are the times at which the requests are submitted,
        in seconds after the first delta is requested; by default all are submitted at once. Leaving the iterator aborts
        unfinished requests.
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
        """`stream` for asyncio; any number may run at once. The request is queued when the first delta is awaited."""
        async with contextlib.aclosing(self.astream_all([prompt], params, truncate=truncate, name="prompt")) as deltas:
            async for _, delta in deltas:
                yield delta

    async def astream_all(
        self,
        prompts: Iterable[Any],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        truncate: Truncate = None,
        name: str = "prompt {}",
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """`stream_all` for asyncio; any number may run at once. Checks and queues when the first delta is awaited.

        Errors call a prompt by its `name`, formatted with its index. If the queue has no room for one of the requests,
        aborts them all and raises QueueFull.
        """
        put, news = asyncio.get_running_loop().call_soon_threadsafe, asyncio.Queue()
        requests = await unblocked(self._requests, list(prompts), params, truncate, name)
        reader = Reader(requests, functools.partial(put, news.put_nowait))
        leave = self._actor.last_message(Actor.leave, reader)
        try:
            await self._actor.ask_async(Requests.enqueue, requests, False)
            while reader.unfinished():
                if news.empty():
                    self._actor.wait(reader)
                yield reader.take(await news.get())
        finally:
            leave()

    def abort(self, request_id: int) -> bool:
        """Aborts a waiting or running request; returns False if no unfinished request has this id."""
        return self._actor.call(Requests.abort, request_id)

    @property
    def has_work(self) -> bool:
        """True if a request is unfinished, or `step` has deltas to return."""
        return self._actor.call(lambda loop: loop.has_work) or bool(self._loop.outbox)

    def step(self) -> list[Delta]:
        """Runs one turn of the loop; returns the deltas of submitted requests that are new since the last step."""
        self._actor.turn()
        deltas = []
        with contextlib.suppress(IndexError):
            while True:
                deltas.append(self._loop.outbox.popleft())
        return deltas

    def warmup(self, first_token: bool = False, *, also: Sequence[Extra] = ()) -> None:
        """Compiles every program before it is needed, with a progress bar. Ctrl-C skips those not begun.

        With `first_token`, compiles only the programs for a request's first token; others are compiled when they are
        needed. The programs for requests with `structured` or `prompt_logprobs` are compiled here if `also` names them,
        else with the first such request.
        """
        total = self._loop.runner.warmup_size(first_token, also)
        self._check_asks()
        self._actor.ask(Requests.begin_warmup, first_token, also)
        end = self._actor.last_message(Actor.do, Requests.end_warmup)
        with progress("compiling", total) as advance:
            try:
                while self._actor.ask(Requests.compile_next) is not None:
                    advance(1)
            finally:
                end()
        heap.trim()  # what the compiler has freed

    def forget_prefixes(self) -> None:
        """Evicts all known prefixes but those in use: later prompts are computed anew, with the same bits."""
        self._actor.call(Requests.forget_prefixes)

    def update(self, model: CausalLM) -> None:
        """Replaces the weights of the running engine by another model's, in place: no program is compiled again.

        From then on, answers are those of a new engine with this model, bit for bit: known prefixes are forgotten, and
        snapshots of the old weights are refused. The arrays are used as they are, without a copy, so nothing may donate
        them; the old ones are freed unless something else refers to them.

        `model` must have the structure, shapes, dtypes and static fields of the present one, on the same device, or
        ValueError names the first difference. Raises ValueError on a mesh and for an engine with its own forward
        programs, and RuntimeError while requests are unfinished, whose answers would be of two models: let them finish
        or abort them first. After an error the engine has its old weights. Any thread may call it, but no callback.
        """
        self._check_asks()
        check_update(self._loop.runner, model)
        if unfinished := self._actor.ask(Requests.update, model):
            raise RuntimeError(
                f"it takes no new weights while requests are unfinished (now {unfinished}): let them finish, "
                "or abort them"
            )

    def follow(self) -> None:
        """Runs this process's part of an engine over several processes, until the first process's engine ends.

        If a model is on devices of several processes, all make the same engine, and then all but the first call this.
        Raises RuntimeError in the first process, and any exception that a turn raises here.
        """
        if self._wire is None or self._intake.leads:
            raise RuntimeError("only an engine over several processes is followed, by all of them but the first")
        lockstep.follow(self._loop, self._intake, self._wire)

    def stats(self) -> Stats:
        """The engine's counts at the time of the call."""
        return self._actor.call(Requests.stats)

    async def astats(self) -> Stats:
        """Does what `stats` does, for asyncio."""
        return await self._actor.ask_async(Requests.stats)

    @property
    def alive(self) -> bool:
        """True while the engine's thread runs; it handles every call."""
        return self._actor.alive

    @property
    def intake(self) -> Intake:
        """The intake, which checks prompts and parameters and makes requests of them."""
        return self._intake

    @property
    def loop(self) -> Requests:
        """The loop, for inspection between two calls of `step`: only the engine's thread may change it."""
        return self._loop

    def __repr__(self) -> str:
        # Read directly and not by a message, which would wait for the engine's thread if it is compiling.
        runner, scheduler = self._loop.runner, self._loop.scheduler
        size = runner.model.parameters
        return (
            f"<Engine: {size:,} parameters, {len(scheduler.running)} of {scheduler.slots} slots running, "
            f"{scheduler.waiting} waiting, {scheduler.pages - scheduler.free_pages} of {scheduler.pages} pages in use>"
        )

    def _check_asks(self) -> None:
        """Raises RuntimeError in a process that may not call the engine: a fork, or a follower."""
        refuse_fork()
        if not self._intake.leads:
            raise RuntimeError(
                f"this is process {jax.process_index()} of {jax.process_count()}, and the first one asks the engine: "
                "call engine.follow() here"
            )

    def _requests(
        self,
        prompts: list[Any],
        params: SamplingParams | Sequence[SamplingParams] | None,
        truncate: Truncate,
        name: str = "prompt {}",
    ) -> list[Request]:
        """The checked requests, not yet in the queue."""
        self._check_asks()
        return self._intake.requests(self._ids, prompts, params, truncate, name)

    def _deltas(
        self, requests: Sequence[Request], times: Iterable[float] | None, *, whole: bool = False
    ) -> Generator[Any, None, None]:
        """Yields (index of the request, delta), with `whole` only the last delta of each sequence.

        Submits the requests at `times`, in seconds from the start; those for which there is no room wait. If `times` is
        None, queues all at once or raises QueueFull, and first yields None.
        """
        actor, news = self._actor, queue.SimpleQueue()
        reader, coming = Reader(requests, news.put, whole), deque(zip(times or (), requests, strict=False))
        leave = actor.last_message(Actor.leave, reader)
        try:
            if times is None:
                actor.call(Requests.enqueue, requests, False)
                yield None
            begin = time.perf_counter()
            while reader.unfinished():
                now, due = time.perf_counter() - begin, []
                while coming and coming[0][0] <= now:
                    due.append(coming.popleft()[1])
                if due:
                    actor.send(None, Actor.do, Requests.enqueue, due, True)
                try:
                    item = news.get_nowait()
                except queue.Empty:
                    actor.wait(reader)
                    try:
                        item = news.get(timeout=coming[0][0] - now if coming else None)
                    except queue.Empty:
                        continue
                yield reader.take(item)
        finally:
            leave()
