"""The requests of a loop: how they come in, end, and hand out their deltas."""

import itertools
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence

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
        self.requests: dict[int, Request] = {}
        self.in_flight: list[Call] = []
        self.counts: Counter[str] = Counter()
        self._backlog: deque[Request] = deque()
        self._raised: list[BaseException] = []
        self._programs: Generator[str, None, None] = (name for name in ())
        self._order = itertools.count()
        self._finished: Counter[str] = Counter()

    def settle(self, sequence: TokenSequence, delta: Delta | None) -> None:
        """Frees what a finished sequence held, and hands out its delta."""
        if sequence.completion is not None:
            for at_end in sequence.request.at_end:
                delta = None if delta is None else at_end(self, sequence, delta)
            self._retire(sequence)
        if delta is not None and (error := self.deliver(sequence.request, delta)) is not None:
            self.give_up(sequence, error)

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

    def deliver(self, request: Request, delta: Delta) -> Exception | None:
        """Calls a request's callback; returns the exception if it raised one, and keeps others for `take_raised`."""
        try:
            request.deliver(delta)
        except Exception as error:
            return error
        except BaseException as error:
            self._raised.append(error)
        return None

    def turn(self) -> Iterator[Call]:
        """One turn of the loop; yields each call before its results are read."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """True if there is queued or running work, or a call whose results are still to be read."""
        return bool(self.requests or self.in_flight or self._backlog)

    def has_room(self, request: Request) -> bool:
        """True if the queue has room for a request."""
        return self.scheduler.waiting + request.params.n <= self.settings.max_queue

    def enqueue(self, request: Request) -> None:
        """Puts a request's sequences in the queue; raises QueueFull if there is no room."""
        if not self.has_room(request):
            raise QueueFull(
                f"{self.scheduler.waiting} requests are waiting and max_queue is {self.settings.max_queue}: step until "
                "some have finished, or give the engine a larger max_queue"
            )
        self.queue(request)

    def queue(self, request: Request) -> None:
        """Puts a request's sequences in the queue, also beyond its bound; each goes to its place if it has one."""
        self.requests[request.request_id] = request
        self.counts["submitted"] += len(request.sequences)
        for sequence in request.sequences:
            sequence.order = next(self._order) if sequence.order < 0 else sequence.order
            sequence.times = Times()
            self.scheduler.enqueue(sequence)

    def enqueue_all(self, requests: Iterable[Request]) -> None:
        """Puts requests in the queue in their order, each as soon as there is room for it."""
        self._backlog.extend(requests)
        self.refill()

    def refill(self) -> None:
        """Moves requests from the backlog into the queue while there is room."""
        while self._backlog and (self._backlog[0].finished or self.has_room(self._backlog[0])):
            request = self._backlog.popleft()
            if not request.finished:  # its reader has not left
                self.enqueue(request)

    def forget(self, request: Request) -> None:
        """Forgets a request if it is finished, and all that follows from it."""
        if request.finished:
            self.requests.pop(request.request_id, None)

    def abort(self, request: Request) -> bool:
        """Ends what is unfinished of a request with `abort`; True if anything was."""
        aborted = False
        for each in (request, *request.followers):
            for sequence in each.sequences:
                if sequence.completion is None:
                    aborted, last = True, sequence.finish("abort")
                    if each.request_id in self.requests:  # otherwise it was never in the queue
                        self.settle(sequence, last)
        return aborted

    def abort_id(self, request_id: int) -> bool:
        """Aborts the request of an id; False if there is none (any more)."""
        request = self.requests.get(request_id)
        return request is not None and self.abort(request)

    def give_up(self, sequence: TokenSequence, error: Exception) -> None:
        """Ends a request whose callback raised: this sequence in `error`, even if it was finished, and the others."""
        request, text = sequence.request, f"the callback for its deltas raised {error!r}"
        request.deliver = request.report
        if (completion := sequence.completion) is not None:
            self._finished[completion.finish_reason] -= 1
            self._finished["error"] += 1
            self.deliver(request, sequence.fail(text))
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
        """Ends every request in `error`."""
        requests = [*self.requests.values(), *self._backlog]
        self.requests, self.in_flight = {}, []
        self._backlog.clear()
        self.scheduler = Scheduler(self.runner.shapes)
        for request in requests:
            request.fault = error
            for sequence in request.sequences:
                if sequence.completion is None:
                    self._finished["error"] += sequence.order >= 0  # it was counted as submitted once it was queued
                    sequence.memory = SequenceMemory()
                    self.deliver(request, sequence.fail(f"the engine failed: {error!r}"))

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
        try:
            return next(self._programs, None)
        except Exception as error:
            raise self.fail(error) from None

    def end_warmup(self) -> None:
        """Leaves out the programs that are not begun."""
        self._programs.close()

    def take_raised(self) -> BaseException | None:
        """The exception of a callback that does not end its request, as KeyboardInterrupt; None if there is none."""
        raised, self._raised = self._raised, []
        return raised[0] if raised else None

    def stats(self) -> Stats:
        """The counts at this moment."""
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
