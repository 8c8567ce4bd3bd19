"""Compiler parameters of the GPU kernels, which are written in Pallas and compiled by Triton."""

from typing import Any


def triton_params(warps: int, stages: int | None = None) -> Any:
    """Triton's compiler parameters: `warps` per program, and `stages` of software pipelining for loads."""
    # Later releases of jax plan to drop Triton, so it is imported only to compile for it.
    from jax.experimental.pallas import triton  # noqa: PLC0415

    return triton.CompilerParams(num_warps=warps, num_stages=stages)
