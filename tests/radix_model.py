"""A prefix cache without a tree: a table of prefixes, asked naively, that the radix tree is compared with."""

import dataclasses
import itertools
import random
from typing import Any

from ling3.engine.radix import RadixStats, RadixTree


@dataclasses.dataclass(eq=False)
class Snapshot:
    name: int
    nbytes: int


@dataclasses.dataclass
class Cell:
    """The last page of a prefix. With snapshots, `shadow` is the one after it."""

    slot: int
    shadow: Any
    used: int = 0


class FlatCache:
    """`cells[prefix]` for every cached prefix (a tuple of pages), and the prefixes at which nodes end."""

    def __init__(self, page_size, window, snapshots):
        self.page_size, self.window, self.snapshots = page_size, window, snapshots
        self.cells, self.ends, self.locks = {}, set(), {}
        self.freed, self.freed_shadows, self.clock = [], [], itertools.count(1)

    def parts(self, end):
        """The prefixes that end inside the node with this end."""
        start = max((n for n in range(len(end)) if end[:n] in self.ends), default=0)
        return [end[:n] for n in range(start + 1, len(end) + 1)]

    def live(self, end):
        return self.cells[end].shadow is not None

    def node_is_live(self, prefix):
        """True if the node has a shadow that the prefix ends in."""
        return self.live(min((end for end in self.ends if end[: len(prefix)] == prefix), key=len))

    def leaf(self, end):
        return not any(len(other) > len(end) and other[: len(end)] == end for other in self.cells)

    def full_lock(self, prefix):
        return sum(end[: len(prefix)] == prefix for end, _ in self.locks.values())

    def shadow_lock(self, end):
        return sum(end in needed for _, needed in self.locks.values())

    def size(self, end):
        if not self.live(end):
            return 0
        return self.cells[end].shadow.nbytes if self.snapshots else len(self.parts(end)) if self.window else 0

    def state(self):
        """What a walk over the tree must find: slots, shadows and locks of each node."""
        found = {}
        for end in self.ends:
            cells = [self.cells[part] for part in self.parts(end)]
            shadow = cells[-1].shadow if self.snapshots else [cell.shadow for cell in cells]
            if not self.live(end):
                shadow = None
            elif not self.snapshots and not self.window:
                shadow = []
            found[end] = ([cell.slot for cell in cells], shadow, self.full_lock(end), self.shadow_lock(end))
        return found

    def stats(self):
        pages, shadows = [0, 0], [0, 0]
        for end in self.ends:
            pages[self.full_lock(end) > 0] += len(self.parts(end))
            shadows[self.shadow_lock(end) > 0] += self.size(end)
        return RadixStats(*pages, *shadows)

    def known(self, pages):
        shared = max(n for n in range(len(pages) + 1) if n == 0 or pages[:n] in self.cells)
        if shared:
            self.ends.add(pages[:shared])
        return shared

    def touch(self, prefix):
        for n in range(1, len(prefix) + 1):
            self.cells[prefix[:n]].used = next(self.clock)

    def valid(self, prefix):
        """True if the prefix can be continued."""
        if self.snapshots:
            return not prefix or self.live(prefix)
        tokens = len(prefix) * self.page_size
        seen = [n for n in range(1, len(prefix) + 1) if n * self.page_size > tokens - self.window]
        return all(self.live(prefix[:n]) for n in seen)

    def match(self, pages):
        shared = self.known(pages)
        length = max(n for n in range(shared + 1) if self.valid(pages[:n]))
        self.touch(pages[:length])
        return length, shared

    def offered(self, pages, known, shadows, prev):
        """The pages for which a sequence brings a shadow, as parts of the nodes that they are in."""
        if not self.snapshots:
            return [i for i in range(prev, len(pages)) if shadows[i] is not None]
        if not pages or shadows[-1] is None:
            return []
        return range(len(pages) - len(self.parts(pages)) if known == len(pages) else known, len(pages))

    def insert(self, pages, slots, shadows, prev):
        """`shadows[i]`: page i's shadow or None; with snapshots all but the last are None. `prev` in pages."""
        end, known = len(pages), self.known(pages)
        offered = self.offered(pages, known, shadows, prev)
        first = offered[0] if offered else end
        if not self.snapshots and 0 < first < known and not self.live(pages[: first + 1]):
            self.ends.add(pages[:first])
        live = [self.node_is_live(pages[: i + 1]) for i in range(known)]
        for i in range(known):
            cell, revived = self.cells[pages[: i + 1]], i in offered and not live[i]
            if i >= prev:
                if revived and not self.full_lock(pages[: i + 1]):
                    cell.slot, slots[i] = slots[i], cell.slot
                self.freed.append(slots[i])
            if i in offered and shadows[i] is not None:
                if revived:
                    cell.shadow = shadows[i]
                elif self.window or self.snapshots:
                    self.freed_shadows.append(shadows[i])
        if known < end and not offered:
            self.freed.extend(slots[known:])
            end = known
        for i in range(known, end):
            self.cells[pages[: i + 1]] = Cell(slots[i], shadows[i])
        if known < end:
            self.ends.update({pages, pages[: max(first, known)]} - {()})
        self.touch(pages[:end])
        return known

    def lock(self, name, prefix):
        needed, tokens, end = [], 0, prefix
        if self.snapshots:
            needed = [prefix] if prefix else []
        while not self.snapshots and end and tokens < self.window:
            parts = self.parts(end)
            needed.extend(parts)
            tokens, end = tokens + len(parts) * self.page_size, parts[0][:-1]
        self.locks[name] = (prefix, needed)

    def unlock(self, name):
        prefix, _ = self.locks.pop(name)
        self.drop_useless(prefix)

    def release_shadow(self, name):
        prefix, needed = self.locks[name]
        self.locks[name] = (prefix, [])
        if needed and not self.snapshots and self.leaf(prefix) and not self.shadow_lock(prefix):
            self.bury(prefix)

    def bury(self, end):
        for part in self.parts(end):
            cell = self.cells[part]
            if cell.shadow is not None and (self.window or self.snapshots):
                self.freed_shadows.append(cell.shadow)
            cell.shadow = None

    def delete(self, end):
        """Deletes a leaf; returns the number of pages, with those of useless parents."""
        self.bury(end)
        parts = self.parts(end)
        self.freed.extend(self.cells.pop(part).slot for part in parts)
        self.ends.remove(end)
        return len(parts) + self.drop_useless(parts[0][:-1])

    def drop_useless(self, end):
        if not end or self.live(end) or not self.leaf(end) or self.full_lock(end):
            return 0
        return self.delete(end)

    def forget(self, prefix):
        for end in sorted((e for e in self.ends if e == prefix[: len(e)]), key=len, reverse=True):
            if end in self.ends:
                if not self.leaf(end) or self.full_lock(end):
                    return
                self.delete(end)

    def oldest(self, ends):
        return min(ends, key=lambda end: self.cells[end].used)

    def evict(self, needed):
        freed = 0
        while freed < needed and (ends := [e for e in self.ends if self.leaf(e) and not self.full_lock(e)]):
            freed += self.delete(self.oldest(ends))
        return freed

    def evict_shadow(self, needed):
        freed = 0
        while freed < needed and (ends := [e for e in self.ends if self.size(e) and not self.shadow_lock(e)]):
            end = self.oldest(ends)
            freed += self.size(end)
            if self.leaf(end) and not self.full_lock(end):
                self.delete(end)
            else:
                self.bury(end)
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
        *("evict", "evict_shadow", "trim", "forget"),
    )

    def __init__(self, page_size, window=0, snapshots=False, alphabet=2):
        self.page_size, self.window, self.snapshots, self.alphabet = page_size, window, snapshots, alphabet
        self.freed, self.freed_shadows = [], []
        self.tree = RadixTree(
            page_size, self.freed.extend, self.freed_shadows.extend, window=window, snapshots=snapshots
        )
        self.flat = FlatCache(page_size, window, snapshots)
        self.running, self.recent = [], [()]
        self.issued, self.issued_shadows = set(), set()
        self.returned, self.returned_shadows = set(), set()

    def step(self, name, rng):
        """One operation, drawn from `rng`; then the tree and the flat cache must have the same."""
        getattr(self, name)(rng)
        self.compare()

    def paged(self, tokens):
        size = self.page_size
        return tuple(tokens[i : i + size] for i in range(0, len(tokens) // size * size, size))

    def draw(self, rng, prefix=()):
        """Tokens that often share some with recent ones."""
        if not prefix:
            prefix = rng.choice(self.recent)
            prefix = prefix[: rng.randint(0, len(prefix))]
        tail = rng.randint(0, max(8 * self.page_size - len(prefix), 1))
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

    def add(self, rng, tokens, matched, prev):
        """Inserts tokens whose first `prev` are matched."""
        pages = self.paged(tokens)
        end, shared = len(pages), prev // self.page_size
        slots = matched + self.slots(end - shared)
        shadows = [None] * end
        if self.snapshots:
            shadow = Snapshot(len(self.issued_shadows), rng.randint(1, 9)) if end and rng.random() < 0.7 else None
            if shadow is not None:
                self.issued_shadows.add(shadow)
                shadows[-1] = shadow
        elif self.window:
            freed = rng.choice([shared, rng.randint(shared, end), rng.randint(shared, end)])
            shadow = self.shadow_slots(end - freed)
            shadows[freed:] = shadow
            if freed == shared and rng.random() < 0.5:
                shadow = [10**9] * shared + shadow  # those of the match, which are the tree's, are not looked at
        else:
            shadow, shadows = None, [0] * end
        known = self.tree.insert(tokens, slots, shadow, prev)
        assert known == self.flat.insert(pages, list(slots), shadows, shared) * self.page_size

    def find(self, tokens):
        match = self.tree.match(tokens)
        pages, size = self.paged(tokens), self.page_size
        assert (match.length // size, match.shared // size) == self.flat.match(pages)
        cells = [self.flat.cells[pages[: n + 1]] for n in range(match.length // size)]
        assert match.slots == [cell.slot for cell in cells]
        if self.snapshots:
            assert match.shadow is (cells[-1].shadow if cells else None)
        else:
            needed = [c.shadow for n, c in enumerate(cells) if (n + 1) * size > match.length - self.window]
            assert match.shadow == needed
        return match

    def hold(self, tokens):
        match = self.find(tokens)
        lock = self.tree.lock(match.node)
        self.flat.lock(lock, self.paged(tokens)[: match.length // self.page_size])
        return Running(tokens, match, lock)

    def match(self, rng):
        self.find(self.draw(rng))

    def insert(self, rng):
        self.add(rng, self.draw(rng), [], 0)

    def begin(self, rng):
        if len(self.running) < 5:
            self.running.append(self.hold(self.draw(rng)))

    def go_on(self, rng):
        if self.running:
            index = rng.randrange(len(self.running))
            old = self.running[index]
            tokens = self.draw(rng, old.tokens)
            self.add(rng, tokens, old.match.slots, old.match.length)
            self.running[index] = self.hold(tokens)
            self.unlock(old)

    def finish(self, rng):
        if self.running:
            old = self.running.pop(rng.randrange(len(self.running)))
            self.add(rng, self.draw(rng, old.tokens), old.match.slots, old.match.length)
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
        needed = rng.randint(0, 9 if self.snapshots else 3)
        assert self.tree.evict_shadow(needed) == self.flat.evict_shadow(needed)

    def forget(self, rng):
        tokens = self.draw(rng)
        match = self.find(tokens)
        self.tree.forget(match.node)
        self.flat.forget(self.paged(tokens)[: match.length // self.page_size])

    def trim(self, rng):
        stats = self.flat.stats()
        budget = rng.randint(20, 80)
        over = max(stats.shadow_evictable + stats.shadow_protected - budget, 0)
        assert self.tree.trim_shadow(budget) == self.flat.evict_shadow(over)

    def compare(self):
        """Raises AssertionError unless both have the same, and all that was issued is in the tree or freed once."""
        self.tree.check()
        prefixes, found = {}, {}
        for node in self.tree.nodes():
            prefix = prefixes[node] = (*prefixes.get(node.parent, ()), *node.key)
            found[prefix] = (node.slots, node.shadow, node.full_lock, node.shadow_lock)
        assert found == self.flat.state()
        assert self.tree.stats() == self.flat.stats()
        for mine, theirs, returned in (
            (self.freed, self.flat.freed, self.returned),
            (self.freed_shadows, self.flat.freed_shadows, self.returned_shadows),
        ):
            assert set(mine) == set(theirs) and len(mine) == len(theirs)
            assert len(set(mine)) == len(mine) and returned.isdisjoint(mine), "freed twice"
            returned.update(mine)
            mine.clear()
            theirs.clear()
        held = {slot for slots, *_ in found.values() for slot in slots}
        shadows = [shadow for _, shadow, *_ in found.values() if shadow is not None]
        kept = set(shadows) if self.snapshots else {slot for shadow in shadows for slot in shadow}
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
    weights = [4, 4, 6, 4, 4, 1, 2, 3, 2, 1, 1]
    for name in rng.choices(World.OPERATIONS, weights, k=operations):
        world.step(name, rng)
    world.finish_all()
