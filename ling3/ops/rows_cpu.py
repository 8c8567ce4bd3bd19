"""Rows of an array by their indices on a CPU, by a kernel in C++ (`rows_cpu.cc`) that copies those in use alone.

XLA gathers number by number, at a tenth of the memory's pace, and a row for every index that is no row's too.
"""

import pathlib

import jax
from jaxtyping import Array, Int32, Shaped

from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 2**20
"""Bytes of the rows below which compiling the kernel takes longer than it saves."""


def suits(x: Shaped[Array, "held *rest"], rows: Int32[Array, " rows"]) -> bool:
    """True if the kernel is there, and the rows have `LEAST` bytes or more."""
    if x.size == 0 or rows.shape[0] * (x.nbytes // x.shape[0]) < LEAST:
        return False
    return native.ffi_target(SOURCE, "take_rows") is not None


def take(x: Shaped[Array, "held *rest"], rows: Int32[Array, " rows"]) -> Shaped[Array, "rows *rest"]:
    """`x[rows]` where it `suits`. A row whose index is not in [0, held) has any numbers, NaN among them."""
    name = native.ffi_target(SOURCE, "take_rows")
    assert name is not None, "`suits` said so"
    shape = jax.ShapeDtypeStruct((rows.shape[0], *x.shape[1:]), x.dtype)
    return jax.ffi.ffi_call(name, shape, vmap_method="sequential")(x, rows)
