"""Reading a part of a narrow array where it lies."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike

from ling3.ops.lowering import XLA, Lowering

T = TypeVar("T")


def read_in_place(read: Callable[[], T], dtype: DTypeLike, always: Bool[Array, ""], lowering: Lowering = XLA) -> T:
    """What `read` takes from an array of `dtype`; `always` must be true, and unknown to the compiler.

    On a CPU, XLA reads a row of a bfloat16 array by converting the array to float32 and taking the row of that; in a
    loop the conversion of all rows would come first, and stay in memory. So with `lowering.read_in_branch` it stands in
    a branch, always taken, out of which XLA takes nothing.
    """
    if not lowering.read_in_branch or jnp.dtype(dtype).itemsize >= 4:
        return read()

    def nothing() -> T:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(read))

    return lax.cond(always, read, nothing)
