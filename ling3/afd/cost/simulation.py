"""A discrete-event simulation of the handshake, in which the operators' own schedulers decide who runs next.

Sessions and cards take the times of a `Stage`. Each card has an `FfnArea` and each session an `AttentionArea`, without
payload (one token, with one slot for each card). A message raises a flag when it arrives, and an idle worker asks its
scheduler.
"""

import collections
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, no_type_check

import jax
import numpy as np

from ling3.afd.cost.deployment import Stage
from ling3.afd.operators.batching import ffn_worker_scheduler
from ling3.afd.operators.limits import ALIGNMENT
from ling3.afd.operators.returning import attention_worker_scheduler
from ling3.afd.operators.windows import AttentionArea, FfnArea

_session_turn = jax.jit(attention_worker_scheduler)
_card_turn = jax.jit(ffn_worker_scheduler, static_argnames="sync_group_size")


@dataclasses.dataclass(frozen=True)
class Interval:
    """A worker at work, from `start` to `end`, in seconds."""

    worker: str
    """`session 0` …, `card 0` …."""
    start: float
    end: float
    step: int
    layer: int
    micro_batch: int
    """Of the first of the `sessions`, if it is a card that took messages of several groups."""
    sessions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a simulation found. Steps before the last ones, in which the pipeline fills, are not measured."""

    step_time: float
    """Seconds from one token of a sequence to its next."""
    attention_utilisation: float
    """The share of that time in which a session was at work, of all sessions."""
    ffn_utilisation: float
    """The same of the cards."""
    timeline: tuple[Interval, ...]
    """Of all steps, in the order of their starts."""


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
    """Runs decode steps of A sessions with M micro-batches each, through layers with these times.

    A session computes a micro-batch's attention, and its link carries the rows to all cards, one micro-batch after the
    other; they arrive `latency` later. A card that is idle takes what `ffn_worker_scheduler` gives it, and returns all
    rows at once over the sessions' links. A session that is idle goes on with what `attention_worker_scheduler` says is
    complete. Each time of a worker is multiplied by a number from the gamma distribution of mean 1 and standard
    deviation `jitter`. The measurement is the mean over `steps` steps, between the first `warm` ones and a last one.

    ValueError for counts below 1, a negative jitter, and stages without times for A sessions.
    """
    counts = {"attention_workers": attention_workers, "ffn_workers": ffn_workers, "micro_batches": micro_batches}
    for name, count in {**counts, "stages": len(stages), "steps": steps, "warm": warm}.items():
        if count < 1:
            raise ValueError(f"{name} is {count}, expected at least 1")
    if not (jitter >= 0 and math.isfinite(jitter)):
        raise ValueError(f"jitter is {jitter}, expected a finite number, 0 or more")
    for stage in stages:
        if len(stage.experts) != attention_workers:
            raise ValueError(f"stages have times for {len(stage.experts)} sessions, expected {attention_workers}")
    sessions = [_Session(a, micro_batches, ffn_workers) for a in range(attention_workers)]
    cards = [_Card(w, attention_workers, micro_batches, ffn_workers, sync_group_size) for w in range(ffn_workers)]
    run = _Run(tuple(stages), sessions, cards, warm + steps + 1, _factors(jitter, seed))
    run.to_the_end()
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


_Message = tuple[int, int, int]
"""Step, layer and micro-batch."""
_Taken = list[tuple[int, _Message]]
"""Messages with their sessions."""


# Events are many: what comes in is checked by `simulate`, and not with each of them again.


@no_type_check
class _Session:
    """An attention worker: its window, and what each of its micro-batches does next."""

    def __init__(self, number: int, micro_batches: int, cards: int) -> None:
        self.number, self.name, self.waits = number, f"session {number}", True
        # Every micro-batch begins as one whose rows are back.
        self.flags = np.ones((micro_batches, 1, cards), np.int32)
        self.area = AttentionArea.empty(micro_batches, 1, cards, ALIGNMENT)
        self.next: list[_Message] = [(0, 0, m) for m in range(micro_batches)]
        self.sent, self.returned = 0.0, [0.0] * cards  # until when the link is taken

    def take(self) -> _Taken:
        self.area, ready = _session_turn(dataclasses.replace(self.area, token_info=self.flags))
        self.flags = np.array(self.area.token_info)
        return [(self.number, self.next[int(self.area.micro_batch_id)])] if ready else []

    def seconds(self, stages: Sequence[Stage], taken: _Taken) -> float:
        return float(stages[taken[0][1][1]].attention)


@no_type_check
class _Card:
    """An FFN worker: its window, and the messages in it."""

    def __init__(self, number: int, sessions: int, micro_batches: int, cards: int, group: int | None) -> None:
        self.number, self.name, self.waits, self.group = number, f"card {number}", True, group
        self.info = np.zeros((sessions, micro_batches, 2 + cards), np.int32)
        self.area = FfnArea.empty(sessions, micro_batches, 1, cards, ALIGNMENT)
        self.messages: dict[tuple[int, int], _Message] = {}

    def take(self) -> _Taken:
        self.area = area = _card_turn(dataclasses.replace(self.area, token_info=self.info), self.group)
        self.info, number = np.array(area.token_info), int(area.out_num)
        ids = (np.asarray(part)[:number].tolist() for part in (area.layer_ids, area.session_ids, area.micro_batch_ids))
        taken = []
        for layer, session, micro_batch in zip(*ids, strict=True):
            message = self.messages.pop((session, micro_batch))
            assert message[1:] == (layer, micro_batch), "the window has another message"
            taken.append((session, message))
        return taken

    def seconds(self, stages: Sequence[Stage], taken: _Taken) -> float:
        layers = collections.Counter(layer for _, (_, layer, _) in taken)
        return float(sum(stages[layer].experts[served - 1] for layer, served in layers.items()))


@no_type_check
class _Run:
    """The queue of events. What happens at one time happens in the order in which it was planned."""

    def __init__(
        self,
        stages: tuple[Stage, ...],
        sessions: list[_Session],
        cards: list[_Card],
        steps: int,
        factors: Iterator[float],
    ) -> None:
        self.stages, self.sessions, self.cards, self.steps, self.factors = stages, sessions, cards, steps, factors
        self.done: list[list[float]] = [[] for _ in range(steps)]
        self.timeline: list[Interval] = []
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.planned, self.now = itertools.count(), 0.0

    def to_the_end(self) -> None:
        for session in self.sessions:
            self.turn(session)
        while self.events:
            self.now, _, happen = heapq.heappop(self.events)
            happen()

    def plan(self, time: float, happen: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (time, next(self.planned), functools.partial(happen, *arguments)))

    def turn(self, worker: _Session | _Card) -> None:
        """Asks the scheduler of a worker that waits, after everything else that arrives at this time."""
        if worker.waits:
            worker.waits = False
            self.plan(self.now, self.ask, worker)

    def ask(self, worker: _Session | _Card) -> None:
        taken = worker.take()
        if not taken:
            worker.waits = True
            return
        end = self.now + worker.seconds(self.stages, taken) * next(self.factors)
        served = tuple(session for session, _ in taken)
        self.timeline.append(Interval(worker.name, self.now, end, *taken[0][1], sessions=served))
        self.plan(end, self.answered if isinstance(worker, _Card) else self.attended, worker, taken)

    def attended(self, session: _Session, taken: _Taken) -> None:
        """A session's rows go over its link to all cards."""
        _, message = taken[0]
        stage = self.stages[message[1]]
        session.sent = max(self.now, session.sent) + float(stage.out)
        for card in self.cards:
            self.plan(session.sent + stage.latency, self.received, card, session.number, message)
        session.waits = True
        self.turn(session)

    def received(self, card: _Card, session: int, message: _Message) -> None:
        """Data before flag; expert w lies on card w."""
        _, layer, micro_batch = message
        assert card.info[session, micro_batch, 0] == 0, "a message that was not taken is overwritten"
        card.messages[session, micro_batch] = message
        card.info[session, micro_batch] = [1, layer, *range(len(self.cards))]
        self.turn(card)

    def answered(self, card: _Card, taken: _Taken) -> None:
        """A card's rows go back, to each session over its own link."""
        for number, message in taken:
            session, stage = self.sessions[number], self.stages[message[1]]
            session.returned[card.number] = max(self.now, session.returned[card.number]) + float(stage.back)
            self.plan(session.returned[card.number] + stage.latency, self.returned, session, card.number, message)
        card.waits = True
        self.turn(card)

    def returned(self, session: _Session, card: int, message: _Message) -> None:
        step, layer, micro_batch = message
        session.flags[micro_batch, 0, card] = 1
        if not session.flags[micro_batch].all():
            return
        last = layer + 1 == len(self.stages)
        if last:
            self.done[step].append(self.now)
            if step + 1 == self.steps:
                session.flags[micro_batch] = 0  # this micro-batch ends here
                return
        session.next[micro_batch] = (step + 1, 0, micro_batch) if last else (step, layer + 1, micro_batch)
        self.turn(session)


def _factors(jitter: float, seed: int) -> Iterator[float]:
    """Of mean 1 and standard deviation `jitter`: the gamma distribution of shape 1/jitter² and scale jitter²."""
    draws = np.random.default_rng(seed)
    while True:
        yield from (draws.gamma(jitter**-2, jitter**2, 1024) if jitter else np.ones(1024)).tolist()
