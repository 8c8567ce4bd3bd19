"""A prefix cache without a tree: a table of prefixes, asked naively, that the radix tree is compared with."""

import dataclasses
import itertools
import random
from typing import Any

from ling3.engine.radix import RadixTree


@dataclasses.dataclass(eq=False)
class Snapshot:
    name: int


@dataclasses.dataclass
class Cell:
    """The last page of a prefix, with its shadow or None."""

    slot: int
    shadow: Any
    touched: int = 0
    uses: float = 0
    used: int = 0
    is_end: bool = False


class FlatCache:
    """`cells[prefix]` for every cached prefix, a tuple of pages."""

    def __init__(self, window, snapshots):
        self.needed = 1 if snapshots else window
        self.snapshots = snapshots
        self.cells, self.locks = {}, {}
        self.freed, self.freed_shadows, self.clock = [], [], itertools.count(1)
        self.now, self.due = 0, 16.0

    def live(self, prefix):
        return self.cells[prefix].shadow is not None

    def leaf(self, prefix):
        return not any(len(other) > len(prefix) and other[: len(prefix)] == prefix for other in self.cells)

    def full_lock(self, prefix):
        return sum(end[: len(prefix)] == prefix for end, _ in self.locks.values())

    def shadow_lock(self, prefix):
        return sum(prefix in needed for _, needed in self.locks.values())

    def state(self):
        """What a walk over the tree must find: the slot, the shadow and the locks of each node."""
        return {
            prefix: (cell.slot, cell.shadow, self.full_lock(prefix), self.shadow_lock(prefix))
            for prefix, cell in self.cells.items()
        }

    def stats(self):
        pages, shadows = [0, 0], [0, 0]
        for prefix in self.cells:
            pages[self.full_lock(prefix) > 0] += 1
            shadows[self.shadow_lock(prefix) > 0] += self.live(prefix)
        return pages, shadows

    def shared(self, pages):
        return max(n for n in range(len(pages) + 1) if n == 0 or pages[:n] in self.cells)

    def touch(self, prefix):
        for n in range(1, len(prefix) + 1):
            self.cells[prefix[:n]].touched = next(self.clock)

    def tail(self, prefix):
        """The prefixes whose shadows are needed to continue this one."""
        return [prefix[:n] for n in range(max(len(prefix) - self.needed, 0) + 1, len(prefix) + 1)]

    def match(self, pages):
        shared = self.shared(pages)
        length = max(n for n in range(shared + 1) if all(map(self.live, self.tail(pages[:n]))))
        self.touch(pages[:length])
        return length, length if self.leaf(pages[:shared]) else shared

    def insert(self, pages, slots, shadows, prev):
        """`shadows[i]`: page i's shadow or None. `prev` in pages."""
        known, added = self.shared(pages), len(pages)
        if self.needed and all(shadow is None for shadow in shadows):
            added = known
            self.freed.extend(slots[added:])
        for i in range(prev, added):
            prefix, slot, shadow = pages[: i + 1], slots[i], shadows[i]
            if i >= known:
                self.cells[prefix] = Cell(slot, shadow)
                continue
            cell = self.cells[prefix]
            if shadow is not None and cell.shadow is None:
                if not self.full_lock(prefix):
                    cell.slot, slot = slot, cell.slot
                cell.shadow = shadow
            elif shadow is not None:
                self.freed_shadows.append(shadow)
            self.freed.append(slot)
        self.touch(pages[:added])
        return known

    def lock(self, name, prefix):
        self.locks[name] = (prefix, self.tail(prefix))

    def unlock(self, name):
        prefix, _ = self.locks.pop(name)
        self.drop(prefix)

    def release_shadow(self, name):
        prefix, needed = self.locks[name]
        self.locks[name] = (prefix, [])
        if needed and not self.snapshots and self.leaf(prefix) and not self.shadow_lock(prefix):
            self.bury(prefix)

    def bury(self, prefix):
        if self.live(prefix):
            self.freed_shadows.append(self.cells[prefix].shadow)
        self.cells[prefix].shadow = None

    def delete(self, prefix):
        """Deletes a leaf; returns the number of pages, with those of useless parents."""
        self.bury(prefix)
        self.freed.append(self.cells.pop(prefix).slot)
        return 1 + self.drop_useless(prefix[:-1])

    def useless(self, prefix):
        return self.needed and prefix and not self.live(prefix) and self.leaf(prefix) and not self.full_lock(prefix)

    def drop_useless(self, prefix):
        return self.delete(prefix) if self.useless(prefix) else 0

    def drop(self, prefix):
        if not self.snapshots:
            self.drop_useless(prefix)
        elif self.useless(prefix):
            self.cells[prefix].touched = -next(self.clock)

    def forget(self, prefix):
        for n in range(len(prefix), 0, -1):
            if prefix[:n] in self.cells:
                if not self.leaf(prefix[:n]) or self.full_lock(prefix[:n]):
                    return
                self.delete(prefix[:n])

    def touched(self, prefix):
        return self.cells[prefix].touched

    def use(self, prefix):
        """A sequence goes on from the snapshot after a prefix."""
        cell = self.cells[prefix]
        if cell.is_end:
            self.due += (1.5 * (self.now - cell.used) - self.due) / 8
        self.count(cell, 1)

    def add_use(self, prefix, is_end):
        """A sequence ends or parts there."""
        cell = self.cells[prefix]
        if is_end:
            self.now += 1
            above = [self.cells[prefix[:n]] for n in range(1, len(prefix)) if self.cells[prefix[:n]].uses]
            if above and above[-1].is_end:
                above[-1].uses, above[-1].is_end = 0, False
        self.count(cell, 0.5 if is_end else 0 if cell.uses else 2)
        cell.is_end |= is_end

    def count(self, cell, uses):
        cell.uses = cell.uses / (1 + (self.now - cell.used) / 4) + uses
        cell.used = self.now

    def worth(self, prefix):
        cell, live = self.cells[prefix], [0, *(n for n in range(1, len(prefix)) if self.live(prefix[:n]))]
        age = self.now - cell.used
        wait = (self.due - age if age else self.due / 2) if cell.is_end else age
        rate = cell.uses / (1 + max(wait, 4 * (age - self.due)))
        return ((len(prefix) - live[-1]) * rate if self.snapshots else 0), cell.touched

    def evict(self, needed):
        freed = 0
        while freed < needed and (ends := [e for e in self.cells if self.leaf(e) and not self.full_lock(e)]):
            freed += self.delete(min(ends, key=self.touched))
        return freed

    def evict_shadow(self, needed):
        freed = 0
        while freed < needed and (ends := [e for e in self.cells if self.live(e) and not self.shadow_lock(e)]):
            end = min(ends, key=self.worth)
            freed += 1
            self.bury(end)
            self.drop(end)
        return freed


@dataclasses.dataclass(eq=False)
class Running:
    """A sequence that runs: its tokens, the length and slots of its match, and its lock."""

    tokens: tuple[int, ...]
    match: Any
    lock: Any


class World:
    """A tree and a flat cache that are told the same, by callers that obey the tree's rules."""

    OPERATIONS = (
        *("match", "insert", "begin", "go_on", "finish", "abandon", "release"),
        *("evict", "evict_shadow", "forget", "use", "add_use"),
    )

    def __init__(self, window=0, snapshots=False, alphabet=2):
        self.window, self.snapshots, self.alphabet = window, snapshots, alphabet
        self.freed, self.freed_shadows = [], []
        self.tree = RadixTree(self.freed.extend, self.freed_shadows.extend, window=window, snapshots=snapshots)
        self.flat = FlatCache(window, snapshots)
        self.running, self.recent = [], [()]
        self.issued, self.issued_shadows = set(), set()
        self.returned, self.returned_shadows = set(), set()

    def step(self, name, rng):
        """One operation, drawn from `rng`; then the tree and the flat cache must have the same."""
        getattr(self, name)(rng)
        self.compare()

    def draw(self, rng, prefix=()):
        """Tokens that often share some with recent ones."""
        if not prefix:
            prefix = rng.choice(self.recent)
            prefix = prefix[: rng.randint(0, len(prefix))]
        tail = rng.randint(0, max(8 - len(prefix), 1))
        tokens = (*prefix, *(rng.randrange(self.alphabet) for _ in range(tail)))
        self.recent = [*self.recent[-5:], tokens]
        return tokens

    def slots(self, count):
        new = [len(self.issued) + i for i in range(count)]
        self.issued.update(new)
        return new

    def shadow_slots(self, count):
        new = [-1 - len(self.issued_shadows) - i for i in range(count)]
        self.issued_shadows.update(new)
        return new

    def add(self, rng, tokens, matched):
        """Inserts tokens, one a step, whose first ones are `matched`."""
        end, shared = len(tokens), len(matched)
        slots = matched + self.slots(end - shared)
        offered = []
        if self.snapshots and end > shared and rng.random() < 0.7:
            offered = [Snapshot(len(self.issued_shadows))]
            self.issued_shadows.update(offered)
        elif self.window:
            freed = rng.choice([shared, rng.randint(shared, end), rng.randint(shared, end)])
            offered = self.shadow_slots(end - freed)
        shadows = [None] * (end - len(offered)) + offered
        known = self.tree.insert(tokens, slots, offered)
        assert known == self.flat.insert(tokens, list(slots), shadows, shared)

    def find(self, tokens):
        match = self.tree.match(tokens)
        assert (match.node.end, match.shared) == self.flat.match(tokens)
        cells = [self.flat.cells[tokens[: n + 1]] for n in range(match.node.end)]
        assert match.slots == [cell.slot for cell in cells]
        needed = cells[max(len(cells) - self.flat.needed, 0) :]
        assert match.shadows == [cell.shadow for cell in needed]
        return match

    def hold(self, tokens):
        match = self.find(tokens)
        lock = self.tree.lock(match.node)
        self.flat.lock(lock, tokens[: match.node.end])
        return Running(tokens, match, lock)

    def match(self, rng):
        self.find(self.draw(rng))

    def insert(self, rng):
        self.add(rng, self.draw(rng), [])

    def begin(self, rng):
        if len(self.running) < 5:
            self.running.append(self.hold(self.draw(rng)))

    def go_on(self, rng):
        if self.running:
            index = rng.randrange(len(self.running))
            old = self.running[index]
            tokens = self.draw(rng, old.tokens)
            self.add(rng, tokens, old.match.slots)
            self.running[index] = self.hold(tokens)
            self.unlock(old)

    def finish(self, rng):
        if self.running:
            old = self.running.pop(rng.randrange(len(self.running)))
            self.add(rng, self.draw(rng, old.tokens), old.match.slots)
            self.unlock(old)

    def abandon(self, rng):
        if self.running:
            self.unlock(self.running.pop(rng.randrange(len(self.running))))

    def unlock(self, sequence):
        self.tree.unlock(sequence.lock)
        self.flat.unlock(sequence.lock)

    def release(self, rng):
        if self.running:
            lock = rng.choice(self.running).lock
            self.tree.release_shadow(lock)
            self.flat.release_shadow(lock)

    def evict(self, rng):
        needed = rng.randint(0, 4 if self.window or self.snapshots else 40)
        assert self.tree.evict(needed) == self.flat.evict(needed)

    def evict_shadow(self, rng):
        needed = rng.randint(0, 3)
        assert self.tree.evict_shadow(needed) == self.flat.evict_shadow(needed)

    def forget(self, rng):
        tokens = self.draw(rng)
        match = self.find(tokens)
        self.tree.forget(match.node)
        self.flat.forget(tokens[: match.node.end])

    def use(self, rng):
        tokens = self.draw(rng)
        if (match := self.find(tokens)).node.end:
            self.tree.use(match.node)
            self.flat.use(tokens[: match.node.end])

    def add_use(self, rng):
        tokens, is_end = self.draw(rng), rng.random() < 0.7
        if (match := self.find(tokens)).node.end:
            self.tree.add_use(match.node, is_end)
            self.flat.add_use(tokens[: match.node.end], is_end)

    def compare(self):
        """Raises AssertionError unless both have the same, and all that was issued is in the tree or freed once."""
        self.tree.check()
        found = {}
        for node in self.tree.nodes():
            prefix = tuple(each.key for each in reversed(list(self.tree._upwards(node))))
            found[prefix] = (node.slot, node.shadow, node.full_lock, node.shadow_lock)
        assert found == self.flat.state()
        assert (self.tree.steps, self.tree.shadows) == self.flat.stats()
        for mine, theirs, returned in (
            (self.freed, self.flat.freed, self.returned),
            (self.freed_shadows, self.flat.freed_shadows, self.returned_shadows),
        ):
            assert set(mine) == set(theirs) and len(mine) == len(theirs)
            assert len(set(mine)) == len(mine) and returned.isdisjoint(mine), "freed twice"
            returned.update(mine)
            mine.clear()
            theirs.clear()
        held = {slot for slot, *_ in found.values()}
        kept = {shadow for _, shadow, *_ in found.values() if shadow is not None}
        assert self.issued == held | self.returned and held.isdisjoint(self.returned), "slots leaked"
        assert self.issued_shadows == kept | self.returned_shadows, "shadows leaked"
        assert kept.isdisjoint(self.returned_shadows), "a freed shadow is in the tree"

    def finish_all(self):
        """Ends all sequences and evicts all: nothing may be left."""
        while self.running:
            self.unlock(self.running.pop())
            self.compare()
        assert self.tree.evict(10**6) == self.flat.evict(10**6)
        self.compare()
        assert not list(self.tree.nodes()) and self.issued == self.returned
        assert self.issued_shadows == self.returned_shadows


def rehearse(operations, seed, **world):
    """Runs random operations from a seed, and then ends everything; returns how often match found something."""
    rng, world = random.Random(seed), World(**world)
    weights = [4, 4, 6, 4, 4, 1, 2, 3, 3, 1, 3, 3]
    for name in rng.choices(World.OPERATIONS, weights, k=operations):
        world.step(name, rng)
    world.finish_all()
