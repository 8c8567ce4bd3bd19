"""A discrete-event simulation of the handshake, in which the operators' schedulers decide what runs next.

Sessions and cards take the times of a `Stage`. Each card has an `FfnArea` and each session an `AttentionArea`, without
payload (one token, with one slot for each card). A message raises a flag when it arrives, and an idle worker then calls
its scheduler.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from ling3.afd.cost.deployment import Stage
from ling3.afd.operators.batching import ffn_worker_scheduler
from ling3.afd.operators.limits import ALIGNMENT
from ling3.afd.operators.returning import attention_worker_scheduler
from ling3.afd.operators.windows import AttentionArea, FfnArea
from ling3.mesh.chips import Number, at_least

_session_turn = jax.jit(attention_worker_scheduler)
_card_turn = jax.jit(ffn_worker_scheduler, static_argnames="sync_group_size")


@dataclasses.dataclass(frozen=True)
class Interval:
    """A time in which a worker was busy, from `start` to `end`, in seconds."""

    worker: str
    """`session 0` …, `card 0` …."""
    start: float
    end: float
    step: int
    layer: int
    micro_batch: int
    """Step, layer and micro-batch are those of the first of `sessions`, if a card took messages of several groups."""
    sessions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a simulation. The first steps, in which the pipeline fills, are not measured."""

    step_time: float
    """Seconds from one token of a sequence to the next."""
    attention_utilisation: float
    """The fraction of the measured time in which a session was busy, averaged over the sessions."""
    ffn_utilisation: float
    """The same for the cards."""
    timeline: tuple[Interval, ...]
    """The intervals of all steps, ordered by their starts."""


def simulate(
    stages: Sequence[Stage],
    *,
    attention_workers: int,
    ffn_workers: int = 1,
    micro_batches: int,
    sync_group_size: int | None = None,
    steps: int = 2,
    warm: int = 2,
    jitter: float = 0.0,
    seed: int = 0,
) -> Outcome:
    """Simulates decode steps of A sessions with M micro-batches each, through layers with the times `stages`.

    A session computes a micro-batch's attention, then its link carries the rows to all cards, one micro-batch after the
    other; they arrive `latency` later. An idle card takes the messages that `ffn_worker_scheduler` gives it, and
    returns all rows at once over the sessions' links. An idle session takes the micro-batch that
    `attention_worker_scheduler` finds complete. Workers' times are multiplied by random numbers (gamma distribution of
    mean 1, standard deviation `jitter`). Results are means over `steps` steps, after `warm` ones and before a last one.

    Raises ValueError for counts below 1, a negative jitter, and stages without times for A sessions.
    """
    counts = {"attention_workers": attention_workers, "ffn_workers": ffn_workers, "micro_batches": micro_batches}
    at_least(1, **counts, stages=len(stages), steps=steps, warm=warm)
    if not (jitter >= 0 and math.isfinite(jitter)):
        raise ValueError(f"jitter is {jitter}, expected a finite number, 0 or more")
    for stage in stages:
        if len(stage.experts) != attention_workers:
            raise ValueError(f"stages have times for {len(stage.experts)} sessions, expected {attention_workers}")
    run = _Run(stages, attention_workers, ffn_workers, micro_batches, sync_group_size, warm + steps + 1)
    run.to_the_end(_factors(jitter, seed))
    start, end = (sum(times) / len(times) for times in (run.done[warm - 1], run.done[warm + steps - 1]))
    busy = {"session": 0.0, "card": 0.0}
    for interval in run.timeline:
        inside = min(interval.end, end) - max(interval.start, start)
        busy[interval.worker.split()[0]] += max(0.0, inside)
    return Outcome(
        step_time=(end - start) / steps,
        attention_utilisation=busy["session"] / (end - start) / attention_workers,
        ffn_utilisation=busy["card"] / (end - start) / ffn_workers,
        timeline=tuple(run.timeline),
    )


_Worker = Generator[float | None, None, None]
"""Yields the seconds after which it continues, or None if it waits for a message."""


# `simulate` checks its arguments once; there are too many events to check each.


class _Run:
    """The windows of all workers, and the queue of events; simultaneous ones happen in the order of their planning."""

    def __init__(
        self, stages: Sequence[Stage], sessions: int, cards: int, micro_batches: int, group: int | None, steps: int
    ) -> None:
        self.stages, self.group, self.steps = stages, group, steps
        self.shape = sessions, micro_batches, 1, cards
        # At first every micro-batch is complete, as if its rows had just come back.
        self.flags = np.ones(self.shape, np.int32)
        self.info = np.zeros((cards, sessions, micro_batches, 2 + cards), np.int32)
        self.blocks = [[0] * micro_batches for _ in range(sessions)]  # done by each micro-batch, in all steps
        self.sessions = [self.session(a) for a in range(sessions)]
        self.cards = [self.card(w) for w in range(cards)]
        self.waiting: set[_Worker] = set()
        self.done: list[list[float]] = [[] for _ in range(steps)]
        self.timeline: list[Interval] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.planned, self.now = itertools.count(), 0.0

    def to_the_end(self, factors: Iterator[float]) -> None:
        self.factors = factors
        for session in self.sessions:
            self.plan(0.0, self.go_on, session)
        self.waiting.update(self.cards)
        while self.events:
            self.now, _, happen = heapq.heappop(self.events)
            happen()

    def plan(self, time: float, happen: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (time, next(self.planned), functools.partial(happen, *arguments)))

    def go_on(self, worker: _Worker) -> None:
        seconds = next(worker)
        if seconds is None:
            self.waiting.add(worker)
        else:
            self.plan(self.now + seconds, self.go_on, worker)

    def wake(self, worker: _Worker) -> None:
        """Lets a waiting worker call its scheduler, after everything else that arrives at this time."""
        if worker in self.waiting:
            self.waiting.remove(worker)
            self.plan(self.now, self.go_on, worker)

    def place(self, session: int, micro_batch: int) -> tuple[int, int]:
        """The current step and layer of a micro-batch."""
        return divmod(self.blocks[session][micro_batch], len(self.stages))

    def work(self, worker: str, seconds: Number, taken: list[tuple[int, int]]) -> float:
        """Records that a worker is busy from now on with `taken` (session, micro-batch); returns for how long."""
        seconds = float(seconds) * next(self.factors)
        served = tuple(session for session, _ in taken)
        self.timeline.append(
            Interval(worker, self.now, self.now + seconds, *self.place(*taken[0]), taken[0][1], sessions=served)
        )
        return seconds

    def session(self, number: int) -> _Worker:
        """An attention worker, whose rows go over its link to all cards."""
        area, sent = AttentionArea.empty(*self.shape[1:], ALIGNMENT), 0.0  # when the link is free again
        while True:
            area, ready = _session_turn(dataclasses.replace(area, token_info=self.flags[number]))
            self.flags[number] = area.token_info
            if not ready:
                yield None
                continue
            micro_batch = int(area.micro_batch_id)
            stage = self.stages[self.place(number, micro_batch)[1]]
            yield self.work(f"session {number}", stage.attention, [(number, micro_batch)])
            sent = max(self.now, sent) + float(stage.out)
            for card in range(len(self.cards)):
                self.plan(sent + stage.latency, self.received, card, number, micro_batch)
            yield 0.0

    def received(self, card: int, session: int, micro_batch: int) -> None:
        """Writes a message that arrives into the card's window; expert w is on card w."""
        window = self.info[card, session, micro_batch]
        assert window[0] == 0, "a message that was not taken is overwritten"
        window[:] = [1, self.place(session, micro_batch)[1], *range(len(self.cards))]
        self.wake(self.cards[card])

    def card(self, number: int) -> _Worker:
        """An FFN worker, whose rows go back to each session over that session's link."""
        area, links = FfnArea.empty(*self.shape, ALIGNMENT), [0.0] * self.shape[0]
        while True:
            area = _card_turn(dataclasses.replace(area, token_info=self.info[number]), self.group)
            self.info[number] = area.token_info
            ids = (area.layer_ids, area.session_ids, area.micro_batch_ids)
            layers, *places = (np.asarray(part)[: int(area.out_num)].tolist() for part in ids)
            if not layers:
                yield None
                continue
            taken = list(zip(*places, strict=True))
            served = collections.Counter(layers).items()
            seconds = sum(self.stages[layer].experts[sessions - 1] for layer, sessions in served)
            yield self.work(f"card {number}", seconds, taken)
            for layer, (session, micro_batch) in zip(layers, taken, strict=True):
                assert layer == self.place(session, micro_batch)[1], "the window has another message"
                links[session] = max(self.now, links[session]) + float(self.stages[layer].back)
                time = links[session] + self.stages[layer].latency
                self.plan(time, self.returned, session, micro_batch, number)
            yield 0.0

    def returned(self, session: int, micro_batch: int, card: int) -> None:
        flags = self.flags[session, micro_batch]
        flags[0, card] = 1
        if not flags.all():
            return
        step, layer = self.place(session, micro_batch)
        self.blocks[session][micro_batch] += 1
        if layer + 1 == len(self.stages):
            self.done[step].append(self.now)
            if step + 1 == self.steps:
                flags[:] = 0  # this micro-batch ends here
                return
        self.wake(self.sessions[session])


def _factors(jitter: float, seed: int) -> Iterator[float]:
    """Random factors of mean 1 and standard deviation `jitter`: gamma of shape 1/jitter² and scale jitter²."""
    draws = np.random.default_rng(seed)
    while True:
        yield from (draws.gamma(jitter**-2, jitter**2, 1024) if jitter else np.ones(1024)).tolist()
