"""A question that a GPU's kernels ask: whether Pallas is to interpret them."""

import jax


def interpreted() -> bool:
    """True where JAX has no GPU: kernels then give their numbers without one, slowly."""
    return jax.default_backend() != "gpu"
