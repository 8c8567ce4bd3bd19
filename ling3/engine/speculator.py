"""When guessing pays: in which turns of a loop its sequences guess, and whether their guesses are checked."""

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence

from ling3.engine.calls import Call, Extended, Passed
from ling3.engine.request import TokenSequence
from ling3.engine.shapes import Shapes
from ling3.engine.speculation import Speculation

PASS = 1.5
"""The time of a pass in steps, while it is not measured."""
MEASURED = 5
"""Times of which the median is taken."""
TRIED = 3
"""Turns in a row without a guess worth checking after which sequences rest from guessing."""
LONGEST_REST = 32
"""The most turns of a rest."""


class Speculator:
    """Decides for all sequences of a loop.

    To guess, the host needs all tokens so far, and the device waits meanwhile. If no guess was worth checking in some
    turns, sequences guess only in every second turn, then in every fourth, and so on. Whether a guess is worth it
    follows from each sequence's right guesses so far, and from the measured times of passes and of plain steps; after
    the longest rest they are tried if they would be worth it with all of them right. Loops in several processes, which
    must decide `alike`, read no clock: they take a pass to last `PASS` steps.
    """

    def __init__(self, shapes: Shapes, *, overlap: bool = True, alike: bool = False):
        self.sizes, self.groups, self.overlap, self.timed = shapes.drafts, shapes.groups, overlap, not alike
        self._times: dict[tuple[bool, int], deque[float]] = defaultdict(lambda: deque(maxlen=MEASURED))
        self._failed = self._rest = 0
        self._rested = False  # for as long as it gets
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
        """Takes the guesses of all sequences away if checking them is not worth it."""
        if not speculations:  # they wait for their tokens, and guess in the next turn
            return
        guessed = [each for each in speculations if each.drafts is not None]
        pays = bool(guessed) and self.pays(len(speculations), [each.mean for each in guessed])
        tries = self._rested and self.pays(len(speculations), [each.each for each in guessed])
        self._failed = 0 if pays else self._failed + 1
        self._rest = min(2 ** (self._failed - TRIED), LONGEST_REST) if self._failed >= TRIED else 0
        for each in speculations if not (pays or tries) else ():
            each.drafts = None

    def pays(self, count: int, means: Sequence[float]) -> bool:
        """True if passes give `count` sequences more tokens a second than steps; `means` are of those with guesses."""
        assert self.sizes is not None, "asked where sequences speculate"
        rows = self.sizes.sequences * self.groups
        sizes = [min(rows, count - start) for start in range(0, count, rows)]
        step, passes = self._time(False, count), [self._time(True, size) for size in sizes]
        known = [each for each in passes if each is not None]
        steps = PASS * len(sizes) if step is None or len(known) < len(sizes) else sum(known) / step
        return count + sum(means) > count * steps

    def end(self, calls: Sequence[Call], later: Sequence[Call]) -> None:
        """Notes the time of the turn that ends, if it was that of one call's passes, or of one call's plain steps."""
        if self.sizes is None or not self.timed or len(calls) != 1 or isinstance(call := calls[0], Extended):
            return
        if isinstance(call, Passed):
            counts = [int(max(call.results.passes))] if not later else []
        else:  # read while the next one runs
            counts = [max(call.ahead)] if later or not self.overlap else []
        for count in filter(None, counts):
            taken = (time.perf_counter() - self._begin) / count
            self._times[isinstance(call, Passed), len(call.sequences)].append(taken)

    def _time(self, passes: bool, sequences: int) -> float | None:
        """The seconds of a pass or step; None until two were measured, as the first may have been compiled."""
        times = self._times[passes, sequences]
        return statistics.median_low(times) if len(times) > 1 else None
