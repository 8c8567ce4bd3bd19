"""A radix tree of the tokens whose cache entries are kept for later requests, in plain Python.

A node stands for consecutive whole pages of tokens and has two kinds of memory. Its *slots*, one a page, hold what a
sequence needs of every token. Its *shadow* holds what a sequence needs of the end of a prefix alone, and may be freed
before the slots are: the node is a tombstone from then on. There are two laws for shadows:

    window=W        the entries of sliding-window attention, one shadow slot a page. A prefix can be continued if its
                    last W tokens have their shadows, or all its tokens. With W = 0 there are no shadows, and every
                    prefix can be continued.
    snapshots=True  the state of a recurrent mixer after the node's last token, one object a node. A prefix can be
                    continued if it ends where a node with a snapshot ends.

The tree allocates nothing. Slots and shadows that it is given are its own until it hands them to `free` or
`free_shadow`: when they are evicted, or at once if the tree has them already. Whatever else is stored for a page
(compressed entries, index keys) is freed with the page's slot. After RadixAttention (Zheng et al., arXiv 2312.07104)
and SGLang's tree for hybrid models.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, no_type_check

from ling3.engine.shadows import Node, Page, Slot, Snapshots, Window


@no_type_check
@dataclasses.dataclass(frozen=True)
class Match:
    """What the tree has of a sequence.

    `length` tokens of it can be continued: they end with `node`, lie in `slots`, and `shadow` has the shadow slots of
    their last pages, as many as cover the window, or the snapshot after them (None after no tokens). `shared` tokens
    are in the tree. Where that is more, the sequence diverges from earlier ones at a place without a shadow: a snapshot
    taken there serves the next sequence that shares them.
    """

    node: Node
    length: int
    shared: int
    slots: list[Slot]
    shadow: Any


@no_type_check
@dataclasses.dataclass(eq=False)
class Lock:
    """A sequence's claim on a matched prefix. `RadixTree.unlock` ends it."""

    node: Node
    shadow_end: int | None
    """The mark of the topmost node whose shadow is locked; None if no shadow is."""
    held: bool = True


@no_type_check
@dataclasses.dataclass(frozen=True)
class RadixStats:
    """The tree's memory. Slots are counted in pages; shadows in pages with a window, in bytes with snapshots."""

    evictable: int
    protected: int
    shadow_evictable: int
    shadow_protected: int


@no_type_check
class Recency:
    """Nodes from the least to the most recently used: a linked list, so that the parts of a node keep its place."""

    def __init__(self):
        # The older and the newer neighbour of each node. None stands for both ends.
        self._neighbours: dict[Node | None, list[Node | None]] = {None: [None, None]}

    def __iter__(self) -> Iterator[Node]:
        node = self._neighbours[None][1]
        while node is not None:
            yield node
            node = self._neighbours[node][1]

    def add(self, node: Node, newer: Node | None = None) -> None:
        """Adds a node as the next older one of `newer`, or as the newest."""
        older = self._neighbours[newer][0]
        self._neighbours[node] = [older, newer]
        self._neighbours[older][1] = self._neighbours[newer][0] = node

    def remove(self, node: Node) -> None:
        """Takes a node out."""
        older, newer = self._neighbours.pop(node)
        self._neighbours[older][1], self._neighbours[newer][0] = newer, older


# Its small methods run for every node of a path: checking types would take longer than they do.
@no_type_check
class RadixTree:
    """Finds the longest known prefix of a sequence, and what it has stored of it.

    `match` finds it, and `lock` protects it while a sequence uses it. `insert` adds what a sequence has computed;
    `evict` and `evict_shadow` free the least recently used of what is not locked. Only whole pages of `page_size`
    tokens count: a sequence's last tokens that fill none are ignored. Lengths are in tokens and multiples of a page.
    """

    def __init__(
        self,
        page_size: int,
        free: Callable[[list[Slot]], object],
        free_shadow: Callable[[list[Any]], object],
        *,
        window: int = 0,
        snapshots: bool = False,
    ):
        if page_size < 1 or window < 0 or (window and snapshots):
            raise ValueError(
                f"page_size is {page_size} and window {window}, expected page_size >= 1, and window >= 0 tokens "
                "without snapshots or 0 with them"
            )
        self.page_size = page_size
        self._free, self._free_shadow = free, free_shadow
        self._law: Window | Snapshots = Snapshots() if snapshots else Window(-(-window // page_size))
        self._root = Node([], [], 0, None)
        self._recency, self._shadow_recency = Recency(), Recency()  # all nodes but the root; those with a shadow
        self._marks = itertools.count()
        self._pages, self._shadows = [0, 0], [0, 0]  # evictable, protected

    def match(self, tokens: Sequence[int]) -> Match:
        """What the tree has of a sequence; the part that can be continued becomes the most recently used.

        Lock `Match.node` before anything is inserted or evicted. A sequence that is to get its next token computes at
        least its last one, so leave that out.
        """
        path = self._descend(self._paged(tokens))
        usable = path[: self._law.usable(path)]
        node = usable[-1] if usable else self._root
        self._touch(node)
        return Match(
            node,
            node.end * self.page_size,
            path[-1].end * self.page_size if path else 0,
            [slot for node in usable for slot in node.slots],
            self._law.matched(self._law.needed(node)),
        )

    def insert(self, tokens: Sequence[int], slots: Sequence[Slot], shadow: Any = None, prev: int = 0) -> int:
        """Adds a sequence, whose memory it takes over; returns how many tokens of it were in the tree before.

        `slots` are those of all its whole pages. The first `prev` tokens are those of a locked match, whose slots the
        tree has already. With a window, `shadow` has the shadow slots of the last len(shadow) pages: those before were
        freed. With snapshots, it is the one after the last whole page, or None. Pages that no shadow lies behind are
        of no use, and are freed rather than added.

        Where the tree has the tokens, it frees what is given, or the slots that it had. So a sequence that goes on
        takes its slots from another `match`. ValueError if numbers do not fit each other or the tree; then nothing is
        taken over.
        """
        pages, slots, law = self._paged(tokens), list(slots), self._law
        end, shared = len(pages), prev // self.page_size
        if len(slots) != end:
            raise ValueError(f"{len(slots)} slots for {len(tokens)} tokens, expected {end}: one for each whole page")
        given = law.offered(shadow, end, shared)
        path = self._descend(pages)
        mine = [slot for node in path if node.end <= shared for slot in node.slots]
        if len(mine) * self.page_size != prev or slots[: len(mine)] != mine:
            raise ValueError(f"prev is {prev}, expected the length of a match whose slots the sequence begins with")
        for node in path:
            self._merge(node, slots[node.start : node.end] if node.end > shared else [], given, end)
        node = path[-1] if path else self._root
        known = node.end
        if known < end:
            first = law.first(given, known, end, end)
            if first == end:
                self._give_back(slots[known:])
            else:
                if first > known:
                    node = self._append(node, pages[known:first], slots[known:first], None)
                node = self._append(node, pages[first:], slots[first:], law.part(given, first, end, end))
        self._touch(node)
        return known * self.page_size

    def lock(self, node: Node) -> Lock:
        """Protects a matched prefix from eviction: all its slots, and the shadows that continuing it needs.

        ValueError if no match ends with the node.
        """
        if node is not self._root and node.parent is None:
            raise ValueError("the node was evicted: lock it before anything is evicted")
        needed = self._law.needed(node)
        for each in needed:
            self._change_locks(each, 0, 1)
        if needed and needed[-1].lock_end is None:
            needed[-1].lock_end = next(self._marks)
        for each in self._upwards(node):
            self._change_locks(each, 1, 0)
        return Lock(node, needed[-1].lock_end if needed else None)

    def unlock(self, lock: Lock) -> None:
        """Ends a lock; tombstones that nothing leads through any more are freed. ValueError if it was ended before."""
        self._unlock_shadow(lock)
        lock.held, node = False, lock.node
        for each in self._upwards(node):
            self._change_locks(each, -1, 0)
        if self._useless(node):
            self._delete(node)

    def release_shadow(self, lock: Lock) -> None:
        """Ends the lock's part that concerns shadows, once the sequence needs them no more; the slots stay locked.

        A window has moved past them, or a snapshot was copied. Shadows that no other lock needs can be evicted from now
        on; those of a leaf with a window are freed at once. A second call does nothing.
        """
        if not self._unlock_shadow(lock):
            return
        node = lock.node
        if not (self._law.kept_after_release or node.children or node.shadow_lock):
            self._bury(node)

    def evict(self, needed: int) -> int:
        """Frees the slots of least recently used leaves until there are `needed` pages or no more; returns how many."""
        freed = 0
        while freed < _natural(needed) and self._pages[0]:
            node = next(node for node in self._recency if not node.children and not node.full_lock)
            freed += self._delete(node)
        return freed

    def evict_shadow(self, needed: int) -> int:
        """Frees the least recently used shadows until they make up `needed` or no more are evictable; returns how much.

        In pages with a window, in bytes with snapshots. A node with children or a lock keeps its slots; others are
        deleted.
        """
        freed = 0
        while freed < _natural(needed) and self._shadows[0]:
            node = next(node for node in self._shadow_recency if not node.shadow_lock)
            freed += self._law.size(node.shadow)
            if node.children or node.full_lock:
                self._bury(node)
            else:
                self._delete(node)
        return freed

    def forget(self, node: Node) -> None:
        """Frees a node and its parents, as far as nothing else leads through them and they are not locked."""
        for each in list(self._upwards(node)):
            if each.children or each.full_lock:
                return
            if each.parent is not None:  # it has not gone with its child
                self._delete(each)

    def trim_shadow(self, budget: int) -> int:
        """Evicts shadows until all together take at most `budget`, or the others are locked; returns how much."""
        return self.evict_shadow(max(sum(self._shadows) - _natural(budget), 0))

    def stats(self) -> RadixStats:
        """How much memory is evictable, and how much is locked."""
        return RadixStats(*self._pages, *self._shadows)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, a parent before its children."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds."""
        nodes, law = list(self.nodes()), self._law
        pages, shadows = [0, 0], [0, 0]
        for node in nodes:
            assert node.parent is not None and node.parent.children[node.key[0]] is node, "a child's parent"
            assert node.start == node.parent.end and len(node.slots) == len(node.key) > 0, "a node's pages"
            assert node.full_lock >= sum(child.full_lock for child in node.children.values()), "a lock ends halfway"
            assert node.full_lock >= node.shadow_lock >= 0, "more locks on a shadow than on the slots"
            if node.shadow is None:
                assert not node.shadow_lock, "a lock on the shadow of a tombstone"
                assert node.children or node.full_lock, "a tombstone without children and locks"
            elif isinstance(law, Window):
                assert len(node.shadow) == (len(node.key) if law.pages else 0), "not one shadow slot for each page"
            pages[node.full_lock > 0] += len(node.key)
            shadows[node.shadow_lock > 0] += law.size(node.shadow)
        assert (pages, shadows) == (self._pages, self._shadows), "the counts of evictable and protected memory"
        recency = list(self._recency)
        assert len(recency) == len(nodes) and set(recency) == set(nodes), "the order of nodes has others than the tree"
        live = [node for node in recency if node.shadow is not None]
        assert list(self._shadow_recency) == live, "the order of shadows is not that of the nodes which have them"
        slots = [slot for node in nodes for slot in node.slots]
        assert len(set(slots)) == len(slots), "a slot is in the tree twice"
        parts = [id(part) if isinstance(law, Snapshots) else part for node in live for part in law.parts(node.shadow)]
        assert len(set(parts)) == len(parts), "a shadow is in the tree twice"
        marks = [node.lock_end for node in nodes if node.lock_end is not None]
        assert len(set(marks)) == len(marks), "two nodes end one lock"

    def _paged(self, tokens: Sequence[int]) -> list[Page]:
        size = self.page_size
        return [tuple(tokens[i : i + size]) for i in range(0, len(tokens) - size + 1, size)]

    def _descend(self, pages: Sequence[Page]) -> list[Node]:
        """The nodes that these pages go through; the last one is split if they diverge inside it."""
        path, node, at = [], self._root, 0
        while at < len(pages) and (child := node.children.get(pages[at])) is not None:
            end = min(child.end, len(pages))
            at = next((i for i in range(at, end) if child.key[i - child.start] != pages[i]), end)
            node = child if at == child.end else self._split(child, at)
            path.append(node)
            if node is not child:
                break
        return path

    def _merge(self, node: Node, slots: list[Slot], given: Any, end: int) -> None:
        """Takes over what a sequence of `end` pages has for a node of the tree; no slots if they are the node's own."""
        start, law = node.start, self._law
        first = law.first(given, start, node.end, end)
        shadow = law.part(given, first, node.end, end)
        if node.shadow is not None or first == node.end:
            self._give_back(slots, shadow)
            return
        if first > start:
            self._split(node, first)
            self._give_back(slots[: first - start])
            slots = slots[first - start :]
        if slots and not node.full_lock:
            node.slots, slots = slots, node.slots
        self._give_back(slots)
        self._set_shadow(node, shadow)

    def _split(self, node: Node, at: int) -> Node:
        """Splits a node before page `at`. Returns the new front; locks on the node are on the back, which it becomes.

        Both parts have its locks. The front takes the end of locks on shadows, unless it has no shadow.
        """
        pages = at - node.start
        parent = node.parent
        assert parent is not None and 0 < pages < len(node.key), "a split inside a node"
        self._count(node, -1)
        front = Node(node.key[:pages], node.slots[:pages], at, parent, full_lock=node.full_lock)
        front.shadow, node.shadow = self._law.split(node.shadow, pages)
        node.key, node.slots, node.parent = node.key[pages:], node.slots[pages:], front
        parent.children[front.key[0]], front.children[node.key[0]] = front, node
        self._recency.add(front, newer=node)
        if front.shadow is not None:
            self._shadow_recency.add(front, newer=node)
            front.shadow_lock = node.shadow_lock
            front.lock_end, node.lock_end = node.lock_end, None
        self._count(front, 1)
        self._count(node, 1)
        return front

    def _append(self, parent: Node, key: list[Page], slots: list[Slot], shadow: Any) -> Node:
        node = Node(key, slots, parent.end + len(key), parent)
        parent.children[key[0]] = node
        self._recency.add(node)
        self._count(node, 1)
        self._set_shadow(node, shadow)
        return node

    def _delete(self, node: Node) -> int:
        """Frees a leaf, and then its parents as far as they are useless; returns the number of pages."""
        pages = 0
        while True:
            parent = node.parent
            assert parent is not None and not node.children and not node.full_lock, "only an unlocked leaf is deleted"
            if node.shadow is not None:
                self._bury(node)
            self._count(node, -1)
            self._recency.remove(node)
            del parent.children[node.key[0]]
            node.parent = None
            self._give_back(node.slots)
            pages += len(node.slots)
            if not self._useless(parent):
                return pages
            node = parent

    def _useless(self, node: Node) -> bool:
        """True for a tombstone without children and locks: no match can end with it or go through it."""
        return node.parent is not None and node.shadow is None and not node.children and not node.full_lock

    def _bury(self, node: Node) -> None:
        """Frees a node's shadow: it becomes a tombstone."""
        shadow = node.shadow
        self._set_shadow(node, None)
        self._give_back([], shadow)

    def _set_shadow(self, node: Node, shadow: Any) -> None:
        self._count(node, -1)
        if node.shadow is not None:
            self._shadow_recency.remove(node)
        node.shadow = shadow
        if shadow is not None:
            self._shadow_recency.add(node)
        self._count(node, 1)

    def _give_back(self, slots: list[Slot], shadow: Any = None) -> None:
        if slots:
            self._free(slots)
        if shadow is not None and (parts := self._law.parts(shadow)):
            self._free_shadow(parts)

    def _unlock_shadow(self, lock: Lock) -> bool:
        """Ends a lock's part that concerns shadows; False if that was done before, or there is none."""
        if not lock.held:
            raise ValueError("the lock was ended before")
        if lock.shadow_end is None:
            return False
        for node in self._upwards(lock.node):
            self._change_locks(node, 0, -1)
            if node.lock_end == lock.shadow_end:
                break
        lock.shadow_end = None
        return True

    def _change_locks(self, node: Node, full: int, shadow: int) -> None:
        self._count(node, -1)
        node.full_lock += full
        node.shadow_lock += shadow
        self._count(node, 1)

    def _count(self, node: Node, sign: int) -> None:
        """Adds a node's memory to the counts, or subtracts it."""
        self._pages[node.full_lock > 0] += sign * len(node.slots)
        self._shadows[node.shadow_lock > 0] += sign * self._law.size(node.shadow)

    def _touch(self, node: Node) -> None:
        """Makes the path to a node the most recently used one, a child more recently than its parent."""
        for each in reversed(list(self._upwards(node))):
            self._recency.remove(each)
            self._recency.add(each)
            if each.shadow is not None:
                self._shadow_recency.remove(each)
                self._shadow_recency.add(each)

    def _upwards(self, node: Node) -> Iterator[Node]:
        """The node and its parents, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent


def _natural(number: int) -> int:
    """The number; ValueError if it is negative."""
    if number < 0:
        raise ValueError(f"{number} given, expected a number >= 0")
    return number
