"""The prefixes of earlier prompts that are still in the pool, so that no later prompt computes them again.

A prompt is prefilled by full chunks, so the caches after some of them depend on nothing but their tokens, bit for bit,
and a prompt that begins with the same tokens may go on from there. A prefix is kept and found by `Grid.step` tokens,
the least common multiple of a chunk and a page: a node of the tree is one step.

Pages are shared: the tree owns them, and running sequences lock those that they use. What a sequence holds beside its
pages (recurrent states, conv tails, a compressor's last tokens) is overwritten by its next token, so a prefix also
needs a snapshot of it, on the device. Pages behind a sliding window come into the tree as their sequence lets go of
them, and are copied for a sequence that goes on from them, so that none ever holds more than its window.

Answers are not kept, as a decoded token has other last bits in the caches than a prefilled one. Nor is what goes on
from a request's snapshot (`snapshots.py`), which may hold such tokens and end anywhere in a chunk.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from ling3.engine.radix import Match, RadixTree
from ling3.engine.request import TokenSequence


@dataclasses.dataclass(frozen=True)
class Grid:
    """Where prefixes may end, and what their snapshots take."""

    step: int
    """Tokens: a multiple of a page's and of a prefill call's."""
    snapshot: int
    """Bytes of a sequence's memory outside its pages; 0 if there is none, and nothing to take a snapshot of."""
    budget: int
    """The most bytes of all snapshots."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What a sequence held outside its pages after a prefix, on the device."""

    states: Any
    nbytes: int


class Prefixes:
    """The known prefixes of one pool, and which pages are theirs.

    `free` takes the numbers of pages that become free. With a `window`, in tokens, only the pages of a prefix's end are
    needed to go on from it: the tree has them as shadows, and its slots are empty.
    """

    def __init__(self, grid: Grid, page_size: int, free: Callable[[list[int]], object], window: int | None = None):
        self.grid, self.page_size, self.window = grid, page_size, window
        self.unit = grid.step // page_size  # pages that are kept, found and freed together
        self._free = free
        self._kept = 0  # how often a prefix was
        if window is None:
            self.tree = RadixTree(grid.step, self._free_units, _forget, snapshots=grid.snapshot > 0)
        else:
            self.tree = RadixTree(grid.step, _forget, self._free_units, window=window)

    @property
    def pages(self) -> int:
        """How many pages have known prefixes."""
        return self.unit * sum(self._owned)

    @property
    def evictable(self) -> int:
        """How many of these no running sequence uses."""
        return self.unit * self._owned[0]

    @property
    def _owned(self) -> list[int]:
        """Units of pages that no sequence uses, and units that are locked."""
        return self.tree.pages if self.window is None else self.tree.shadows

    @property
    def snapshot_bytes(self) -> int:
        """What all snapshots take."""
        return sum(self.tree.shadows) if self.grid.snapshot else 0

    def evict(self, pages: int) -> None:
        """Frees at least so many pages, or all that can be freed, the least recently used first."""
        evict = self.tree.evict if self.window is None else self.tree.evict_shadow
        evict(-(-pages // self.unit))

    def first_page(self, position: int) -> int:
        """The first page, a unit's first, that the token at this position needs; all before it are behind its window.

        A sequence keeps whole units, so that whole units can be kept of it.
        """
        behind = 0 if self.window is None else max(position - self.window + 1, 0)
        return behind // self.grid.step * self.unit

    def known(self, sequence: TokenSequence) -> int:
        """Tokens of the longest known prefix of a sequence's prompt."""
        return self._match(sequence).length if sequence.reads_prefixes else 0

    def adopt(self, sequence: TokenSequence) -> bool:
        """Lets a sequence go on from the longest known prefix of its prompt; True if that is longer than what it has.

        What the prefix needs beside shared pages is in `snapshot` and `copied` until it is in the pool, which `settled`
        tells.
        """
        if not sequence.reads_prefixes or sequence.looked_up == self._kept:
            return False
        sequence.looked_up = self._kept
        match = self._match(sequence)
        # Where the prompt diverges from known prefixes and none ends: a snapshot there serves the next one.
        sequence.branch = match.shared if match.shared > match.length else 0
        if match.length <= sequence.prefilled:
            return False
        lock = self.tree.lock(match.node)
        if self.window is None:
            self._share(sequence, match.slots, lock)
            sequence.snapshot = match.shadows[0] if match.shadows else None
        else:
            sequence.first_page = self.first_page(match.length)
            needed = match.length // self.page_size - sequence.first_page
            sequence.copied = _flat(match.shadows)[-needed:] if needed else []
            sequence.lock = lock
        sequence.prefilled = sequence.cached = match.length
        return True

    def settled(self, sequence: TokenSequence) -> None:
        """After `adopt`: the copies of what the sequence does not share are under way."""
        sequence.snapshot, sequence.copied = None, []
        if self.window is None:
            self.tree.use(sequence.lock.node)
            self.tree.release_shadow(sequence.lock)
        else:
            self._unlock(sequence)

    def abandon(self, sequence: TokenSequence) -> None:
        """Undoes `adopt` for a sequence that got no memory."""
        sequence.prefilled = sequence.cached = sequence.first_page = 0
        sequence.looked_up = None
        self.leave(sequence)

    def wants(self, sequence: TokenSequence) -> bool:
        """True if the prefix that the sequence has just computed is to be kept.

        Every one is, as long as there is room for its snapshot. Beyond that only the last of a prompt's full steps and
        the place where it diverged from known prefixes are: then the snapshot that is worth least is evicted.
        """
        end = self._keepable(sequence)
        if self.window is not None or end < sequence.prefilled or end <= sequence.shared * self.page_size:
            return False
        room = self.snapshot_bytes + self.grid.snapshot <= self.grid.budget
        return room or end == sequence.branch or self._is_last(sequence)

    def keep(self, sequence: TokenSequence, snapshot: Snapshot | None) -> None:
        """Takes over the pages of the prefix that the sequence has computed; it goes on with the tree's."""
        tokens, tree = sequence.prompt[: sequence.prefilled], self.tree
        units = self._units(sequence.pages[: sequence.prefilled // self.page_size])
        tree.insert(tokens, units, [] if snapshot is None else [snapshot], prev=sequence.shared * self.page_size)
        self._kept += 1
        # Another may have computed the same: then these are its pages, with the same bits.
        match = tree.match(tokens)
        assert match.length == len(tokens), "a prefix is found where it was just inserted"
        lock = tree.lock(match.node)
        tree.release_shadow(lock)
        sequence.shared = len(match.slots) * self.unit  # what was its own before is the tree's now
        self._share(sequence, match.slots, lock)
        if self.grid.snapshot:
            is_end = self._is_last(sequence)
            if is_end or sequence.prefilled == sequence.branch:
                tree.add_use(match.node, is_end)
            tree.evict_shadow(max(self.snapshot_bytes - self.grid.budget, 0))

    def leave(self, sequence: TokenSequence) -> None:
        """Takes back all pages of a sequence."""
        own = self._detach(sequence)
        if self.window is None:
            self._free(own)
        else:
            self.pass_by(sequence, own)

    def spoil(self, sequence: TokenSequence) -> None:
        """Keeps nothing of a sequence that only it uses: its numbers are not finite, or some of its memory is lost."""
        prefix = sequence.prompt[: sequence.prefilled]
        node = self.tree.match(prefix).node if sequence.lock is None else sequence.lock.node
        own = self._detach(sequence)
        self.tree.forget(node)
        self._free(own)

    def pass_by(self, sequence: TokenSequence, pages: list[int]) -> None:
        """With a window: takes the first pages of a sequence, and keeps what a later prompt can go on from."""
        first, size = sequence.first_page, self.page_size
        end = max(min(self._keepable(sequence) // size, first + len(pages)), first)
        if units := self._units(pages[: end - first]):
            self.tree.insert(sequence.prompt[: end * size], [None] * (end // self.unit), units)
            self._kept += 1
        self._free(pages[end - first :])

    def check(self, running: list[TokenSequence]) -> list[int]:
        """The pages with known prefixes. AssertionError unless the sequences' shared ones are locked ones of these."""
        self.tree.check()
        nodes = list(self.tree.nodes())
        pages = _flat(node.slot or node.shadow or () for node in nodes)
        locked = set(_flat(node.slot or () for node in nodes if node.full_lock))
        for sequence in running:
            assert locked.issuperset(sequence.pages[: sequence.shared]), "a shared page that nobody locked"
        assert len(pages) == self.pages, "the count of pages with known prefixes"
        return pages

    def _match(self, sequence: TokenSequence) -> Match:
        """The longest known prefix of a prompt without its last token, with which decoding begins."""
        return self.tree.match(sequence.prompt[: len(sequence.prompt) - 1])

    def _is_last(self, sequence: TokenSequence) -> bool:
        """True if the sequence has computed the last of its prompt's full steps."""
        return sequence.prefilled == sequence.prefill_end // self.grid.step * self.grid.step

    def _keepable(self, sequence: TokenSequence) -> int:
        """Tokens in whole steps whose caches are those of any prompt that begins with them, as far as it is computed.

        Tokens that were decoded or prefilled in less than a full chunk are not.
        """
        prefilled = sequence.prefilled if sequence.keeps_prefixes else 0
        return prefilled // self.grid.step * self.grid.step

    def _detach(self, sequence: TokenSequence) -> list[int]:
        """Ends a sequence's claims on pages and prefixes; returns those of its pages that are not the tree's."""
        own = sequence.pages[sequence.shared :]
        self._unlock(sequence)
        sequence.pages, sequence.shared, sequence.snapshot, sequence.copied = [], 0, None, []
        return own

    def _unlock(self, sequence: TokenSequence) -> None:
        if sequence.lock is not None:
            self.tree.unlock(sequence.lock)
            sequence.lock = None

    def _share(self, sequence: TokenSequence, units: list[tuple[int, ...]], lock: Any) -> None:
        """Puts units of the tree in the place of the sequence's first pages; its own ones among these are freed."""
        pages = _flat(units)
        self._free(sequence.pages[sequence.shared : len(pages)])
        sequence.pages[: len(pages)] = pages
        self._unlock(sequence)
        sequence.lock, sequence.shared = lock, len(pages)

    def _units(self, pages: list[int]) -> list[tuple[int, ...]]:
        return list(zip(*[iter(pages)] * self.unit, strict=True))

    def _free_units(self, units: list[tuple[int, ...]]) -> None:
        self._free(_flat(units))


def _flat(units: Iterable[tuple[int, ...]]) -> list[int]:
    return [page for unit in units for page in unit]


def _forget(_: list[Any]) -> None:
    """No-op: snapshots are freed with their last reference, and empty slots have no memory."""
