"""The dtypes in which products are summed, and the precision of matrix products."""

from typing import TYPE_CHECKING, Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import AbstractDtype, DTypeLike

if TYPE_CHECKING:
    from typing import Annotated as Wide
else:

    class Wide(AbstractDtype):
        """`Wide[Array, "..."]`: an array of float32 or float64, the dtypes that `wide` returns."""

        dtypes = ("float32", "float64")


Accumulation = Literal["float32", "float64"]
"""The accumulation dtype of products with weights; operands in a wider dtype are summed in theirs."""


def summed_in(dtype: DTypeLike, sums: Accumulation) -> jnp.dtype:
    """The dtype in which products of operands in `dtype` are summed."""
    return wide(dtype) if sums == "float32" else jnp.dtype(jnp.float64)


def wide(dtype: DTypeLike) -> jnp.dtype:
    """float32, or float64 for float64: the dtype of norms, gates, states and sums of products."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def exact(dtype: DTypeLike) -> lax.Precision:
    """The precision of matrix products of operands in `dtype`: float32 is never rounded to TF32 or bfloat16."""
    return lax.Precision.DEFAULT if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
