"""Low-rank updates (LoRA) in a call whose rows may each have another adapter.

The adapters that the call's rows have take turns: each adds its update to its own rows, computed for all rows. So a
row's bits depend neither on the other rows' adapters nor on which adapters there are, and those that no row has cost
nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ling3.ops.matmul import Multiply, matmul_transposed
from ling3.ops.precision import Wide, wide


class AdapterRows(NamedTuple):
    """The adapter of each row of a call, among those of one stack."""

    which: Array
    """[rows], int32: the place of each row's adapter in the stack; that after the last for a row that has none."""
    order: Array
    """[adapters], int32: all places, those whose adapter any row has first."""
    used: Array
    """[], int32: the number of adapters that any row has."""

    @staticmethod
    def of(which: Int32[Array, " rows"], stack: Sequence[int]) -> "AdapterRows":
        """The rows of a call whose row i has the adapter `which[i]`, for a stack of these adapters."""
        same = which[:, None] == jnp.asarray(stack, jnp.int32)[None]
        place = jnp.where(jnp.any(same, axis=1), jnp.argmax(same, axis=1), len(stack)).astype(jnp.int32)
        had = jnp.any(same, axis=0)
        return AdapterRows(place, jnp.argsort(~had).astype(jnp.int32), had.sum(dtype=jnp.int32))


class StackedUpdates(NamedTuple):
    """The updates scale · B A of one rank that several adapters make to one matrix."""

    A: Array
    """[adapters, rank, inner], in float32 or wider, as the others are."""
    B: Array
    """[adapters, outer, rank]"""
    scale: Array
    """[adapters]"""

    def product(
        self, x: Float[Array, "rows inner"], place: Int32[Array, ""], times: Multiply
    ) -> Wide[Array, "rows outer"]:
        """(scale · x Aᵀ) Bᵀ for the adapter at this place."""
        return low_rank(x, self.A[place], self.B[place], self.scale[place], times)

    def dense(self, place: Int32[Array, ""]) -> Wide[Array, "outer inner"]:
        """scale · B A for the adapter at this place."""
        return self.scale[place] * matmul_transposed(self.B[place], self.A[place].T)


def low_rank(
    x: Float[Array, "rows inner"],
    A: Float[Array, "rank inner"],
    B: Float[Array, "outer rank"],
    scale: Wide[Array, ""] | float,
    times: Multiply,
) -> Wide[Array, "rows outer"]:
    """(scale · x Aᵀ) Bᵀ in float32 or wider: the update of a product x Wᵀ (LoRA, arXiv 2106.09685, §4.1).

    The scale multiplies the narrow product, so that XLA cannot fuse it with a sum that follows.
    """
    dtype = wide(x.dtype)
    inner = times(x.astype(dtype), A.astype(dtype)).astype(dtype)
    factor = scale.astype(dtype) if isinstance(scale, Array) else scale
    return times(factor * inner, B.astype(dtype))


RowUpdates = Sequence[tuple[StackedUpdates, AdapterRows]]
"""The updates of one matrix: a stack for each rank, and the rows that have one of its adapters."""


def added(
    y: Float[Array, "*shape"], updates: RowUpdates, update: Callable[[StackedUpdates, Array], Array]
) -> Float[Array, "*shape"]:
    """y + update(stack, i) in the rows that have the stack's i-th adapter; rows without an adapter keep their bits.

    The first axis of y has the same number of entries for each row of the call, one row's after another's.
    """
    for stack, rows in updates:
        y = _in_turn(y, rows, functools.partial(update, stack))
    return y


def _in_turn(y: Array, rows: AdapterRows, update: Callable[[Array], Array]) -> Array:
    which = jnp.repeat(rows.which, y.shape[0] // rows.which.shape[0]).reshape(-1, *(1,) * (y.ndim - 1))

    def one(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        turn, y = carry
        place = rows.order[turn]
        return turn + 1, jnp.where(which == place, y + update(place).astype(y.dtype), y)

    # The number of turns is no constant: XLA would inline a single one, and fuse it with what follows.
    return lax.while_loop(lambda carry: carry[0] < rows.used, one, (jnp.zeros((), jnp.int32), y))[1]
