"""The operators' forms for GPUs: kernels in Pallas, for Triton."""

from ling3.ops.gpu import attention, experts, kda

__all__ = ["attention", "experts", "kda"]
