"""A radix tree over the tokens of prompts, whose nodes own memory that later requests can use, in plain Python.

A node is one step of tokens, which follows its parent's, and has two kinds of memory. Its *slot* (not the engine's) is
needed for every step of a prefix, and its *shadow* only near the prefix's end. A shadow may be freed before the slot;
the node is then a tombstone. A prefix can be continued if its last nodes have their shadows; there are two laws:

    window=W        the entries of sliding-window attention: the last W nodes. With W = 0 there are no shadows, and
                    every prefix can be continued.
    snapshots=True  the state of a recurrent mixer after the node: the last node alone.

The tree allocates nothing. It owns the slots and shadows that it is given until it passes them to `free` or
`free_shadow`: when they are evicted, or at once if the tree has them already. After RadixAttention (Zheng et al., arXiv
2312.07104) and SGLang's tree for hybrid models.
"""

import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

PrefixStep = tuple[int, ...]
"""The tokens of one step, before the first perhaps a negative number for an adapter: prefixes consist of full steps."""
CANDIDATES = 256
"""How many of the least recently used snapshots are compared when one is to be evicted."""


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """The last step of a prefix of `end` steps. The root has no parent and no step."""

    key: PrefixStep
    slot: Any
    """The memory of the step; None if it has none."""
    end: int
    parent: "Node | None"
    shadow: Any = None
    """None means that the node is a tombstone, unless the tree has no shadows at all."""
    children: "dict[PrefixStep, Node]" = dataclasses.field(default_factory=dict)
    full_lock: int = 0
    """The number of locks on the node or below it."""
    shadow_lock: int = 0
    """The number of locks that need its shadow."""
    uses: float = 0
    """How often sequences ended, diverged or continued here, discounted for age at the time `used`."""
    used: int = 0
    """The time of the last use, in sequences that had ended by then."""
    is_end: bool = False
    """True if a sequence ended here, and no continuation of it has ended since."""


@dataclasses.dataclass(frozen=True)
class Match:
    """The prefix of a sequence that is in the tree.

    The steps up to `node` can be continued: `slots` has the memory of each, and `shadows` those that continuing needs.
    `shared` is larger than `node.end` if the sequence diverges from earlier ones at a later step without a shadow: a
    snapshot there serves the next sequence that shares these steps.
    """

    node: Node
    shared: int
    slots: list[Any]
    shadows: list[Any]


@dataclasses.dataclass(eq=False)
class Lock:
    """A sequence's lock on a matched prefix, at first including the shadows that continuing it needs."""

    node: Node
    shadows: bool = True


class RadixTree:
    """Finds the longest known prefix of a sequence, and the memory stored for it.

    `match` finds the prefix, and `lock` protects it while a sequence uses it. `insert` adds what a sequence has
    computed; `evict` and `evict_shadow` free what is not locked.
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
        self._needed = 1 if snapshots else window  # the last nodes of a prefix, whose shadows are needed to continue it
        self._root = Node((), None, 0, None)
        # All nodes but the root, and those with a shadow, from the least to the most recently used.
        self._recency: OrderedDict[Node, None] = OrderedDict()
        self._shadow_recency: OrderedDict[Node, None] = OrderedDict()
        # The numbers of [evictable, locked] ones.
        self.steps, self.shadows = [0, 0], [0, 0]
        self._clock, self._due = 0, 16.0  # now, and the time until a conversation continues, in ended sequences

    def match(self, steps: Sequence[PrefixStep]) -> Match:
        """Finds the prefix of a sequence that is in the tree; its continuable part becomes the most recently used.

        Lock `Match.node` before anything is inserted or evicted.
        """
        path = self._descend(steps)
        usable, live = 0, self._needed  # live: nodes since the last tombstone; enough at the beginning
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
        """Adds a sequence, whose memory the tree takes over; returns how many of its steps were in the tree before.

        `slots` has one for each step; for a sequence that continues a locked match, the first ones are the tree's.
        `shadows` has those of the last steps; if some are needed and none is given, new steps are freed and not added.
        Where the tree has a step already, it frees the given slot or its previous one: a sequence that goes on takes
        its slots from a new `match`.
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
        """Ends a lock; drops the node if it is a tombstone without children and locks now."""
        self._unlock_shadows(lock)
        for each in self._upwards(lock.node):
            self._change_locks(each, -1, 0)
        self._drop(lock.node)

    def release_shadow(self, lock: Lock) -> None:
        """Ends the lock's claim on shadows, once a window has moved past them or a snapshot was copied.

        Shadows that no other lock needs can be evicted from now on. With a window, a leaf's shadow is freed at once, as
        another sequence rarely ends there; a snapshot stays as useful for others as before. A second call does nothing.
        """
        node = lock.node
        if self._unlock_shadows(lock) and not (self.snapshots or node.children or node.shadow_lock):
            self._bury(node)

    def use(self, node: Node) -> None:
        """Counts a use of a node's snapshot, from which a sequence continues."""
        if node.is_end:  # most likely by the same conversation's next turn: learn when that comes
            self._due += (1.5 * (self._clock - node.used) - self._due) / 8
        self._count_uses(node, 1)

    def add_use(self, node: Node, is_end: bool) -> None:
        """Counts a sequence that ended at a node, as half a use, or diverged there, as two uses if it is the first."""
        self._clock += is_end
        if is_end and (above := self._above(node, lambda each: each.uses)).is_end:
            above.uses, above.is_end = 0, False
        self._count_uses(node, 0.5 if is_end else 0 if node.uses else 2)
        node.is_end |= is_end

    def evict(self, needed: int) -> int:
        """Frees slots of the least recently used leaves, until `needed` are freed or none is left; returns how many.

        Only age decides, as every step costs the same to compute again.
        """
        freed = 0
        while freed < needed and self.steps[0]:
            freed += self._delete(next(node for node in self._recency if not node.children and not node.full_lock))
        return freed

    def evict_shadow(self, needed: int) -> int:
        """Frees shadows until `needed` are freed or no more are evictable; returns how many.

        With a window, the least recently used goes first; of snapshots, the one that is worth least (`_worth`).
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
        """Frees a node and its ancestors, up to one that is locked or has other children."""
        for each in list(self._upwards(node)):
            if each.children or each.full_lock:
                return
            if each.parent is not None:  # not deleted with its child
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
        """A snapshot's worth: the steps that it saves, times its uses, over the expected time until its next use:

            steps · uses / (1 + max(wait, 4 (age - due)))      in steps over ended sequences
            wait = age where sequences diverge;  due - age at an end, and due / 2 at the newest end

        Where sequences diverge, the next use is expected as long from now as the last one is ago (Blankstein et al.,
        Hyperbolic Caching, ATC 2017). A conversation is expected to continue `due` after its end, as learnt from
        others, or at once: the newest end waits half as long. So of conversations that take turns, those that are kept
        stay until their turn. An overdue snapshot loses its worth four times as fast.
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
        """The node and its ancestors, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _above(self, node: Node, found: Callable[[Node], object]) -> Node:
        """The nearest ancestor for which `found` is true, or the root."""
        return next(filter(found, itertools.islice(self._upwards(node), 1, None)), self._root)

    def _touch(self, node: Node) -> None:
        """Makes the path to a node the most recently used one, a child more recently than its parent."""
        for each in reversed(list(self._upwards(node))):
            self._recency.move_to_end(each)
            if each.shadow is not None:
                self._shadow_recency.move_to_end(each)

    def _delete(self, node: Node) -> int:
        """Deletes a leaf, and then its ancestors as long as they are useless; returns how many nodes."""
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
        """Deletes a useless tombstone; with snapshots it goes next, as until then it shows where others diverge."""
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
        """Ends a lock's claim on shadows; returns False if it has none, or no longer."""
        claimed = list(itertools.islice(self._upwards(lock.node), self._needed)) if lock.shadows else []
        for each in claimed:
            self._change_locks(each, 0, -1)
        lock.shadows = False
        return bool(claimed)

    def _change_locks(self, node: Node, full: int, shadow: int) -> None:
        """Changes a node's locks, and the counts of evictable and locked memory."""
        self._count(node, -1)
        node.full_lock += full
        node.shadow_lock += shadow
        self._count(node, 1)

    def _count(self, node: Node, sign: int) -> None:
        self.steps[node.full_lock > 0] += sign
        self.shadows[node.shadow_lock > 0] += sign * (node.shadow is not None)
