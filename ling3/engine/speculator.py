"""When guessing pays: in which turns of a loop its sequences guess, and how many guesses of each a pass checks."""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import numpy as np

from ling3.engine.calls import Call, Extended, Passed
from ling3.engine.request import TokenSequence
from ling3.engine.shapes import Shapes
from ling3.engine.speculation import Speculation

ROW = 0.2
"""The time that a row adds to a step, in steps, while it is not measured."""
MEASURED = 5
"""The number of times of which the median is taken."""
TRIED = 3
"""Turns in a row without a guess worth checking after which sequences rest from guessing."""
LONGEST_REST = 32
"""The most turns of a rest."""

RowTimes = Mapping[int, deque[float]]
"""The latest times in seconds, for each number of rows with a token."""


class Speculator:
    """Decides when the sequences of a loop guess, and how many guesses of each a pass checks.

    To guess, the host needs all tokens so far, and the device waits meanwhile. If no guess was worth checking in some
    turns, sequences guess only in every second turn, then in every fourth, and so on. Whether a guess is worth it
    follows from how likely each sequence's guesses are right, and from the measured times of passes and of plain steps:
    a pass takes longer the more rows it has. After the longest rest guesses are tried if they would be worth it with
    all of them right. Loops in several processes, which must decide `alike`, read no clock.
    """

    def __init__(self, shapes: Shapes, *, overlap: bool = True, alike: bool = False):
        self.sizes, self.groups, self.overlap, self.timed = shapes.drafts, shapes.groups, overlap, not alike
        self._steps, self._passes = (defaultdict(lambda: deque(maxlen=MEASURED)) for _ in range(2))
        self._failed = self._rest = 0
        self._rested = False  # True in the turn after the longest rest
        self._begin = 0.0

    def begin(self, running: Sequence[TokenSequence]) -> bool:
        """True if sequences guess in the turn that begins: unless they rest, and none of them is in its first calls."""
        if self.sizes is None:
            return False
        self._begin = time.perf_counter() if self.timed else 0.0
        if self._rest and not any(each.decoding and len(each.token_ids) < self.sizes.each for each in running):
            self._rest -= 1
            return False
        self._rested = self._failed >= TRIED and 2 ** (self._failed - TRIED) >= LONGEST_REST
        return True

    def choose(self, speculations: Sequence[Speculation]) -> None:
        """Sets how many guesses of each sequence a pass checks; takes the guesses away if none is worth it."""
        if not speculations:  # they wait for their tokens, and guess in the next turn
            return
        guessed = [each for each in speculations if each.drafts is not None]
        depth = self.depth(len(speculations), [each.chance for each in guessed])
        self._failed = 0 if depth else self._failed + 1
        self._rest = min(2 ** (self._failed - TRIED), LONGEST_REST) if self._failed >= TRIED else 0
        if self._rested and not depth:
            depth = self.depth(len(speculations), [1.0] * len(guessed))
        for each in speculations:
            each.depth, each.drafts = depth, each.drafts if depth else None

    def depth(self, count: int, chances: Sequence[float]) -> int:
        """The number of guesses in a pass with which `count` sequences get the most tokens a second; 0 for plain steps.

        `chances` are of those with guesses. A pass that checks d guesses gives 1 + p + … + p^d tokens, on average.
        """
        assert self.sizes is not None, "asked where sequences speculate"
        calls = -(-count // (self.sizes.sequences * self.groups))

        def speed(depth: int) -> float:
            tokens = count - len(chances) + sum(sum(p**i for i in range(depth + 1)) for p in chances)
            rows = (count + depth * len(chances)) / calls
            return tokens / (calls * _time(self._passes, rows, self._steps))

        plain = count / _time(self._steps, count, self._passes)
        best = max(range(1, self.sizes.each + 1), key=speed) if chances else 0
        return best if best and speed(best) > plain else 0

    def end(self, calls: Sequence[Call], later: Sequence[Call]) -> None:
        """Notes the time of the turn that ends, if it was that of one call's passes, or of one call's plain steps."""
        if self.sizes is None or not self.timed or len(calls) != 1 or isinstance(call := calls[0], Extended):
            return
        taken, rows = time.perf_counter() - self._begin, len(call.sequences)
        if isinstance(call, Passed):
            counts = np.asarray(call.results.passes)
            rows += sum(call.depths)
            if not later and counts.any():
                self._passes[rows].append(taken / int(counts.max()))
        elif later or not self.overlap:  # with overlap, it is read while the next one runs
            self._steps[rows].append(taken / max(call.ahead))


def _time(times: RowTimes, rows: float, others: RowTimes) -> float:
    """The seconds of a pass or a step with `rows` rows: measured, or from the line through those measured.

    If fewer than two numbers of rows were measured, `others` are added; if none was, the unit is a step of one row. A
    number of rows counts from its second time on, since the first may have waited for a compiler.
    """
    points = {count: statistics.median_low(own) for count, own in times.items() if len(own) > 1}
    if rows in points:
        return points[int(rows)]
    if len(points) < 2:
        points = {count: statistics.median_low(own) for count, own in others.items() if len(own) > 1} | points
    if len(points) < 2:
        [base] = [seconds / (1 + ROW * (count - 1)) for count, seconds in points.items()] or [1.0]
        return base * (1 + ROW * (rows - 1))
    slope, base = np.polyfit(list(points), list(points.values()), 1)
    return max(float(base + slope * rows), min(points.values()) / 2)
