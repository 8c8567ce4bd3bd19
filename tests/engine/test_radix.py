"""The radix tree alone: what it finds, what it frees and when, beside a flat table of prefixes."""

import random
from types import SimpleNamespace

import pytest
from exhaustive_cases import exhaustively
from hypothesis import given, settings
from hypothesis import strategies as st
from radix_model import Snapshot, World, rehearse

from ling3.engine.radix import RadixTree

CONFIGS = {"window": {"window": 4}, "window of a step": {"window": 1}, "all": {}, "snapshots": {"snapshots": True}}


class Tree(RadixTree):
    """A tree of steps of one token that keeps what it frees.

    Slot and shadow slot of the n-th step are `base` + n and -(`base` + n).
    """

    def __init__(self, **law):
        self.freed, self.freed_shadows = [], []
        super().__init__(self.freed.extend, self.freed_shadows.extend, **law)

    def add(self, tokens, base, freed=0):
        """Inserts tokens, of which `freed` have no shadow any more."""
        slots = [base + n for n in range(len(tokens))]
        return self.insert(tokens, slots, [-slot for slot in slots[freed:]])

    def taken(self):
        """What was freed since the last call."""
        freed, shadows = sorted(self.freed), sorted(-shadow for shadow in self.freed_shadows)
        self.freed.clear()
        self.freed_shadows.clear()
        return freed, shadows

    def shape(self, tokens):
        """The known ones of some tokens, tombstones with a dagger."""
        return " ".join(f"{node.key}" + "†" * (node.shadow is None) for node in self._descend(tokens))


def chain():
    """0† 1† 2 3 4 5, with a window of 4 tokens."""
    tree = Tree(window=4)
    tree.add(range(6), 0, freed=2)
    assert tree.shape(range(6)) == "0† 1† 2 3 4 5"
    return tree


def tombstone():
    """0† to 3†, which lead to other tokens than 4-7; their slots are 100-103."""
    tree = Tree(window=4)
    tree.add([0, 1, 2, 3, 96, 97, 98, 99], 100, freed=4)
    assert tree.taken() == ([], []) and tree.shape(range(4)) == "0† 1† 2† 3†"
    return tree


@pytest.mark.parametrize("tokens, length", [(6, 6), (4, 0), (5, 0)])
def test_a_match_needs_the_window_before_its_end(tokens, length):
    tree = chain()
    match = tree.match(range(tokens))
    assert (match.node.end, match.shared) == (length, tokens)
    assert match.slots == list(range(length)) and match.shadows == ([-2, -3, -4, -5] if length else [])
    tree.check()


@pytest.mark.parametrize(
    "freed, slots, shadows, shape, found",
    [
        (0, [100, 101, 102, 103], [], "0 1 2 3 4 5 6 7", 8),
        (2, [0, 1, 102, 103], [], "0† 1† 2 3 4 5 6 7", 8),
        (4, [0, 1, 2, 3], [], "0† 1† 2† 3† 4 5 6 7", 8),
        (6, [0, 1, 2, 3], [], "0† 1† 2† 3† 4† 5† 6 7", 0),
        (8, [0, 1, 2, 3, 4, 5, 6, 7], [], "0† 1† 2† 3†", 0),
    ],
)
def test_an_insertion_over_tombstones(freed, slots, shadows, shape, found):
    tree = tombstone()
    assert tree.add(range(8), 0, freed=freed) == 4
    assert tree.taken() == (slots, shadows)
    assert tree.shape(range(8)) == shape
    tree.check()
    assert tree.match(range(8)).node.end == found


def test_eviction_of_shadows_and_then_of_slots():
    tree = chain()
    assert tree.evict_shadow(2) == 2
    assert tree.taken() == ([], [2, 3]) and tree.shape(range(6)) == "0† 1† 2† 3† 4 5"
    assert tree.evict(1) == 1 and tree.taken() == ([5], [5])
    assert tree.evict(1) == 5  # the last one above the tombstones, which are of no use without it
    assert tree.taken() == ([0, 1, 2, 3, 4], [4]) and not list(tree.nodes())
    tree.check()


def test_a_locked_tombstone_keeps_its_slot_and_gets_the_new_shadow():
    tree = Tree(window=2)
    tree.add(range(4), 100)
    lock = tree.lock(tree.match(range(4)).node)
    tree.release_shadow(lock)
    assert tree.taken() == ([], [103]) and tree.shape(range(4)) == "0 1 2 3†"
    assert tree.evict_shadow(9) == 3 and tree.taken() == ([], [100, 101, 102])
    assert tree.add(range(4), 0, freed=2) == 4
    assert tree.taken() == ([0, 1, 2, 3], []) and tree.shape(range(4)) == "0† 1† 2 3"
    match = tree.match(range(4))
    assert (match.slots, match.shadows) == ([100, 101, 102, 103], [-2, -3])
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
    assert tree.insert([*range(6), 60, 61], slots, [-200, -201]) == 6
    assert tree.taken() == ([], []) and tree.match([*range(6), 60, 61]).slots == slots


def test_deleting_a_leaf_deletes_the_tombstones_above_it_up_to_a_lock():
    tree = Tree(window=1)
    tree.add(range(6), 0)
    held = tree.lock(tree.match(range(2)).node)
    tree.release_shadow(held)  # the node has children: its shadow stays, but can be evicted
    tree.match(range(6))
    assert tree.evict_shadow(5) == 5 and tree.shape(range(6)) == "0† 1† 2† 3† 4† 5"
    assert tree.evict(1) == 4 and tree.shape(range(6)) == "0† 1†"
    tree.unlock(held)  # nothing leads through the tombstones any more
    assert not list(tree.nodes()) and tree.taken() == ([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])


def test_locks_protect():
    tree = chain()
    lock = tree.lock(tree.match(range(6)).node)
    tree.add([0, 1, 7, 8, 9, 10], 100)
    assert (tree.steps, tree.shadows) == ([4, 6], [6, 4])
    assert tree.evict(100) == 4 and tree.evict_shadow(100) == 2
    assert tree.match(range(6)).node.end == 6 and tree.evict(1) == tree.evict_shadow(1) == 0
    tree.unlock(lock)
    assert tree.evict(100) == 6 and tree.steps[1] == 0


def test_a_lock_covers_the_shadows_of_the_window_alone():
    tree = Tree(window=2)
    tree.add(range(8), 0)
    lock = tree.lock(tree.match(range(8)).node)
    assert tree.shadows[1] == 2 and tree.evict_shadow(100) == 6
    assert tree.match(range(8)).shadows == [-6, -7]
    tree.unlock(lock)


def test_a_released_shadow_stays_for_another_lock():
    tree = Tree(window=2)
    tree.add(range(4), 0)
    first, second = (tree.lock(tree.match(range(4)).node) for _ in range(2))
    tree.release_shadow(first)
    tree.release_shadow(first)  # does nothing the second time
    assert tree.shadows[1] == 2 and tree.taken() == ([], [])
    tree.release_shadow(second)
    assert tree.steps[1] == 4 and tree.taken() == ([], [3])
    tree.unlock(first)
    assert tree.steps[1] == 4 and tree.taken() == ([], [])
    tree.unlock(second)
    assert tree.taken() == ([3], []) and tree.match(range(4)).node.end == 3


def test_a_match_of_a_part_makes_only_that_part_the_most_recently_used():
    tree = Tree(window=1)
    tree.add([0, 1, 2, 3], 0)
    tree.add([5], 10)
    tree.match([0, 1, 9])
    assert [tree.evict(1) for _ in range(3)] == [1, 1, 1]
    assert sorted(tree.taken()[0]) == [2, 3, 10] and tree.match([0, 1]).node.end == 2


def test_a_match_says_where_a_sequence_diverges_from_known_tokens():
    tree = Tree(snapshots=True)
    first = Snapshot(1)
    tree.insert([0, 1, 2, 3], [0, 1, 2, 3], [first])
    match = tree.match([0, 1, 7])
    assert (match.node.end, match.shared, match.slots, match.shadows) == (0, 2, [], [])
    # The sequence takes a snapshot there. The tokens are in the tree, so their slots are free again.
    second = Snapshot(2)
    assert tree.insert([0, 1], [10, 11], [second]) == 2
    assert sorted(tree.freed) == [1, 10] and not tree.freed_shadows
    match = tree.match([0, 1, 7])
    assert (match.node.end, match.shared, match.shadows) == (2, 2, [second])
    assert tree.match([0, 1, 2, 3, 4]).shadows == [first]
    assert tree.insert([0, 1], [20, 21], [third := Snapshot(3)]) == 2
    assert tree.freed_shadows == [third]  # it has one there
    tree.check()


def snapshots(*sequences):
    """A tree with a snapshot after each of some sequences, which end there."""
    tree = Tree(snapshots=True)
    for n, tokens in enumerate(sequences):
        tree.insert(tokens, [100 * n + at for at in range(len(tokens))], [Snapshot(n)])
        tree.add_use(tree.match(tokens).node, is_end=True)
    return tree


def names(tree):
    """The snapshots that were evicted since the last call."""
    found = [snapshot.name for snapshot in tree.freed_shadows]
    tree.freed_shadows.clear()
    return found


def test_eviction_of_snapshots_and_locks():
    tree = snapshots([0, 0], [1, 1], [2, 2], [3, 3])
    lock = tree.lock(tree.match([0, 0]).node)
    assert tree.evict_shadow(2) == 2 and sorted(names(tree)) == [1, 2]
    assert not tree.freed and tree.match([1, 1]).node.end == 0
    assert tree.evict(4) == 4 and sorted(tree.freed) == [100, 101, 200, 201]  # of no use without their snapshots
    assert tree.evict_shadow(4) == 1 and tree.shadows == [0, 1]
    tree.release_shadow(lock)
    assert tree.match([0, 0]).shadows  # still there for the next sequence
    assert tree.evict_shadow(1) == 1 and tree.match([0, 0]).node.end == 0
    assert tree.steps == [2, 2]
    tree.unlock(lock)
    assert tree.steps == [4, 0] and tree.evict(9) == 4 and not list(tree.nodes())


def test_the_snapshot_that_saves_least_goes_first():
    tree = snapshots([50] * 3, range(9), [60] * 9, [70])
    # One step; three; nine, and again nine, of an older end, which is due sooner.
    assert [tree.evict_shadow(1) for _ in range(4)] == [1] * 4 and names(tree) == [3, 0, 2, 1]


def test_the_end_of_a_sequence_that_went_on_goes_first():
    tree = snapshots(range(5), range(9), [60] * 6, [70])
    assert [tree.evict_shadow(1) for _ in range(2)] == [1] * 2 and names(tree) == [0, 3]


def test_where_sequences_part_counts_more_than_where_they_end():
    tree = snapshots(range(6), [*range(3), 50, 51, 52], [60] * 9, [70])
    tree.insert(range(3), [500, 501, 502], [Snapshot(9)])
    parting = tree.match(range(3)).node
    tree.add_use(parting, is_end=False)
    tree.use(parting)
    # One step; three of each end below it, of which the older is due sooner; nine; three more often.
    assert [tree.evict_shadow(1) for _ in range(4)] == [1] * 4 and names(tree) == [3, 1, 0, 2]


def test_conversations_in_turns_do_not_drive_each_other_out():
    """Room for three of five: those that were kept are found in each turn, and one alone always is."""
    for conversations, expected in ((5, 2), (1, 1)):
        tree, hits = Tree(snapshots=True), 0
        for turn in range(1, 9):
            for name in range(conversations):
                match = tree.match([name] * 4 * (turn - 1))
                hits += match.node.end > 0 and turn == 8
                if match.node.end:
                    tree.use(match.node)
                tokens = [name] * 4 * turn
                tree.insert(tokens, [(turn, name, at) for at in range(4 * turn)], [Snapshot(turn)])
                tree.add_use(tree.match(tokens).node, is_end=True)
                tree.evict_shadow(max(sum(tree.shadows) - 3, 0))
        assert hits >= expected
        tree.check()


def test_a_conversation_that_ended_makes_room():
    tree = snapshots([0] * 4, [1] * 4, [2] * 4)
    for name in range(3, 60):
        tree.insert([name] * 4, [(name, at) for at in range(4)], [Snapshot(name)])
        tree.add_use(tree.match([name] * 4).node, is_end=True)
        tree.evict_shadow(sum(tree.shadows) - 3)
    assert not any(tree.match([name] * 4).node.end for name in range(3)) and tree.match([59] * 4).node.end


def test_forgetting_goes_on_above_tombstones_up_to_what_others_use():
    tree = snapshots([0, 1], [0, 1, 2, 3, 4], [0, 9])
    tree.forget(tree.match([0, 1, 2, 3, 4]).node)
    assert tree.shape([0, 1]) == "0†" and tree.match([0, 9]).node.end == 2
    tree.check()


def test_without_shadows_every_step_is_an_end():
    tree = Tree()
    assert tree.insert(range(4), [0, 1, 2, 3]) == 0
    assert [tree.match(range(n)).node.end for n in range(5)] == [0, 1, 2, 3, 4]
    assert tree.evict_shadow(5) == 0
    tree.release_shadow(tree.lock(tree.match(range(2)).node))
    assert tree.match(range(4)).slots == [0, 1, 2, 3]


def test_a_long_chain_of_tombstones_is_deleted():
    tree = Tree(window=1)
    tree.add(range(3000), 0, freed=2999)
    assert tree.evict(1) == 3000


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda t: Tree(window=4, snapshots=True), "one law"),
        (lambda t: t.tree.insert([0, 1], [0], []), "a slot, at most a shadow"),
        (lambda t: t.tree.insert([0], [50], [1, 2]), "a slot, at most a shadow"),
        (lambda t: Tree().insert([0], [50], [1]), "a slot, at most a shadow"),
        (lambda t: t.tree.lock(t.gone), "before anything is evicted"),
    ],
)
def test_callers_that_break_the_rules(call, text):
    tree = chain()
    tree.add([7], 99)
    gone = tree.match([7]).node
    tree.match(range(6))
    tree.evict(1)
    tree.taken()
    with pytest.raises(AssertionError, match=text):
        call(SimpleNamespace(tree=tree, gone=gone))
    assert tree.taken() == ([], [])
    tree.check()


@pytest.mark.parametrize("config", CONFIGS)
def test_random_operations(config):
    for seed in range(2):
        rehearse(250, seed, **CONFIGS[config])


@pytest.mark.slow
@pytest.mark.parametrize("config", exhaustively(CONFIGS, but=["window", "all", "snapshots"]))
def test_ten_thousand_random_operations(config):
    for seed in range(10, 15):
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
