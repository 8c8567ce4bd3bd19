"""Checks of snapshots, which refuse those of another engine and damaged ones before the request is queued."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ling3.cache import pages_of, slots_of
from ling3.engine.pool import Pool, moves
from ling3.engine.shapes import Shapes
from ling3.engine.snapshots import Continued, Snapshot
from ling3.runtime.parameters import ParameterError
from ling3.runtime.quoting import shown
from ling3.runtime.scalars import is_whole

NONE_KEPT = "an engine on a mesh or of attention and experts apart keeps no snapshots, nor does a fleet"


def continued(prompt: Any) -> Continued | None:
    """The prompt as a `Continued`, if it is a snapshot or continues one; None for any other prompt."""
    found = Continued(prompt) if isinstance(prompt, Snapshot) else prompt
    if not isinstance(found, Continued):
        return None
    if not isinstance(found.snapshot, Snapshot):
        raise ParameterError("prompt", f"the prompt continues {shown(found.snapshot)}, expected a ling3.Snapshot")
    return found


@dataclasses.dataclass(frozen=True)
class SnapshotChecks:
    """Checks of an engine's snapshots: their origin, their counts, and their arrays' shapes and dtypes."""

    origin: Callable[[], Mapping[str, Any]]
    """Returns the origin of the engine's snapshots (`origins.py`)."""
    page_size: int
    states: Any
    """The expected `Snapshot.states`, as `jax.ShapeDtypeStruct`."""
    entries: Sequence[jax.ShapeDtypeStruct]
    """The shape and dtype of a page of each paged array."""
    first_page: Callable[[int], int]
    """The first page that the token at a position needs."""
    updates: Callable[[], int]
    """Returns how often the engine's weights have been replaced, and the origin with them."""

    @staticmethod
    def of(
        pool: Pool, shapes: Shapes, origin: Callable[[], Mapping[str, Any]], updates: Callable[[], int]
    ) -> "SnapshotChecks":
        """The checks for the engine with this pool."""
        states = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), slots_of(pool.layers))
        paged = [each.entries for each in pages_of(pool.layers)]
        entries = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in paged]
        return SnapshotChecks(origin, shapes.page_size, states, entries, shapes.first_page, updates)

    def check(self, snapshot: Snapshot, name: str, adapter: Mapping[str, Any]) -> None:
        """Raises ValueError, calling the snapshot by its `name`, unless an engine of this origin could have made it.

        `adapter` is the part of the origin that is the adapter's; empty without one.
        """
        self._check_origin(snapshot.origin, {**self.origin(), **adapter}, name)
        if (problem := self._counts(snapshot) or self._arrays(snapshot)) is not None:
            raise ValueError(f"{name} is a snapshot that was damaged or edited: {problem}")

    def _check_origin(self, found: Any, origin: Mapping[str, Any], name: str) -> None:
        """Raises ValueError for a snapshot of another model or adapter, or of other settings."""
        if not isinstance(found, Mapping):
            raise ValueError(f"{name} is a snapshot whose origin is {shown(found)}, expected a mapping")
        for key in {**found, **origin}:
            if origin.get(key) != (other := found.get(key)):
                if key == "adapter":
                    had = "without an adapter" if other is None else "with an adapter that is not this one's"
                    raise ValueError(f"{name} is a snapshot of a request {had}: it holds for the same adapter")
                whole = key in ("model", "execution")
                what = f"another {key}" if whole else f"an engine whose {key} is {shown(other)}"
                here = "" if whole else f" and not {shown(origin.get(key))}"
                raise ValueError(f"{name} is a snapshot of {what}{here}: it holds for the same model and settings")

    def _counts(self, snapshot: Snapshot) -> str | None:
        """Describes the first wrong number of a snapshot; None if there is none."""
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
        """Describes the first wrong array of a snapshot; None if there is none."""
        count = -(-snapshot.held // self.page_size) - snapshot.first_page
        pages = tuple(tuple(jax.ShapeDtypeStruct((n, *x.shape), x.dtype) for x in self.entries) for n in moves(count))
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
