"""Snapshots: copies of a request's memory on the host, from which any number of later requests can continue.

An engine refuses those of another engine and damaged ones before the request is queued.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from ling3.cache import State, pages_of, slots_of
from ling3.engine.pool import Pool, moves
from ling3.engine.sampling_params import SamplingParams
from ling3.engine.shapes import Shapes
from ling3.runtime.parameters import ParameterError
from ling3.runtime.quoting import shown
from ling3.runtime.scalars import is_whole

NONE_KEPT = "an engine on a mesh or of attention and experts apart keeps no snapshots, nor does a fleet"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Snapshot:
    """A request's tokens and its caches and states for them, on the host: a prompt that need not be computed again.

    `SamplingParams(keep=True)` gives one at the end of each completion (`Completion.snapshot`), and with `max_tokens=0`
    one right after the prompt. It is a prompt for any number of requests, also at once, and `then` appends to it. Only
    its last token and what is appended are computed: all other tokens are `cached_tokens`. It takes no slot and no
    page, and its memory is freed once nothing refers to it.

    It holds the state one token before the end: the next request puts the last token in. The bits of a request that
    continues from it do not depend on other requests, and they are these:

    - With nothing appended, those of one request that was never interrupted; after a prompt, those of a new request
      with that prompt. Sampling continues by (seed, position), and penalties count the complete answer. `max_tokens`
      and `min_tokens` count new tokens; a stop string is looked for only in the new text, and a grammar starts anew.
    - With tokens appended, those of a new request with all the tokens if the snapshot holds full chunks
      (`chunked_prefill_size`) of a prompt. Otherwise the new request would split the tokens into other calls, which
      round differently in the last bits, as decoding a token does compared with prefilling it. Then the bits are those
      of the same steps, from the first prompt on, in any engine of these settings.

    A prompt that continues a snapshot is not kept for `prefix_cache`.
    """

    token_ids: tuple[int, ...]
    """The tokens of prompt and answer."""
    answered: int
    """How many of these tokens, the last ones, are the answer; 0 right after a prompt."""
    held: int
    """The number of tokens in the caches: all but the last."""
    first_page: int
    """The number of pages left out at the beginning, which are behind a sliding window."""
    states: tuple[State, ...]
    """The states in the request's slot, one row of each array."""
    pages: tuple[tuple[Shaped[np.ndarray, "_moved _page ..."], ...], ...]
    """The entries of its pages: for each block of up to `PAGES_MOVED` pages, those of each paged array."""
    origin: Mapping[str, Any]
    """The model and the settings that the snapshot is for."""

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays in the host's memory."""
        return sum(x.nbytes for x in jax.tree.leaves((self.states, self.pages)))

    def then(self, more: Any) -> "Continued":
        """A prompt of the snapshot's tokens followed by `more`, a text or token ids.

        `more` may also be a complete chat, with the conversation so far, whose ids must begin with the snapshot's.
        """
        return Continued(self, more)

    def check(self, params: SamplingParams, more: bool, name: str) -> None:
        """Raises ParameterError if no request with `params` can continue from it, with or without `more`."""
        again = f"{name} goes on from a snapshot, and its prompt is not computed again"
        if params.prompt_logprobs is not None:
            raise ParameterError("prompt_logprobs", f"prompt_logprobs: {again}")
        if params.capture is not None or params.interventions:
            field = "interventions" if params.capture is None else "capture"
            remedy = "capture and interventions take the whole prompt in place of the snapshot"
            raise ParameterError(field, f"{again}: {remedy}")
        if params.max_tokens == 0 and not more:
            problem = f"max_tokens is 0 and {name} is a snapshot with nothing appended: nothing is to be done"
            raise ParameterError("max_tokens", problem)

    def __repr__(self) -> str:
        return f"<Snapshot: {len(self.token_ids)} tokens, {self.nbytes / 1e6:.2f} MB>"


@dataclasses.dataclass(frozen=True, eq=False)
class Continued:
    """A prompt that consists of a snapshot and what is appended to it."""

    snapshot: Snapshot
    more: Any = ()


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
    shapes: Shapes
    states: Any
    """The expected `Snapshot.states`, as `jax.ShapeDtypeStruct`."""
    entries: Sequence[jax.ShapeDtypeStruct]
    """The shape and dtype of a page of each paged array."""
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
        return SnapshotChecks(origin, shapes, states, entries, updates)

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
        expected = {"held": tokens - 1, "first_page": self.shapes.first_page(tokens - 1)}
        for field, count in expected.items():
            if not is_whole(value := getattr(snapshot, field)) or value != count:
                return f"{field} is {shown(value)}, expected {count} with {tokens} tokens"
        return None

    def _arrays(self, snapshot: Snapshot) -> str | None:
        """Describes the first wrong array of a snapshot; None if there is none."""
        count = -(-snapshot.held // self.shapes.page_size) - snapshot.first_page
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
