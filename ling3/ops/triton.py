"""What the kernels for a GPU have in common. They are written in Pallas, for Triton."""

from typing import Any


def triton_params(warps: int) -> Any:
    """How a kernel is compiled for a GPU: by Triton, with so many warps to a program."""
    # Newer releases of jax mean to drop Triton: whoever does not compile for it need not have it.
    from jax.experimental.pallas import triton  # noqa: PLC0415

    return triton.CompilerParams(num_warps=warps)
