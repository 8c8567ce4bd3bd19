"""The requests of a loop: how they come in, end, and hand out their deltas."""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from ling3.engine.calls import Call
from ling3.engine.outputs import FINISH_REASONS, Delta, Stats
from ling3.engine.request import Request, SequenceMemory, Times, TokenSequence
from ling3.engine.runner import Extra, Runner
from ling3.engine.scheduler import Scheduler
from ling3.engine.settings import EngineSettings


class QueueFull(RuntimeError):
    """`max_queue` requests are waiting already: let some finish first."""


class Requests:
    """The waiting and running requests of an engine, and the memory that they hold. Belongs to one thread.

    `settings.max_queue` sequences may wait.
    """

    def __init__(self, runner: Runner, settings: EngineSettings):
        self.runner, self.settings = runner, settings
        self.scheduler = Scheduler(runner.shapes)
        self.requests: dict[int, Request] = {}  # the unfinished ones, by their ids
        self.in_flight: list[Call] = []
        self.counts: Counter[str] = Counter()
        self._backlog: deque[Request] = deque()
        self.outbox: deque[Delta] = deque()  # the deltas of requests without a callback
        self.raised: BaseException | None = None  # what does not end a request, as KeyboardInterrupt, from a callback
        self.on_raise: Callable[[TokenSequence, Exception], Any] | None = None  # in place of `give_up`
        self._programs: Generator[str, None, None] = (name for name in ())
        self._order = itertools.count()
        self._finished: Counter[str] = Counter()

    def settle(self, sequence: TokenSequence, delta: Delta | None) -> None:
        """Hands out what is new of a sequence, if anything is, after freeing what it held if it is finished."""
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
        """Delivers a delta. A callback that raises an exception gets no more, and its request ends in `error`."""
        if (error := self._deliver(sequence.request, delta)) is not None:
            sequence.request.deliver = self.outbox.append
            (self.on_raise or self.give_up)(sequence, error)

    def _deliver(self, request: Request, delta: Delta) -> Exception | None:
        """Calls a request's callback; returns the exception if it raises one, and keeps others in `raised`."""
        try:
            request.deliver(delta)
        except Exception as error:
            return error
        except BaseException as error:
            self.raised = self.raised or error
        return None

    def _retire(self, sequence: TokenSequence) -> None:
        """Frees the slot, the pages and the place in the queue of a finished sequence."""
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
        """One turn of the loop; yields each call before its results are read."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """True if a request is unfinished, or a call's results are still to be read."""
        return bool(self.requests or self.in_flight)

    def take(self, method: Callable[..., Any], *args: Any) -> Any:
        """Calls a method of this class, or another function of a loop."""
        return method(self, *args)

    def enqueue(self, requests: Sequence[Request], waits: bool) -> None:
        """Puts requests in the queue in their order. One for which there is no room `waits` for it, or QueueFull."""
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
            if not request.finished:  # its reader has not left
                self.queue(request)

    def queue(self, request: Request) -> None:
        """Puts a request's sequences in the queue, also beyond its bound; each goes to its place if it has one."""
        self.requests[request.request_id] = request
        self.counts["submitted"] += len(request.sequences)
        for sequence in request.sequences:
            sequence.order = next(self._order) if sequence.order < 0 else sequence.order
            sequence.times = Times()
            self.scheduler.enqueue(sequence)

    def _has_room(self, request: Request) -> bool:
        return self.scheduler.waiting + request.params.n <= self.settings.max_queue

    def forget(self, request: Request) -> None:
        """Forgets a request if it is finished, and all that follows from it."""
        if request.finished:
            self.requests.pop(request.request_id, None)

    def abort(self, request_id: int) -> bool:
        """Ends what is unfinished of a request with `abort`; False if there is none of this id (any more)."""
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
        """Ends a request whose callback raised: this sequence in `error`, even if it was finished, and the others."""
        request, text = sequence.request, f"the callback for its deltas raised {error!r}"
        if (completion := sequence.completion) is not None:
            self._finished[completion.finish_reason] -= 1
            self._finished["error"] += 1
            self._deliver(request, sequence.fail(text))
        for other in request.sequences:
            if other.completion is None:
                self.settle(other, other.fail(text))

    def fail(self, error: Exception) -> Exception:
        """After a fault of the engine's own: ends every request in `error`, and begins anew with an empty pool.

        Returns what is to be raised: the fault, or what has come of beginning anew.
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
        self.scheduler = Scheduler(self.runner.shapes)
        for request in requests:
            request.fault = error
            for sequence in request.sequences:
                if sequence.completion is None:
                    self._finished["error"] += sequence.order >= 0  # it was counted as submitted once it was queued
                    sequence.memory = SequenceMemory()
                    self._deliver(request, sequence.fail(f"the engine failed: {error!r}"))

    def forget_prefixes(self) -> None:
        """Frees the pages and states of all known prefixes but those that running sequences use."""
        for prefixes in self.scheduler.prefixes:
            prefixes.evict(self.scheduler.pages)

    def begin_warmup(self, first_token: bool, also: Sequence[Extra] = ()) -> None:
        """Begins to compile every program, or with `first_token` what a request's first token needs."""
        self.end_warmup()
        self._programs = self.runner.warmup(first_token, *also)

    def compile_next(self) -> str | None:
        """The name of the next program of a warm-up once it is compiled; None after the last."""
        return next(self._programs, None)

    def end_warmup(self) -> None:
        """Leaves out the programs that are not begun."""
        self._programs.close()

    def stats(self) -> Stats:
        """The engine's counts at the time of the call."""
        scheduler = self.scheduler
        counts = ("submitted", "prompt_tokens", "cached_tokens", "output_tokens", "preemptions")
        turns = ("steps", "prefill_calls", "decode_calls")
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
