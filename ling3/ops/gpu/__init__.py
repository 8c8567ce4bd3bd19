"""The operators' forms for GPUs: Pallas kernels, compiled by Triton."""

from ling3.ops.gpu import attention, experts, kda

__all__ = ["attention", "experts", "kda"]
