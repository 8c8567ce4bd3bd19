"""Softmax attention over whole sequences, paged caches and MLA latents; `attention` is the simple specification."""

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int32

from ling3.ops.forms import form_of
from ling3.ops.matmul import Multiply, product
from ling3.ops.precision import Wide, exact, wide

# Keys per step of `block_attention`: fixed, so that the summation order is the same at any context length.
BLOCK = 256
# Batch rows that share an iteration of `paged_attention`.
GROUP = 8


def attention(
    q: Float[Array, "batch heads rows width"],
    k: Float[Array, "batch heads positions width"],
    v: Float[Array, "batch heads positions value"],
    mask: Bool[Array, "batch rows positions"],
) -> Float[Array, "batch heads rows value"]:
    """softmax(q kᵀ) v over the allowed positions, in the dtype of q: the specification. With none allowed, 0."""
    scores = jnp.einsum("bhrw,bhpw->bhrp", q, k, precision=lax.Precision.HIGHEST)
    scores = jnp.where(jnp.broadcast_to(mask[:, None], scores.shape), scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(weights.dtype).tiny)
    return jnp.einsum("bhrp,bhpv->bhrv", weights / total, v, precision=lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class Expansion:
    """Expands MLA's entries [latent | rope] to every head's keys [nope | rope] and values.

    weight · latent is [nope | value] of each head; all heads share the rope part (DeepSeek-V2, arXiv 2405.04434, §2.1).
    It is data rather than a function, so that a kernel can read it.
    """

    weight: Float[Array, "channels latent"]  # heads·(nope + value)
    heads: int
    nope: int
    times: Multiply = product

    @property
    def value(self) -> int:
        """The number of channels in a head's value."""
        return self.weight.shape[0] // self.heads - self.nope

    def keys_and_values(
        self, entries: Float[Array, "batch positions entry"], dtype: DTypeLike
    ) -> tuple[
        Float[Array, "batch {self.heads} positions {self.nope+entries.shape[-1]-self.weight.shape[1]}"],
        Float[Array, "batch {self.heads} positions {self.value}"],
    ]:
        """Every head's keys and values for the given entries, in `dtype`."""
        latent, k_rope = jnp.split(entries.astype(dtype), [self.weight.shape[1]], axis=-1)
        flat = self.times(latent.reshape(-1, latent.shape[-1]), self.weight).astype(dtype)
        expanded = rearrange(flat, "(b p) (h d) -> b h p d", b=entries.shape[0], h=self.heads)
        k_nope, v = expanded[..., : self.nope], expanded[..., self.nope :]
        k_rope = jnp.broadcast_to(k_rope[:, None], (*k_nope.shape[:-1], k_rope.shape[-1]))
        return jnp.concatenate([k_nope, k_rope], axis=-1), v


@dataclasses.dataclass(frozen=True)
class PerHead:
    """Splits entries that hold every head's key and value already: [key of each head | value of each head]."""

    heads: int
    value: int
    """Channels of a head's key, and of its value."""

    def keys_and_values(
        self, entries: Float[Array, "batch positions {2*self.heads*self.value}"], dtype: DTypeLike
    ) -> tuple[
        Float[Array, "batch {self.heads} positions {self.value}"],
        Float[Array, "batch {self.heads} positions {self.value}"],
    ]:
        """Every head's keys and values for the given entries, in `dtype`."""
        both = rearrange(entries.astype(dtype), "b p (two h d) -> two b h p d", two=2, h=self.heads)
        return both[0], both[1]


@runtime_checkable
class BlockAttention(Protocol):
    """Causal attention over whole sequences without a cache, as in training. Differentiable.

    `positions` is a multiple of BLOCK. A query attends to the positions up to its own and below `length`; with
    `oldest`, only to those from there on, as in a window or in one of several texts. Sums and result are float32 or
    wider. Without an `expansion` an entry is both key and value, for all heads.
    """

    def __call__(
        self,
        q: Float[Array, "batch heads rows width"],
        row_positions: Int32[Array, "batch rows"],
        entries: Float[Array, "batch positions entry"],
        length: Int32[Array, " batch"],
        expansion: Expansion | PerHead | None = None,
        oldest: Int32[Array, "batch rows"] | None = None,
        /,
    ) -> Wide[Array, "batch heads rows value"]:
        """Each query's weighted sum of values."""
        ...


@runtime_checkable
class PagedAttention(Protocol):
    """`BlockAttention` over a paged cache, as in prefill; need not be differentiable.

    `table[b, i]` is the page with row b's positions [page·i, page·(i+1)). With a `window`, a query attends only to the
    last `window` positions, its own included."""

    def __call__(
        self,
        q: Float[Array, "batch heads rows width"],
        row_positions: Int32[Array, "batch rows"],
        pages: Float[Array, "pages page entry"],
        table: Int32[Array, "batch columns"],
        length: Int32[Array, " batch"],
        expansion: Expansion | PerHead | None = None,
        window: int | None = None,
        /,
    ) -> Wide[Array, "batch heads rows value"]:
        """Each query's weighted sum of values."""
        ...


@runtime_checkable
class LatentAttention(Protocol):
    """The absorbed attention of a decode step: softmax(q entriesᵀ) entries over each row's pages, float32 or wider.

    An entry is both key and value, for all heads (DeepSeek-V2, arXiv 2405.04434, §2.1.2): `rows` are the heads'
    queries of one token, already scaled. Pages, table, `length` and the causal mask are as in `PagedAttention`.
    """

    def __call__(
        self,
        q: Float[Array, "batch rows entry"],
        row_positions: Int32[Array, "batch rows"],
        pages: Float[Array, "pages page entry"],
        table: Int32[Array, "batch columns"],
        length: Int32[Array, " batch"],
        /,
    ) -> Wide[Array, "batch rows entry"]:
        """Each query's weighted sum of entries."""
        ...


@form_of(BlockAttention)
def block_attention(q, row_positions, entries, length, expansion=None, oldest=None):
    """The plain form of `BlockAttention`: a running softmax, BLOCK positions at a time.

    The backward pass computes each block's scores again, as in FlashAttention (arXiv 2205.14135, §3.1), so that memory
    grows with the tokens and not with their square.
    """

    @jax.checkpoint
    def step(i, carry):
        i = jnp.asarray(i, jnp.int32)
        block = lax.dynamic_slice_in_dim(entries, i * BLOCK, BLOCK, axis=1)
        return _attend(carry, q, row_positions, block, i * BLOCK, length, expansion, oldest)

    return finish(lax.fori_loop(0, entries.shape[1] // BLOCK, step, _empty(q, expansion)))


@form_of(PagedAttention)
def paged_attention(q, row_positions, pages, table, length, expansion=None, window=None):
    """The plain form of `PagedAttention`.

    Batch rows are sorted by their number of pages and form groups of up to GROUP; the loop has one iteration for each
    group and page column in use, so a long row adds no work to other groups. Each row sums its pages in order,
    independently of the other rows. Pages entirely before a `window` are not read.

    Not differentiable, since the number of iterations depends on the data.
    """
    batch, page_size, columns = q.shape[0], pages.shape[1], table.shape[1]
    if window is not None:  # start each row at the page of the oldest position that it attends to
        oldest = jnp.where(length > 0, jnp.min(row_positions, axis=1) - window + 1, 0)
        first = jnp.maximum(oldest, 0)[:, None] // page_size
        table = jnp.take_along_axis(table, first + jnp.arange(columns, dtype=jnp.int32)[None], axis=1, mode="clip")
        row_positions, length = row_positions - page_size * first, length - page_size * first[:, 0]
    used = -(-length // page_size)
    if batch <= GROUP:

        def together(i, carry):
            block = pages.at[lax.dynamic_index_in_dim(table, i, axis=1, keepdims=False)].get(mode="clip")
            oldest = None if window is None else row_positions - window + 1
            return _attend(carry, q, row_positions, block, i * page_size, length, expansion, oldest)

        return finish(lax.fori_loop(0, jnp.max(used), together, _empty(q, expansion)))

    order = jnp.argsort(used, descending=True, stable=True)
    spare = -batch % GROUP
    rows = jnp.concatenate([order, jnp.full(spare, batch, order.dtype)])
    q, row_positions, table = (x.at[rows].get(mode="clip") for x in (q, row_positions, table))
    length = length.at[rows].get(mode="fill", fill_value=0)
    readers = jnp.sum(used[None] > jnp.arange(columns, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    turns = -(-readers // GROUP)  # groups of rows that have a page in this column
    turn_ends = jnp.cumsum(turns)

    def turn(t, carry):
        i = jnp.searchsorted(turn_ends, t, side="right").astype(jnp.int32)
        first = (t - (turn_ends[i] - turns[i])) * GROUP

        def group(x):
            return lax.dynamic_slice_in_dim(x, first, GROUP)

        block = pages.at[lax.dynamic_index_in_dim(group(table), i, axis=1, keepdims=False)].get(mode="clip")
        top, total, sums = (group(x) for x in carry)
        rows = (group(q), group(row_positions), block, i * page_size, group(length))
        oldest = None if window is None else rows[1] - window + 1
        own = _attend((top, total, sums), *rows, expansion, oldest)
        return tuple(lax.dynamic_update_slice_in_dim(x, y, first, 0) for x, y in zip(carry, own, strict=True))

    o = finish(lax.fori_loop(0, turn_ends[-1], turn, _empty(q, expansion)))
    return o[jnp.argsort(order)]


@form_of(LatentAttention)
def latent_attention(q, row_positions, pages, table, length):
    """The plain form of `LatentAttention`: its reference implementation."""
    return paged_attention(q[:, None], row_positions, pages, table, length)[:, 0]


_Carry = tuple[
    Wide[Array, "batch heads rows"],  # the largest score so far
    Wide[Array, "batch heads rows"],  # Σ e^(score - largest)
    Wide[Array, "batch heads rows value"],  # Σ e^(score - largest) v
]


def _empty(q: Float[Array, "batch heads rows width"], expansion: Expansion | PerHead | None) -> _Carry:
    dtype, rows = wide(q.dtype), q.shape[:3]
    value = q.shape[-1] if expansion is None else expansion.value
    return jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, value), dtype)


def _attend(
    carry: _Carry,
    q: Float[Array, "batch heads rows width"],
    row_positions: Int32[Array, "batch rows"],
    block: Float[Array, "batch positions entry"],
    first: Int32[Array, ""],
    length: Int32[Array, " batch"],
    expansion: Expansion | PerHead | None,
    oldest: Int32[Array, "batch rows"] | None,
) -> _Carry:
    """Adds a block of entries, at positions from `first` on, to the running softmax."""
    positions = first + jnp.arange(block.shape[1], dtype=jnp.int32)
    # Entries that were never written, or whose page was freed, may be NaN, and 0 · NaN is NaN.
    used = positions[None] < length[:, None]
    allowed = (positions[None, None] <= row_positions[..., None]) & used[:, None]
    if oldest is not None:
        used &= positions[None] >= jnp.min(oldest, axis=1, keepdims=True)
        allowed &= positions[None, None] >= oldest[..., None]
    entries = jnp.where(used[..., None], block, 0.0)
    if expansion is None:
        # The value is the full entry: summing k_rope too costs less than slicing it off in every block.
        k = v = entries.astype(q.dtype)[:, None]
    else:
        k, v = expansion.keys_and_values(entries, q.dtype)
    return accumulate(carry, q, k, v, allowed)


def accumulate(
    carry: _Carry,
    q: Float[Array, "batch heads rows width"],
    k: Float[Array, "batch heads positions width"],
    v: Float[Array, "batch heads positions value"],
    allowed: Bool[Array, "batch rows positions"],
) -> _Carry:
    """Adds keys and values to the running softmax; each query row sees those that `allowed` marks.

    Keys and values must be finite even where they are masked for every row, since 0 · NaN is NaN.
    """
    top, total, sums = carry
    dtype = top.dtype
    scores = jnp.einsum("bhrw,bhpw->bhrp", q, k, precision=exact(q.dtype), preferred_element_type=dtype)
    scores = jnp.where(jnp.broadcast_to(allowed[:, None], scores.shape), scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    shift = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
    weights = jnp.exp(scores - shift[..., None])
    rescale = jnp.exp(top - shift)
    shares = weights.astype(v.dtype)
    products = jnp.einsum("bhrp,bhpv->bhrv", shares, v, precision=exact(v.dtype), preferred_element_type=dtype)
    total = rescale * total + jnp.sum(weights, axis=-1)
    return new_top, total, rescale[..., None] * sums + products


def finish(carry: _Carry) -> Wide[Array, "batch heads rows value"]:
    """Normalizes the running softmax: the weighted sum of values, or 0 for rows that saw none."""
    _, total, sums = carry
    return sums / jnp.maximum(total, jnp.finfo(total.dtype).tiny)[..., None]
