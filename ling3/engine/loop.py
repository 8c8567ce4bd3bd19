"""Continuous batching: who runs next, on what memory, and what has come of it. One thread at a time.

One turn, `launch` and then `read` of what the turn before it launched:

    make room   for the next tokens of all who decode; when pages run out, the youngest gives up its slot
    admit       the oldest waiting runs, while there are slots and pages: first come, first served
    prefill     the next chunks of their prompts, up to `chunk` tokens
    decode      `decode_steps` tokens for every run past its prompt, as many runs to a call as it has rows
    read        the tokens of the *last* turn, while the device works on this one

Every call has a fixed shape, and a row's result depends on its own inputs alone. So a run's tokens and
log-probabilities are bit for bit the same whoever runs beside it, whenever it comes, and after being preempted.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import no_type_check

import numpy as np

from ling3.engine.outputs import FINISH_REASONS, Delta, Stats
from ling3.engine.request import Request, Run
from ling3.engine.runner import Runner, smallest
from ling3.engine.sampling import Choice
from ling3.engine.scheduler import Scheduler


@dataclasses.dataclass
class Call:
    """Work on its way: whose it is and in which rows, the most tokens each can get, and what will come of it."""

    choice: Choice
    runs: Sequence[Run]
    rows: Sequence[int]
    most: Sequence[int]


# Its turns are the host's part of every token: checking types would take longer than they do.
@no_type_check
class Loop:
    """The requests of an engine, from the queue to their ends.

    `hand_out` gives a delta to who asked, and returns what that raised.
    """

    def __init__(
        self,
        runner: Runner,
        chunk: int,
        decode_steps: int,
        hand_out: Callable[[Request, Delta], Exception | None],
    ):
        self.runner, self.chunk, self.decode_steps, self.hand_out = runner, chunk, decode_steps, hand_out
        self.scheduler = Scheduler(runner.shapes.slots, runner.shapes.pages, runner.shapes.page_size)
        self.requests: dict[int, Request] = {}
        self.in_flight: list[Call] = []
        self._order = itertools.count()
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        return bool(self.requests or self.in_flight)

    def enqueue(self, request: Request) -> None:
        """Puts a request's runs in the queue."""
        self.requests[request.request_id] = request
        for run in request.runs:
            run.order = next(self._order)
            run.submitted()
            self.scheduler.enqueue(run)
        self._counts["submitted"] += len(request.runs)

    def abort(self, request: Request) -> bool:
        """Ends what is unfinished of a request with `abort`; whether anything was."""
        aborted = False
        for run in request.runs:
            if run.completion is None:
                aborted, last = True, run.finish("abort")
                if request.request_id in self.requests:  # else it never came into the queue
                    self._settle(run, last)
        return aborted

    def launch(self) -> list[Call]:
        """Dispatches a turn's work; returns that of the turn before, to be read.

        It waits for the turn before only where there is no room otherwise.
        """
        self._counts["steps"] += 1
        self._make_room()
        self._admit()
        calls = self._prefill()
        # Who has just been prefilled goes on at once if there is room.
        ready = [run for run in self.scheduler.running if run.decoding and run.left > 0]
        ready = [run for run in ready if self.scheduler.reserve(run, self._goal(run))]
        before, self.in_flight = self.in_flight, calls
        if not (self.runner.decode_waits and (before or calls)):
            self.in_flight = calls + self._decode(ready)
        return before

    def read(self, calls: Sequence[Call]) -> None:
        """Takes in what calls have brought, waiting for them if need be."""
        for call in calls:
            for run, most in zip(call.runs, call.most, strict=True):
                run.ahead -= most
            if any(most and run.completion is None for run, most in zip(call.runs, call.most, strict=True)):
                self._take(call)

    def fail(self, error: Exception) -> None:
        """After a fault of the engine's own: every request ends in `error`, and all begins anew."""
        requests, self.requests, self.in_flight = list(self.requests.values()), {}, []
        shapes = self.runner.shapes
        self.scheduler = Scheduler(shapes.slots, shapes.pages, shapes.page_size)
        for request in requests:
            request.fault = error
            for run in request.runs:
                if run.completion is None:
                    run.slot, run.pages = None, []
                    self._finished["error"] += 1
                    self.hand_out(request, run.finish("error", error=f"the engine failed: {error!r}"))
        self.runner.reset()

    def stats(self) -> Stats:
        """The books, at this moment."""
        scheduler = self.scheduler
        counts = ("submitted", "prompt_tokens", "output_tokens", "preemptions")
        turns = ("steps", "prefill_calls", "decode_calls")
        return Stats(
            waiting=scheduler.waiting,
            running=len(scheduler.running),
            finished={reason: self._finished[reason] for reason in FINISH_REASONS},
            slots=scheduler.slots,
            free_slots=scheduler.free_slots,
            pages=scheduler.pages,
            free_pages=scheduler.free_pages,
            page_size=scheduler.page_size,
            compile_seconds=self.runner.compile_seconds,
            **{name: self._counts[name] for name in (*counts, *turns)},
        )

    def _goal(self, run: Run) -> int:
        """Tokens that the run's caches may have to hold after the next decode call."""
        return len(run.prompt) + len(run.token_ids) + run.ahead - 1 + min(self.decode_steps, run.left)

    def _make_room(self) -> None:
        """Gives every decoding run pages for its next call, the oldest first, by preempting the youngest."""
        for run in list(self.scheduler.running):
            while run.slot is not None and run.decoding and run.left > 0:
                if self.scheduler.reserve(run, self._goal(run)):
                    break
                if self.in_flight:  # some may have finished, and the books must be exact before a run is moved
                    calls, self.in_flight = self.in_flight, []
                    self.read(calls)
                else:
                    self._preempt(self.scheduler.running[-1])

    def _preempt(self, run: Run) -> None:
        """Puts a run back into the queue, its states and pages kept on the host bit for bit."""
        run.saved = self.runner.depart(run) if run.held else None
        run.preemptions += 1
        self._counts["preemptions"] += 1
        self.scheduler.release(run)
        self.scheduler.enqueue(run)

    def _admit(self) -> None:
        while (run := self.scheduler.head()) is not None and self.scheduler.admit(self._goal(run)) is not None:
            run.admitted()
            self.runner.arrive(run)

    def _prefill(self) -> list[Call]:
        """The next chunks, the oldest run's first, up to `chunk` padded tokens in all."""
        calls, spent = [], 0
        for run in self.scheduler.running:
            while not run.decoding:
                size = min(self.chunk - run.prefilled % self.chunk, len(run.prompt) - run.prefilled)
                spent += smallest(self.runner.shapes.widths, size)
                if calls and spent > self.chunk:
                    return calls
                choice = self.runner.prefill(run, run.prompt[run.prefilled : run.prefilled + size])
                run.prefilled += size
                self._counts["prefill_calls"] += 1
                self._counts["prompt_tokens"] += size
                calls.append(Call(choice, [run], [0], [int(run.decoding)]))
                run.ahead += int(run.decoding)
        return calls

    def _decode(self, runs: Sequence[Run]) -> list[Call]:
        """The next tokens of the runs, as many to a call as its rows."""
        calls, rows = [], self.runner.shapes.rows[-1]
        for start in range(0, len(runs), rows):
            some = runs[start : start + rows]
            most = [min(self.decode_steps, run.left) for run in some]
            choice, places = self.runner.decode(some, max(most))
            calls.append(Call(choice, some, places, most))
            self._counts["decode_calls"] += 1
            for run, tokens in zip(some, most, strict=True):
                run.ahead += tokens
        return calls

    def _take(self, call: Call) -> None:
        """Gives each run of a call its tokens, and settles what ends with them."""
        rows = call.choice.token.shape[0]
        tokens, logprobs = (np.asarray(x).reshape(rows, -1) for x in (call.choice.token, call.choice.logprob))
        shape = (*tokens.shape, -1)
        tops = (call.choice.top_ids, call.choice.top_logprobs)
        if any(run.params.logprobs for run in call.runs):
            top_ids, top_logprobs = (np.asarray(x).reshape(shape) for x in tops)
        else:  # nobody looks at them: they stay on the device
            top_ids, top_logprobs = (np.zeros((*tokens.shape, 0), x.dtype) for x in tops)
        for row, run, most in zip(call.rows, call.runs, call.most, strict=True):
            if run.completion is None and most:
                held = len(run.token_ids)
                delta = run.take(tokens[row], logprobs[row], top_ids[row], top_logprobs[row])
                self._counts["output_tokens"] += len(run.token_ids) - held
                self._settle(run, delta)

    def _settle(self, run: Run, delta: Delta | None) -> None:
        """Frees what a finished run held, and hands out its delta."""
        if run.completion is not None:
            self._retire(run)
        if delta is not None and (error := self.hand_out(run.request, delta)) is not None:
            self._give_up(run, f"the callback for its deltas raised {error!r}")

    def _give_up(self, run: Run, error: str) -> None:
        """Ends the request of a run whose callback failed: the run in `error`, however it had ended, and the others."""
        request = run.request
        request.deliver = request.report
        if (completion := run.completion) is not None:
            self._finished[completion.finish_reason] -= 1
            self._finished["error"] += 1
            self.hand_out(request, run.fail(error))
        for other in request.runs:
            if other.completion is None:
                self._settle(other, other.fail(error))

    def _retire(self, run: Run) -> None:
        """Takes a finished run off the books."""
        assert run.completion is not None, "only a finished run retires"
        self._finished[run.completion.finish_reason] += 1
        if run.slot is None:
            self.scheduler.withdraw(run)
        else:
            if run.completion.finish_reason == "error":
                self.runner.scrub(run)
            self.scheduler.release(run)
        if run.request.finished:
            del self.requests[run.request.request_id]
