"""Reading a part of a narrow array where it lies."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike

T = TypeVar("T")


def read_in_place(read: Callable[[], T], dtype: DTypeLike, always: Bool[Array, ""]) -> T:
    """What `read` takes from an array of `dtype`; `always` must be true, and unknown to the compiler.

    On a CPU, XLA reads a row of a bfloat16 array by converting the array to float32 and taking the row of that; in a
    loop the conversion of all rows would come first, and stay in memory. So there it stands in a branch, always taken,
    out of which XLA takes nothing.
    """
    if jax.default_backend() != "cpu" or jnp.dtype(dtype).itemsize >= 4:
        return read()

    def nothing() -> T:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(read))

    return lax.cond(always, read, nothing)
