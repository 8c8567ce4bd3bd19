"""The operators' forms for CPUs: kernels in C++, and what XLA's CPU backend runs faster than the plain forms."""

from ling3.ops.cpu import absorption, attention, experts, kda, matmul, products, rows

__all__ = ["absorption", "attention", "experts", "kda", "matmul", "products", "rows"]
