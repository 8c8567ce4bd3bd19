"""The requests that are running, as arrays on the device, and the compiled programs that move them on.

Every request has a slot: its KDA states, its newest token and how it is sampled lie in row `slot` of the pool. Its MLA
latents lie in pages that a table names. A program takes some slots' rows out, continues them, and puts them back.

Programs are compiled by `jax.jit`: Equinox's `filter_jit` would wait for each call's end before the next is dispatched.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from ling3.cache import Cache, State, map_pages, map_slots, pages_of, slots_of
from ling3.engine.sampling import Choice, Sampling, choose, counted, ends
from ling3.engine.settings import DECODE_STEPS
from ling3.execution import Execution
from ling3.model import CausalLM

# Pages that travel to or from the host in one call.
PAGES_MOVED = 8


class Rows(eqx.Module):
    """The rows of one call: their slots (None: every slot, in order) and the pages of each, first to last.

    A slot past the pool's last is a row without a request; a page past the last is no page. With `in_place` there is a
    row for every slot and each of them is its own slot's or nobody's: then no state is taken out and put back, which
    accelerators gain by. The slot of a row that is nobody's stays as it is, whoever it belongs to: its newest token is
    computed for nothing, and leaves a state unchanged wherever that token's numbers are finite.
    """

    slots: Int32[Array, " rows"] | None
    table: Int32[Array, "rows columns"]
    in_place: bool = eqx.field(static=True, default=False)


class Pool(eqx.Module):
    """Everything that the running requests remember. Donated to every call, so that each updates it in place."""

    layers: tuple[State, ...]  # with a row per slot, or paged
    length: Int32[Array, " slots"]  # tokens in the caches
    token: Int32[Array, " slots"]  # the newest token, not yet in the caches
    until: Int32[Array, " slots"]  # tokens of prompt and output together at which the row ends
    done: Bool[Array, " slots"]
    sampling: Sampling

    @staticmethod
    def empty(model: CausalLM, sampling: Sampling, pages: int, page_size: int, dtype: DTypeLike) -> "Pool":
        """A pool with a slot for each row of `sampling`, all of them without a request."""
        slots = sampling.temperature.shape[0]
        length, token, until = (jnp.asarray(np.zeros(slots, np.int32)) for _ in range(3))
        layers = new_memory(model, slots, pages, page_size, dtype)
        return Pool(layers, length, token, until, jnp.asarray(np.ones(slots, bool)), sampling)

    def take(self, rows: Rows) -> "Pool":
        """The slots of these rows; the pages stay where they are."""
        slots, size = rows.slots, self.length.shape[0]
        if slots is None:
            return self
        if rows.in_place:
            # Nobody's row attends to nothing, and gets no token and no expert.
            length, done = jnp.where(slots < size, self.length, 0), self.done | (slots >= size)
            return Pool(self.layers, length, self.token, self.until, done, self.sampling)
        kept = jnp.minimum(slots, size - 1)
        parts = (self.layers, self.length, self.token, self.until, self.done, self.sampling)
        layers, length, token, until, done, sampling = map_slots(lambda x: x[kept], parts)
        return Pool(layers, length, token, until, done | (slots >= size), sampling)

    def put(self, rows: Rows, view: "Pool") -> "Pool":
        """The pool with `view`, of what was taken, in its place."""
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
        """What the model's forward pass takes."""
        return Cache(self.layers, self.length, table)

    def after(self, cache: Cache, token: Int32[Array, " slots"], chosen: Bool[Array, " slots"]) -> "Pool":
        """The pool with the forward pass's memory, and where one was `chosen` the row's next token."""
        done = ends(token, self.sampling, cache.length) | (cache.length + 1 >= self.until)
        return Pool(
            cache.layers,
            cache.length,
            jnp.where(chosen, token, self.token),
            self.until,
            jnp.where(chosen, done, self.done),
            counted(self.sampling, token, chosen),
        )


class Arrival(eqx.Module):
    """What a slot is filled with: a request that begins, or one that goes on where it was."""

    states: tuple[State, ...]  # one row of each, and nothing paged; zeros at the beginning
    length: Int32[Array, ""]
    token: Int32[Array, ""]
    until: Int32[Array, ""]
    done: Bool[Array, ""]  # until its prompt is in the caches
    sampling: Sampling  # one row


@eqx.filter_jit
def new_memory(model: CausalLM, slots: int, pages: int, page_size: int, dtype: DTypeLike) -> tuple[State, ...]:
    """What a pool's layers hold before the first request."""
    return model.empty_states(slots, pages, page_size, dtype)


def cache_dtype(model: CausalLM) -> jnp.dtype:
    """What latents and convolution tails are kept in: the weights' dtype, but float32 on the CPU.

    There XLA copies a whole bfloat16 cache to write one entry into it. The values are those of the narrower dtype.
    """
    dtype = model.dtype
    return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" and dtype.itemsize < 4 else dtype


def _next(
    model: CausalLM,
    view: Pool,
    table: Int32[Array, "rows columns"],
    tokens: Int32[Array, "rows seq"],
    lengths: Int32[Array, " rows"],
    execution: Execution,
    *,
    last: bool,
) -> tuple[Choice, Cache]:
    """What follows each row's next `lengths` tokens, and the caches with these in them."""
    logits, cache = model.step(tokens, view.cache(table), lengths, last=last, execution=execution)
    return choose(logits[:, 0], view.sampling, cache.length), cache


@functools.partial(jax.jit, donate_argnames="pool", static_argnames="execution")
def prefill(
    model: CausalLM,
    rows: Rows,
    tokens: Int32[Array, "rows seq"],
    lengths: Int32[Array, " rows"],
    end: Bool[Array, " rows"],
    pool: Pool,
    execution: Execution,
) -> tuple[Choice, Pool]:
    """Bring each row's next `lengths` prompt tokens into the caches; the rows that `end` their prompt get a token."""
    view = pool.take(rows)
    choice, cache = _next(model, view, rows.table, tokens, lengths, execution, last=True)
    return choice, pool.put(rows, view.after(cache, choice.token, end))


@functools.partial(jax.jit, donate_argnames="pool", static_argnames="execution")
def decode(
    model: CausalLM, rows: Rows, steps: Int32[Array, ""], pool: Pool, execution: Execution
) -> tuple[Choice, Pool]:
    """Up to `steps` new tokens for each row that is not done, `[rows, DECODE_STEPS]`; -1 where a row got none."""
    view = pool.take(rows)

    def unfinished(carry: tuple[Int32[Array, ""], Choice, Pool]) -> Bool[Array, ""]:
        i, _, view = carry
        return (i < steps) & ~jnp.all(view.done)

    def step(carry: tuple[Int32[Array, ""], Choice, Pool]) -> tuple[Int32[Array, ""], Choice, Pool]:
        i, out, view = carry
        active = ~view.done
        lengths = active.astype(jnp.int32)
        choice, cache = _next(model, view, rows.table, view.token[:, None], lengths, execution, last=False)
        view = view.after(cache, choice.token, active)
        choice = eqx.tree_at(lambda c: c.token, choice, jnp.where(active, choice.token, -1))
        return i + 1, jax.tree.map(lambda x, y: x.at[:, i].set(y), out, choice), view

    out = Choice.none((view.token.shape[0], DECODE_STEPS), model.config.vocab_size)
    _, out, view = lax.while_loop(unfinished, step, (jnp.zeros((), jnp.int32), out, view))
    return out, pool.put(rows, view)


@functools.partial(jax.jit, donate_argnames="pool")
def arrive(slot: Int32[Array, ""], arrival: Arrival, pool: Pool) -> Pool:
    """Fill a slot; whatever an earlier request left in it is gone."""
    layers = map_slots(lambda x, y: x.at[slot].set(y[0].astype(x.dtype)), pool.layers, arrival.states)
    return Pool(
        layers,
        pool.length.at[slot].set(arrival.length),
        pool.token.at[slot].set(arrival.token),
        pool.until.at[slot].set(arrival.until),
        pool.done.at[slot].set(arrival.done),
        jax.tree.map(lambda x, y: x.at[slot].set(y[0]), pool.sampling, arrival.sampling),
    )


@jax.jit
def depart(slot: Int32[Array, ""], pool: Pool) -> tuple[State, ...]:
    """The states of a slot, one row each, for an `Arrival` later."""
    return jax.tree.map(lambda x: x[slot][None], slots_of(pool.layers))


@jax.jit
def read_pages(pages: Int32[Array, " moved"], pool: Pool) -> tuple[Float[Array, "moved page *entry"], ...]:
    """What lies in some pages of every paged array; a number past the last page reads anything."""
    return tuple(paged.entries.at[pages].get(mode="clip") for paged in pages_of(pool.layers))


@functools.partial(jax.jit, donate_argnames="pool")
def write_pages(
    pages: Int32[Array, " moved"], contents: tuple[Float[Array, "moved page *entry"], ...], pool: Pool
) -> Pool:
    """And back, into these pages; a number past the last page is dropped."""
    new = iter(contents)
    layers = map_pages(lambda x: x.at[pages].set(next(new).astype(x.dtype), mode="drop"), pool.layers)
    return eqx.tree_at(lambda p: p.layers, pool, layers)
