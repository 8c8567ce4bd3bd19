"""x Wᵀ on a CPU, by the C++ kernels or in the form that XLA's CPU backend runs fast."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from ling3.ops import matmul
from ling3.ops.cpu import products
from ling3.ops.forms import form_of, runs
from ling3.ops.matmul import decoded_product, differential, dot, in_blocks
from ling3.ops.precision import Accumulation
from ling3.ops.quantized import Quantized, constant

FEW_ROWS = 32
"""Up to this many rows of x, XLA computes (W xᵀ)ᵀ instead."""


def unsuited(
    x: Float[Array, "*stack rows inner"],
    weight: Float[Array, "*stack outer inner"] | Quantized,
    sums: Accumulation = "float32",
) -> str | None:
    """Why the kernels do not run, or None: they are missing, cannot read it, or a matrix is small, or a float stack."""
    if sums != "float32":
        return f"sums are {sums}, and the kernel's float32"
    matrix = arrays_of(weight)
    if matrix.scale is None and weight.ndim != 2:
        return "the kernel takes one float matrix, and not a stack"
    least = products.LEAST["dense" if matrix.scale is None else "quantized"] * math.prod(weight.shape[:-2])
    return products.unsuited(x, matrix, weight.shape[-1], least)


@form_of(matmul.Product)
def product(x, weight, sums: Accumulation = "float32"):
    """`matmul.product` with the kernels, where they suit: a row's bits are then the same for any number of rows."""
    if runs("product", unsuited(x, weight, sums)):
        return _decoded(weight.rounded(x), constant(weight)) if isinstance(weight, Quantized) else _dense(x, weight)
    if not isinstance(weight, Quantized):
        return _by_xla(x, weight, sums)

    def times(x: Array, weight: Array) -> Array:
        if unsuited(x, weight, sums) is None:
            return _dense(x, weight)
        return in_blocks(functools.partial(_by_xla, sums=sums), x, weight)

    return decoded_product(x, weight, times)


@form_of(matmul.Product)
def xla_product(x, weight, sums: Accumulation = "float32"):
    """`matmul.product` by XLA alone, which repacks the right operand of a product in every call.

    With few rows it computes (W xᵀ)ᵀ, so that it repacks x and not the much larger weight. A row's result then depends
    bitwise on the number of rows, but not on the other rows' values.
    """
    if isinstance(weight, Quantized):
        return decoded_product(x, weight, functools.partial(in_blocks, functools.partial(_by_xla, sums=sums)))
    return _by_xla(x, weight, sums)


def _by_xla(
    x: Float[Array, "*stack rows inner"], weight: Float[Array, "*stack outer inner"], sums: Accumulation
) -> Array:
    rows = x.shape[-2]
    if rows == 1 and x.dtype == jnp.bfloat16:
        return _by_xla(jnp.concatenate([x, x], axis=-2), weight, sums)[..., :1, :]
    if not 1 < rows <= FEW_ROWS:
        return matmul.matmul_transposed(x, weight, sums)
    # Without the barrier XLA would fold the transposition into the product, with the weight as right operand again.
    return jnp.swapaxes(lax.optimization_barrier(dot(weight, x, x.dtype, sums)), -1, -2)


@jax.custom_jvp
def _dense(x: Float[Array, "rows inner"], weight: Float[Array, "outer inner"]) -> Float32[Array, "rows outer"]:
    return products.product(x, products.StoredMatrix(weight))


def _tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    """dx Wᵀ + x dWᵀ, by XLA."""
    (x, weight), (dx, dweight) = primals, tangents
    zero = jax.custom_derivatives.SymbolicZero
    terms = [] if isinstance(dx, zero) else [differential(dx, weight)]
    terms += [] if isinstance(dweight, zero) else [dot(x, dweight, x.dtype, "float32")]
    y = _dense(x, weight)
    return y, sum(terms, jnp.zeros_like(y))


_dense.defjvp(_tangent, symbolic_zeros=True)


@jax.custom_jvp
def _decoded(x: Float[Array, "*stack rows inner"], matrix: Quantized) -> Float32[Array, "*stack rows outer"]:
    return products.product(x, arrays_of(matrix))


def _decoded_tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    """dx Wᵀ by XLA. The matrix has no tangent: `constant` raises TypeError for one."""
    (x, matrix), (dx, _) = primals, tangents
    y = _decoded(x, matrix)
    zero = jax.custom_derivatives.SymbolicZero
    return y, jnp.zeros_like(y) if isinstance(dx, zero) else differential(dx, matrix)


_decoded.defjvp(_decoded_tangent, symbolic_zeros=True)


def arrays_of(matrix: Float[Array, "..."] | Quantized) -> products.StoredMatrix:
    """A matrix as the kernels take it; an array has neither scales nor a layout."""
    if not isinstance(matrix, Quantized):
        return products.StoredMatrix(matrix)
    return products.StoredMatrix(*matrix.arrays, matrix.zero_points, matrix.layout)
