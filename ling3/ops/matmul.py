"""The product with a weight matrix, in the form that the backend runs at the speed of its memory."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from ling3.ops import products_cpu
from ling3.ops.lowering import XLA, Lowering
from ling3.ops.precision import exact, wide


def matmul_transposed(
    x: Float[Array, "*stack rows inner"], weight: Float[Array, "*stack outer inner"], lowering: Lowering = XLA
) -> Float[Array, "*stack rows outer"]:
    """x Wᵀ for each matrix of a stack (or one); sums and result are `lowering.accumulation`, or x's dtype if wider.

    Up to `lowering.few_rows` rows are computed as (W xᵀ)ᵀ: on a CPU, XLA's products repack their right side for every
    call, and the weight is by far the larger side. A row's bits then depend on the number of rows, but not on the other
    rows' values.

    A single bfloat16 row is computed as two, for which XLA has a product in bfloat16.

    With `lowering.native` a kernel for CPUs takes the place of all this where it is faster; there a row's bits are the
    same for every number of rows.
    """
    if is_native(x, weight, lowering):
        return _native(x, weight)
    rows = x.shape[-2]
    if rows == 1 and x.dtype == jnp.bfloat16:
        return matmul_transposed(jnp.concatenate([x, x], axis=-2), weight, lowering)[..., :1, :]
    last, stack = x.ndim - 1, tuple(range(x.ndim - 2))
    dimensions = (((last,), (last,)), (stack, stack))
    sums = wide(x.dtype) if lowering.accumulation == "float32" else jnp.float64
    options = {"precision": exact(x.dtype), "preferred_element_type": sums}
    if 1 < rows <= lowering.few_rows:
        # Without the barrier XLA would fold the transposition into the product and put the weight on its right again.
        return jnp.swapaxes(lax.optimization_barrier(lax.dot_general(weight, x, dimensions, **options)), -1, -2)
    return lax.dot_general(x, weight, dimensions, **options)


def is_native(
    x: Float[Array, "*stack rows inner"], weight: Float[Array, "*stack outer inner"], lowering: Lowering
) -> bool:
    """True if the kernel for CPUs computes it: for one large weight, in float32 or bfloat16 as x is."""
    if not lowering.native or lowering.accumulation != "float32" or weight.ndim != 2:
        return False
    return products_cpu.suits(x, weight, None, weight.shape[1], products_cpu.LEAST["dense"])


@jax.custom_jvp
def _native(x: Float[Array, "rows inner"], weight: Float[Array, "outer inner"]) -> Float32[Array, "rows outer"]:
    """x Wᵀ by the kernel for CPUs."""
    return products_cpu.product(x, weight)


def _tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    """dx Wᵀ + x dWᵀ, by XLA."""
    (x, weight), (dx, dweight) = primals, tangents

    def times(x: Array, weight: Array) -> Array:
        dimensions = (((1,), (1,)), ((), ()))
        return lax.dot_general(x, weight, dimensions, exact(x.dtype), preferred_element_type=jnp.float32)

    zero = jax.custom_derivatives.SymbolicZero
    terms = [] if isinstance(dx, zero) else [times(dx, weight)]
    terms += [] if isinstance(dweight, zero) else [times(x, dweight)]
    y = _native(x, weight)
    return y, sum(terms, jnp.zeros_like(y))


_native.defjvp(_tangent, symbolic_zeros=True)
