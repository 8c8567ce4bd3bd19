"""Whether a GPU's kernels run in Pallas' interpreter."""

import jax


def interpreted() -> bool:
    """True where JAX has no GPU: kernels then give their numbers without one, slowly."""
    return jax.default_backend() != "gpu"
