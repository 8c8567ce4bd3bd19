"""The memory of the running sequences, as arrays on the device, and the programs that fill and read slots and pages.

Every running sequence has a slot: row `slot` of the pool has its per-slot states, its newest token and its sampling
parameters. Its paged entries are in pages that a block table lists. A forward program (`forward.py`) takes some rows
out of the pool, continues them, and puts them back.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Int32, Shaped

from ling3.cache import Cache, CacheSpec, State, map_pages, map_slots, pages_of, slots_of
from ling3.engine.arrays import AnyArray
from ling3.engine.sampling import Sampling, counted, ends
from ling3.engine.settings import CacheDtype
from ling3.mesh.placement import Placement, here
from ling3.mesh.sharded import placement_of
from ling3.model import CausalLM
from ling3.ops.rows import TakeRows, take_rows

PAGES_MOVED = 8
"""The most pages that one call copies to or from the host."""


def moves(count: int) -> list[int]:
    """The number of pages that each call copies to or from the host, to copy `count` pages in all."""
    return [min(count - start, PAGES_MOVED) for start in range(0, count, PAGES_MOVED)]


class Rows(eqx.Module):
    """The rows of one call: their slots (None: every slot, in order), and the block table with the pages of each.

    Slot indices >= the pool's number of slots mark unused rows, and page indices >= its number of pages mark unused
    columns. With `in_place` there are as many rows as slots, and row i is slot i or unused: then no state is gathered
    or scattered, which is faster on accelerators. An unused row then computes its slot's newest token as padding, even
    if the slot belongs to a sequence: this leaves the slot's state unchanged as long as the numbers are finite.
    """

    slots: Int32[AnyArray, " rows"] | None
    table: Int32[AnyArray, "rows columns"]
    in_place: bool = eqx.field(static=True, default=False)
    beside: str | None = eqx.field(static=True, default=None)
    """The mesh axis along which other devices run other rows of the call; None if there are none."""

    def here(self, pool: "Pool", axis: str | None) -> "Rows":
        """These rows with slots and pages renumbered for this device's part of the pool, sharded along `axis`."""
        if axis is None:
            return self
        slots = None if self.slots is None else here(self.slots, pool.length.shape[0], axis)
        table = self.table
        for paged in pages_of(pool.layers)[:1]:
            table = here(table, paged.entries.shape[0], axis)
        return Rows(slots, table, self.in_place, beside=axis)


class Pool(eqx.Module):
    """The memory of all slots. Donated to every call, so that each updates it in place."""

    layers: tuple[State, ...]  # arrays with a row per slot, or paged
    length: Int32[Array, " slots"]  # tokens in the caches
    token: Int32[Array, " slots"]  # the newest token, not yet in the caches
    until: Int32[Array, " slots"]  # tokens of prompt and output together at which the row ends
    done: Bool[Array, " slots"]
    sampling: Sampling
    placement: Placement | None = eqx.field(static=True, default=None)  # of a model on a mesh

    @staticmethod
    def empty(model: CausalLM, sampling: Sampling, spec: CacheSpec) -> "Pool":
        """A pool of free slots, one for each row of `sampling`."""
        layers, placement = new_memory(model, spec), placement_of(model)

        def put(x: np.ndarray) -> Any:
            return jnp.asarray(x) if placement is None else placement.everywhere(x)

        length, token, until = (put(np.zeros(spec.slots, np.int32)) for _ in range(3))
        done = put(np.ones(spec.slots, bool))
        pool = Pool(layers, length, token, until, done, sampling, placement)
        return pool if placement is None else _settled(pool)

    @property
    def axis(self) -> str | None:
        """The mesh axis along which slots and pages are sharded; None if every device has all."""
        if self.placement is None:
            return None
        sizes = [self.length.shape[0], *(paged.entries.shape[0] for paged in pages_of(self.layers)[:1])]
        return self.placement.rows(math.gcd(*sizes))

    @property
    def specs(self) -> "Pool":
        """The sharding (a PartitionSpec) of each array of `part`."""
        assert self.placement is not None, "a pool on a mesh"
        by_slot = jax.tree.map(lambda _: PartitionSpec(self.axis), self.part)
        return eqx.tree_at(lambda p: p.layers, by_slot, self.placement.states(self.layers, self.axis))

    @property
    def part(self) -> "Pool":
        """This pool without its placement: what a device's program gets, with that device's part of each array."""
        return dataclasses.replace(self, placement=None)

    @property
    def settled(self) -> "Pool":
        """The pool with its sharding constrained, inside jit."""
        if self.placement is None:
            return self
        return dataclasses.replace(self.placement.settled(self.part, self.specs), placement=self.placement)

    def everywhere(self, states: State) -> State:
        """Some rows or pages of the pool, on every device of its mesh (sharded heads stay sharded)."""
        placement = self.placement
        return states if placement is None else placement.settled(states, placement.states(states, None))

    def take(self, rows: Rows, take: TakeRows = take_rows) -> "Pool":
        """A pool of only these rows; the pages are not moved. Unused rows have arbitrary states."""
        slots, size = rows.slots, self.length.shape[0]
        if slots is None:
            return self
        if rows.in_place:
            # An unused row attends to nothing, and gets no token and no expert.
            length, done = jnp.where(slots < size, self.length, 0), self.done | (slots >= size)
            return Pool(self.layers, length, self.token, self.until, done, self.sampling)
        parts = (self.layers, self.length, self.token, self.until, self.done, self.sampling)

        layers, length, token, until, done, sampling = map_slots(lambda x: take(x, slots), parts)
        return Pool(layers, length, token, until, done | (slots >= size), sampling)

    def put(self, rows: Rows, view: "Pool") -> "Pool":
        """The pool after writing back the rows of `view`, which came from `take`."""
        slots = rows.slots
        if slots is None:
            return view
        if rows.in_place:
            own = slots < self.length.shape[0]
            length, done = jnp.where(own, view.length, self.length), jnp.where(own, view.done, self.done)
            return Pool(view.layers, length, view.token, self.until, done, view.sampling)

        def placed(pool, new):
            return jax.tree.map(lambda x, y: x.at[slots].set(y, mode="drop"), pool, new)

        layers = map_slots(lambda new, old: old.at[slots].set(new, mode="drop"), view.layers, self.layers)
        length, token, done = placed((self.length, self.token, self.done), (view.length, view.token, view.done))
        sampling = self.sampling
        if sampling.adjustments is not None and view.sampling.adjustments is not None:
            counts = placed(sampling.adjustments.counts, view.sampling.adjustments.counts)
            sampling = eqx.tree_at(lambda s: s.adjustments.counts, sampling, counts)
        return Pool(layers, length, token, self.until, done, sampling)

    def cache(self, table: Int32[Array, "slots columns"]) -> Cache:
        """The cache for the model's forward pass."""
        return Cache(self.layers, self.length, table)

    def after(self, cache: Cache, token: Int32[Array, " slots"], chosen: Bool[Array, " slots"]) -> "Pool":
        """The pool after a forward pass, with the new `token` of each row in which one was `chosen`."""
        done = ends(token, self.sampling, cache.length) | (cache.length + 1 >= self.until)
        return Pool(
            cache.layers,
            cache.length,
            jnp.where(chosen, token, self.token),
            self.until,
            jnp.where(chosen, done, self.done),
            counted(self.sampling, token, chosen),
        )


@functools.partial(jax.jit, donate_argnums=0)
def _settled(pool: Pool) -> Pool:
    return pool.settled


class SlotContents(eqx.Module):
    """The new contents of a slot: a new sequence, or one that was swapped out."""

    states: tuple[State, ...]  # one row of each, and nothing paged; zeros for a new sequence
    length: Int32[Array, ""]
    token: Int32[Array, ""]
    until: Int32[Array, ""]
    sampling: Sampling  # one row


@eqx.filter_jit
def new_memory(model: CausalLM, spec: CacheSpec) -> tuple[State, ...]:
    """The states of an empty pool, one per mixer."""
    return model.empty_states(spec)


def cache_dtype(model: CausalLM, name: CacheDtype = "auto") -> jnp.dtype:
    """The floating dtype of the caches: the one named, else the weights' dtype, but at least float32 on a CPU.

    On a CPU, XLA copies all of a bfloat16 cache to write one entry. The values are those of the narrower dtype.
    """
    if name in ("float32", "bfloat16"):
        return jnp.dtype(name)
    dtype = model.dtype
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" and dtype.itemsize < 4 else dtype


@functools.partial(jax.jit, donate_argnames="pool")
def swap_in(slot: Int32[Array, ""], contents: SlotContents, pool: Pool) -> Pool:
    """Fills a slot, and overwrites everything that was in it."""
    layers = map_slots(lambda x, y: x.at[slot].set(y[0].astype(x.dtype)), pool.layers, contents.states)
    filled = Pool(
        layers,
        pool.length.at[slot].set(contents.length),
        pool.token.at[slot].set(contents.token),
        pool.until.at[slot].set(contents.until),
        pool.done.at[slot].set(False),
        jax.tree.map(lambda x, y: x.at[slot].set(y[0]), pool.sampling, contents.sampling),
        pool.placement,
    )
    return filled.settled


@jax.jit
def swap_out(slot: Int32[Array, ""], pool: Pool) -> tuple[State, ...]:
    """The states of a slot, one row each, for a later `swap_in`."""
    return pool.everywhere(jax.tree.map(lambda x: _bits(pool, x, lambda x: x[slot][None]), slots_of(pool.layers)))


@jax.jit
def read_pages(pages: Int32[Array, " moved"], pool: Pool) -> tuple[Shaped[Array, "moved _page ..."], ...]:
    """The entries of some pages of every paged array; out-of-range page indices read arbitrary ones."""
    read = map_pages(lambda x: _bits(pool, x, lambda x: x.at[pages].get(mode="clip")), pool.layers)
    return tuple(paged.entries for paged in pages_of(pool.everywhere(read)))


def _bits(pool: Pool, x: Array, read: Callable[[Array], Array]) -> Array:
    """Applies `read` to an array's bits: on a sharded array XLA adds zeros, which may change floats (-0.0)."""
    if pool.placement is None or not jnp.issubdtype(x.dtype, jnp.floating):
        return read(x)
    whole = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(read(lax.bitcast_convert_type(x, whole)), x.dtype)


@functools.partial(jax.jit, donate_argnames="pool")
def write_pages(
    pages: Int32[Array, " moved"], contents: tuple[Shaped[Array, "moved _page ..."], ...], pool: Pool
) -> Pool:
    """Writes entries that `read_pages` returned into pages; those for out-of-range page indices are dropped."""
    new = iter(contents)
    layers = map_pages(lambda x: x.at[pages].set(next(new).astype(x.dtype), mode="drop"), pool.layers)
    return eqx.tree_at(lambda p: p.layers, pool, layers).settled
