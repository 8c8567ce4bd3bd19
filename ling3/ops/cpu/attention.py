"""Attention over pages on a CPU, by a C++ kernel (`attention.cc`) that reads entries in place.

XLA copies a row's pages, splits the copy into each head's keys and values, and writes all scores to memory several
times, for full pages even if few of their entries are used. With 32 rows of a few tokens each, this took a quarter of
a decode step.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ling3.ops import attention
from ling3.ops.attention import Expansion, PerHead
from ling3.ops.forms import form_of, runs
from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 256
"""Entry size, in numbers, below which compiling the kernel takes longer than it saves."""
MOST = 32
"""Above this many bfloat16 queries per latent, XLA is faster over long contexts: it uses bfloat16 instructions."""


def unsuited(
    q: Float[Array, "batch heads rows width"],
    pages: Float[Array, "pages page entry"],
    expansion: Expansion | PerHead | None,
) -> str | None:
    """Why the kernel does not run, or None: it is missing or slower, or entries have to be expanded first."""
    if isinstance(expansion, Expansion):
        return "entries are expanded to keys and values"
    if pages.dtype != jnp.float32 or q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"pages are {pages.dtype} and queries {q.dtype}; the kernel takes float32 pages"
    if pages.shape[2] < LEAST:
        return f"an entry has less than {LEAST} numbers"
    if expansion is None and q.dtype == jnp.bfloat16 and q.shape[2] > MOST:
        return f"more than {MOST} queries in bfloat16 share a latent, for which XLA is faster"
    return native.missing(SOURCE)


@form_of(attention.PagedAttention)
def paged_attention(q, row_positions, pages, table, length, expansion=None, window=None):
    """Computes `attention.paged_attention` with the C++ kernel, where it suits."""
    if not runs("paged_attention", unsuited(q, pages, expansion)):
        return attention.paged_attention(q, row_positions, pages, table, length, expansion, window)
    return _over_pages(q, row_positions, pages, table, length, expansion, window)


@form_of(attention.LatentAttention)
def latent_attention(q, row_positions, pages, table, length):
    """Computes `attention.latent_attention` with the C++ kernel, where it suits."""
    if not runs("latent_attention", unsuited(q[:, None], pages, None)):
        return attention.latent_attention(q, row_positions, pages, table, length)
    return _over_pages(q[:, None], row_positions, pages, table, length, None, None)[:, 0]


@form_of(attention.PagedAttention)
def _over_pages(q, row_positions, pages, table, length, expansion: PerHead | None, window):
    """Calls the kernel. Sums are float32; a row's result is bitwise independent of the other rows."""
    value = pages.shape[2] if expansion is None else expansion.value
    shape = jax.ShapeDtypeStruct((*q.shape[:3], value), jnp.float32)
    call = jax.ffi.ffi_call(native.target(SOURCE, "attention"), shape, vmap_method="sequential")
    # In an entry, head h has its key at h·width, and its value at `values` + h·value.
    values = 0 if expansion is None else expansion.heads * expansion.value
    numbers = {"values": np.int64(values), "window": np.int64(window or 0)}
    return call(q.astype(jnp.float32), row_positions, pages, table, length, **numbers)
