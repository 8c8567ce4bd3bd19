"""The choice of a replica for a prompt: one that has seen its beginning, or the least busy one."""

from collections.abc import Iterator, Mapping, Sequence

SLACK = 4
"""How many more unfinished completions a replica may have than the least busy one and still be chosen for a prefix."""
MOST = 2**14
"""The most beginnings that are remembered."""


class Routes:
    """Remembers which replicas have seen which beginnings of prompts: of `step` tokens, twice as many, and so on."""

    def __init__(self, step: int):
        self._step = step
        self._seen: dict[int, set[int]] = {}

    def choose(self, ids: Sequence[int], loads: Mapping[int, int]) -> int:
        """The number of a replica for a prompt; `loads` has the unfinished completions of each that is ready.

        Of the replicas that have seen the longest beginning it is the least busy one, unless that has over `SLACK` more
        to do than another.
        """
        beginnings = list(self._beginnings(ids))
        least = min(loads, key=lambda number: (loads[number], number))
        known = next(
            (found for each in reversed(beginnings) if (found := self._seen.get(each, set()) & loads.keys())), ()
        )
        chosen = min(known, key=lambda number: (loads[number], number), default=least)
        if loads[chosen] > loads[least] + SLACK:
            chosen = least
        for each in beginnings:  # the last ones in the dict are those used last
            self._seen[each] = self._seen.pop(each, set()) | {chosen}
        while len(self._seen) > MOST:
            del self._seen[next(iter(self._seen))]
        return chosen

    def forget(self, number: int) -> None:
        """Forgets what a replica that died has seen."""
        for replicas in self._seen.values():
            replicas.discard(number)

    def _beginnings(self, ids: Sequence[int]) -> Iterator[int]:
        """The hashes of a prompt's beginnings, the shortest first."""
        length = self._step
        while length <= len(ids):
            yield hash(tuple(ids[:length]))
            length *= 2
