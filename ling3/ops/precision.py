"""Which precision products and sums are kept in."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import DTypeLike


def wide(dtype: DTypeLike) -> jnp.dtype:
    """float32, or float64 for float64: what norms, gates, states and the sums of products are computed in."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def exact(dtype: DTypeLike) -> lax.Precision:
    """The matrix products' precision for operands of `dtype`: float32 is never cut to TF32 or bfloat16 on the way."""
    return lax.Precision.DEFAULT if dtype == jnp.bfloat16 else lax.Precision.HIGHEST
