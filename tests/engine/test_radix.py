"""The radix tree alone: what it finds, what it frees and when, beside a flat table of prefixes."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from radix_model import Snapshot, World, rehearse

from ling3.engine.radix import RadixTree

CONFIGS = {
    "window": {"page_size": 1, "window": 4},
    "window, pages of 2": {"page_size": 2, "window": 5},
    "window of a page": {"page_size": 4, "window": 4},
    "all tokens": {"page_size": 1},
    "all tokens, pages of 3": {"page_size": 3},
    "snapshots": {"page_size": 1, "snapshots": True},
    "snapshots, pages of 2": {"page_size": 2, "snapshots": True},
}


class Tree(RadixTree):
    """A tree that keeps what it frees. Slot and shadow slot of the n-th page are `base` + n and -(`base` + n)."""

    def __init__(self, page_size=1, **law):
        self.freed, self.freed_shadows = [], []
        super().__init__(page_size, self.freed.extend, self.freed_shadows.extend, **law)

    def add(self, tokens, base, freed=0, prev=0):
        """Inserts tokens, of which `freed` have no shadow any more."""
        slots = [base + n for n in range(len(tokens))]
        return self.insert(tokens, slots, [-slot for slot in slots[freed:]], prev)

    def taken(self):
        """What was freed since the last call."""
        freed, shadows = sorted(self.freed), sorted(-shadow for shadow in self.freed_shadows)
        self.freed.clear()
        self.freed_shadows.clear()
        return freed, shadows

    def shape(self, tokens):
        """The keys on the path of some tokens, tombstones with a dagger."""
        path, node, found = [tuple(tokens)], self._root, []
        for token in path[0]:
            if node.end < len(path[0]) and (token,) in node.children and node.end == len(sum(found, ())):
                node = node.children[(token,)]
                found.append(tuple(page[0] for page in node.key))
                path.append(f"{found[-1][0]}-{found[-1][-1]}" + ("†" if node.shadow is None else ""))
        return " ".join(path[1:])


def chain():
    """0-1† → 2-3 → 4-5, with a window of 4 tokens."""
    tree = Tree(window=4)
    tree.add(range(6), 0, freed=2)
    tree.match(range(4))
    assert tree.shape(range(6)) == "0-1† 2-3 4-5"
    return tree


def tombstone():
    """0-3†, which leads to other tokens than 4-7; its slots are 100-103."""
    tree = Tree(window=4)
    tree.add([0, 1, 2, 3, 96, 97, 98, 99], 100, freed=4)
    assert tree.taken() == ([], []) and tree.shape(range(4)) == "0-3†"
    return tree


@pytest.mark.parametrize(
    "tokens, length, shape", [(6, 6, "0-1† 2-3 4-5"), (4, 0, "0-1† 2-3 4-5"), (5, 0, "0-1† 2-3 4-4 5-5")]
)
def test_a_match_needs_the_window_before_its_end(tokens, length, shape):
    tree = chain()
    match = tree.match(range(tokens))
    assert (match.length, match.shared) == (length, tokens)
    assert match.slots == list(range(length)) and match.shadow == [-2, -3, -4, -5][: length - 2 if length else 0]
    assert tree.shape(range(6)) == shape
    tree.check()


@pytest.mark.parametrize(
    "freed, slots, shadows, shape, found",
    [
        (0, [100, 101, 102, 103], [], "0-3 4-7", 8),
        (2, [0, 1, 102, 103], [], "0-1† 2-3 4-7", 8),
        (4, [0, 1, 2, 3], [], "0-3† 4-7", 8),
        (6, [0, 1, 2, 3], [], "0-3† 4-5† 6-7", 0),
        (8, [0, 1, 2, 3, 4, 5, 6, 7], [], "0-3†", 0),
    ],
)
def test_an_insertion_over_a_tombstone(freed, slots, shadows, shape, found):
    tree = tombstone()
    assert tree.add(range(8), 0, freed=freed) == 4
    assert tree.taken() == (slots, shadows)
    assert tree.shape(range(8)) == shape
    tree.check()
    assert tree.match(range(8)).length == found


def test_eviction_of_shadows_and_then_of_slots():
    tree = chain()
    assert tree.evict_shadow(2) == 2
    assert tree.taken() == ([], [2, 3]) and tree.shape(range(6)) == "0-1† 2-3† 4-5"
    assert tree.evict(2) == 6
    assert tree.taken() == ([0, 1, 2, 3, 4, 5], [4, 5]) and not list(tree.nodes())
    tree.check()


def test_a_locked_tombstone_keeps_its_slots_and_gets_the_new_shadows():
    tree = Tree(window=2)
    tree.add(range(4), 100)
    lock = tree.lock(tree.match(range(4)).node)
    tree.release_shadow(lock)
    assert tree.taken() == ([], [100, 101, 102, 103]) and tree.shape(range(4)) == "0-3†"
    assert tree.add(range(4), 0, freed=2) == 4
    assert tree.taken() == ([0, 1, 2, 3], []) and tree.shape(range(4)) == "0-1† 2-3"
    match = tree.match(range(4))
    assert (match.slots, match.shadow) == ([100, 101, 102, 103], [-2, -3])
    tree.unlock(lock)
    tree.check()


def test_what_the_tree_has_is_freed():
    tree = Tree(window=2)
    tree.add(range(4), 0)
    assert tree.add(range(6), 100, freed=1) == 4
    assert tree.taken() == ([100, 101, 102, 103], [101, 102, 103])
    match = tree.match(range(6))
    # The sequence that holds the match goes on: the slots of its first six tokens are the tree's already.
    slots = [*match.slots, 200, 201]
    assert tree.insert([*range(6), 60, 61], slots, [-200, -201], prev=6) == 6
    assert tree.taken() == ([], []) and tree.match([*range(6), 60, 61]).slots == slots


def test_deleting_a_leaf_deletes_the_tombstones_above_it_up_to_a_lock():
    tree = Tree(window=1)
    tree.add(range(2), 0)
    held = tree.lock(tree.match(range(2)).node)
    tree.add(range(6), 0, prev=2)
    tree.match(range(4))
    tree.match(range(6))
    assert tree.shape(range(6)) == "0-1 2-3 4-5"
    tree.release_shadow(held)  # the node has children: its shadow stays, but can be evicted
    assert tree.evict_shadow(4) == 4 and tree.shape(range(6)) == "0-1† 2-3† 4-5"
    assert tree.evict(1) == 4 and tree.shape(range(6)) == "0-1†"
    tree.unlock(held)  # nothing leads through the tombstone any more
    assert not list(tree.nodes()) and tree.taken() == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])


def test_locks_protect():
    tree = chain()
    lock = tree.lock(tree.match(range(6)).node)
    tree.add([0, 1, 7, 8, 9, 10], 100)
    before = tree.stats()
    assert (before.evictable, before.protected, before.shadow_evictable, before.shadow_protected) == (4, 6, 6, 4)
    assert tree.evict(100) == 4 and tree.evict_shadow(100) == 2
    assert tree.match(range(6)).length == 6 and tree.evict(1) == tree.evict_shadow(1) == 0
    tree.unlock(lock)
    assert tree.evict(100) == 6 and tree.stats().protected == 0


def test_a_lock_covers_the_shadows_of_the_window_alone():
    tree = Tree(window=2)
    tree.add(range(8), 0)
    tree.match(range(6))
    lock = tree.lock(tree.match(range(8)).node)
    assert tree.stats().shadow_protected == 2 and tree.evict_shadow(100) == 6
    assert tree.match(range(8)).shadow == [-6, -7]
    tree.unlock(lock)


def test_a_released_shadow_stays_for_another_lock():
    tree = Tree(window=2)
    tree.add(range(4), 0)
    first, second = (tree.lock(tree.match(range(4)).node) for _ in range(2))
    tree.release_shadow(first)
    tree.release_shadow(first)  # does nothing the second time
    assert tree.stats().shadow_protected == 4 and tree.taken() == ([], [])
    tree.release_shadow(second)
    assert tree.stats().protected == 4 and tree.taken() == ([], [0, 1, 2, 3])
    tree.unlock(first)
    assert tree.stats().protected == 4 and tree.taken() == ([], [])
    tree.unlock(second)
    assert tree.taken() == ([0, 1, 2, 3], [])


def test_a_split_keeps_locks():
    tree = Tree(window=2)
    tree.add(range(6), 0)
    lock = tree.lock(tree.match(range(6)).node)
    tree.match([0, 1, 2])  # splits the node in three parts
    tree.match([0])
    assert tree.shape(range(6)) == "0-0 1-2 3-5"
    assert tree.evict(1) == tree.evict_shadow(1) == 0
    tree.unlock(lock)
    stats = tree.stats()
    assert (stats.protected, stats.shadow_protected) == (0, 0)
    tree.check()


def test_a_split_keeps_the_place_among_the_recently_used():
    tree = Tree(window=1)
    tree.add([0, 1, 2, 3], 0)
    tree.add([5], 10)
    tree.match([0, 1, 9])  # splits, and makes 0-1 the most recently used, but not 2-3
    assert tree.evict(1) == 2 and tree.taken()[0] == [2, 3]
    assert tree.evict(1) == 1 and tree.taken()[0] == [10]


def test_a_match_says_where_a_sequence_diverges_from_known_tokens():
    tree = Tree(snapshots=True)
    first = Snapshot(1, 10)
    tree.insert([0, 1, 2, 3], [0, 1, 2, 3], first)
    match = tree.match([0, 1, 7])
    assert (match.length, match.shared, match.slots, match.shadow) == (0, 2, [], None)
    # The sequence takes a snapshot there. The tokens are in the tree, so their slots are free again.
    second = Snapshot(2, 10)
    assert tree.insert([0, 1], [10, 11], second) == 2
    assert sorted(tree.freed) in ([0, 1], [10, 11]) and not tree.freed_shadows
    match = tree.match([0, 1, 7])
    assert (match.length, match.shared, match.shadow) == (2, 2, second)
    assert tree.match([0, 1, 2, 3, 4]).shadow is first
    tree.check()


def test_a_snapshot_inside_a_node_splits_it():
    tree = Tree(page_size=2, snapshots=True)
    first, second = Snapshot(1, 10), Snapshot(2, 5)
    tree.insert(range(8), [0, 1, 2, 3], first)
    assert tree.insert(range(5), [10, 11], second) == 4
    assert [node.shadow for node in tree.nodes()] == [second, first]
    assert [tree.match(range(n)).length for n in (3, 5, 7, 8)] == [0, 4, 4, 8]
    assert tree.insert(range(4), [20, 21], Snapshot(3, 5)) == 4
    assert [snapshot.name for snapshot in tree.freed_shadows] == [3]  # it has one there


def test_snapshots_stay_within_a_budget_of_bytes():
    tree = Tree(snapshots=True)
    snapshots = [Snapshot(n, 10) for n in range(4)]
    for n, snapshot in enumerate(snapshots):
        tree.insert([n, n], [2 * n, 2 * n + 1], snapshot)
    lock = tree.lock(tree.match([0, 0]).node)
    assert tree.trim_shadow(25) == 20 and tree.freed_shadows == snapshots[1:3]
    assert tree.freed == [2, 3, 4, 5]  # without its snapshot a leaf is of no use
    assert tree.trim_shadow(0) == 10 and tree.stats().shadow_protected == 10
    tree.release_shadow(lock)
    assert tree.match([0, 0]).shadow is snapshots[0]  # still there for the next sequence
    assert tree.trim_shadow(0) == 10 and tree.match([0, 0]).length == 0
    assert tree.stats().protected == 2
    tree.unlock(lock)
    assert not list(tree.nodes())


def test_without_shadows_every_page_is_an_end():
    tree = Tree(page_size=2)
    assert tree.insert(range(9), [0, 1, 2, 3]) == 0
    assert [tree.match(range(n)).length for n in range(10)] == [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]
    assert tree.evict_shadow(5) == 0 and tree.trim_shadow(0) == 0
    tree.release_shadow(tree.lock(tree.match(range(4)).node))
    assert tree.match(range(8)).slots == [0, 1, 2, 3]


def test_a_long_chain_of_tombstones_is_deleted():
    tree = Tree(window=1)
    tree.add(range(3000), 0, freed=2999)
    for n in reversed(range(3000)):
        tree.match(range(n))
    assert tree.evict(1) == 3000


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda t: Tree(page_size=0), "page_size is 0"),
        (lambda t: Tree(window=-1), "window -1"),
        (lambda t: Tree(window=4, snapshots=True), "without snapshots"),
        (lambda t: t.tree.insert([0, 1], [0], []), "1 slots for 2 tokens"),
        (lambda t: t.tree.insert([0], [50], [1, 2]), "2 shadow slots for 1 pages"),
        (lambda t: t.tree.insert(range(8), range(8), [], prev=3), "prev is 3"),
        (lambda t: t.tree.insert(range(8), range(50, 58), [], prev=2), "prev is 2"),
        (lambda t: t.tree.insert([8, 9], [50, 51], [], prev=2), "prev is 2"),
        (lambda t: t.tree.insert(range(2), range(2), [], prev=4), "prev is 4"),
        (lambda t: t.tree.evict(-1), "-1 given"),
        (lambda t: t.tree.evict_shadow(-1), "-1 given"),
        (lambda t: t.tree.trim_shadow(-1), "-1 given"),
        (lambda t: t.tree.unlock(t.ended), "ended before"),
        (lambda t: t.tree.release_shadow(t.ended), "ended before"),
        (lambda t: t.tree.lock(t.gone), "evicted"),
        (lambda t: t.tree.lock(next(t.tree.nodes())), "no shadow"),
        (lambda t: Tree(snapshots=True).insert([], [], Snapshot(0, 1)), "at least one whole page"),
    ],
)
def test_bad_arguments(call, text):
    tree = chain()
    ended = tree.lock(tree.match(range(6)).node)
    tree.unlock(ended)
    tree.add([7], 99)
    gone = tree.match([7]).node
    tree.match(range(6))
    tree.evict(1)
    tree.taken()
    with pytest.raises(ValueError, match=text):
        call(SimpleNamespace(tree=tree, ended=ended, gone=gone))
    assert tree.taken() == ([], [])
    tree.check()


@pytest.mark.parametrize("config", CONFIGS)
def test_random_operations(config):
    for seed in range(2):
        rehearse(250, seed, **CONFIGS[config])


@pytest.mark.slow
@pytest.mark.parametrize("config", CONFIGS)
def test_ten_thousand_random_operations(config):
    for seed in range(10, 16):
        rehearse(2000, seed, **CONFIGS[config])


@settings(max_examples=40)
@given(
    st.sampled_from(list(CONFIGS)),
    st.lists(st.tuples(st.sampled_from(World.OPERATIONS), st.integers(0, 99)), max_size=30),
)
def test_any_order_of_operations(config, operations):
    world = World(**CONFIGS[config])
    for name, seed in operations:
        world.step(name, random.Random(seed))
    world.finish_all()
