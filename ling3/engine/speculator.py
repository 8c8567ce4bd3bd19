"""When guessing pays: in which turns of a loop its sequences guess, and how many guesses of each a pass checks."""

import math
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ling3.engine.calls import Call, Extended, Passed
from ling3.engine.request import TokenSequence
from ling3.engine.shapes import Shapes
from ling3.engine.speculation import Speculation

ROW = 0.2
"""The time that a row adds to a step, in steps, while it is not measured."""
MEASURED = 4
"""The number of times that are kept of each program."""
PAYS = 1.05
"""The factor by which passes must be faster than plain steps."""
FORGOTTEN = 256
"""Turns with one kind of program after which the times of the other are forgotten."""
EXPLORED = 32
"""Turns after which a model's own layer is tried again although its guesses did not pay."""
MOST = 0.8
"""The largest part of a call's time that is taken for the host's."""

Key = TypeVar("Key")
Latest = dict[Key, deque[float]]
"""The latest times in seconds of programs of each kind."""


class Speculator:
    """Decides when the sequences of a loop guess, and how many guesses of each a pass checks.

    A turn with passes costs more than their time: the host must know all tokens so far to guess, and the device waits
    meanwhile (with plain steps, the host reads the tokens of a call while the device runs the next). So sequences
    guess if none of their calls is in flight, or if passes would pay with guesses like those that they made while the
    device worked (`Speculation.foresee`). Whether passes pay follows from how likely each sequence's guesses are right,
    and from measured times: of plain steps, of passes (longer with more rows), and of the host's part of a call. Until
    plain steps were measured, there are no passes. Latest of a program that has not run for long are forgotten.

    A model's own layer guesses only in passes. If these would not pay, they are made once in `EXPLORED` turns all the
    same, provided that they would pay with all guesses right. Loops in several processes, which must decide `alike`,
    read no clock.
    """

    def __init__(self, shapes: Shapes, *, overlap: bool = True, alike: bool = False):
        self.sizes, self.groups, self.overlap, self.timed = shapes.drafts, shapes.groups, overlap, not alike
        self._steps: Latest[int] = defaultdict(lambda: deque(maxlen=MEASURED))  # by rows
        self._passes: Latest[tuple[int, int]] = defaultdict(lambda: deque(maxlen=MEASURED))  # of calls, by rows, passes
        self._unguessed = self._repeated = 0
        self._last: Latest[Any] = self._steps
        self._begin = 0.0

    def begin(self, running: Sequence[TokenSequence]) -> bool:
        """True if sequences guess in the turn that begins, for which they wait until their calls in flight are read."""
        if self.sizes is None:
            return False
        self._begin = time.perf_counter() if self.timed else 0.0
        able = [each for each in running if each.speculation is not None and each.decoding and each.left > 0]
        if all(each.synchronous or not each.ahead for each in able):
            return True
        guesses = [each.speculation for each in able if each.speculation is not None and not each.synchronous]
        likely = [1.0 if self._explores else each.chance for each in guesses if each.foresees]
        pays = self.depth(len(guesses), likely) > 0
        self._unguessed += not pays
        return pays

    @property
    def _explores(self) -> bool:
        """True if the model's layer is to be tried again, as if all of its guesses were right."""
        return self.sizes is not None and self.sizes.mtp and self._unguessed >= EXPLORED

    @property
    def measured(self) -> bool:
        """True if plain steps were measured, or are not to be."""
        return not self.timed or bool(_shortest(self._steps))

    def choose(self, speculations: Sequence[Speculation]) -> bool:
        """Sets how many guesses of each sequence a pass checks, and returns True.

        If none is worth it, takes the guesses away and returns False.
        """
        if not speculations:  # they wait for their tokens, and guess in the next turn
            return True
        chances = [1.0 if self._explores else each.chance for each in speculations if each.drafts is not None]
        depth = self.depth(len(speculations), chances)
        self._unguessed = 0 if depth else self._unguessed + 1
        for each in speculations:
            each.depth, each.drafts = depth, each.drafts if depth else None
        return depth > 0

    def depth(self, count: int, chances: Sequence[float]) -> int:
        """The number of guesses in a pass with which `count` sequences get the most tokens a second; 0 for plain steps.

        `chances` are of those with guesses. A pass that checks d guesses gives 1 + p + … + p^d tokens on average, and
        the next pass has guesses with probability p^d, or p if the model guesses anew after each pass.
        """
        assert self.sizes is not None, "asked where sequences speculate"
        if not (chances and self.measured):
            return 0
        sizes, calls = self.sizes, -(-count // (self.sizes.sequences * self.groups))
        passes, steps = range(sizes.tokens // (sizes.each + 1)), _shortest(self._steps)
        host, each_pass = _parts(_shortest(self._passes), steps)

        def speed(depth: int) -> float:
            goes_on = [p if sizes.mtp else p**depth for p in chances]
            made = sum(1 - math.prod(1 - q**i for q in goes_on) for i in passes)
            right = [sum(p**i for i in range(1, depth + 1)) for p in chances]
            tokens = count * made + sum(r * sum(q**i for i in passes) for r, q in zip(right, goes_on, strict=True))
            rows = (count + depth * len(chances)) / calls
            return tokens / (host + calls * made * _time(rows, each_pass, steps))

        best = max(range(1, sizes.each + 1), key=speed)
        return best if speed(best) > PAYS * count / _time(count, steps, each_pass) else 0

    def end(self, calls: Sequence[Call], later: Sequence[Call]) -> None:
        """Notes the time of the turn that ends, if it was that of one call's passes, or of one call's plain steps."""
        if self.sizes is None or not self.timed or len(calls) != 1 or isinstance(call := calls[0], Extended):
            return
        taken, rows = time.perf_counter() - self._begin, len(call.sequences)
        if isinstance(call, Passed):
            counts = np.asarray(call.results.passes)
            if not later and counts.any():
                self._note(self._passes, (rows + sum(call.depths), int(counts.max())), taken)
        elif later or not self.overlap:  # with overlap, it is read while the next one runs
            self._note(self._steps, rows, taken / max(call.ahead))

    def _note(self, times: Latest[Any], key: object, taken: float) -> None:
        """Notes a time; forgets those of the other kind of program if only this one ran for long."""
        times[key].append(taken)
        self._repeated, self._last = self._repeated + 1 if times is self._last else 0, times
        if self._repeated >= FORGOTTEN:
            (self._passes if times is self._steps else self._steps).clear()


def _shortest(times: Latest[Key]) -> dict[Key, float]:
    """The shortest of the latest times, since whatever disturbs a measurement makes it longer.

    A time counts from its second measurement on: the first may be a compiler's.
    """
    return {key: min(own) for key, own in times.items() if len(own) > 1}


def _parts(calls: Mapping[tuple[int, int], float], steps: dict[int, float]) -> tuple[float, dict[int, float]]:
    """The host's part of a call, and the time of one pass by its rows, from the times of calls by rows and passes.

    A call takes host + passes · pass, so the host's part follows from calls with few and with many passes. Without
    these, a pass is assumed to take as long as a plain step with as many rows.
    """
    lines, guesses = [], []
    for rows in {rows for rows, _ in calls}:
        known = sorted((n, taken) for (r, n), taken in calls.items() if r == rows)
        (few, short), (many, long) = known[0], known[-1]
        lines += [short - few * (long - short) / (many - few)] if few < many else []
        guesses.append(short - few * _time(rows, steps, {}))
    host = min(max(statistics.median(lines or guesses or [0.0]), 0.0), MOST * min(calls.values(), default=0.0))
    each: dict[int, float] = {}
    for (rows, passes), taken in calls.items():
        each[rows] = min(each.get(rows, math.inf), (taken - host) / passes)
    return host, each


def _time(rows: float, times: dict[int, float], others: dict[int, float]) -> float:
    """The seconds of a pass or a step with `rows` rows, from the nearest number of rows that was measured.

    If none was, `others` are taken; without these, the unit is a step of one row.
    """
    known = times or others or {1: 1.0}
    nearest = min(known, key=lambda count: abs(count - rows))
    return known[nearest] * (1 + ROW * (rows - 1)) / (1 + ROW * (nearest - 1))
