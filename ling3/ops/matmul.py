"""x Wᵀ, the product with a weight matrix that is an array or `Quantized`."""

import functools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float

from ling3.ops.precision import Accumulation, Wide, exact, summed_in, wide
from ling3.ops.quantized import Quantized, constant

ROWS = 16
"""Rows of x that are multiplied by a decoded matrix in one call: fixed, so that a row's result does not depend bitwise
on the number of rows."""
DECODED = 2**24
"""About how many elements are decoded at once; of a larger matrix, some rows of W at a time."""


@runtime_checkable
class Product(Protocol):
    """x Wᵀ for one matrix or each of a stack. Sums and result are in `sums`, or in x's dtype if that is wider.

    A row's result does not depend bitwise on the other rows' values.
    """

    def __call__(
        self,
        x: Float[Array, "*stack rows inner"],
        weight: Float[Array, "*stack outer inner"] | Quantized,
        sums: Accumulation,
        /,
    ) -> Wide[Array, "*stack rows outer"]:
        """The product of each row."""
        ...


@runtime_checkable
class Multiply(Protocol):
    """A `Product` whose `sums` are fixed, such as `Execution.times`."""

    def __call__(
        self, x: Float[Array, "*stack rows inner"], weight: Float[Array, "*stack outer inner"] | Quantized, /
    ) -> Wide[Array, "*stack rows outer"]:
        """The product of each row."""
        ...


def product(
    x: Float[Array, "*stack rows inner"],
    weight: Float[Array, "*stack outer inner"] | Quantized,
    sums: Accumulation = "float32",
) -> Wide[Array, "*stack rows outer"]:
    """The plain form of `Product`: its reference implementation."""
    if isinstance(weight, Quantized):
        dense = functools.partial(matmul_transposed, sums=sums)
        return decoded_product(x, weight, functools.partial(in_blocks, dense))
    return matmul_transposed(x, weight, sums)


def matmul_transposed(
    x: Float[Array, "*stack rows inner"], weight: Float[Array, "*stack outer inner"], sums: Accumulation = "float32"
) -> Wide[Array, "*stack rows outer"]:
    """x Wᵀ of arrays. A single bfloat16 row is computed as two, since XLA has no bfloat16 product for one."""
    if x.shape[-2] == 1 and x.dtype == jnp.bfloat16:
        return matmul_transposed(jnp.concatenate([x, x], axis=-2), weight, sums)[..., :1, :]
    return dot(x, weight, x.dtype, sums)


def dot(
    left: Float[Array, "*stack rows inner"],
    right: Float[Array, "*stack columns inner"],
    dtype: DTypeLike,
    sums: Accumulation,
) -> Wide[Array, "*stack rows columns"]:
    """left rightᵀ by XLA, with the precision and the accumulation dtype of operands in `dtype`."""
    last, stack = left.ndim - 1, tuple(range(left.ndim - 2))
    options = {"precision": exact(dtype), "preferred_element_type": summed_in(dtype, sums)}
    return lax.dot_general(left, right, (((last,), (last,)), (stack, stack)), **options)


def decoded_product(
    x: Float[Array, "*stack rows inner"], matrix: Quantized, times: Callable[..., Array]
) -> Wide[Array, "*stack rows outer"]:
    """x Wᵀ with W decoded on the fly, some rows at a time if it is large; `times` multiplies by the decoded rows.

    Only x is rounded, and only if the matrix `rounds`; it is widened to float32 if it is narrower. Differentiable with
    respect to x; a gradient with respect to W raises TypeError.
    """
    if matrix.ndim > 2:
        return lax.map(lambda own: decoded_product(own[1], own[0], times), (matrix, x))
    own, x = constant(matrix), matrix.rounded(x).astype(wide(x.dtype))
    (outer, inner), step = own.shape, own.step

    def part(rows: Quantized) -> Array:
        return times(x, rows.decoded().astype(x.dtype))

    size = max(1, DECODED // max(1, inner) // step) * step
    if size >= outer:
        return part(own)
    whole = outer // size
    parts = lax.map(lambda i: part(own.cut(i * size, size)), jnp.arange(whole, dtype=jnp.int32))
    parts = [jnp.swapaxes(parts, 0, 1).reshape(x.shape[0], -1)]
    if outer % size:
        parts.append(part(own.cut(jnp.asarray(whole * size, jnp.int32), outer - whole * size)))
    return jnp.concatenate(parts, axis=-1)


def in_blocks(
    times: Callable[..., Array], x: Wide[Array, "rows inner"], weight: Wide[Array, "outer inner"]
) -> Wide[Array, "rows outer"]:
    """x Wᵀ by calls of `times` with ROWS rows each, since a row's result may depend bitwise on the size of a call."""
    rows = x.shape[0]
    blocks = -(-rows // ROWS)
    filled = jnp.pad(x, ((0, blocks * ROWS - rows), (0, 0))).reshape(blocks, ROWS, -1)
    return lax.map(lambda own: times(own, weight), filled).reshape(blocks * ROWS, -1)[:rows]
