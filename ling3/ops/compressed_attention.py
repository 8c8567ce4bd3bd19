"""Attention of many query heads over entries that are key and value at once: a sink, a window, and compressed ones.

One softmax runs over all of them: each function takes its running sums and gives them on (`attention.accumulate`).
Queries are rows `token · heads + head`, already scaled. Pages are [pages, page, channels], or bytes [pages, bytes] of
a `Packing`, which are unpacked as they are read.
"""

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Int32, UInt8

from ling3.ops.attention import BLOCK, accumulate
from ling3.ops.packed_kv import Packing
from ling3.ops.precision import Wide, exact, wide

Sums = tuple[
    Wide[Array, "batch 1 rows"],  # the largest score so far
    Wide[Array, "batch 1 rows"],  # Σ e^(score - largest)
    Wide[Array, "batch 1 rows channels"],  # Σ e^(score - largest) e
]


def sink(q: Float[Array, "batch seq heads channels"], logit: Float[Array, " heads"] | None) -> Sums:
    """The sums before the first entry: those of a sink, whose score is its head's logit and whose value is 0."""
    dtype, (batch, seq, heads, channels) = wide(q.dtype), q.shape
    rows = (batch, 1, seq * heads)
    nothing = jnp.zeros((*rows, channels), dtype)
    if logit is None:
        return jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), nothing
    return jnp.broadcast_to(jnp.tile(logit.astype(dtype), seq), rows), jnp.ones(rows, dtype), nothing


def over_window(
    sums: Sums,
    q: Float[Array, "batch seq heads channels"],
    inputs: Float[Array, "batch tokens channels"],
    start: Int32[Array, " batch"],
) -> Sums:
    """The sums after the entries of each token and of the tokens before it that `inputs` begins with.

    These are the tail, tokens - seq of them: column i of `inputs` is the entry at position start - tail + i. Queries go
    in bands of up to tail + 1 tokens, each with the columns that one of them sees.
    """
    seq, heads = q.shape[1:3]
    tail = inputs.shape[1] - seq
    band = min(seq, tail + 1)
    bands = -(-seq // band)
    spare = bands * band - seq

    def cut(x):  # [batch, heads=1, seq·heads, …] to bands, and the reverse
        x = jnp.pad(x, ((0, 0), (0, 0), (0, spare * heads), *((0, 0),) * (x.ndim - 3)))
        return rearrange(x, "b one (n r) ... -> (b n) one r ...", n=bands)

    columns = np.arange(bands)[:, None] * band + np.arange(band + tail)[None]
    keys = jnp.pad(inputs, ((0, 0), (0, spare), (0, 0)))[:, columns].astype(q.dtype)
    keys = rearrange(keys, "b n p c -> (b n) 1 p c")
    offset = np.arange(band + tail)[None] - np.arange(band)[:, None]
    near = (offset >= 0) & (offset <= tail)
    seen = (start[:, None, None] - tail + columns[None] >= 0)[:, :, None] & near[None, None]
    allowed = jnp.repeat(rearrange(seen, "b n r p -> (b n) r p"), heads, axis=1)

    def whole(x):
        return rearrange(x, "(b n) one r ... -> b one (n r) ...", n=bands)[:, :, : seq * heads]

    top, total, sum_ = accumulate((cut(sums[0]), cut(sums[1]), cut(sums[2])), cut(_rows(q)), keys, keys, allowed)
    return whole(top), whole(total), whole(sum_)


def over_entries(
    sums: Sums,
    q: Float[Array, "batch seq heads channels"],
    entries: Float[Array, "batch entries channels"],
    seen: Int32[Array, "batch seq"],
    chosen: Bool[Array, "batch seq entries"] | None,
) -> Sums:
    """The sums after contiguous entries, of which a token sees the first `seen`, or of these those `chosen` for it.

    Differentiable; BLOCK entries at a time.
    """
    spare = -entries.shape[1] % BLOCK
    entries = jnp.pad(entries, ((0, 0), (0, spare), (0, 0)))
    chosen = None if chosen is None else jnp.pad(chosen, ((0, 0), (0, 0), (0, spare)))

    def step(i, sums):
        block = lax.dynamic_slice_in_dim(entries, i * BLOCK, BLOCK, axis=1)
        picked = None if chosen is None else lax.dynamic_slice_in_dim(chosen, i * BLOCK, BLOCK, axis=2)
        return _over_block(sums, q, block, jnp.asarray(i * BLOCK, jnp.int32), seen, picked)

    return lax.fori_loop(0, entries.shape[1] // BLOCK, step, sums)


def over_pages(
    sums: Sums,
    q: Float[Array, "batch seq heads channels"],
    pages: Float[Array, "pages page channels"] | UInt8[Array, "pages bytes"],
    table: Int32[Array, "batch columns"],
    seen: Int32[Array, "batch seq"],
    chosen: Bool[Array, "batch seq entries"] | None,
    packing: Packing | None = None,
) -> Sums:
    """The same over pages: `table[b, i]` is the page of row b's entries [page·i, page·(i+1)). Not differentiable."""
    page = _entries(pages, packing)

    def step(i, sums):
        block = _block(pages, lax.dynamic_index_in_dim(table, i, axis=1, keepdims=False), packing)
        picked = None if chosen is None else lax.dynamic_slice_in_dim(chosen, i * page, page, axis=2)
        return _over_block(sums, q, block, i * page, seen, picked)

    return lax.fori_loop(0, -(-jnp.max(seen) // page), step, sums)


def over_chosen(
    sums: Sums,
    q: Float[Array, "batch 1 heads channels"],
    pages: Float[Array, "pages page channels"] | UInt8[Array, "pages bytes"],
    table: Int32[Array, "batch columns"],
    seen: Int32[Array, "batch 1"],
    chosen: Int32[Array, "batch top_k"],
    packing: Packing | None = None,
) -> Sums:
    """The same for one token a row, where only the entries `chosen` for it are read; those not seen count for none."""
    page = _entries(pages, packing)
    owner, entry = jnp.take_along_axis(table, chosen // page, axis=1), chosen % page
    taken = pages.at[owner, entry].get(mode="clip") if packing is None else packing.read(pages, owner, entry)
    allowed = chosen < seen
    taken = jnp.where(allowed[..., None], taken, 0.0).astype(q.dtype)[:, None]
    rows = jnp.broadcast_to(allowed[:, None], (*q.shape[:1], q.shape[2], chosen.shape[1]))
    return accumulate(sums, _rows(q), taken, taken, rows)


def index_scores(
    q: Float[Array, "batch seq heads channels"],
    weights: Wide[Array, "batch seq heads"],
    keys: Float[Array, "batch entries channels"],
    seen: Int32[Array, "batch seq"],
) -> Wide[Array, "batch seq entries"]:
    """Σ_h weights_h · relu(q_h · k_w) for the first `seen` entries w of each token, -inf for the others."""
    used = _within(jnp.zeros((), jnp.int32), keys.shape[1], jnp.max(seen, axis=1))
    k = jnp.where(used[..., None], keys, 0.0).astype(q.dtype)
    products = jnp.einsum("bshc,bwc->bshw", q, k, precision=exact(q.dtype), preferred_element_type=weights.dtype)
    scores = jnp.sum(jnp.maximum(products, 0.0) * weights[..., None], axis=2)
    return jnp.where(_within(jnp.zeros((), jnp.int32), keys.shape[1], seen), scores, -jnp.inf)


def index_scores_of_pages(
    q: Float[Array, "batch seq heads channels"],
    weights: Wide[Array, "batch seq heads"],
    pages: Float[Array, "pages page channels"] | UInt8[Array, "pages bytes"],
    table: Int32[Array, "batch columns"],
    seen: Int32[Array, "batch seq"],
    packing: Packing | None = None,
) -> Wide[Array, "batch seq positions"]:
    """The same over pages, for as many entries as the table has room for; only the pages in use are read."""
    (batch, seq), page = seen.shape, _entries(pages, packing)
    scores = jnp.full((batch, seq, table.shape[1] * page), -jnp.inf, weights.dtype)

    def step(i, scores):
        block = _block(pages, lax.dynamic_index_in_dim(table, i, axis=1, keepdims=False), packing)
        own = index_scores(q, weights, block, seen - i * page)
        return lax.dynamic_update_slice_in_dim(scores, own, i * page, axis=2)

    return lax.fori_loop(0, -(-jnp.max(seen) // page), step, scores)


def highest(scores: Wide[Array, "batch seq entries"], count: int) -> Bool[Array, "batch seq entries"]:
    """True for the `count` highest scores of each token; ties go to the earlier entry."""
    _, chosen = lax.top_k(scores, count)
    batch, seq, _ = scores.shape
    at = (np.arange(batch)[:, None, None], np.arange(seq)[None, :, None], chosen)
    return jnp.zeros(scores.shape, bool).at[at].set(True)


def _entries(pages: Float[Array, "pages page channels"] | UInt8[Array, "pages bytes"], packing: Packing | None) -> int:
    """Entries of a page."""
    return pages.shape[1] if packing is None else packing.page(pages.shape[1])


def _block(
    pages: Float[Array, "pages page channels"] | UInt8[Array, "pages bytes"],
    page: Int32[Array, " batch"],
    packing: Packing | None,
) -> Float[Array, "batch positions channels"]:
    """The entries of a page for each row; of a page that is not there, another one's."""
    return pages.at[page].get(mode="clip") if packing is None else packing.read_pages(pages, page)


def _over_block(
    sums: Sums,
    q: Float[Array, "batch seq heads channels"],
    block: Float[Array, "batch positions channels"],
    first: Int32[Array, ""],
    seen: Int32[Array, "batch seq"],
    chosen: Bool[Array, "batch seq positions"] | None,
) -> Sums:
    """The sums after a block of entries, from `first` on."""
    allowed = _within(first, block.shape[1], seen)
    if chosen is not None:
        allowed &= chosen
    # Entries that were never written, or whose page was freed, may be NaN, and 0 · NaN is NaN.
    used = _within(first, block.shape[1], jnp.max(seen, axis=1))
    entries = jnp.where(used[..., None], block, 0.0).astype(q.dtype)[:, None]
    return accumulate(sums, _rows(q), entries, entries, jnp.repeat(allowed, q.shape[2], axis=1))


def _within(first: Int32[Array, ""], size: int, seen: Int32[Array, "*batch"]) -> Bool[Array, "*batch {size}"]:
    """Which of the entries first, first + 1, … are among the first `seen`."""
    index = first + jnp.arange(size, dtype=jnp.int32)
    return index.reshape((1,) * seen.ndim + (-1,)) < seen[..., None]


def _rows(q: Float[Array, "batch seq heads channels"]) -> Float[Array, "batch 1 seq*heads channels"]:
    return rearrange(q, "b s h c -> b 1 (s h) c")
