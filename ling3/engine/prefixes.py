"""The prefix cache: the prefixes of earlier prompts whose caches are still in the pool, the *known prefixes*.

Prompts are prefilled in full chunks, so the caches after a chunk depend only on the tokens up to there, bit for bit,
and a prompt that begins with the same tokens can continue from there. Prefixes are kept and found in steps of
`Grid.step` tokens, the least common multiple of a chunk and a page; a node of the tree is one step.

Pages are shared: the tree owns them, and running sequences lock those that they use. What a sequence holds outside its
pages (recurrent states, conv tails, a compressor's last tokens) is overwritten by its next token, so a prefix also
needs a snapshot of it, on the device. With a sliding window, pages enter the tree once the window has moved past them,
and are copied for a sequence that continues from them, so that no sequence holds more than its window.

The caches of a prompt depend on its adapter too: prompts share prefixes only with prompts of the same adapter.

Answers are not kept, because decoding a token gives other last bits in the caches than prefilling it. Neither are
prompts that continue a request's snapshot (`snapshots.py`): it may hold decoded tokens and end anywhere in a chunk.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ling3.engine.radix import Match, PrefixStep, RadixTree
from ling3.engine.request import TokenSequence
from ling3.engine.shapes import Shapes


class PrefixStore(Protocol):
    """Known prefixes elsewhere than in memory, as on disk (`prefix_disk.py`)."""

    def restore(self, prefixes: "Prefixes", sequence: TokenSequence) -> None:
        """Puts the longest stored prefix of a prompt into the tree, if it is longer than the one in the tree."""
        ...

    def save(self, prefixes: "Prefixes", sequence: TokenSequence, end: int, states: Sequence[Any]) -> None:
        """Stores the first `end` steps of a prompt, and `states`, the snapshot after them, if any."""
        ...


class Prefixes:
    """The known prefixes of one group of devices, and the pages that they own; empty without a `Shapes.grid`.

    `free` takes the numbers of pages that become free, and `take` gives as many pages as are requested, or none. With
    a window, a sequence continues from the pages at a prefix's end alone: the tree has these as shadows, and its slots
    are empty.
    """

    store: PrefixStore | None = None
    """Prefixes that outlive the engine, from which prompts continue too."""

    def __init__(self, shapes: Shapes, free: Callable[[list[int]], object], take: Callable[[int], list[int]]):
        self.grid, self.page_size, self.window = shapes.grid, shapes.page_size, shapes.window
        self.step, self._first_page = shapes.step, shapes.first_page
        self.unit = self.step // self.page_size  # pages of a step, which are kept, found and freed together
        self._states = 0 if self.grid is None else self.grid.snapshot
        self._free, self.take = free, take
        self._kept = 0  # how many times a prefix was inserted
        if self.window is None:
            self.tree = RadixTree(self._free_units, _forget, snapshots=self._states > 0)
        else:
            self.tree = RadixTree(_forget, self._free_units, window=-(-self.window // self.step))

    @property
    def pages(self) -> int:
        """The number of pages that known prefixes own."""
        return self.unit * sum(self._owned)

    @property
    def evictable(self) -> int:
        """The number of these pages that no running sequence uses."""
        return self.unit * self._owned[0]

    @property
    def _owned(self) -> list[int]:
        """The numbers of units of pages: [those that no sequence uses, those that are locked]."""
        return self.tree.steps if self.window is None else self.tree.shadows

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of all snapshots on the device."""
        return sum(self.tree.shadows) * self._states

    def evict(self, pages: int) -> None:
        """Frees at least this many pages, or all that can be freed, the least recently used first."""
        evict = self.tree.evict if self.window is None else self.tree.evict_shadow
        evict(-(-pages // self.unit))

    def known(self, sequence: TokenSequence) -> int:
        """The length in tokens of the longest known prefix of a sequence's prompt."""
        return self._match(sequence).node.end * self.step if sequence.reads_prefixes else 0

    def adopt(self, sequence: TokenSequence) -> bool:
        """Makes a sequence of which nothing was computed continue from the longest known prefix of its prompt.

        Returns True if that prefix is longer than what the sequence has. Memory that is not shared but must be copied
        is in `memory.states` and `memory.copied`, until the copies are dispatched and `settled` is called.
        """
        memory = sequence.memory
        reads = self.grid is not None and sequence.reads_prefixes and not sequence.begun
        if not reads or memory.looked_up == self._kept:
            return False
        if self.store is not None:
            self.store.restore(self, sequence)
        memory.looked_up = self._kept
        match = self._match(sequence)
        length = match.node.end * self.step
        # The prompt diverges from known prefixes here, but none ends here: a snapshot serves the next such prompt.
        memory.branch = match.shared * self.step if match.shared > match.node.end else 0
        if length <= sequence.prefilled:
            return False
        if self.window is None:
            self._free(memory.pages[self.shared(sequence) : length // self.page_size])
            self._share(sequence, match)
            memory.states = match.shadows[0] if match.shadows else None
        else:
            memory.first_page = self._first_page(length)
            needed = length // self.page_size - memory.first_page
            memory.copied = _flat(match.shadows)[-needed:] if needed else []
            memory.lock = self.tree.lock(match.node)
        sequence.prefilled = sequence.cached = length
        return True

    def settled(self, sequence: TokenSequence) -> None:
        """Ends the claims of `adopt` on the memory that had to be copied; called once the copies are dispatched."""
        memory = sequence.memory
        memory.states, memory.copied = None, []
        if self.window is None:
            self.tree.use(memory.lock.node)
            self.tree.release_shadow(memory.lock)
        else:
            self._unlock(sequence)

    def abandon(self, sequence: TokenSequence) -> None:
        """Undoes `adopt` for a sequence that got no memory."""
        sequence.prefilled = sequence.cached = sequence.memory.first_page = 0
        sequence.memory.looked_up = None
        self.leave(sequence)

    def keep(self, sequence: TokenSequence, states: Callable[[TokenSequence], Any]) -> None:
        """Gives the tree the prefix that a sequence has just computed, with its pages, which the sequence then shares.

        `states` copies what the sequence holds outside its pages, for the snapshot. As long as snapshots fit into the
        budget, every prefix is kept. Beyond it, only a prompt's last full step and the step where it diverged from
        known prefixes are kept, and the snapshot that is worth least is evicted. With a window this does nothing:
        `pass_by` keeps prefixes.
        """
        end, budget = self._keepable(sequence), 0 if self.grid is None else self.grid.budget
        if self.window is not None or end < sequence.prefilled or end <= self.shared(sequence) * self.page_size:
            return
        diverged, last = end == sequence.memory.branch, end == sequence.prefill_end // self.step * self.step
        if self.snapshot_bytes + self._states > budget and not (diverged or last):
            return
        steps, tree = self.steps_of(sequence, sequence.prefilled), self.tree
        pages, snapshots = sequence.memory.pages[: sequence.prefilled // self.page_size], []
        if self._states:
            snapshots.append(states(sequence))
        if self.store is not None:
            self.store.save(self, sequence, len(steps), snapshots)
        tree.insert(steps, self.units(pages), snapshots)
        self._kept += 1
        # If another sequence has inserted the same prefix, these are that one's pages, with the same bits.
        match = tree.match(steps)
        assert match.node.end == len(steps), "a prefix is found where it was just inserted"
        self._share(sequence, match)
        tree.release_shadow(sequence.memory.lock)
        if self._states:
            if diverged or last:
                tree.add_use(match.node, last)
            tree.evict_shadow(sum(tree.shadows) - budget // self._states)

    def add(self, steps: Sequence[PrefixStep], slots: Sequence[tuple[int, ...]], states: Sequence[Any]) -> None:
        """Gives the tree a prefix that no sequence has computed here: the pages of its steps, and its snapshot."""
        self.tree.insert(steps, slots, states)
        self._kept += 1
        if self._states and self.grid is not None:
            self.tree.add_use(self.tree.match(steps).node, is_end=False)
            self.tree.evict_shadow(sum(self.tree.shadows) - self.grid.budget // self._states)

    def put_back(self, pages: list[int]) -> None:
        """Frees pages that `take` gave and nothing has used."""
        self._free(pages)

    def leave(self, sequence: TokenSequence, spoiled: bool = False) -> None:
        """Takes back all pages of a sequence, and ends its locks.

        If it is `spoiled`, prefixes that only this sequence uses are dropped: its numbers are not finite, or some of
        its memory is lost.
        """
        memory = sequence.memory
        own, lock = memory.pages[self.shared(sequence) :], memory.lock
        self._unlock(sequence)
        memory.pages, memory.states, memory.copied = [], None, []
        if spoiled:
            self._free(own)
            known = self.tree.match(self.steps_of(sequence, sequence.prefilled)) if lock is None else lock
            self.tree.forget(known.node)
        else:
            self.pass_by(sequence, own)

    def pass_by(self, sequence: TokenSequence, pages: list[int]) -> None:
        """Takes back a sequence's first pages; with a window, keeps those from which later prompts can continue."""
        first, size = sequence.memory.first_page, self.page_size
        end = first if self.window is None else min(self._keepable(sequence) // size, first + len(pages))
        if units := self.units(pages[: max(end - first, 0)]):
            self.tree.insert(self.steps_of(sequence, end * size), [None] * (end // self.unit), units)
            self._kept += 1
        self._free(pages[max(end - first, 0) :])

    def shared(self, sequence: TokenSequence) -> int:
        """The number of a sequence's first pages that the tree owns."""
        lock = sequence.memory.lock
        return 0 if lock is None or self.window is not None else lock.node.end * self.unit

    def check(self, running: list[TokenSequence]) -> list[int]:
        """The pages that the tree owns. Raises AssertionError unless those that sequences share are locked."""
        self.tree.check()
        nodes = list(self.tree.nodes())
        pages = _flat(node.slot or node.shadow or () for node in nodes)
        locked = set(_flat(node.slot or () for node in nodes if node.full_lock))
        for sequence in running:
            assert locked.issuperset(sequence.memory.pages[: self.shared(sequence)]), "a shared page that nobody locked"
        assert len(pages) == self.pages, "the count of pages with known prefixes"
        return pages

    def _match(self, sequence: TokenSequence) -> Match:
        """The longest known prefix of a prompt without its last token, with which decoding begins."""
        return self.tree.match(self.steps_of(sequence, len(sequence.prompt) - 1))

    def steps_of(self, sequence: TokenSequence, tokens: int) -> list[PrefixStep]:
        """The full steps among the first `tokens` tokens of a sequence's prompt.

        The first step names the adapter, so that prompts with different adapters have no step in common.
        """
        size, prompt = self.step, sequence.prompt
        steps = [tuple(prompt[start : start + size]) for start in range(0, tokens - size + 1, size)]
        if steps and sequence.adapter is not None:
            steps[0] = (-1 - sequence.adapter, *steps[0])
        return steps

    def _keepable(self, sequence: TokenSequence) -> int:
        """The number of prefilled tokens, in full steps, whose caches any prompt that begins with them can use.

        Tokens that were decoded, or prefilled in less than a full chunk, do not count.
        """
        prefilled = sequence.prefilled if sequence.keeps_prefixes and self.grid is not None else 0
        return prefilled // self.step * self.step

    def _unlock(self, sequence: TokenSequence) -> None:
        if sequence.memory.lock is not None:
            self.tree.unlock(sequence.memory.lock)
            sequence.memory.lock = None

    def _share(self, sequence: TokenSequence, match: Match) -> None:
        """Replaces the sequence's first pages by the pages of a match, and locks these."""
        pages, lock = _flat(match.slots), self.tree.lock(match.node)
        sequence.memory.pages[: len(pages)] = pages
        self._unlock(sequence)
        sequence.memory.lock = lock

    def units(self, pages: list[int]) -> list[tuple[int, ...]]:
        """The pages of each step, which are given one after another."""
        return list(zip(*[iter(pages)] * self.unit, strict=True))

    def _free_units(self, units: list[tuple[int, ...]]) -> None:
        self._free(_flat(units))


def _flat(units: Iterable[tuple[int, ...]]) -> list[int]:
    return [page for unit in units for page in unit]


def _forget(_: list[Any]) -> None:
    """No-op: snapshots are freed with their last reference, and empty slots have no memory."""
