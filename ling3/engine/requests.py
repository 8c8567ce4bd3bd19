"""The requests of a loop: how they are queued, end, and hand out their deltas."""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from ling3.engine.calls import Call
from ling3.engine.outputs import FINISH_REASONS, Delta, Stats
from ling3.engine.prefix_disk import PrefixDisk
from ling3.engine.request import Request, SequenceMemory, Times, TokenSequence
from ling3.engine.runner import Extra, Runner
from ling3.engine.scheduler import Scheduler
from ling3.engine.settings import EngineSettings
from ling3.model import CausalLM


class QueueFull(RuntimeError):
    """`max_queue` requests are waiting already: let some finish first."""


class Requests:
    """The waiting and running requests of an engine, and the memory that they hold. Only one thread may use it.

    At most `settings.max_queue` sequences wait.
    """

    def __init__(self, runner: Runner, settings: EngineSettings):
        self.runner, self.settings = runner, settings
        self.disk = PrefixDisk.of(runner, settings)
        self.scheduler = self._scheduler()
        self.requests: dict[int, Request] = {}  # the unfinished ones, by their ids
        self.in_flight: list[Call] = []
        self.counts: Counter[str] = Counter()
        self._backlog: deque[Request] = deque()
        self.outbox: deque[Delta] = deque()  # for `step`: of requests without a callback, or whose callback raised
        self.raised: BaseException | None = None  # from a callback, but not for its request, as KeyboardInterrupt
        self.on_raise: Callable[[TokenSequence, Exception], Any] | None = None  # called instead of `give_up`
        self._programs: Generator[str, None, None] = (name for name in ())
        self._order = itertools.count()
        self._finished: Counter[str] = Counter()

    def _scheduler(self) -> Scheduler:
        """A scheduler of free slots and pages, which knows the prefixes on disk."""
        scheduler = Scheduler(self.runner.shapes)
        for prefixes in scheduler.prefixes:
            prefixes.store = self.disk
        return scheduler

    def settle(self, sequence: TokenSequence, delta: Delta | None) -> None:
        """Hands out a delta, if there is one; if its sequence is finished, first runs `at_end` and frees its memory."""
        if delta is None:
            return
        if sequence.completion is not None:
            later = [at_end(self, sequence, delta) for at_end in sequence.request.at_end]
            self._retire(sequence)
            if any(later):
                return
            delta = sequence.last(delta)
        self.hand_out(sequence, delta)

    def hand_out(self, sequence: TokenSequence, delta: Delta) -> None:
        """Delivers a delta. If the callback raises an exception, it gets no more, and its request ends in `error`."""
        if (error := self._deliver(sequence.request, delta)) is not None:
            sequence.request.deliver = sequence.request.fallback
            (self.on_raise or self.give_up)(sequence, error)

    def _deliver(self, request: Request, delta: Delta) -> Exception | None:
        """Calls a request's callback; returns an Exception that it raises, and stores other exceptions in `raised`."""
        try:
            request.deliver(delta)
        except Exception as error:
            return error
        except BaseException as error:
            self.raised = self.raised or error
        return None

    def _retire(self, sequence: TokenSequence) -> None:
        """Frees a finished sequence's slot and pages, or takes it out of the queue."""
        assert sequence.completion is not None, "only a finished sequence retires"
        self._finished[sequence.completion.finish_reason] += 1
        if sequence.memory.slot is None:
            self.scheduler.withdraw(sequence)
        else:
            slot, pages = sequence.memory.slot, sequence.memory.pages
            spoiled = sequence.completion.finish_reason == "error"
            self.scheduler.release(sequence, spoiled)
            if spoiled:
                self.runner.scrub(slot, self.scheduler.are_free(pages))
        self.forget(sequence.request)

    def turn(self) -> Iterator[Call]:
        """Runs one turn of the loop; yields each call before its results are read."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """True if a request is unfinished, or a call's results have not been read."""
        return bool(self.requests or self.in_flight)

    def take(self, method: Callable[..., Any], *args: Any) -> Any:
        """Calls a method of this class, or another function, with this loop."""
        return method(self, *args)

    def enqueue(self, requests: Sequence[Request], waits: bool) -> None:
        """Queues requests in order. If there is no room, the rest wait if `waits`; otherwise raises QueueFull."""
        if waits:
            self.requests |= {request.request_id: request for request in requests}
            self._backlog.extend(requests)
            self.refill()
            return
        for request in requests:
            if not self._has_room(request):
                raise QueueFull(
                    f"{self.scheduler.waiting} requests are waiting and max_queue is {self.settings.max_queue}: step "
                    "until some have finished, or give the engine a larger max_queue"
                )
            self.queue(request)

    def refill(self) -> None:
        """Moves requests from the backlog into the queue while there is room."""
        while self._backlog and (self._backlog[0].finished or self._has_room(self._backlog[0])):
            request = self._backlog.popleft()
            if not request.finished:  # not aborted meanwhile
                self.queue(request)

    def queue(self, request: Request) -> None:
        """Queues a request's sequences, even beyond `max_queue`; one that has an `order` keeps its place."""
        self.requests[request.request_id] = request
        self.counts["submitted"] += len(request.sequences)
        for sequence in request.sequences:
            sequence.order = next(self._order) if sequence.order < 0 else sequence.order
            sequence.times = Times()
            self.scheduler.enqueue(sequence)
        if request.updates is not None and request.updates != self.runner.updates:
            for sequence in request.sequences:
                self.settle(sequence, sequence.fail("the engine's weights were replaced meanwhile: submit it again"))

    def _has_room(self, request: Request) -> bool:
        return self.scheduler.waiting + request.params.n <= self.settings.max_queue

    def forget(self, request: Request) -> None:
        """Forgets a request if it and its followers are finished."""
        if request.finished:
            self.requests.pop(request.request_id, None)

    def abort(self, request_id: int) -> bool:
        """Ends a request's unfinished sequences with `abort`; returns False if no unfinished request has this id."""
        if (request := self.requests.get(request_id)) is None:
            return False
        for sequence in [own for each in (request, *request.followers) for own in each.sequences]:
            if sequence.completion is None:
                last = sequence.finish("abort")
                if sequence.order >= 0:
                    self.settle(sequence, last)
                else:  # it was never in the queue
                    self._deliver(request, last)
        self.forget(request)
        return True

    def give_up(self, sequence: TokenSequence, error: Exception) -> None:
        """Ends a request in `error` whose callback raised: this sequence, even if finished, and unfinished ones."""
        request, text = sequence.request, f"the callback for its deltas raised {error!r}"
        if (completion := sequence.completion) is not None:
            self._finished[completion.finish_reason] -= 1
            self._finished["error"] += 1
            self._deliver(request, sequence.fail(text))
        for other in request.sequences:
            if other.completion is None:
                self.settle(other, other.fail(text))

    def fail(self, error: Exception) -> Exception:
        """After a fault of the engine itself: ends every request in `error`, and starts again with an empty pool.

        Returns the exception to raise: the fault, or one that starting again raised.
        """
        self.end_all(error)
        try:
            self.runner.reset()
        except Exception as second:
            return second
        return error

    def end_all(self, error: Exception) -> None:
        """Ends every request with the reason `error`."""
        requests, self.requests, self.in_flight = list(self.requests.values()), {}, []
        self._backlog.clear()
        self.scheduler = self._scheduler()
        for request in requests:
            request.fault = error
            for sequence in request.sequences:
                if sequence.completion is None:
                    self._finished["error"] += sequence.order >= 0  # only queued ones were counted as submitted
                    sequence.memory = SequenceMemory()
                    self._deliver(request, sequence.fail(f"the engine failed: {error!r}"))

    def forget_prefixes(self) -> None:
        """Evicts all known prefixes but those that running sequences use."""
        for prefixes in self.scheduler.prefixes:
            prefixes.evict(self.scheduler.pages)

    def update(self, model: CausalLM) -> int:
        """Replaces the weights, and forgets what was computed with the old ones; returns 0.

        While requests are unfinished it does nothing, and returns their number.
        """
        if not self.requests:
            self.in_flight = []  # calls for sequences that have ended
            self.runner.update(model)
            self.forget_prefixes()
        return len(self.requests)

    def begin_warmup(self, first_token: bool, also: Sequence[Extra] = ()) -> None:
        """Begins to compile every program, or with `first_token` only those for a request's first token."""
        self.end_warmup()
        self._programs = self.runner.warmup(first_token, *also)

    def compile_next(self) -> str | None:
        """Waits for the warm-up's next program to be compiled and returns its name, or None after the last."""
        return next(self._programs, None)

    def end_warmup(self) -> None:
        """Ends the warm-up; programs that are not begun are skipped."""
        self._programs.close()

    def stats(self) -> Stats:
        """The engine's counts at the time of the call."""
        scheduler = self.scheduler
        counts = ("submitted", "prompt_tokens", "cached_tokens", "output_tokens", "drafted_tokens", "accepted_tokens")
        turns = ("preemptions", "steps", "prefill_calls", "decode_calls")
        return Stats(
            waiting=scheduler.waiting,
            running=len(scheduler.running),
            finished={reason: self._finished[reason] for reason in FINISH_REASONS},
            slots=scheduler.slots,
            free_slots=scheduler.free_slots,
            pages=scheduler.pages,
            free_pages=scheduler.free_pages,
            cached_pages=sum(prefixes.pages for prefixes in scheduler.prefixes),
            snapshot_bytes=sum(prefixes.snapshot_bytes for prefixes in scheduler.prefixes),
            page_size=scheduler.page_size,
            compile_seconds=self.runner.compile_seconds,
            **{name: self.counts[name] for name in (*counts, *turns)},
        )
