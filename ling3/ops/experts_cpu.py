"""The experts' rows on a CPU, by a kernel in C++ (`experts_cpu.cc`) that reads each expert's weights in place.

XLA's products take no index, so it copies an expert's weights before it multiplies by them: on two cores, one token's
experts took twice as long as reading their weights does.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 2**24
"""Bytes of a layer's gate projections below which compiling the kernel takes longer than it saves."""


def suits(
    x: Float[Array, "tokens hidden"],
    chosen: Int32[Array, "tokens top_k"],
    gate_proj: Float[Array, "experts intermediate hidden"],
    up_proj: Float[Array, "experts intermediate hidden"],
    down_proj: Float[Array, "experts hidden intermediate"],
) -> bool:
    """True if the kernel is faster: for large float32 weights, and for bfloat16 up to one row per expert on average.

    For more rows XLA uses the bfloat16 products that some processors have; the bound was measured on one of those.
    """
    dtypes = {a.dtype for a in (x, gate_proj, up_proj, down_proj)}
    if dtypes not in ({jnp.dtype(jnp.float32)}, {jnp.dtype(jnp.bfloat16)}):
        return False
    if gate_proj.size * gate_proj.dtype.itemsize < LEAST:
        return False
    if x.dtype == jnp.bfloat16 and chosen.size > gate_proj.shape[0]:
        return False
    return native.target(SOURCE, "experts") is not None


def expert_rows(
    x: Float[Array, "tokens hidden"],
    order: Int32[Array, " rows"],
    starts: Int32[Array, " experts"],
    counts: Int32[Array, " experts"],
    gate_proj: Float[Array, "experts intermediate hidden"],
    up_proj: Float[Array, "experts intermediate hidden"],
    down_proj: Float[Array, "experts hidden intermediate"],
    limit: float,
    limit_first: bool,
) -> Float32[Array, "rows hidden"]:
    """down(swiglu(gate x, up x)) of each row `token · top_k + j` by its expert, where it `suits`; zeros for no expert.

    `order` has the rows sorted by expert, rows without one last; expert e has `counts[e]` rows from `starts[e]` on.
    swiglu is that of `experts`, with its limits. Sums are in float32; between the two products a row has x's dtype. A
    row's bits depend only on its own values and its expert's weights.
    """
    name = native.target(SOURCE, "experts")
    assert name is not None, "`suits` said so"
    shapes = (
        jax.ShapeDtypeStruct((order.shape[0], x.shape[1]), jnp.float32),
        jax.ShapeDtypeStruct((order.shape[0], gate_proj.shape[1]), x.dtype),
    )
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    limits = {"limit": np.float32(limit), "limit_first": limit_first}
    return call(x, order, starts, counts, gate_proj, up_proj, down_proj, **limits)[0]
