"""The prefixes of earlier prompts that are still in the pool, so that no later prompt computes them again.

A prompt goes in by full chunks, each a call of the same width. So the caches after some full chunks depend on nothing
but the tokens of these, bit for bit, and a prompt that begins with the same tokens may go on from there: it gets what
it would have computed. A prefix is therefore kept and found by `Grid.step` tokens, the least whole number of chunks
that is also one of pages.

Pages are shared: the tree owns them, and running sequences lock those that they use. What a sequence holds beside its
pages (recurrent states, conv tails, a compressor's last tokens) is overwritten by its next token, so a prefix also
needs a snapshot of it. Snapshots stay on the device, where taking one or going on from one is a copy that nobody waits
for. Pages behind a sliding window are free for others to use; they come into the tree as their sequence lets go of
them, and are copied for a sequence that goes on from them, so that none ever holds more than its window.

Answers are not kept: a token that was decoded has other last bits in the caches than one that was prefilled, which is
what a later prompt with this answer in it would do without a cache. Nor is what goes on from a request's snapshot
(`snapshots.py`), which may hold such tokens, and may end anywhere in a chunk.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, no_type_check

from ling3.engine.radix import RadixTree
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


# Asked in every turn: checking types would take longer than the answers.
@no_type_check
class Prefixes:
    """The known prefixes of one pool, and which pages are theirs.

    `free` takes the numbers of pages that are nobody's any more. With a `window`, in tokens, only the pages of a
    prefix's end are needed to go on from it.
    """

    def __init__(self, grid: Grid, page_size: int, free: Callable[[list[int]], object], window: int | None = None):
        self.grid, self.page_size, self.window = grid, page_size, window
        self.unit = grid.step // page_size  # pages that are kept, found and freed together
        self._free = free
        self._kept = 0  # how often a prefix was
        self._names = itertools.count()  # with a window no memory goes with the tree's slots
        if window is None:
            self.tree = RadixTree(grid.step, self._free_units, _forget, snapshots=grid.snapshot > 0)
        else:
            self.tree = RadixTree(grid.step, _forget, self._free_units, window=window)

    @property
    def pages(self) -> int:
        """How many pages have known prefixes."""
        stats = self.tree.stats()
        own = stats.protected if self.window is None else stats.shadow_protected
        return self.evictable + own * self.unit

    @property
    def evictable(self) -> int:
        """How many of these no running sequence uses."""
        stats = self.tree.stats()
        return self.unit * (stats.evictable if self.window is None else stats.shadow_evictable)

    @property
    def snapshot_bytes(self) -> int:
        """What all snapshots take."""
        stats = self.tree.stats()
        return stats.shadow_evictable + stats.shadow_protected if self.grid.snapshot else 0

    def evict(self, pages: int) -> None:
        """Frees at least so many pages, or all that can be freed, the least recently used first."""
        units = -(-pages // self.unit)
        if self.window is None:
            self.tree.evict(units)
        else:
            self.tree.evict_shadow(units)

    def first_page(self, position: int) -> int:
        """The first page, a unit's first, that the token at this position needs; all before it are behind its window.

        A sequence keeps whole units, so that whole units can be kept of it.
        """
        behind = 0 if self.window is None else max(position - self.window + 1, 0)
        return behind // self.grid.step * self.unit

    def known(self, sequence: TokenSequence) -> int:
        """Tokens of the longest known prefix of a sequence's prompt."""
        prompt = sequence.prompt
        if sequence.apart or len(prompt) <= self.grid.step:
            return 0
        return self.tree.match(prompt[: len(prompt) - 1]).length

    def adopt(self, sequence: TokenSequence) -> bool:
        """Lets a sequence go on from the longest known prefix of its prompt; True if that is longer than what it has.

        The prompt's last token is left for the sequence to compute, which gives its first new token. A sequence that is
        `apart` computes all of it. What the prefix needs beside shared pages is in `snapshot` and `copied` until it is
        in the pool, which `settled` tells.
        """
        prompt = sequence.prompt
        settled = sequence.apart or sequence.resumed or sequence.looked_up == self._kept
        if settled or len(prompt) <= self.grid.step:
            return False
        sequence.looked_up = self._kept
        match = self.tree.match(prompt[: len(prompt) - 1])
        # Where it leaves the known prefixes, and none ends: worth a snapshot for the next one to come this way.
        sequence.branch = match.shared if match.shared > match.length else 0
        if match.length <= sequence.prefilled:
            return False
        lock = self.tree.lock(match.node)
        if self.window is None:
            self._share(sequence, match.slots, lock)
            sequence.snapshot = match.shadow if self.grid.snapshot else None
        else:
            sequence.first_page = self.first_page(match.length)
            needed = match.length // self.page_size - sequence.first_page
            sequence.copied = [page for unit in match.shadow for page in unit][-needed:] if needed else []
            sequence.lock = lock
        sequence.prefilled = sequence.cached = match.length
        return True

    def settled(self, sequence: TokenSequence) -> None:
        """After `adopt`: the copies of what the sequence does not share are under way."""
        sequence.snapshot, sequence.copied = None, []
        if self.window is None:
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

        Every one is, as long as there is room for its snapshot. Beyond that a snapshot takes the place of an older one,
        which pays at the last of a prompt's full steps, and where it left the known prefixes.
        """
        end, grid = sequence.prefilled, self.grid
        if sequence.resumed or self.window is not None or end % grid.step or end <= sequence.shared * self.page_size:
            return False
        if sequence.secluded:
            return False
        if self.snapshot_bytes + grid.snapshot <= grid.budget:
            return True
        return end in (sequence.branch, len(sequence.prompt) // grid.step * grid.step)

    def keep(self, sequence: TokenSequence, snapshot: Snapshot | None) -> None:
        """Takes over the pages of the prefix that the sequence has computed; it goes on with the tree's."""
        tokens, tree = sequence.prompt[: sequence.prefilled], self.tree
        units = self._units(sequence.pages[: sequence.prefilled // self.page_size])
        tree.insert(tokens, units, snapshot, prev=sequence.shared * self.page_size)
        self._kept += 1
        # Another may have computed the same: then these are its pages, with the same bits.
        match = tree.match(tokens)
        assert match.length == len(tokens), "a prefix is found where it was just inserted"
        lock = tree.lock(match.node)
        tree.release_shadow(lock)
        sequence.shared = len(match.slots) * self.unit  # what was its own before is the tree's now
        self._share(sequence, match.slots, lock)
        if self.grid.snapshot:
            tree.trim_shadow(self.grid.budget)

    def leave(self, sequence: TokenSequence) -> None:
        """Takes back all pages of a sequence."""
        own = sequence.pages[sequence.shared :]
        self._unlock(sequence)
        sequence.pages, sequence.shared, sequence.snapshot, sequence.copied = [], 0, None, []
        if self.window is None:
            self._free(own)
        else:
            self.pass_by(sequence, own)

    def spoil(self, sequence: TokenSequence) -> None:
        """Keeps nothing of a sequence that only it uses: its numbers are not finite, or some of its memory is lost."""
        prefix = sequence.prompt[: sequence.prefilled]
        node = self.tree.match(prefix).node if sequence.lock is None else sequence.lock.node
        self._unlock(sequence)
        self.tree.forget(node)
        self._free(sequence.pages[sequence.shared :])
        sequence.pages, sequence.shared, sequence.snapshot, sequence.copied = [], 0, None, []

    def pass_by(self, sequence: TokenSequence, pages: list[int]) -> None:
        """With a window: takes the first pages of a sequence, and keeps what a later prompt can go on from."""
        first, size = sequence.first_page, self.page_size
        # Tokens that were decoded, prefilled in less than a full chunk, only scored or secluded are not kept.
        prefilled = 0 if sequence.resumed or sequence.secluded else sequence.prefilled - sequence.only_scored
        end = max(min(prefilled // self.grid.step * self.unit, first + len(pages)), first)
        units = self._units(pages[: end - first])
        if units:
            names = list(itertools.islice(self._names, end // self.unit))
            self.tree.insert(sequence.prompt[: end * size], names, units)
            self._kept += 1
        self._free(pages[end - first :])

    def check(self, running: list[TokenSequence]) -> list[int]:
        """The pages with known prefixes. AssertionError unless the sequences' shared ones are locked ones of these."""
        self.tree.check()
        nodes = list(self.tree.nodes())
        owned = [node.slots if self.window is None else node.shadow or [] for node in nodes]
        pages = [page for units in owned for unit in units for page in unit]
        held = [unit for node in nodes if node.full_lock and self.window is None for unit in node.slots]
        locked = {page for unit in held for page in unit}
        for sequence in running:
            assert locked.issuperset(sequence.pages[: sequence.shared]), "a shared page that nobody locked"
        assert len(pages) == self.pages, "the count of pages with known prefixes"
        return pages

    def _unlock(self, sequence: TokenSequence) -> None:
        if sequence.lock is not None:
            self.tree.unlock(sequence.lock)
            sequence.lock = None

    def _share(self, sequence: TokenSequence, units: list[tuple[int, ...]], lock: Any) -> None:
        """Puts units of the tree in the place of the sequence's first pages; its own ones among these are freed."""
        pages = [page for unit in units for page in unit]
        self._free(sequence.pages[sequence.shared : len(pages)])
        sequence.pages[: len(pages)] = pages
        self._unlock(sequence)
        sequence.lock, sequence.shared = lock, len(pages)

    def _units(self, pages: list[int]) -> list[tuple[int, ...]]:
        return list(zip(*[iter(pages)] * self.unit, strict=True))

    def _free_units(self, units: list[tuple[int, ...]]) -> None:
        self._free([page for unit in units for page in unit])


def _forget(_: list[Any]) -> None:
    """Frees what is no memory of the pool's: snapshots, which go with their last reference, and mere names."""
