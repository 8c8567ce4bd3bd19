"""A radix tree of the tokens whose cache entries are kept for later requests, in plain Python.

A node stands for one step of tokens after those of its parents and has two kinds of memory. Its *slot* holds what a
sequence needs of every token. Its *shadow* holds what a sequence needs of the end of a prefix alone, and may be freed
before the slot is: the node is a tombstone from then on. A prefix can be continued if all of its last nodes, as many
as the law says, have their shadows. There are two laws:

    window=W        the entries of sliding-window attention: the last W nodes need their shadows. With W = 0 there are
                    no shadows, and every prefix can be continued.
    snapshots=True  the state of a recurrent mixer after the node: the last node needs its own.

The tree allocates nothing. It owns the slots and shadows that it is given until it hands them to `free` or
`free_shadow`: when they are evicted, or at once if the tree has them already. After RadixAttention (Zheng et al.,
arXiv 2312.07104) and SGLang's tree for hybrid models.
"""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PrefixStep = tuple[int, ...]
"""The tokens of a step: prefixes are kept and found by whole steps."""
CANDIDATES = 256
"""How many of the least recently used snapshots are compared when one is to be evicted."""


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """The last step of a prefix of `end` steps. The root, which has no parent, stands for no step."""

    key: PrefixStep
    slot: Any
    """None: the step has no memory."""
    end: int
    parent: "Node | None"
    shadow: Any = None
    """None: the node is a tombstone, unless there are no shadows at all."""
    children: "dict[PrefixStep, Node]" = dataclasses.field(default_factory=dict)
    full_lock: int = 0
    """Locks on the node or below it."""
    shadow_lock: int = 0
    """Locks that need its shadow."""
    uses: float = 0
    """How often sequences ended, parted or went on here, discounted for age at the time `used`."""
    used: int = 0
    """How many sequences had ended then."""
    is_end: bool = False
    """A sequence ended here, and no later end of it is known."""


@dataclasses.dataclass(frozen=True)
class Match:
    """The prefix of a sequence that is in the tree.

    The steps up to `node` can be continued: they lie in `slots`, and `shadows` are those that continuing needs.
    `shared` is more where the sequence diverges from earlier ones at a later place, which has no shadow: a snapshot
    taken there serves the next sequence that shares so many steps.
    """

    node: Node
    shared: int
    slots: list[Any]
    shadows: list[Any]


@dataclasses.dataclass(eq=False)
class Lock:
    """A sequence's claim on a matched prefix, at first with the shadows that continuing it needs."""

    node: Node
    shadows: bool = True


class RadixTree:
    """Finds the longest known prefix of a sequence, and what it has stored of it.

    `match` finds it, and `lock` protects it while a sequence uses it. `insert` adds what a sequence has computed;
    `evict` and `evict_shadow` free what is not locked.
    """

    def __init__(
        self,
        free: Callable[[list[Any]], object],
        free_shadow: Callable[[list[Any]], object],
        *,
        window: int = 0,
        snapshots: bool = False,
    ):
        assert not (window and snapshots), "a tree has one law"
        self.snapshots, self._free, self._free_shadow = snapshots, free, free_shadow
        self._needed = 1 if snapshots else window  # nodes whose shadows continuing a prefix needs
        self._root = Node((), None, 0, None)
        # All nodes but the root, and those with a shadow, from the least to the most recently used.
        self._recency: OrderedDict[Node, None] = OrderedDict()
        self._shadow_recency: OrderedDict[Node, None] = OrderedDict()
        # How many are evictable and how many are locked.
        self.steps, self.shadows = [0, 0], [0, 0]
        self._clock, self._due = 0, 16.0  # both in ends of sequences

    def match(self, steps: Sequence[PrefixStep]) -> Match:
        """Finds the prefix of a sequence that is in the tree, whose continuable part becomes the most recently used.

        Lock `Match.node` before anything is inserted or evicted.
        """
        path = self._descend(steps)
        usable, live = 0, self._needed  # live nodes since the last tombstone; the beginning is as good as enough
        for node in path:
            live = 0 if node.shadow is None else live + 1
            usable = node.end if live >= self._needed else usable
        node = path[usable - 1] if usable else self._root
        shared = len(path) if path and path[-1].children else usable
        self._touch(node)
        shadows = [each.shadow for each in path[max(usable - self._needed, 0) : usable]]
        slots = [each.slot for each in path[:usable]]
        return Match(node, shared, slots, shadows)

    def insert(self, steps: Sequence[PrefixStep], slots: Sequence[Any], shadows: Sequence[Any] = ()) -> int:
        """Adds a sequence, whose memory the tree takes over; returns how many steps of it were in the tree before.

        `slots` are those of all its steps, beginning with the tree's where the sequence goes on from a locked match;
        `shadows` are those of its last steps, as many as there are. Steps that no shadow lies behind are of no use, and
        are freed rather than added. Where the tree has a step, it frees the slot that is given, or the one that it had:
        a sequence that goes on takes its slots from another `match`.
        """
        end = len(steps)
        assert len(slots) == end and len(shadows) <= (end if self._needed else 0), "a slot, at most a shadow, of a step"
        path = self._descend(steps)
        added = end if shadows or not self._needed else len(path)
        spare, spare_shadows = list(slots[added:]), []
        aligned = [None] * (end - len(shadows)) + list(shadows)
        node = self._root
        for at in range(added):
            slot, shadow, parent = slots[at], aligned[at], node
            if at >= len(path):
                node = parent.children[steps[at]] = Node(steps[at], slot, at + 1, parent)
                self._recency[node] = None
                self.steps[0] += 1
                self._set_shadow(node, shadow)
                continue
            node = path[at]
            if shadow is not None and node.shadow is None:
                if not node.full_lock:
                    node.slot, slot = slot, node.slot
                self._set_shadow(node, shadow)
            elif shadow is not None:
                spare_shadows.append(shadow)
            if slot != node.slot:
                spare.append(slot)
        self._touch(node)
        self._free(spare)
        self._free_shadow(spare_shadows)
        return len(path)

    def lock(self, node: Node) -> Lock:
        """Protects a matched prefix from eviction: all its slots, and the shadows that continuing it needs."""
        assert node.parent is not None or node is self._root, "a node is locked before anything is evicted"
        for index, each in enumerate(self._upwards(node)):
            self._change_locks(each, 1, int(index < self._needed))
        return Lock(node)

    def unlock(self, lock: Lock) -> None:
        """Ends a lock; a tombstone that nothing leads through any more is dropped."""
        self._unlock_shadows(lock)
        for each in self._upwards(lock.node):
            self._change_locks(each, -1, 0)
        self._drop(lock.node)

    def release_shadow(self, lock: Lock) -> None:
        """Ends the lock's claim on shadows, as a window has moved past them or a snapshot was copied.

        Shadows that no other lock needs can be evicted from now on. With a window a leaf's is freed at once, as another
        sequence rarely ends there; a snapshot is as useful for others as before. A second call does nothing.
        """
        node = lock.node
        if self._unlock_shadows(lock) and not (self.snapshots or node.children or node.shadow_lock):
            self._bury(node)

    def use(self, node: Node) -> None:
        """Counts a sequence that goes on from a node's snapshot."""
        if node.is_end:  # its next part, most likely, whose end will take this one's place
            self._due += (1.5 * (self._clock - node.used) - self._due) / 8
        self._count_uses(node, 1)

    def add_use(self, node: Node, is_end: bool) -> None:
        """Counts a sequence that ended at a node, as half a use, or that parted there, as two if it is the first."""
        self._clock += is_end
        if is_end and (above := self._above(node, lambda each: each.uses)).is_end:
            above.uses, above.is_end = 0, False
        self._count_uses(node, 0.5 if is_end else 0 if node.uses else 2)
        node.is_end |= is_end

    def evict(self, needed: int) -> int:
        """Frees the slots of least recently used leaves until there are `needed` or no more; returns how many.

        Age decides, as a step costs the same to compute again wherever it is.
        """
        freed = 0
        while freed < needed and self.steps[0]:
            freed += self._delete(next(node for node in self._recency if not node.children and not node.full_lock))
        return freed

    def evict_shadow(self, needed: int) -> int:
        """Frees shadows until there are `needed` or no more are evictable; returns how many.

        With a window the least recently used goes first; of snapshots, the one that is worth least.
        """
        freed = 0
        while freed < needed and self.shadows[0]:
            found = (node for node in self._shadow_recency if not node.shadow_lock)
            node = min(itertools.islice(found, CANDIDATES if self.snapshots else 1), key=self._worth)
            freed += 1
            self._bury(node)
            self._drop(node)
        return freed

    def forget(self, node: Node) -> None:
        """Frees a node and its parents, as far as nothing else leads through them and they are not locked."""
        for each in list(self._upwards(node)):
            if each.children or each.full_lock:
                return
            if each.parent is not None:  # it has not gone with its child
                self._delete(each)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, from the least to the most recently used."""
        return iter(self._recency)

    def check(self) -> None:
        """Raises AssertionError unless every invariant holds."""
        steps, shadows, links = [0, 0], [0, 0], len(self._root.children)
        for node in self._recency:
            assert node.parent is not None and node.parent.children[node.key] is node, "a child's parent"
            assert node.end == node.parent.end + 1, "a node's place"
            assert node.full_lock >= sum(child.full_lock for child in node.children.values()), "a lock ends halfway"
            assert node.full_lock >= node.shadow_lock >= 0, "more locks on a shadow than on the slot"
            assert node.shadow is not None or not node.shadow_lock, "a lock on the shadow of a tombstone"
            assert self.snapshots or not self._is_useless(node), "a tombstone without children and locks"
            steps[node.full_lock > 0] += 1
            shadows[node.shadow_lock > 0] += node.shadow is not None
            links += len(node.children)
        assert links == len(self._recency), "the order of nodes has others than the tree"
        assert (steps, shadows) == (self.steps, self.shadows), "the counts of evictable and locked memory"
        live = [node for node in self._recency if node.shadow is not None]
        assert list(self._shadow_recency) == live, "the order of shadows is not that of the nodes which have them"
        slots = [node.slot for node in self._recency if node.slot is not None]
        assert len(set(slots)) == len(slots), "a slot is in the tree twice"
        shadows = {id(node.shadow) if self.snapshots else node.shadow for node in live}
        assert len(shadows) == len(live), "a shadow is in the tree twice"

    def _worth(self, node: Node) -> float:
        """The steps that would be computed again without a snapshot, times its uses, over how long the next one takes:

            steps · uses / (1 + max(wait, 4 (age - due)))      in steps over ends of sequences
            wait = age where sequences part;  due - age at an end, and due / 2 at the newest one

        A use is expected as long after the last one as that is ago (Blankstein et al., Hyperbolic Caching, ATC 2017).
        A conversation goes on from its end when the end is due, which is learnt from those that went on, or at once:
        the newest end waits half as long. Of conversations in turns, those that are kept are thus kept until their
        turn. What is overdue loses its worth four times as fast.
        """
        age, steps = self._clock - node.used, node.end - self._above(node, lambda each: each.shadow is not None).end
        wait = (self._due - age if age else self._due / 2) if node.is_end else age
        return steps * node.uses / (1 + max(wait, 4 * (age - self._due)))

    def _count_uses(self, node: Node, uses: float) -> None:
        """Adds uses to a node's earlier ones, which count half if four sequences have ended since."""
        node.uses = node.uses / (1 + (self._clock - node.used) / 4) + uses
        node.used = self._clock

    def _descend(self, steps: Sequence[PrefixStep]) -> list[Node]:
        """The nodes of the longest known prefix."""
        path, node = [], self._root
        for step in steps:
            if (node := node.children.get(step)) is None:
                break
            path.append(node)
        return path

    def _upwards(self, node: Node) -> Iterator[Node]:
        """The node and its parents, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _above(self, node: Node, found: Callable[[Node], object]) -> Node:
        """The nearest parent of which something is true, or the root."""
        return next(filter(found, itertools.islice(self._upwards(node), 1, None)), self._root)

    def _touch(self, node: Node) -> None:
        """Makes the path to a node the most recently used one, a child more recently than its parent."""
        for each in reversed(list(self._upwards(node))):
            self._recency.move_to_end(each)
            if each.shadow is not None:
                self._shadow_recency.move_to_end(each)

    def _delete(self, node: Node) -> int:
        """Frees a leaf, and then its parents as far as they are useless; returns how many."""
        slots = []
        while not slots or self._is_useless(node):
            parent = node.parent
            assert parent is not None and not node.children and not node.full_lock, "only an unlocked leaf is deleted"
            if node.shadow is not None:
                self._bury(node)
            self.steps[0] -= 1
            del self._recency[node], parent.children[node.key]
            slots.append(node.slot)
            node.parent, node = None, parent
        self._free(slots)
        return len(slots)

    def _drop(self, node: Node) -> None:
        """Deletes a useless tombstone; of snapshots, it goes next, and until then shows where others part."""
        if self._is_useless(node) and not self.snapshots:
            self._delete(node)
        elif self._is_useless(node):
            self._recency.move_to_end(node, last=False)

    def _is_useless(self, node: Node) -> bool:
        """True for a tombstone without children and locks: no match can end with it or go through it."""
        needed = node.parent is None or node.children or node.full_lock
        return bool(self._needed and node.shadow is None and not needed)

    def _bury(self, node: Node) -> None:
        """Frees a node's shadow: it becomes a tombstone."""
        self._free_shadow([node.shadow])
        self._set_shadow(node, None)

    def _set_shadow(self, node: Node, shadow: Any) -> None:
        self._count(node, -1)
        self._shadow_recency.pop(node, None)
        node.shadow = shadow
        if shadow is not None:
            self._shadow_recency[node] = None
        self._count(node, 1)

    def _unlock_shadows(self, lock: Lock) -> bool:
        """Ends a lock's claim on shadows; False if that was done before, or it has none."""
        claimed = list(itertools.islice(self._upwards(lock.node), self._needed)) if lock.shadows else []
        for each in claimed:
            self._change_locks(each, 0, -1)
        lock.shadows = False
        return bool(claimed)

    def _change_locks(self, node: Node, full: int, shadow: int) -> None:
        """Changes a node's locks, and the counts of what is evictable and locked."""
        self._count(node, -1)
        node.full_lock += full
        node.shadow_lock += shadow
        self._count(node, 1)

    def _count(self, node: Node, sign: int) -> None:
        self.steps[node.full_lock > 0] += sign
        self.shadows[node.shadow_lock > 0] += sign * (node.shadow is not None)
