"""Which precision sums are kept in."""

import jax.numpy as jnp
from jaxtyping import DTypeLike


def wide(dtype: DTypeLike) -> jnp.dtype:
    """float32, or float64 for float64: what norms, gates, states and the sums of products are computed in."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
