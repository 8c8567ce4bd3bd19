"""Decode attention over pages of latents in two kernels: one reads the cache in place, one combines the splits."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from ling3.ops import attention
from ling3.ops.forms import form_of, runs
from ling3.ops.gpu.triton import triton_params
from ling3.ops.precision import exact, wide
from ling3.runtime.interpreted import interpreted

SPLIT = 256
"""Positions per program; several programs share a long row. Fixed, so that sums have the same order at any length."""
TILE = 64
"""Positions that are read at a time; fewer if a page is no multiple of this."""
LEAST = 16
"""The smallest number of rows or columns of a tile that matrix units multiply."""


def unsuited(q: Float[Array, "batch rows entry"], pages: Float[Array, "pages page entry"]) -> str | None:
    """Why the kernel does not run, or None: tiles do not fit the pages, heads or entries, or q is float64."""
    rows, entry = q.shape[1:]
    if pages.shape[1] % LEAST or entry % LEAST:
        return f"a page's positions or an entry's numbers are no multiple of {LEAST}"
    if rows < LEAST or rows & (rows - 1):
        return f"heads are fewer than {LEAST}, or no power of two"
    return "numbers are float64" if q.dtype == jnp.float64 else None


@form_of(attention.LatentAttention)
def latent_attention(q, row_positions, pages, table, length):
    """Computes `attention.latent_attention` with the Pallas kernels, where they suit."""
    if not runs("latent_attention", unsuited(q, pages)):
        return attention.latent_attention(q, row_positions, pages, table, length)
    return fused_latent_attention(q, row_positions, pages, table, length, interpret=interpreted())


def fused_latent_attention(
    q: Float[Array, "batch rows entry"],
    row_positions: Int32[Array, "batch rows"],
    pages: Float[Array, "pages page entry"],
    table: Int32[Array, "batch columns"],
    length: Int32[Array, " batch"],
    *,
    interpret: bool = False,
) -> Float[Array, "batch rows entry"]:
    """`attention.latent_attention`: softmax(q kᵀ) k over each row's pages, float32 or wider. Not differentiable.

    A program computes a running softmax over SPLIT positions of one row (as in Flash-Decoding, Dao et al. 2023); a
    second kernel combines the splits, rescaled to the largest score. Programs past a row's length write nothing, and
    their output is not read. On a GPU `rows` must be a power of two, and 16 of them fill its matrix units; `entry` is
    split into powers of two, 576 into 512 and 64. Raises ValueError unless a page is a multiple of LEAST positions.
    """
    batch, rows, entry = q.shape
    page, columns = pages.shape[1], table.shape[1]
    tile = math.gcd(page, TILE)
    if tile < LEAST:
        raise ValueError(f"a page holds {page} positions, expected a multiple of {LEAST}")
    splits = -(-columns * page // SPLIT)
    dtype = wide(q.dtype)
    own = pl.BlockSpec((None, None, rows), lambda b, s: (b, s, 0))
    top, total, sums = pl.pallas_call(
        functools.partial(_program, _powers_of_two(entry), page, tile),
        out_shape=(
            *(jax.ShapeDtypeStruct((batch, splits, rows), dtype) for _ in range(2)),
            jax.ShapeDtypeStruct((batch, splits, rows, entry), dtype),
        ),
        grid=(batch, splits),
        in_specs=[
            pl.BlockSpec((None, rows, entry), lambda b, s: (b, 0, 0)),
            pl.BlockSpec((None, rows), lambda b, s: (b, 0)),
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec(memory_space=pl.ANY),
            pl.BlockSpec((1,), lambda b, s: (b,)),
        ],
        out_specs=(own, own, pl.BlockSpec((None, None, rows, entry), lambda b, s: (b, s, 0, 0))),
        interpret=interpret,
        name="latent_attention",
        compiler_params=None if interpret else triton_params(warps=4, stages=2),
    )(q, row_positions, pages, table, length)
    width = math.gcd(entry, TILE)
    return pl.pallas_call(
        _combined,
        out_shape=jax.ShapeDtypeStruct((batch, rows, entry), dtype),
        grid=(batch, entry // width),
        in_specs=[
            pl.BlockSpec((None, splits, rows), lambda b, i: (b, 0, 0)),
            pl.BlockSpec((None, splits, rows), lambda b, i: (b, 0, 0)),
            pl.BlockSpec((None, splits, rows, width), lambda b, i: (b, 0, 0, i)),
            pl.BlockSpec((1,), lambda b, i: (b,)),
        ],
        out_specs=pl.BlockSpec((None, rows, width), lambda b, i: (b, 0, i)),
        interpret=interpret,
        name="latent_attention_sum",
        compiler_params=None if interpret else triton_params(warps=4),
    )(top, total, sums, length)


def _combined(top, total, sums, length, out):
    """Combines some columns of one row's splits: top and total [splits, rows], sums [splits, rows, width]."""

    def add(i, carry):
        largest, weight, found = carry
        new = jnp.maximum(largest, top[i])
        before, own = jnp.exp(largest - _finite(new)), jnp.exp(top[i] - _finite(new))
        return new, before * weight + own * total[i], before[:, None] * found + own[:, None] * sums[i]

    dtype, rows = out.dtype, out.shape[0]
    nothing = jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros(out.shape, dtype)
    _, weight, found = lax.fori_loop(0, (length[0] + SPLIT - 1) // SPLIT, add, nothing)
    out[...] = found / jnp.maximum(weight, jnp.finfo(dtype).tiny)[:, None]


def _program(parts, page, step, q, row_positions, pages, table, length, top, total, sums):
    """SPLIT positions of one row: q [rows, entry], row_positions [rows]; pages and table are the full arrays."""
    row, split = pl.program_id(0), pl.program_id(1)
    rows, dtype = q.shape[0], top.dtype
    end, last = length[0], row_positions[...]
    queries = [q[:, part] for part in parts]

    def tile(i, carry):
        top, total, sums = carry
        first = split * SPLIT + i * step
        positions = first + jnp.arange(step, dtype=jnp.int32)
        place = jnp.minimum(table[row, first // page], pages.shape[0] - 1), pl.ds(first % page, step)
        # Entries that were never written may be NaN, and 0 · NaN is NaN.
        entries = [jnp.where((positions < end)[:, None], pages[*place, part], 0).astype(q.dtype) for part in parts]
        scores = sum(_product(x, y, 1) for x, y in zip(queries, entries, strict=True))
        allowed = (positions[None] <= last[:, None]) & (positions < end)[None]
        scores = jnp.where(allowed, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - _finite(new_top)[:, None])
        rescale = jnp.exp(top - _finite(new_top))
        shares = weights.astype(q.dtype)
        sums = [rescale[:, None] * x + _product(shares, y, 0) for x, y in zip(sums, entries, strict=True)]
        return new_top, rescale * total + jnp.sum(weights, axis=1), sums

    @pl.when(split * SPLIT < end)
    def _():
        tiles = jnp.minimum((end - split * SPLIT + step - 1) // step, SPLIT // step)
        nothing = jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), [jnp.zeros_like(x, dtype) for x in queries]
        top[...], total[...], found = lax.fori_loop(0, tiles, tile, nothing)
        for part, x in zip(parts, found, strict=True):
            sums[:, part] = x


def _product(x, y, inner):
    """x times y, contracted over y's axis `inner` and summed in float32 or wider."""
    dimensions = (((1,), (inner,)), ((), ()))
    return lax.dot_general(x, y, dimensions, precision=exact(x.dtype), preferred_element_type=wide(x.dtype))


def _finite(top):
    return jnp.where(jnp.isfinite(top), top, 0)


def _powers_of_two(size: int) -> tuple[pl.Slice, ...]:
    """Slices that cover `size` numbers; each length is a power of two, the largest first."""
    parts, start = [], 0
    for bit in reversed(range(size.bit_length())):
        if size & 1 << bit:
            parts.append(pl.ds(start, 1 << bit))
            start += 1 << bit
    return tuple(parts)
