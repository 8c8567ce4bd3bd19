"""Who runs, in which slot and on which pages: the engine's bookkeeping, in plain Python."""

import heapq
import itertools
from typing import no_type_check

from ling3.engine.request import Run


# Asked several times a turn about every request: checking types would take longer than the answers.
@no_type_check
class Scheduler:
    """First come, first served: the head of the queue is never overtaken, and the youngest makes room.

    `slots` runs have a slot at once. Pages hold `page_size` tokens each and belong to one run or are free.
    """

    def __init__(self, slots: int, pages: int, page_size: int):
        self.slots, self.pages, self.page_size = slots, pages, page_size
        self.running: list[Run] = []  # the oldest first
        self._waiting: list[tuple[int, int, Run]] = []
        self._ticket = itertools.count()
        self._free_slots = list(range(slots - 1, -1, -1))
        self._free_pages = list(range(pages - 1, -1, -1))

    @property
    def waiting(self) -> int:
        """How many runs wait, preempted ones among them."""
        return len(self._waiting)

    @property
    def free_slots(self) -> int:
        """Slots without a run."""
        return len(self._free_slots)

    @property
    def free_pages(self) -> int:
        """Pages without a run."""
        return len(self._free_pages)

    def pages_for(self, tokens: int) -> int:
        """How many pages so many tokens take."""
        return -(-tokens // self.page_size)

    def enqueue(self, run: Run) -> None:
        """Puts a run in the queue, at the place of its order."""
        heapq.heappush(self._waiting, (run.order, next(self._ticket), run))

    def head(self) -> Run | None:
        """The run whose turn it is."""
        return self._waiting[0][2] if self._waiting else None

    def queued(self) -> list[Run]:
        """The waiting runs, the oldest first."""
        return [run for _, _, run in sorted(self._waiting)]

    def withdraw(self, run: Run) -> None:
        """Takes a run out of the queue."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not run]
        heapq.heapify(self._waiting)

    def admit(self, tokens: int) -> Run | None:
        """Gives the head of the queue a slot and pages for so many tokens, or None and nothing."""
        run = self.head()
        if run is None or not self._free_slots or self.pages_for(tokens) > len(self._free_pages):
            return None
        heapq.heappop(self._waiting)
        run.slot = self._free_slots.pop()
        self.reserve(run, tokens)
        self.running.append(run)
        self.running.sort(key=lambda r: r.order)
        return run

    def reserve(self, run: Run, tokens: int) -> bool:
        """Gives a run pages for so many tokens in all; False, and none given, if there are too few."""
        missing = self.pages_for(tokens) - len(run.pages)
        if missing > len(self._free_pages):
            return False
        run.pages.extend(self._free_pages.pop() for _ in range(missing))
        return True

    def release(self, run: Run) -> None:
        """Takes back a run's slot and pages."""
        assert run.slot is not None, "only a running run has something to give back"
        self.running.remove(run)
        self._free_slots.append(run.slot)
        self._free_pages.extend(reversed(run.pages))
        run.slot, run.pages = None, []

    def check(self) -> None:
        """Raises AssertionError unless every slot and every page is free or belongs to just one run."""
        slots = sorted([*self._free_slots, *(run.slot for run in self.running if run.slot is not None)])
        pages = sorted([*self._free_pages, *(page for run in self.running for page in run.pages)])
        assert slots == list(range(self.slots)), f"slots: {slots}"
        assert pages == list(range(self.pages)), f"pages: {pages}"
        assert all(run.slot is None and not run.pages for run in self.queued()), "a waiting run holds memory"
