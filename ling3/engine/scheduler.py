"""The scheduler: which sequences run, in which slots and on which pages, in plain Python."""

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from ling3.engine.prefixes import Prefixes
from ling3.engine.request import TokenSequence
from ling3.engine.shapes import Shapes


class Group:
    """Slots and pages that lie on the same devices: a sequence has all its memory in one group.

    A page holds `page_size` tokens; it is free, belongs to one sequence, or has a known prefix and belongs to
    `prefixes`. Prefix pages that no sequence uses count as available: they are evicted when needed. With a window, a
    sequence needs only the pages of its last tokens, and holds at most `most_pages` at once.
    """

    def __init__(self, shapes: Shapes, number: int):
        self.shapes, self.number = shapes, number
        self.slots, self.pages = (_dealt(count, number, shapes.groups) for count in (shapes.slots, shapes.pages))
        self.free_slots, self.free_pages = list(reversed(self.slots)), list(reversed(self.pages))
        self.prefixes = Prefixes(shapes, self._free, self._take)

    @property
    def available(self) -> int:
        """The number of pages that are free or can be evicted."""
        return len(self.free_pages) + self.prefixes.evictable

    def admit(self, sequence: TokenSequence, tokens: int) -> bool:
        """Gives a sequence a slot and pages for `tokens` tokens; returns False and gives nothing if there are too few.

        If nothing of it is prefilled yet, it starts from the longest known prefix, or without one if that does not fit.
        """
        if not self.free_slots:
            return False
        if sequence.memory.group != self.number:
            sequence.memory.group, sequence.memory.looked_up = self.number, None
        begins = not sequence.prefilled
        if begins:
            self.prefixes.adopt(sequence)
        given = self.reserve(sequence, tokens)
        if begins and not given:
            # The pages that a prefix is copied from may be too many beside those that it is copied to.
            self.prefixes.abandon(sequence)
            given = self.reserve(sequence, tokens)
        if given:
            sequence.memory.slot = self.free_slots.pop()
        return given

    def reserve(self, sequence: TokenSequence, tokens: int) -> bool:
        """Gives a sequence pages for `tokens` tokens in all; returns False and gives none if there are too few.

        With a window, first frees the pages behind it (even if it then returns False), and never lets the sequence hold
        more than `most_pages`, which is enough for any one call.
        """
        self.free_behind(sequence)
        memory = sequence.memory
        needed = -(-tokens // self.shapes.page_size) - memory.first_page
        missing = min(needed, self.shapes.most_pages) - len(memory.pages)
        if missing > self.available:
            return False
        memory.pages.extend(self._take(missing))
        return True

    def free_behind(self, sequence: TokenSequence) -> None:
        """Gives up the pages wholly behind the window of the sequence's next token; `prefixes` may keep some.

        Calls in flight may still read them: programs run in the order of their dispatch, and whatever the next owner
        writes into these pages is dispatched later.
        """
        if self.shapes.window is None:
            return
        memory, first = sequence.memory, self.shapes.first_page(sequence.next_position)
        if behind := memory.pages[: first - memory.first_page]:
            del memory.pages[: len(behind)]
            self.prefixes.pass_by(sequence, behind)
        memory.first_page = first

    def release(self, sequence: TokenSequence, spoiled: bool = False) -> None:
        """Gives back a sequence's slot and pages. If it failed (`spoiled`), prefixes that only it used are dropped."""
        assert sequence.memory.slot is not None, "only a running sequence has a slot and pages"
        self.free_slots.append(sequence.memory.slot)
        sequence.memory.slot = None
        self.prefixes.leave(sequence, spoiled)

    def _take(self, count: int) -> list[int]:
        """Takes free pages, after evicting as many as are missing; takes none if there are too few."""
        if count > self.available:
            return []
        if count > len(self.free_pages):
            self.prefixes.evict(count - len(self.free_pages))
        return [self.free_pages.pop() for _ in range(count)]

    def _free(self, pages: list[int]) -> None:
        self.free_pages.extend(reversed(pages))

    def check(self, running: list[TokenSequence]) -> None:
        """Raises AssertionError unless each slot and page is free, or belongs to one sequence or known prefix."""
        taken = [slot for sequence in running if (slot := sequence.memory.slot) is not None]
        slots = sorted([*self.free_slots, *taken])
        own = [page for sequence in running for page in sequence.memory.pages[self.prefixes.shared(sequence) :]]
        pages = sorted([*self.free_pages, *own, *self.prefixes.check(running)])
        assert slots == list(self.slots), f"slots: {slots}"
        assert pages == list(self.pages), f"pages: {pages}"


class Scheduler:
    """First come, first served: the head of the queue is never overtaken, and the youngest sequence is preempted first.

    `Shapes.slots` sequences run at once; slots and pages are dealt evenly to the groups.
    """

    def __init__(self, shapes: Shapes):
        self.slots, self.pages, self.page_size = shapes.slots, shapes.pages, shapes.page_size
        self.groups = [Group(shapes, number) for number in range(shapes.groups)]
        self.prefixes = [group.prefixes for group in self.groups]
        self.running: list[TokenSequence] = []  # the oldest first
        self._waiting: list[tuple[int, int, TokenSequence]] = []
        self._ticket = itertools.count()

    @property
    def waiting(self) -> int:
        """How many sequences wait, including preempted ones."""
        return len(self._waiting)

    @property
    def free_slots(self) -> int:
        """The number of slots that no request has."""
        return sum(len(group.free_slots) for group in self.groups)

    @property
    def free_pages(self) -> int:
        """The number of pages that are free or can be evicted."""
        return sum(group.available for group in self.groups)

    def alike(self, sequences: Sequence[TokenSequence], rows: int, drafted: int) -> Iterator[list[TokenSequence]]:
        """Batches of sequences with the same `key`, of each group at most `rows`, or `drafted` if any has drafts."""
        kinds: dict[Any, list[TokenSequence]] = {}
        for sequence in sequences:
            kinds.setdefault(sequence.key, []).append(sequence)
        for kind in kinds.values():
            groups = [[each for each in kind if each.memory.group == group.number] for group in self.groups]
            most = drafted if any(each.drafts is not None for each in kind) else rows
            for start in range(0, max(map(len, groups)), most):
                yield [sequence for group in groups for sequence in group[start : start + most]]

    def enqueue(self, sequence: TokenSequence) -> None:
        """Puts a sequence in the queue, at its place by `order`."""
        heapq.heappush(self._waiting, (sequence.order, next(self._ticket), sequence))

    def head(self) -> TokenSequence | None:
        """The oldest waiting sequence, or None."""
        return self._waiting[0][2] if self._waiting else None

    def queued(self) -> list[TokenSequence]:
        """The waiting sequences, the oldest first."""
        return [sequence for _, _, sequence in sorted(self._waiting)]

    def withdraw(self, sequence: TokenSequence) -> None:
        """Takes a sequence out of the queue."""
        self._waiting = [entry for entry in self._waiting if entry[2] is not sequence]
        heapq.heapify(self._waiting)

    def admit(self, tokens: int) -> TokenSequence | None:
        """Gives the head of the queue a slot and pages for `tokens` tokens, or returns None if there are too few."""
        sequence = self.head()
        if sequence is None or not any(group.admit(sequence, tokens) for group in self._for(sequence)):
            return None
        heapq.heappop(self._waiting)
        self.running.append(sequence)
        self.running.sort(key=lambda r: r.order)
        return sequence

    def _for(self, sequence: TokenSequence) -> list[Group]:
        """The groups in the order to try: by the longest known prefix, then by free slots, then by available pages."""
        if len(self.groups) == 1:
            return self.groups

        def known(group: Group) -> int:
            return 0 if sequence.prefilled else group.prefixes.known(sequence)

        return sorted(self.groups, key=lambda group: (-known(group), -len(group.free_slots), -group.available))

    def group_of(self, sequence: TokenSequence) -> Group:
        """The group in which a sequence runs, or last ran."""
        return self.groups[sequence.memory.group]

    def prefixes_of(self, sequence: TokenSequence) -> Prefixes:
        """The prefix cache of the sequence's group."""
        return self.group_of(sequence).prefixes

    def youngest(self, group: Group) -> TokenSequence:
        """The group's running sequence that arrived last, which is preempted first."""
        return next(sequence for sequence in reversed(self.running) if self.group_of(sequence) is group)

    def reserve(self, sequence: TokenSequence, tokens: int) -> bool:
        """Gives a running sequence pages for `tokens` tokens in all, or returns False if there are too few."""
        return self.group_of(sequence).reserve(sequence, tokens)

    def release(self, sequence: TokenSequence, spoiled: bool = False) -> None:
        """Gives back a running sequence's slot and pages, and drops prefixes that only it used if it is `spoiled`."""
        self.group_of(sequence).release(sequence, spoiled)
        self.running.remove(sequence)

    def are_free(self, pages: list[int]) -> list[int]:
        """The free ones among `pages`, sorted by number; evictable pages do not count."""
        return sorted({page for group in self.groups for page in group.free_pages}.intersection(pages))

    def check(self) -> None:
        """Raises AssertionError as `Group.check` does, and if a waiting sequence holds memory."""
        for group in self.groups:
            group.check([sequence for sequence in self.running if self.group_of(sequence) is group])
        assert all(sequence.memory.slot is None and not sequence.memory.pages for sequence in self.queued()), (
            "a waiting sequence holds memory"
        )


def _dealt(count: int, number: int, groups: int) -> range:
    """Group `number`'s equal share of range(count)."""
    return range(number * count // groups, (number + 1) * count // groups)
