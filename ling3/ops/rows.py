"""Rows of an array by their indices."""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Int32, Shaped

T = TypeVar("T")


@runtime_checkable
class TakeRows(Protocol):
    """`x[rows]`. A row whose index is not in [0, held) has any numbers, NaN among them."""

    def __call__(self, x: Shaped[Array, "held *rest"], rows: Int32[Array, " rows"], /) -> Shaped[Array, "rows *rest"]:
        """The rows."""
        ...


@runtime_checkable
class Read(Protocol):
    """The result of `read`, which indexes an array of `dtype`; `always` is true, but not a constant to the compiler."""

    def __call__(self, read: Callable[[], T], dtype: DTypeLike, always: Bool[Array, ""], /) -> T:
        """The result of `read`."""
        ...


def take_rows(x: Shaped[Array, "held *rest"], rows: Int32[Array, " rows"]) -> Shaped[Array, "rows *rest"]:
    """The plain form of `TakeRows`, which is its specification."""
    return x[jnp.minimum(rows, x.shape[0] - 1)]


def read(read: Callable[[], T], dtype: DTypeLike, always: Bool[Array, ""]) -> T:
    """The plain form of `Read`, which is its specification."""
    return read()
