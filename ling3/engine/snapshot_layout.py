"""What an engine's snapshots look like: one that was damaged or edited is refused before it reaches the loop."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ling3.cache import pages_of, slots_of
from ling3.engine.pool import PAGES_MOVED, Pool
from ling3.engine.shapes import Shapes
from ling3.engine.snapshots import Snapshot
from ling3.runtime.quoting import shown
from ling3.runtime.scalars import is_whole


@dataclasses.dataclass(frozen=True)
class Layout:
    """The shapes and dtypes of a snapshot's arrays, and what its counts follow from."""

    page_size: int
    states: Any
    """As in `Snapshot`, of `jax.ShapeDtypeStruct`."""
    entries: Sequence[jax.ShapeDtypeStruct]
    """A page of each paged array."""
    first_page: Callable[[int], int]
    """The first page that the token at a position needs."""

    @staticmethod
    def of(pool: Pool, shapes: Shapes) -> "Layout":
        """The layout of an engine's pool."""
        states = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), slots_of(pool.layers))
        paged = [each.entries for each in pages_of(pool.layers)]
        entries = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in paged]
        return Layout(shapes.page_size, states, entries, shapes.first_page)

    def check(self, snapshot: Snapshot, name: str) -> None:
        """ValueError, calling the snapshot by its `name`, for one that no engine of this layout has made."""
        if (problem := self._counts(snapshot) or self._arrays(snapshot)) is not None:
            raise ValueError(f"{name} is a snapshot that was damaged or edited: {problem}")

    def _counts(self, snapshot: Snapshot) -> str | None:
        """What is wrong with its numbers."""
        if not isinstance(snapshot.token_ids, tuple) or not snapshot.token_ids:
            return f"token_ids are {shown(snapshot.token_ids)}, expected a tuple of at least one"
        tokens, answered = len(snapshot.token_ids), snapshot.answered
        if not is_whole(answered) or not 0 <= answered < tokens:
            return f"answered is {shown(answered)}, expected a whole number in [0, {tokens})"
        expected = {"held": tokens - 1, "first_page": self.first_page(tokens - 1)}
        for field, count in expected.items():
            if not is_whole(value := getattr(snapshot, field)) or value != count:
                return f"{field} is {shown(value)}, expected {count} with {tokens} tokens"
        return None

    def _arrays(self, snapshot: Snapshot) -> str | None:
        """What is wrong with its arrays."""
        count = -(-snapshot.held // self.page_size) - snapshot.first_page
        moved = [min(count - start, PAGES_MOVED) for start in range(0, count, PAGES_MOVED)]
        pages = tuple(tuple(jax.ShapeDtypeStruct((n, *x.shape), x.dtype) for x in self.entries) for n in moved)
        for field, expected in (("states", self.states), ("pages", pages)):
            found = getattr(snapshot, field)
            if jax.tree.structure(found) != jax.tree.structure(expected):
                return f"{field} has other parts than this engine's"
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                if not isinstance(one, np.ndarray) or (one.shape, one.dtype) != (other.shape, other.dtype):
                    is_array = isinstance(one, np.ndarray)
                    has = f"an array of {one.dtype}{list(one.shape)}" if is_array else shown(one)
                    return f"{field} has {has}, expected an array of {other.dtype}{list(other.shape)}"
        return None
