"""The common part of the GPU kernels, which are written in Pallas, for Triton."""

from typing import Any


def triton_params(warps: int, stages: int | None = None) -> Any:
    """How a kernel is compiled for a GPU: by Triton, with so many warps to a program and loads so far ahead."""
    # Later releases of jax plan to drop Triton, so it is imported only to compile for it.
    from jax.experimental.pallas import triton  # noqa: PLC0415

    return triton.CompilerParams(num_warps=warps, num_stages=stages)
