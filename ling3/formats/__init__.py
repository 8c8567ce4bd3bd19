"""Formats of quantized matrices, one file and one class for each.

A class is a kind of `Matrix` whose array fields are the published tensors, and itself the `Quantized` operand of the
operators. Its file defines how weights are decoded (`decoded`, `rows`), sliced (`cut`, `steps`), drawn at random
(`init`) and encoded (`encode`), and how a config describes them. Products multiply decoded weights by unrounded
activations, even if a checkpoint wants activations in 8 bits: that is closer to the model than servers that round them.
"""

from ling3.formats.channels import Fp8Channels, Int8Channels
from ling3.formats.compressed_tensors import CompressedTensors
from ling3.formats.fp8 import Fp8
from ling3.formats.gguf_blocks import GgufBlocks
from ling3.formats.integers import PackedIntegers
from ling3.formats.key_value_halves import KeyValueHalves
from ling3.formats.matrix import QuantizedMatrix, in_model, weights_per_element
from ling3.formats.mxfp4 import Fp4, Mxfp4

__all__ = [
    "CompressedTensors",
    "Fp4",
    "Fp8",
    "Fp8Channels",
    "GgufBlocks",
    "Int8Channels",
    "KeyValueHalves",
    "Mxfp4",
    "PackedIntegers",
    "QuantizedMatrix",
    "in_model",
    "weights_per_element",
]
