"""Gathering rows of an array by index."""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Int32, Shaped

from ling3.ops.forms import form_of

T = TypeVar("T")


@runtime_checkable
class TakeRows(Protocol):
    """`x[rows]`. For indices outside [0, held) the result is arbitrary, possibly NaN."""

    def __call__(self, x: Shaped[Array, "held *rest"], rows: Int32[Array, " rows"], /) -> Shaped[Array, "rows *rest"]:
        """The gathered rows."""
        ...


@runtime_checkable
class Read(Protocol):
    """Calls `read`, which indexes an array of `dtype`, and returns its result.

    `always` is True, but the compiler cannot know it: a platform's form may call `read` in a branch on it.
    """

    def __call__(self, read: Callable[[], T], dtype: DTypeLike, always: Bool[Array, ""], /) -> T:
        """The result of `read()`."""
        ...


@form_of(TakeRows)
def take_rows(x, rows):
    """The plain form of `TakeRows`: its reference implementation."""
    return x[jnp.minimum(rows, x.shape[0] - 1)]


@form_of(Read)
def read(read, dtype, always):
    """The plain form of `Read`: its reference implementation."""
    return read()
