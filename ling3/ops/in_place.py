"""Reading a part of a bfloat16 array in place."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike

from ling3.ops.lowering import XLA, Lowering

T = TypeVar("T")


def read_in_place(read: Callable[[], T], dtype: DTypeLike, always: Bool[Array, ""], lowering: Lowering = XLA) -> T:
    """The result of `read`, which indexes an array of `dtype`; `always` is true, but not a constant to the compiler.

    On a CPU, XLA reads a row of a bfloat16 array by converting the whole array to float32 and indexing the result; it
    would hoist the conversion out of a loop and keep it in memory. With `lowering.read_in_branch` the read is in a
    branch, which is always taken and which XLA hoists nothing out of.
    """
    if not lowering.read_in_branch or jnp.dtype(dtype).itemsize >= 4:
        return read()

    def nothing() -> T:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(read))

    return lax.cond(always, read, nothing)
