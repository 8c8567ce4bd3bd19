"""Gathering rows of an array by index on a CPU, and summing rows times weights.

XLA gathers number by number, at a tenth of the memory's speed, and also for out-of-range indices; a C++ kernel
(`rows.cc`) copies only the rows in range.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from ling3.ops import experts
from ling3.ops import rows as plain
from ling3.ops.forms import form_of, runs
from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 2**20
"""Bytes of all the rows below which compiling the kernel takes longer than it saves."""


def unsuited(x: Shaped[Array, "held *rest"], rows: Int32[Array, " rows"]) -> str | None:
    """Why the kernel does not run, or None: it is missing, or the rows have less than `LEAST` bytes."""
    if x.size == 0 or rows.shape[0] * (x.nbytes // x.shape[0]) < LEAST:
        return f"the rows are empty or have less than {LEAST:,} bytes"
    return native.missing(SOURCE)


@form_of(plain.TakeRows)
def take_rows(x, rows):
    """Computes `rows.take_rows` with the C++ kernel, where it suits."""
    if not runs("take_rows", unsuited(x, rows)):
        return plain.take_rows(x, rows)
    shape = jax.ShapeDtypeStruct((rows.shape[0], *x.shape[1:]), x.dtype)
    return jax.ffi.ffi_call(native.target(SOURCE, "take_rows"), shape, vmap_method="sequential")(x, rows)


def weighted(
    weights: Float[Array, "tokens top_k"], rows: Float[Array, "tokens*top_k hidden"]
) -> Float[Array, "tokens hidden"]:
    """Computes `experts.weighted` with a C++ kernel, if there is a compiler and the rows are in float32.

    Its bits depend on nothing else. XLA computes such a sum inside of the loops of what follows, and how it rounds
    there differs from program to program.
    """
    if rows.dtype != jnp.float32 or native.missing(SOURCE) is not None:
        return experts.weighted(weights, rows)
    shape = jax.ShapeDtypeStruct((weights.shape[0], rows.shape[1]), rows.dtype)
    call = jax.ffi.ffi_call(native.target(SOURCE, "weighted_rows"), shape, vmap_method="sequential")
    return call(weights.astype(rows.dtype), rows)


@form_of(plain.Read)
def read(read, dtype, always):
    """`rows.read` inside a branch that is always taken, and out of which XLA hoists nothing.

    XLA reads a row of a bfloat16 array by converting the array to float32 and indexing the result. It would hoist this
    conversion out of a loop and keep its result in memory.
    """
    if jnp.dtype(dtype).itemsize >= 4:
        return read()

    def nothing() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(read))

    return lax.cond(always, read, nothing)
