"""Formats of matrices in fewer bits: one file for each, with a class that is the format.

A class is a kind of `Matrix` whose array fields are the published tensors, and a `Quantized` operand of the operators
itself. Its file says what the bits mean (`decoded`, `rows`), what comes together (`cut`, `steps`), what random bits are
(`init`), how numbers become bits (`encode`), and what a config says of them. Products multiply unrounded activations by
the numbers that the bits mean, whatever a checkpoint says of activations: that is nearer to the model than the servers
that round them to 8 bits.
"""

from ling3.formats.compressed_tensors import CompressedTensors
from ling3.formats.fp8 import Fp8
from ling3.formats.integers import PackedIntegers
from ling3.formats.matrix import QuantizedMatrix, in_float32, weights_per_element
from ling3.formats.mxfp4 import Fp4, Mxfp4

__all__ = [
    "CompressedTensors",
    "Fp4",
    "Fp8",
    "Mxfp4",
    "PackedIntegers",
    "QuantizedMatrix",
    "in_float32",
    "weights_per_element",
]
