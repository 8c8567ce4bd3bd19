"""Attention of few queries over pages on a CPU, by a kernel in C++ (`attention_cpu.cc`) that reads entries in place.

XLA copies a row's pages, splits the copy into keys and values of each head, and does so for whole pages, however little
of them is in use: at 32 rows of a few tokens each, a layer's attention took as long as its products with weights.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 1024
"""Numbers of a token's queries below which compiling the kernel takes longer than it saves."""
MOST = {"float32": 64, "bfloat16": 8}
"""Queries of a key head above which XLA is faster; in bfloat16 it uses the processor's own products."""


def suits(q: Float[Array, "batch heads rows width"], pages: Float[Array, "pages page entry"]) -> bool:
    """True if the kernel is there and faster: few queries, not of a toy's size, over pages of float32."""
    _, heads, rows, width = q.shape
    if pages.dtype != jnp.float32 or rows > MOST.get(q.dtype.name, 0) or heads * rows * width < LEAST:
        return False
    return native.target(SOURCE, "attention") is not None


def paged(
    q: Float[Array, "batch heads rows width"],
    row_positions: Int32[Array, "batch rows"],
    pages: Float32[Array, "pages page entry"],
    table: Int32[Array, "batch columns"],
    length: Int32[Array, " batch"],
    value: int,
    values: int,
    window: int | None,
) -> Float32[Array, "batch heads rows {value}"]:
    """`ops.attention.paged_attention` where it `suits`.

    In an entry, head h has its key at h·width, and its value of `value` numbers at `values` + h·value. Sums are
    float32; a row's bits depend only on its own queries, entries and length.
    """
    name = native.target(SOURCE, "attention")
    assert name is not None, "`suits` said so"
    shape = jax.ShapeDtypeStruct((*q.shape[:3], value), jnp.float32)
    call = jax.ffi.ffi_call(name, shape, vmap_method="sequential")
    numbers = {"values": np.int64(values), "window": np.int64(window or 0)}
    return call(q.astype(jnp.float32), row_positions, pages, table, length, **numbers)
