"""Counts of a disaggregated model's work since they were last reset."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence

from ling3.afd.plan import AfdPlan


@dataclasses.dataclass(frozen=True)
class AfdStats:
    """Counts of the work since the last `generate` began."""

    rows: Sequence[int]
    """Rows that each FFN worker has run experts on."""
    max_in_flight: int
    """The most micro-batches that a session had sent and not yet combined."""
    busy: dict[str, list[float]]
    """Seconds that each worker of `attention` and `ffn` worked, without the time spent waiting for messages."""
    both_busy: float
    """Seconds in which at least one worker of each group worked."""


class Counts:
    """The counts of all workers in a process; each worker's thread writes only that worker's counts."""

    def __init__(self, plan: AfdPlan):
        self._sizes = {"attention": plan.attention_workers, "ffn": plan.ffn_workers}
        self._lock = threading.Lock()
        self._working = {"attention": 0, "ffn": 0}
        self.clear()

    def clear(self) -> None:
        """Sets all counts back to zero."""
        self.rows = [0] * self._sizes["ffn"]
        self.in_flight = [0] * self._sizes["attention"]
        self._busy = {side: [0.0] * size for side, size in self._sizes.items()}
        self._both, self._since = 0.0, time.perf_counter()

    @contextlib.contextmanager
    def working(self, side: str, worker: int) -> Iterator[None]:
        """Adds the time spent in the block to a worker's busy time."""
        begin = self._shift(side, 1)
        try:
            yield
        finally:
            self._busy[side][worker] += self._shift(side, -1) - begin

    def _shift(self, side: str, change: int) -> float:
        """Adds `change` to the number of busy workers of a side; returns the time."""
        with self._lock:
            now = time.perf_counter()
            if all(self._working.values()):
                self._both += now - self._since
            self._working[side] += change
            self._since = now
            return now

    def stats(self) -> AfdStats:
        """The counts at the time of the call."""
        busy = {side: list(seconds) for side, seconds in self._busy.items()}
        return AfdStats(list(self.rows), max(self.in_flight), busy, self._both)
