"""x Wᵀ on a CPU, by a kernel in C++ (`matmul_cpu.cc`): for few rows it takes little longer than reading the weight.

XLA reads a bfloat16 weight at half that pace, and packs one anew for each call with more than 32 rows.
"""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from ling3.ops.precision import exact
from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 2**21
"""Bytes of a weight below which a call costs more than it saves."""


def suits(x: Float[Array, "*stack rows inner"], weight: Float[Array, "*stack outer inner"]) -> bool:
    """True if the kernel is there and not slower: for one large weight, float32 or bfloat16."""
    if x.dtype != weight.dtype or x.dtype not in (jnp.float32, jnp.bfloat16):
        return False
    if weight.ndim != 2 or weight.size * weight.dtype.itemsize < LEAST:
        return False
    return native.target(SOURCE, "matmul") is not None


@jax.custom_jvp
def product(x: Float[Array, "rows inner"], weight: Float[Array, "outer inner"]) -> Float32[Array, "rows outer"]:
    """x Wᵀ where it `suits`, summed in float32. A row's bits depend only on its own values and the weight.

    Rows of zeros, as padding is, have zeros and cost nothing; the numbers of W are finite.
    """
    name = native.target(SOURCE, "matmul")
    assert name is not None, "`suits` said so"
    shape = jax.ShapeDtypeStruct((x.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(name, shape, vmap_method="sequential")(x, weight)


def _tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
    """dx Wᵀ + x dWᵀ, by XLA."""
    (x, weight), (dx, dweight) = primals, tangents

    def times(x: Array, weight: Array) -> Array:
        dimensions = (((1,), (1,)), ((), ()))
        return lax.dot_general(x, weight, dimensions, exact(x.dtype), preferred_element_type=jnp.float32)

    zero = jax.custom_derivatives.SymbolicZero
    terms = [] if isinstance(dx, zero) else [times(dx, weight)]
    terms += [] if isinstance(dweight, zero) else [times(x, dweight)]
    y = product(x, weight)
    return y, sum(terms, jnp.zeros_like(y))


product.defjvp(_tangent, symbolic_zeros=True)
