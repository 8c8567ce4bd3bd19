"""x Wᵀ, the product with a weight matrix that is an array or `Quantized`."""

import functools
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float

from ling3.ops.forms import form_of
from ling3.ops.precision import Accumulation, Wide, exact, summed_in, wide
from ling3.ops.quantized import Quantized, constant, numbers

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
        sums: Accumulation = "float32",
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


@form_of(Product)
def product(x, weight, sums: Accumulation = "float32"):
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
    return _in_parts(own, lambda start, size: times(x, _decoded(own, start, size).astype(x.dtype)))


def differential(
    dx: Float[Array, "*stack rows inner"], weight: Float[Array, "*stack outer inner"] | Quantized
) -> Wide[Array, "*stack rows outer"]:
    """dx Wᵀ for derivatives of products by kernels, in float32 or wider: a linear function of dx.

    Forwards and transposed (dy W), W is widened or decoded some rows at a time if it is large, and kept as stored.
    """
    if weight.ndim > 2:
        return lax.map(lambda own: differential(*own), (dx, weight))
    dx = dx.astype(wide(dx.dtype))
    if not isinstance(weight, Quantized) and weight.dtype == dx.dtype:
        return dot(dx, weight, dx.dtype, "float32")

    # Without the checkpoint all decoded rows would be kept for the transposed product.
    @functools.partial(jax.checkpoint, static_argnums=2)
    def part(dx: Array, start: Array | None, size: int) -> Array:
        return dot(dx, _decoded(weight, start, size).astype(dx.dtype), dx.dtype, "float32")

    return _in_parts(weight, functools.partial(part, dx))


def _decoded(matrix: Array | Quantized, start: Array | None, size: int) -> Array:
    """`size` rows of a matrix from `start` on as floats, or all of them."""
    if start is None:
        return numbers(matrix)
    return matrix.cut(start, size).decoded() if isinstance(matrix, Quantized) else _rows(matrix, start, size)


def _rows(matrix: Array, start: Array, size: int) -> Array:
    """Rows of an array. XLA's CPU backend would convert all of a bfloat16 array to cut it, but not one of integers."""
    if matrix.dtype.itemsize != 2:
        return lax.dynamic_slice_in_dim(matrix, start, size)
    words = lax.dynamic_slice_in_dim(lax.bitcast_convert_type(matrix, jnp.uint16), start, size)
    return lax.bitcast_convert_type(words, matrix.dtype)


def _in_parts(matrix: Array | Quantized, part: Callable[[Array | None, int], Array]) -> Array:
    """Joins the results [rows, size] of `part(start, size)` for some rows of a matrix [outer, inner] at a time.

    A `start` of None means all rows.
    """
    outer, inner = matrix.shape
    step = matrix.step if isinstance(matrix, Quantized) else 1
    size = max(1, DECODED // max(1, inner) // step) * step
    if size >= outer:
        return part(None, outer)
    whole = outer // size
    parts = lax.map(lambda i: part(i * size, size), jnp.arange(whole, dtype=jnp.int32))
    parts = [jnp.swapaxes(parts, 0, 1).reshape(parts.shape[1], -1)]
    if outer % size:
        parts.append(part(jnp.asarray(whole * size, jnp.int32), outer - whole * size))
    return jnp.concatenate(parts, axis=-1)


def in_blocks(
    times: Callable[..., Array], x: Wide[Array, "rows inner"], weight: Wide[Array, "outer inner"]
) -> Wide[Array, "rows outer"]:
    """x Wᵀ by calls of `times` with ROWS rows each, since a row's result may depend bitwise on the size of a call."""
    rows = x.shape[0]
    blocks = -(-rows // ROWS)
    filled = jnp.pad(x, ((0, blocks * ROWS - rows), (0, 0))).reshape(blocks, ROWS, -1)
    return lax.map(lambda own: times(own, weight), filled).reshape(blocks * ROWS, -1)[:rows]
