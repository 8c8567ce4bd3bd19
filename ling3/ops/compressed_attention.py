"""Attention of many query heads over entries that are both key and value: a sink, a window and compressed entries.

One softmax covers all of them: each function takes its running sums and returns them updated (`attention.accumulate`).
Queries are already scaled; the sums have a row `token · heads + head` for each. Pages are [pages, page, channels], or
[pages, bytes] in the format of a `Packing`, unpacked as they are read.
"""

import jax
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


def pooled(
    joined: Float[Array, "batch tokens channels"],
    start: Int32[Array, " batch"],
    ape: Float[Array, "ratio columns"],
    copies: int = 1,
) -> tuple[Wide[Array, "batch completed width"], Int32[Array, "batch completed"]]:
    """Σ softmax(gate + ape) · kv over the tokens of each entry, per channel; and the indices of these entries.

    `joined` has [kv | gate] of each token, the last copies · ratio - 1 before `start` first. The entries are as many
    as the tokens can complete, from the first that is incomplete at `start`. With 2 `copies`, an entry covers the ratio
    tokens before its block too, and these use the first half of the channels.
    """
    (ratio, columns), batch = ape.shape, joined.shape[0]
    width, tail = columns // copies, copies * ratio - 1
    count = -(-(joined.shape[1] - tail) // ratio)
    entry = (start // ratio)[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    slots = jnp.arange(copies * ratio, dtype=jnp.int32) - (copies - 1) * ratio
    at = ratio * entry[..., None] + slots[None, None]  # their tokens' positions
    taken = jnp.take_along_axis(joined, (at - start[:, None, None] + tail).reshape(batch, -1, 1), axis=1, mode="clip")
    split = {"n": count, "half": copies, "m": ratio, "two": 2, "part": copies, "w": width}
    taken = rearrange(taken, "b (n half m) (two part w) -> two half part b n m w", **split)
    kv, gate = (jnp.concatenate([y[i, i] for i in range(copies)], axis=2) for y in taken)
    bias = rearrange(ape.astype(kv.dtype), "m (part w) -> 1 1 (part m) w", part=copies)
    gate = jnp.where((at >= 0)[..., None], gate + bias, -jnp.inf)
    return jnp.sum(jax.nn.softmax(gate, axis=2) * kv, axis=2), entry


def sink(q: Float[Array, "batch seq heads channels"], logit: Float[Array, " heads"] | None) -> Sums:
    """The initial sums: of an attention sink with its head's `logit` as score and the value 0, or empty without one."""
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
    """Adds, for each token, its own entry and those of the `tail` tokens before it, where tail = tokens - seq.

    Column i of `inputs` is the entry at position start - tail + i. Queries are processed in bands of up to tail + 1
    tokens, each with only the columns that some token of the band sees.
    """
    seq, heads = q.shape[1:3]
    tail = inputs.shape[1] - seq
    band = min(seq, tail + 1)
    bands = -(-seq // band)
    spare = bands * band - seq

    def cut(x):  # [batch, heads=1, seq·heads, …] into bands; `whole` is the inverse
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
    """Adds contiguous entries: a token sees the first `seen` of them, or those of these that `chosen` marks for it.

    Differentiable. Processes BLOCK entries at a time.
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
    """`over_entries` over pages: `table[b, i]` has row b's entries [page·i, page·(i+1)). Not differentiable."""
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
    """`over_pages` for one token per row. Reads only the entries with the indices `chosen`, and masks those unseen."""
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
    """Σ_h weights_h · relu(q_h · k_w) for each token's first `seen` entries w, and -inf for the others."""
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
    """`index_scores` over pages, for as many entries as the table has room for; only pages in use are read."""
    (batch, seq), page = seen.shape, _entries(pages, packing)
    scores = jnp.full((batch, seq, table.shape[1] * page), -jnp.inf, weights.dtype)

    def step(i, scores):
        block = _block(pages, lax.dynamic_index_in_dim(table, i, axis=1, keepdims=False), packing)
        own = index_scores(q, weights, block, seen - i * page)
        return lax.dynamic_update_slice_in_dim(scores, own, i * page, axis=2)

    return lax.fori_loop(0, -(-jnp.max(seen) // page), step, scores)


def highest(scores: Wide[Array, "batch seq entries"], count: int) -> Bool[Array, "batch seq entries"]:
    """A mask of each token's `count` highest scores; ties go to the earlier entry."""
    _, chosen = lax.top_k(scores, count)
    batch, seq, _ = scores.shape
    at = (np.arange(batch)[:, None, None], np.arange(seq)[None, :, None], chosen)
    return jnp.zeros(scores.shape, bool).at[at].set(True)


def _entries(pages: Float[Array, "pages page channels"] | UInt8[Array, "pages bytes"], packing: Packing | None) -> int:
    """The number of entries in a page."""
    return pages.shape[1] if packing is None else packing.page(pages.shape[1])


def _block(
    pages: Float[Array, "pages page channels"] | UInt8[Array, "pages bytes"],
    page: Int32[Array, " batch"],
    packing: Packing | None,
) -> Float[Array, "batch positions channels"]:
    """The entries of one page for each row. An out-of-range index reads some other page, which callers mask."""
    return pages.at[page].get(mode="clip") if packing is None else packing.read_pages(pages, page)


def _over_block(
    sums: Sums,
    q: Float[Array, "batch seq heads channels"],
    block: Float[Array, "batch positions channels"],
    first: Int32[Array, ""],
    seen: Int32[Array, "batch seq"],
    chosen: Bool[Array, "batch seq positions"] | None,
) -> Sums:
    """Adds a block of entries whose first one has the index `first`."""
    allowed = _within(first, block.shape[1], seen)
    if chosen is not None:
        allowed &= chosen
    # Entries that were never written, or whose page was freed, may be NaN, and 0 · NaN is NaN.
    used = _within(first, block.shape[1], jnp.max(seen, axis=1))
    entries = jnp.where(used[..., None], block, 0.0).astype(q.dtype)[:, None]
    return accumulate(sums, _rows(q), entries, entries, jnp.repeat(allowed, q.shape[2], axis=1))


def _within(first: Int32[Array, ""], size: int, seen: Int32[Array, "*batch"]) -> Bool[Array, "*batch {size}"]:
    """True for those of the entries first, first + 1, … whose index is below `seen`."""
    index = first + jnp.arange(size, dtype=jnp.int32)
    return index.reshape((1,) * seen.ndim + (-1,)) < seen[..., None]


def _rows(q: Float[Array, "batch seq heads channels"]) -> Float[Array, "batch 1 seq*heads channels"]:
    return rearrange(q, "b s h c -> b 1 (s h) c")
