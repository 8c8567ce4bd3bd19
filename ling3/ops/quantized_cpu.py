"""x Wᵀ and the experts with matrices in 8 and 4 bits on a CPU, by kernels in C++ (`quantized_cpu.cc`).

They read a matrix once, in its format, and decode it in registers: a product with few rows takes little longer than
reading so many bytes, where XLA writes and reads the numbers in float32 first.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 2**18
"""Bytes of a matrix, or of a stack, below which compiling the kernels takes longer than they save."""
STEP = 128
"""The kernels lay out the rows of x in multiples of so many numbers."""

Arrays = tuple[Shaped[Array, "..."], Shaped[Array, "..."]]
"""A stack's numbers `[experts, outer, stored]`, in float8_e4m3fn, packed int32 or packed uint8, and its scales."""


def suits(
    x: Float[Array, "rows width"],
    numbers: Shaped[Array, "*stack outer stored"],
    scale: Shaped[Array, "*stack scales groups"],
    inner: int,
) -> bool:
    """True if the kernels are there: for x in float32 or bfloat16, and groups of 32, 64, 128, … or whole rows.

    `inner` is how many numbers a row of the matrix has. x need not have as many: of experts' three stacks the last is
    multiplied with what the others give.
    """
    if x.dtype not in (jnp.float32, jnp.bfloat16) or x.size == 0 or numbers.size == 0:
        return False
    if numbers.size * numbers.dtype.itemsize < LEAST:
        return False
    if numbers.dtype == jnp.int32:  # FP8 and MXFP4 have one size of block each
        groups = scale.shape[-1]
        group, rest = divmod(inner, groups)
        if inner < 8:  # a word has them all, and its size does not tell 4 bits from 8
            return False
        if scale.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            return False
        if groups > 1 and (rest or group < 32 or group & (group - 1)):
            return False
    return native.target(SOURCE, "quantized") is not None


def product(
    x: Float[Array, "rows inner"], numbers: Shaped[Array, "outer stored"], scale: Shaped[Array, "scales groups"]
) -> Float32[Array, "rows outer"]:
    """x Wᵀ where it `suits`, summed in float32. A row's bits depend only on its own values and the matrix.

    Rows of zeros, as padding is, have zeros and cost nothing; the numbers of W are finite.
    """
    name = native.target(SOURCE, "quantized")
    assert name is not None, "`suits` said so"
    rows, inner = x.shape
    shapes = (jax.ShapeDtypeStruct((rows, numbers.shape[0]), jnp.float32), _laid(rows, inner))
    return jax.ffi.ffi_call(name, shapes, vmap_method="sequential")(x, numbers, _bytes(scale))[0]


def expert_rows(
    x: Float[Array, "tokens hidden"],
    order: Int32[Array, " rows"],
    starts: Int32[Array, " experts"],
    counts: Int32[Array, " experts"],
    gate: Arrays,
    up: Arrays,
    down: Arrays,
    limit: float,
    limit_first: bool,
) -> Float32[Array, "rows hidden"]:
    """What `experts_cpu.expert_rows` computes, for three stacks in one format that each `suits`.

    Between the two products a row has x's dtype. A row's bits depend only on its own values and its expert's weights.
    """
    name = native.target(SOURCE, "quantized_experts")
    assert name is not None, "`suits` said so"
    (tokens, hidden), rows, intermediate = x.shape, order.shape[0], gate[0].shape[1]
    shapes = (jax.ShapeDtypeStruct((rows, hidden), jnp.float32), _laid(tokens, hidden), _laid(rows, intermediate))
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    arrays = (a for numbers, scale in (gate, up, down) for a in (numbers, _bytes(scale)))
    limits = {"limit": np.float32(limit), "limit_first": limit_first}
    return call(x, order, starts, counts, *arrays, **limits)[0]


def _laid(rows: int, inner: int) -> jax.ShapeDtypeStruct:
    """The kernel's copy of rows, in the order in which it decodes."""
    return jax.ShapeDtypeStruct((rows, -(-inner // STEP) * STEP), jnp.float32)


def _bytes(scale: Shaped[Array, "*stack scales groups"]) -> Shaped[Array, "*stack scales groups"]:
    """Scales, powers of two as the bytes that they are."""
    return lax.bitcast_convert_type(scale, jnp.uint8) if scale.dtype == jnp.float8_e8m0fnu else scale
