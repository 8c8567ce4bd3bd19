"""Attention over pages on a CPU, by a kernel in C++ (`attention_cpu.cc`) that reads entries in place.

XLA copies a row's pages, splits the copy into keys and values of each head, writes all scores to memory several times,
and does so for whole pages, however little of them is seen. At 32 rows of a few tokens each, a decode step took a
quarter of its time for that.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 256
"""Numbers of an entry below which compiling the kernel takes longer than it saves."""
MOST = 8
"""Queries in bfloat16 that share a latent above which XLA is faster, which has the processor's own products."""


def suits(q: Float[Array, "batch heads rows width"], pages: Float[Array, "pages page entry"], latents: bool) -> bool:
    """True if the kernel is there and faster: over pages of float32, in a model that is not a toy."""
    if pages.dtype != jnp.float32 or q.dtype not in (jnp.float32, jnp.bfloat16) or pages.shape[2] < LEAST:
        return False
    if latents and q.dtype == jnp.bfloat16 and q.shape[2] > MOST:
        return False
    return native.ffi_target(SOURCE, "attention") is not None


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
    name = native.ffi_target(SOURCE, "attention")
    assert name is not None, "`suits` said so"
    shape = jax.ShapeDtypeStruct((*q.shape[:3], value), jnp.float32)
    call = jax.ffi.ffi_call(name, shape, vmap_method="sequential")
    numbers = {"values": np.int64(values), "window": np.int64(window or 0)}
    return call(q.astype(jnp.float32), row_positions, pages, table, length, **numbers)


def absorbs(x: Float[Array, "batch heads inner"], weight: Float[Array, "channels latent"]) -> bool:
    """True if the kernels beside it are there for these queries, or sums of latents: for a model that is not a toy."""
    if x.dtype != weight.dtype or x.dtype not in (jnp.float32, jnp.bfloat16) or x.size == 0:
        return False
    return weight.shape[1] >= LEAST and native.ffi_target(SOURCE, "absorb_keys") is not None


def absorb_keys(
    q: Float[Array, "batch heads nope"], weight: Float[Array, "channels latent"]
) -> Float32[Array, "batch heads latent"]:
    """`ops.absorption.latent_queries` where it `absorbs`. A row's bits are its own; rows of zeros cost nothing."""
    return _per_head("absorb_keys", q, weight, 0, q.shape[2], weight.shape[1])


def expand_values(
    summed: Float[Array, "batch heads latent"], weight: Float[Array, "channels latent"], value: int
) -> Float32[Array, "batch heads {value}"]:
    """`ops.absorption.latent_values`, likewise."""
    first = weight.shape[0] // summed.shape[1] - value
    return _per_head("expand_values", summed, weight, first, value, value)


def _per_head(
    handler: str,
    x: Float[Array, "batch heads inner"],
    weight: Float[Array, "channels latent"],
    first: int,
    count: int,
    outer: int,
) -> Float32[Array, "batch heads {outer}"]:
    """What a handler makes of each head's numbers with `count` rows of its own, from the row `first` on."""
    name = native.ffi_target(SOURCE, handler)
    assert name is not None, "`absorbs` said so"
    shape = jax.ShapeDtypeStruct((*x.shape[:2], outer), jnp.float32)
    call = jax.ffi.ffi_call(name, shape, vmap_method="sequential")
    return call(x, weight, first=np.int64(first), count=np.int64(count))
