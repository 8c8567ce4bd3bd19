"""Continuous batching: which sequences run next, in which memory, and what they got. Belongs to one thread.

One turn is `launch`, and then `read` for the calls that it returns:

    make room   for the next tokens of all decoding sequences; if pages run out, the youngest is preempted
    admit       the oldest waiting sequences, while there are slots and pages: first come, first served; each goes on
                from the longest known prefix of its prompt
    prefill     the next chunks of their prompts, up to `chunk` tokens; before each, its scores if they are asked for
    constrain   tokens for sequences with grammars, read in this turn while the device works on the others (`plans.py`)
    decode      tokens for every sequence whose prompt is done, one row of a call each: one while other prompts wait to
                be prefilled, else `decode_steps`, or fewer if many rows would soon be idle
    watch       a sequence of which arrays are captured comes again once it is whole: its tokens go in as a prompt's do,
                in calls of their own
    read        the tokens of the *previous* turn, while the device works on this one (without `overlap`: of this turn)

Every call has a fixed shape, and a row's result depends on its own inputs alone. So the tokens and log-probabilities
of a sequence are bit for bit the same in any company, at any time, and after being preempted.
"""

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from typing import no_type_check

from ling3.engine.calls import Call
from ling3.engine.dispatch import Dispatcher
from ling3.engine.journal import Journal, told
from ling3.engine.outputs import FINISH_REASONS, Delta, Stats
from ling3.engine.request import Request, TokenSequence
from ling3.engine.runner import Extra, Runner
from ling3.engine.scheduler import Scheduler
from ling3.engine.shapes import Shapes


class QueueFull(RuntimeError):
    """`max_queue` requests are waiting already: let some finish first."""


# Its turns are the host's part of every token: checking types would take longer than they do.
@no_type_check
class Loop:
    """The requests of an engine, from the queue to their ends.

    `max_queue` sequences may wait. With `overlap` the host reads the results of a turn while the device works on the
    next; without it, each turn waits for its own results. Either way the answers have the same bits. With a `journal`,
    the loops of other processes take the same steps.
    """

    def __init__(
        self,
        runner: Runner,
        chunk: int,
        decode_steps: int,
        max_queue: int,
        overlap: bool = True,
        journal: Journal | None = None,
    ):
        self.journal, self._broken = journal, None
        self.runner, self.max_queue, self.overlap = runner, max_queue, overlap
        self.requests: dict[int, Request] = {}
        self.in_flight: list[Call] = []
        self._backlog: deque[Request] = deque()
        self._raised: list[BaseException] = []
        self._programs: Generator[str, None, None] = (name for name in ())
        self._order = itertools.count()
        self._counts: Counter[str] = Counter()
        self.dispatcher = Dispatcher(runner, _scheduler(runner.shapes), chunk, decode_steps, self._counts)
        self._finished: Counter[str] = Counter()

    @property
    def scheduler(self) -> Scheduler:
        """Which sequences wait and run, and in which memory."""
        return self.dispatcher.scheduler

    @property
    def has_work(self) -> bool:
        """True if there is queued or running work, or a call whose results are still to be read."""
        return bool(self.requests or self.in_flight or self._backlog)

    def first_page(self, position: int) -> int:
        """The first page that the token at a position of a sequence needs."""
        return self.scheduler.groups[0].first_page(position)

    def has_room(self, request: Request) -> bool:
        """True if the queue has room for a request."""
        return self.scheduler.waiting + request.params.n <= self.max_queue

    @told
    def enqueue(self, request: Request) -> None:
        """Puts a request's sequences in the queue; raises QueueFull if there is no room."""
        if not self.has_room(request):
            raise QueueFull(
                f"{self.scheduler.waiting} requests are waiting and max_queue is {self.max_queue}: step until some "
                "have finished, or give the engine a larger max_queue"
            )
        self.requests[request.request_id] = request
        ends_on_host = bool(request.params.stop) or self.runner.shapes.window is not None
        for sequence in request.sequences:
            sequence.order, sequence.stepwise = next(self._order), request.params.keep and ends_on_host
            sequence.submitted()
            params = request.params
            if params.capture is not None and params.max_tokens == 0 and params.prompt_logprobs is None:
                sequence.finish("length")
                sequence = sequence.watch()  # noqa: PLW2901
            self.scheduler.enqueue(sequence)
        self._counts["submitted"] += len(request.sequences)

    @told
    def enqueue_all(self, requests: Iterable[Request]) -> None:
        """Puts requests in the queue in their order, each as soon as there is room for it."""
        self._backlog.extend(requests)
        self._refill()

    @told
    def abort(self, request: Request) -> bool:
        """Ends what is unfinished of a request with `abort`; True if anything was."""
        aborted = False
        for sequence in request.sequences:
            if sequence.completion is None:
                aborted, last = True, sequence.finish("abort")
                if request.request_id in self.requests:  # otherwise it was never in the queue
                    self._settle(sequence, last)
        return aborted

    def abort_id(self, request_id: int) -> bool:
        """The same for the request of an id; False if there is none (any more)."""
        request = self.requests.get(request_id)
        return request is not None and self.abort(request)

    @told
    def give_up(self, sequence: TokenSequence, error: Exception) -> None:
        """Ends a request whose callback raised: this sequence in `error`, even if it was finished, and the others."""
        request, text = sequence.request, f"the callback for its deltas raised {error!r}"
        request.deliver = request.report
        if (completion := sequence.completion) is not None:
            self._finished[completion.finish_reason] -= 1
            self._finished["error"] += 1
            self._hand_out(request, sequence.fail(text))
        for other in request.sequences:
            if other.completion is None:
                self._settle(other, other.fail(text))

    @told
    def launch(self) -> list[Call]:
        """Dispatches a turn's work; returns the calls to read.

        It waits for the previous turn only where there is no room otherwise.
        """
        if self._broken is not None:
            raise self._broken
        self._counts["steps"] += 1
        self._refill()
        self._make_room()
        self._admit()
        calls = self.dispatcher.first_tokens() + self.dispatcher.prefill()
        # A sequence whose prompt has just been completed goes on at once if there is room.
        ready = [sequence for sequence in self.scheduler.running if sequence.decoding and sequence.left > 0]
        ready = [sequence for sequence in ready if not (sequence.stepwise and sequence.ahead)]
        ready = [sequence for sequence in ready if self.scheduler.reserve(sequence, self.dispatcher.goal(sequence))]
        before, self.in_flight = self.in_flight, calls
        at_once: list[Call] = []
        if not (self.runner.decode_waits and (before or calls)):
            at_once = self.dispatcher.constrained([sequence for sequence in ready if sequence.constrained])
            others = [sequence for sequence in ready if not sequence.constrained]
            at_once += self.dispatcher.decode([sequence for sequence in others if sequence.stepwise], 1)
            self.in_flight = calls + self.dispatcher.decode([sequence for sequence in others if not sequence.stepwise])
        if any(sequence.constrained and sequence.scored for call in calls for sequence in call.sequences):
            # Its answer may be whole in its first call, and the prompt's scores have to be there before.
            at_once, self.in_flight = calls + at_once, self.in_flight[len(calls) :]
        if not self.overlap:
            at_once, self.in_flight = at_once + self.in_flight, []
        return before + at_once

    @told
    def read(self, calls: Sequence[Call]) -> None:
        """Takes in the results of calls, waiting for them if need be."""
        for call in calls:
            for sequence, most in zip(call.sequences, call.most, strict=True):
                sequence.ahead -= most
            if call.wanted:
                self._take(call)
            for sequence, scores in call.scores():
                self._settle(sequence, sequence.take_scores(*scores))
            if call.watched is not None:
                self._take_chunks(call)

    def fail(self, error: Exception) -> Exception:
        """After a fault of the engine's own: ends every request in `error`, and begins anew with an empty pool.

        Returns what is to be raised: the fault, or what has come of beginning anew.
        """
        requests = [*self.requests.values(), *self._backlog]
        self.requests, self.in_flight = {}, []
        self._backlog.clear()
        self.dispatcher.scheduler = _scheduler(self.runner.shapes)
        for request in requests:
            request.fault = error
            for sequence in request.sequences:
                if sequence.completion is None:
                    self._finished["error"] += (
                        sequence.order >= 0
                    )  # `submitted` counts it only once it was in the queue
                    sequence.slot, sequence.pages = None, []
                    self.deliver(request, sequence.fail(f"the engine failed: {error!r}"))
        if self.journal is not None:  # the other processes are amid the step that failed
            self._broken = error
            return error
        try:
            self.runner.reset()
        except Exception as second:
            return second
        return error

    @told
    def forget_prefixes(self) -> None:
        """Frees the pages and snapshots of all known prefixes but those that running sequences use."""
        for prefixes in self.scheduler.prefixes:
            prefixes.evict(self.scheduler.pages)

    @told
    def begin_warmup(self, first_token: bool, also: Sequence[Extra] = ()) -> None:
        """Begins to compile every program, or with `first_token` what a request's first token needs."""
        self.end_warmup()
        self._programs = self.runner.warmup(first_token, *also)

    @told
    def compile_next(self) -> str | None:
        """The name of the next program of a warm-up once it is compiled; None after the last."""
        try:
            return next(self._programs, None)
        except Exception as error:
            raise self.fail(error) from None

    @told
    def end_warmup(self) -> None:
        """Leaves out the programs that are not begun."""
        self._programs.close()

    def take_raised(self) -> BaseException | None:
        """What a callback has raised that does not end its request, such as KeyboardInterrupt; None if nothing."""
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
            **{name: self._counts[name] for name in (*counts, *turns)},
        )

    def _refill(self) -> None:
        """Moves requests from the backlog into the queue while there is room."""
        while self._backlog and (self._backlog[0].finished or self.has_room(self._backlog[0])):
            request = self._backlog.popleft()
            if not request.finished:  # its reader has not left
                self.enqueue(request)

    def _make_room(self) -> None:
        """Gives every decoding sequence pages for its next call, the oldest first, by preempting the youngest."""
        for sequence in list(self.scheduler.running):
            while sequence.slot is not None and sequence.decoding and sequence.left > 0:
                if self.scheduler.reserve(sequence, self.dispatcher.goal(sequence)):
                    break
                if self.in_flight:  # some may have finished, and a sequence is swapped out with all its tokens
                    calls, self.in_flight = self.in_flight, []
                    self.read(calls)
                else:
                    self._preempt(self.scheduler.youngest(self.scheduler.group_of(sequence)))

    def _preempt(self, sequence: TokenSequence) -> None:
        """Puts a sequence back into the queue, its states and pages kept on the host bit for bit."""
        self.scheduler.group_of(sequence).free_behind(sequence)
        sequence.saved = self.runner.swap_out(sequence) if sequence.held else None
        sequence.preemptions += 1
        self._counts["preemptions"] += 1
        self.scheduler.release(sequence)
        self.scheduler.enqueue(sequence)

    def _admit(self) -> None:
        while (head := self.scheduler.head()) is not None:
            known = head.cached
            if self.scheduler.admit(self.dispatcher.goal(head)) is None:
                return
            self._counts["cached_tokens"] += 0 if head.preemptions else known  # of a snapshot
            head.admitted()
            self.dispatcher.fill(head, known)

    def _take_chunks(self, call: Call) -> None:
        """Gives watchers what was seen of their chunks, and ends the sequences of which all has been."""
        for watcher, length, chunk in call.chunks():
            sequence, delta = watcher.watched, watcher.saw(length, chunk)
            if sequence is not None and delta is not None:
                self._settle(sequence, delta)

    def _take(self, call: Call) -> None:
        """Gives each sequence of a call its tokens, and settles those that end with them."""
        for sequence, results in call.tokens():
            held = len(sequence.token_ids)
            try:
                delta = sequence.take(*results)
            except Exception as error:
                sequence.decoder = None  # it may be what raised
                delta = sequence.fail(f"its tokens could not be read: {error!r}")
            self._counts["output_tokens"] += len(sequence.token_ids) - held
            self._settle(sequence, delta)

    def _settle(self, sequence: TokenSequence, delta: Delta | None) -> None:
        """Frees what a finished sequence held, and hands out its delta; what is to be watched of it goes on instead."""
        if sequence.completion is not None:
            if delta is not None and sequence.params.keep and sequence.completion.finish_reason in ("stop", "length"):
                delta = self._keep(sequence, delta)
            self._retire(sequence)
            sequence.watcher = None
        elif sequence.whole is not None and sequence.watcher is None:
            self.scheduler.release(sequence)
            self.scheduler.enqueue(sequence.watch())
        if delta is not None and (error := self._hand_out(sequence.request, delta)) is not None:
            self.give_up(sequence, error)

    def _keep(self, sequence: TokenSequence, delta: Delta) -> Delta:
        """The last delta of a sequence with a snapshot of it, or in `error` if there is no memory for one."""
        assert sequence.completion is not None, "kept at its end"
        self.scheduler.group_of(sequence).free_behind(sequence)
        try:
            sequence.keep(self.runner.keep(sequence))
        except Exception as error:
            sequence.fail(f"what it remembers could not be copied: {error!r}")
        reason = sequence.completion.finish_reason
        return dataclasses.replace(delta, finish_reason=reason, output=sequence.request.output())

    def _hand_out(self, request: Request, delta: Delta) -> Exception | None:
        """Delivers a delta, with a journal after the step under way."""
        if self.journal is None:
            return self.deliver(request, delta)
        self.journal.later(request, delta)
        return None

    def deliver(self, request: Request, delta: Delta) -> Exception | None:
        """Calls a request's callback; returns the exception if it raised one, and keeps others for `take_raised`."""
        try:
            request.deliver(delta)
        except Exception as error:
            return error
        except BaseException as error:
            self._raised.append(error)
        return None

    def _retire(self, sequence: TokenSequence) -> None:
        """Frees the slot, the pages and the place in the queue of a finished sequence."""
        assert sequence.completion is not None, "only a finished sequence retires"
        self._finished[sequence.completion.finish_reason] += 1
        held = sequence if sequence.watcher is None else sequence.watcher
        if held.slot is None:
            self.scheduler.withdraw(held)
        else:
            slot, pages, spoiled = held.slot, held.pages, sequence.completion.finish_reason == "error"
            self.scheduler.release(held, spoiled)
            if spoiled:
                self.runner.scrub(slot, self.scheduler.are_free(pages))
        if sequence.request.finished:
            del self.requests[sequence.request.request_id]


def _scheduler(shapes: Shapes) -> Scheduler:
    """The scheduler of an empty pool."""
    sizes = (shapes.slots, shapes.pages, shapes.page_size, shapes.window, shapes.most_pages, shapes.grid)
    return Scheduler(*sizes, shapes.groups)
