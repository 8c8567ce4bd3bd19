"""The memory of a running model: arrays with a row for each sequence, and paged arrays.

A mixer's state is any pytree of the two: `Paged` nodes are paged, all other arrays have a row per slot. The engine
knows nothing else about a layer.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Int32, PyTree, Shaped, UInt8

from ling3.execution import PLAIN, Execution
from ling3.ops.packed_kv import Packing
from ling3.runtime.recorder import SILENT, Recorder


class Span(eqx.Module):
    """The new tokens of a right-padded `[batch, seq]`: `length[b]` of row b, the first at position `start[b]`.

    Positions are absolute and count from 0; columns from `length[b]` on are padding. `table[b, i]` is the page with row
    b's positions [page·i, page·(i+1)) in every paged array; out-of-range indices mean no page. `execution` is how the
    pass runs. `recorder` records arrays inside the pass, or changes them at a `site`. The decoder fills in the
    `tokens`, for feed-forwards that look experts up by token id.

    Without a cache a row may hold several texts, as packed training batches do. `text_starts[b, t]` is then the column
    where the text of column t begins: its segment id. Positions count from there, and a mixer keeps texts apart: no
    token depends on another text, and recurrent states are zero at its start. A column in front of its text's start, as
    multi-token prediction has them, attends to nothing. Raises ValueError for `text_starts` with a `table`.

    With `rows_each` above 1 that many neighbouring rows, of one column, are one sequence: its newest token and drafts
    of those after it. They share pages, so that paged attention needs nothing else; other arrays have a row for each
    sequence, and are returned as `Drafted`. All else computes such rows like those of other sequences.
    """

    start: Int32[Array, " batch"]
    length: Int32[Array, " batch"]
    table: Int32[Array, "batch columns"] | None = None
    execution: Execution = eqx.field(static=True, default=PLAIN)
    recorder: Recorder = eqx.field(static=True, default=SILENT)
    tokens: Int[Array, "batch seq"] | None = None
    rows_each: int = eqx.field(static=True, default=1)
    text_starts: Int32[Array, "batch seq"] | None = None

    def __check_init__(self) -> None:
        if self.table is not None and self.text_starts is not None:
            raise ValueError("text_starts: a row of a cache is one text; give texts a row each, or no table")

    @staticmethod
    def whole(batch: int, seq: int, execution: Execution = PLAIN, recorder: Recorder = SILENT) -> "Span":
        """The span of complete sequences of `seq` tokens, from position 0 and without a cache."""
        zeros = jnp.zeros(batch, jnp.int32)
        return Span(zeros, jnp.full(batch, seq, jnp.int32), None, execution, recorder)

    def positions(self, seq: int) -> Int32[Array, "batch seq"]:
        """The absolute position of each column."""
        positions = self.start[:, None] + jnp.arange(seq, dtype=jnp.int32)[None]
        return positions if self.text_starts is None else positions - self.text_starts

    def columns(self, positions: Int32[Array, "batch seq"]) -> Int32[Array, "batch seq"]:
        """The index of each column, given its position."""
        columns = positions - self.start[:, None]
        return columns if self.text_starts is None else columns + self.text_starts

    def oldest(self, seq: int, window: int | None = None) -> Int32[Array, "batch seq"] | None:
        """The first column that each column attends to, by its text and a `window`; None without both: the first."""
        if window is None:
            return self.text_starts
        oldest = self.columns(self.positions(seq)) - (window - 1)
        return oldest if self.text_starts is None else jnp.maximum(oldest, self.text_starts)

    def forgotten(self, g: Float[Array, "batch seq *rest"]) -> Float[Array, "batch seq *rest"]:
        """Log decays `g` with -inf where a text begins: a factor e^g of 0, which resets a recurrent state."""
        if self.text_starts is None:
            return g
        begins = self.text_starts == self.columns(self.positions(g.shape[1]))
        return jnp.where(begins.reshape(*g.shape[:2], *[1] * (g.ndim - 2)), -jnp.inf, g)

    @property
    def seen(self) -> Int32[Array, " batch"]:
        """The number of tokens that each row's last new token attends to, including itself; 0 for rows without one."""
        return jnp.where(self.length > 0, self.start + self.length, 0)

    def valid(self, seq: int) -> Bool[Array, "batch seq"]:
        """True for columns that are tokens, False for padding."""
        return jnp.arange(seq, dtype=jnp.int32)[None] < self.length[:, None]

    def cleared(self, x: Float[Array, "batch seq *rest"]) -> Float[Array, "batch seq *rest"]:
        """`x` with zeros in place of padding, which stay zeros through most layers: CPU kernels skip them."""
        return jnp.where(self.valid(x.shape[1]).reshape(*x.shape[:2], *[1] * (x.ndim - 2)), x, 0)

    def by_sequence(self, x: Shaped[Array, "rows 1 *rest"]) -> Shaped[Array, "sequences drafted *rest"]:
        """The rows of each sequence, in order."""
        return x.reshape(-1, self.rows_each, *x.shape[2:])

    @property
    def watched(self) -> bool:
        """True if there is a recorder, for which a module may compute more than the pass needs."""
        return self.recorder is not SILENT

    def site(self, name: str, x: Any) -> Any:
        """Shows an array to the recorder; returns the one to continue with, which is `x` itself without a recorder."""
        return self.recorder.site(name, x, self)

    def within(self, name: str) -> "Span":
        """The same span for a submodule, whose `name` the recorder adds to the paths of its arrays."""
        if self.recorder is SILENT:
            return self
        return dataclasses.replace(self, recorder=self.recorder.within(name))


@dataclasses.dataclass(frozen=True)
class CacheSpec:
    """The size of a model's memory: slots, pages and their size, and the dtype of its arrays."""

    slots: int
    pages: int
    page_size: int
    """The number of tokens per page."""
    dtype: DTypeLike
    packed: bool = False
    """True stores pages as bytes in the formats of `ling3.ops.packed_kv`; other arrays still have `dtype`."""
    mtp: int = 0
    """The number of multi-token-prediction layers that also have a state, after those of the model."""


class Shared(eqx.Module):
    """A part of a state that can be sharded by heads. Other arrays are not: each device has all of a row."""

    @property
    @abc.abstractmethod
    def shared_axes(self) -> tuple[int | None, ...]:
        """For each of its arrays, the axis that is sharded by heads; None if each device has all of it."""


class Paged(Shared):
    """A paged array of a state: `entries[p, i]` is entry i of page p; with a `packing`, `entries[p]` are its bytes.

    An entry stands for `tokens` consecutive tokens, so a page of the engine's `page_size` tokens has page_size / tokens
    entries. `Span.table` lists the pages of each row, in order. With a `window`, a token's output depends only on the
    entries of the last `window` tokens, including its own: pages behind them may be freed.
    """

    entries: Float[Array, "pages page *entry"] | UInt8[Array, "pages bytes"]
    tokens: int = eqx.field(static=True, default=1)
    window: int | None = eqx.field(static=True, default=None)
    packing: Packing | None = eqx.field(static=True, default=None)
    shared: int | None = eqx.field(static=True, default=None)
    """The axis of `entries` that is sharded by heads; None if each device has all of them."""

    @staticmethod
    def empty(
        spec: CacheSpec,
        entry: tuple[int, ...],
        tokens: int = 1,
        window: int | None = None,
        packing: Packing | None = None,
        shared: int | None = None,
    ) -> "Paged":
        """Zeros for the pages of `spec`; if `spec` is packed, as bytes of the `packing`.

        Raises ValueError if page_size is no multiple of `tokens`, or if `spec` is packed and such entries cannot be.
        """
        if spec.page_size % tokens:
            raise ValueError(f"page_size is {spec.page_size}, expected a multiple of {tokens}, the tokens of an entry")
        page = spec.page_size // tokens
        if not spec.packed:
            return Paged(jnp.zeros((spec.pages, page, *entry), spec.dtype), tokens, window, shared=shared)
        if packing is None:
            raise ValueError("its entries have no packed form")
        if entry != (packing.channels,):
            raise ValueError(f"its {packing.name} have {entry[0]} channels, and packed ones have {packing.channels}")
        return Paged(jnp.zeros((spec.pages, packing.bytes(page)), jnp.uint8), tokens, window, packing)

    @property
    def shared_axes(self) -> tuple[int | None, ...]:
        """The axis of `entries` that is sharded by heads."""
        return (self.shared,)

    @property
    def page(self) -> int:
        """The number of entries in a page."""
        size = self.entries.shape[1]
        return size if self.packing is None else self.packing.page(size)

    @property
    def page_size(self) -> int:
        """The number of tokens in a page."""
        return self.page * self.tokens

    def append(self, new: Float[Array, "batch completed *entry"], span: Span) -> "Paged":
        """Writes the entries that the span completes, in order for each row; drops padding, and entries without a page.

        Entry w is complete with the token at position (w + 1) · tokens - 1. `new` has at least as many columns as
        entries are completed.
        """
        assert span.table is not None, "a span over a paged array has a table"
        columns, pages, page = span.table.shape[1], self.entries.shape[0], self.page
        first = span.start // self.tokens
        count = (span.start + span.length) // self.tokens - first
        offsets = jnp.arange(new.shape[1], dtype=jnp.int32)[None]
        entry = first[:, None] + offsets
        column = entry // page
        kept = (offsets < count[:, None]) & (column < columns)
        owner = jnp.take_along_axis(span.table, jnp.minimum(column, columns - 1), axis=1)
        owner = jnp.where(kept, owner, pages)
        if self.packing is None:
            entries = self.entries.at[owner, entry % page].set(new.astype(self.entries.dtype), mode="drop")
        else:
            entries = self.packing.write(self.entries, owner, entry % page, new)
        return dataclasses.replace(self, entries=entries)


class KDAState(Shared):
    """One KDA layer's memory, of the same size after any number of tokens. It is sharded by heads."""

    recurrent: Float[Array, "batch heads key value"]  # S, float32
    conv: Float[Array, "batch tail channels"]  # the last taps - 1 projections before the convolution: q | k | v

    @property
    def shared_axes(self) -> tuple[int, int]:
        """The heads of the state are sharded, and the channels of the tail."""
        return 1, 2


class Drafted(eqx.Module):
    """A mixer's state after a span whose rows are drafts (`Span.rows_each`), of which only the first will be kept."""

    @abc.abstractmethod
    def kept(self, count: Array) -> "State":
        """The state after the first `count` [sequences] tokens of each, with the bits of as many single steps."""


State = PyTree
"""A mixer's memory: a pytree of arrays with a row per slot and of `Paged` nodes."""


class Cache(eqx.Module):
    """The memory of all layers: one state per mixer, the number of tokens that each row holds, and the block table."""

    layers: tuple[State, ...]
    length: Int32[Array, " batch"]
    table: Int32[Array, "batch columns"]

    def capacity(self) -> int:
        """The most tokens that a row has room for; without a paged array, as many as positions can count."""
        sizes = [paged.page_size for paged in pages_of(self.layers)]
        return self.table.shape[1] * min(sizes) if sizes else 2**31 - 1


def kept(states: "State", count: Int32[Array, " sequences"]) -> "State":
    """The states after the first `count` tokens of each sequence of a span of drafts; pages need nothing."""
    return jax.tree.map(
        lambda node: node.kept(count) if isinstance(node, Drafted) else node,
        states,
        is_leaf=lambda node: isinstance(node, Drafted),
    )


def is_paged(node: object) -> bool:
    """True for a paged array, a `Paged` node."""
    return isinstance(node, Paged)


def pages_of(states: State) -> tuple[Paged, ...]:
    """The paged arrays of some states."""
    return tuple(node for node in jax.tree.leaves(states, is_leaf=is_paged) if is_paged(node))


def window_of(states: State) -> int | None:
    """The largest window of the paged arrays: no token needs a page behind it. None if one of them has no window."""
    pages = pages_of(states)
    windows = [paged.window for paged in pages if paged.window is not None]
    return max(windows) if windows and len(windows) == len(pages) else None


def shared_axes(states: State) -> list[int | None]:
    """For each array of some states (in the order of `jax.tree.leaves`), the axis that is sharded by heads.

    None means that each device has all of it.
    """
    nodes = jax.tree.leaves(states, is_leaf=lambda node: isinstance(node, Shared))
    return [axis for node in nodes for axis in (node.shared_axes if isinstance(node, Shared) else (None,))]


def slots_of(states: State) -> State:
    """The states with None in place of the paged arrays: the part that a slot holds."""
    return jax.tree.map(lambda node: None if is_paged(node) else node, states, is_leaf=is_paged)


def map_slots(function: Callable[..., Array], states: State, *others: State) -> State:
    """Applies `function` to each array with a row per slot; paged arrays stay as they are in `states`."""
    return jax.tree.map(
        lambda node, *rest: node if is_paged(node) else function(node, *rest), states, *others, is_leaf=is_paged
    )


def map_pages(function: Callable[..., Array], states: State, *others: State) -> State:
    """Applies `function` to the entries of each paged array; other arrays stay as they are in `states`."""

    def mapped(node: Any, *rest: Any) -> Any:
        if not is_paged(node):
            return node
        return dataclasses.replace(node, entries=function(node.entries, *(paged.entries for paged in rest)))

    return jax.tree.map(mapped, states, *others, is_leaf=is_paged)
