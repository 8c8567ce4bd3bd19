"""The operators' forms for CPUs: C++ kernels, and forms that XLA's CPU backend runs faster than the plain ones."""

from ling3.ops.cpu import absorption, attention, conv, drawing, experts, kda, logits, matmul, products, rows

__all__ = ["absorption", "attention", "conv", "drawing", "experts", "kda", "logits", "matmul", "products", "rows"]
