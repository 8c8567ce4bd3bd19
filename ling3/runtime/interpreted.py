"""Whether Pallas interprets the GPU kernels."""

import jax


def interpreted() -> bool:
    """True if JAX's default backend is no GPU: kernels then compute the same numbers, slowly."""
    return jax.default_backend() != "gpu"
