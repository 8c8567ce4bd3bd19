"""The block types of ggml, in which GGUF files store matrices: blocks of 32 or 256 neighbouring columns of a row.

A block has its scales and its codes in one place. W = scale · code, plus or minus a minimum in some types. Products of
scales and codes are exact in float32, and the minimum is added with one rounding, so that all ways to compute a number
give the same bits (ggml/src/ggml-common.h and ggml-quants.c of llama.cpp).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Int, Int32, Integer, PRNGKeyArray, UInt8

from ling3.formats.matrix import QuantizedMatrix
from ling3.layers.linear import Linear
from ling3.ops.rounding import Rounding

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The sixteen levels of IQ4_NL."""
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The sixteen numbers of MXFP4, doubled; ggml has no negative zero."""


class BlockType(NamedTuple):
    """A block type: how many columns a block has, its size, and how it is decoded and drawn at random."""

    columns: int
    bytes: int
    decode: Callable[[UInt8[Array, "*batch bytes"]], Float32[Array, "*batch columns"]]
    rms: float
    """The root mean square of random codes under the scales in `scales`."""
    scales: Mapping[int, float]
    """The float16 scales of a random block: their places in bytes, and their values. Empty if byte 0 is an exponent."""


class GgufBlocks(QuantizedMatrix):
    """A matrix in one of ggml's block types: each row is a sequence of blocks, exactly as in the file."""

    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("U8",)}
    EMBEDS: ClassVar[bool] = True
    weight: UInt8[Array, "*stack out_features bytes"]
    block: str = eqx.field(static=True)
    """The name of the block type in ggml, a key of `BLOCKS`."""
    narrow: bool = eqx.field(static=True, default=False)
    """True if `row` and `dense` round to bfloat16, as part of a bfloat16 model; products never round the weights."""
    bias: Float[Array, "*stack out_features"] | None = None
    rounding: Rounding | None = eqx.field(static=True, default=None)
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def init(like: Linear, *, key: PRNGKeyArray, std: float, block: str = "Q4_0") -> "GgufBlocks":
        """Random codes under equal scales. Raises ValueError if the columns are no multiple of the block."""
        inner, own = like.shape[-1], BLOCKS[block]
        if inner % own.columns:
            raise ValueError(f"found {inner} columns; expected a multiple of the block of {block}, {own.columns}")
        narrow = like.dtype == jnp.bfloat16
        return GgufBlocks(
            weight=_drawn(key, like.shape, block, std), block=block, narrow=narrow, bias=like.bias, axes=like.axes
        )

    def encode(self, numbers: Float32[np.ndarray, "rows columns"], dtype: np.dtype) -> NoReturn:
        """Raises TypeError, since ling3 reads these types and does not write them."""
        raise TypeError(f"ling3 does not quantize to {self.block}; convert the checkpoint with llama.cpp")

    @property
    def unsaved(self) -> str | None:
        """The reason: safetensors files have no such blocks."""
        return "is in blocks of a GGUF file, which safetensors files do not have"

    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that one element describes: the blocks of a row are kept together."""
        return (1, None) if field == "weight" else (1, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*stack, out, in] of the matrix."""
        *rest, size = self.weight.shape
        own = BLOCKS[self.block]
        return (*rest, size // own.bytes * own.columns)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of `row` and `dense`: bfloat16 if `narrow`, else float32, which holds all numbers exactly."""
        return jnp.dtype(jnp.bfloat16 if self.narrow else jnp.float32)

    @property
    def largest(self) -> float:
        """The number 1, since no separate tensor has the scales."""
        return 1.0

    @property
    def arrays(self) -> tuple[UInt8[Array, "*stack outer bytes"], UInt8[Array, "*stack outer 0"]]:
        """The blocks, and an empty array, since they contain the scales."""
        return self.weight, self.weight[..., :0]

    @property
    def layout(self) -> str:
        """The name of the block type."""
        return self.block

    def decoded(self) -> Float32[Array, "*stack outer inner"]:
        """Decodes all its numbers to float32."""
        return self._numbers(self.weight)

    def rows(self, index: Int[Array, "*batch"]) -> Float32[Array, "*batch inner"]:
        """W[index], for indices in any shape."""
        return self._numbers(self.weight[index])

    def in_model(self, dtype: DTypeLike) -> "GgufBlocks":
        """The same matrix; in a bfloat16 model its rows are rounded to bfloat16 (`narrow`)."""
        return dataclasses.replace(self, narrow=dtype == jnp.bfloat16)

    def cut(self, start: Int32[Array, ""], size: int) -> "GgufBlocks":
        """`size` rows of W from `start` on."""
        return self._with_rows(start, size, "weight")

    def _numbers(self, rows: UInt8[Array, "*batch bytes"]) -> Float32[Array, "*batch inner"]:
        blocks = rows.reshape(*rows.shape[:-1], -1, BLOCKS[self.block].bytes)
        return BLOCKS[self.block].decode(blocks).reshape(*rows.shape[:-1], self.shape[-1])


def q4_0(block: UInt8[Array, "*batch 18"]) -> Float32[Array, "*batch 32"]:
    """Decodes scale · (code - 8)."""
    return _half(block, 0) * (_floats(_nibbles(block[..., 2:])) - 8)


def q4_1(block: UInt8[Array, "*batch 20"]) -> Float32[Array, "*batch 32"]:
    """Decodes scale · code + minimum, with codes of four bits."""
    return _half(block, 0) * _floats(_nibbles(block[..., 4:])) + _half(block, 2)


def q5_0(block: UInt8[Array, "*batch 22"]) -> Float32[Array, "*batch 32"]:
    """Decodes scale · (code - 16), with the fifth bits of all codes in four bytes."""
    return _half(block, 0) * (_floats(_nibbles(block[..., 6:]) | _bits(block[..., 2:6]) << 4) - 16)


def q5_1(block: UInt8[Array, "*batch 24"]) -> Float32[Array, "*batch 32"]:
    """Decodes scale · code + minimum, with codes of five bits."""
    codes = _nibbles(block[..., 8:]) | _bits(block[..., 4:8]) << 4
    return _half(block, 0) * _floats(codes) + _half(block, 2)


def q8_0(block: UInt8[Array, "*batch 34"]) -> Float32[Array, "*batch 32"]:
    """Decodes scale · code, with signed bytes as codes."""
    return _half(block, 0) * _floats(lax.bitcast_convert_type(block[..., 2:], jnp.int8))


def q4_k(block: UInt8[Array, "*batch 144"]) -> Float32[Array, "*batch 256"]:
    """Decodes scale · code - minimum; each 32 columns have a scale and a minimum of six bits."""
    return _in_units(block, _halves(block[..., 16:], 32))


def q5_k(block: UInt8[Array, "*batch 176"]) -> Float32[Array, "*batch 256"]:
    """Decodes scale · code - minimum; bit u of byte i is the fifth bit of code i of unit u."""
    fifth = jnp.stack([block[..., 16:48] >> unit & 1 for unit in range(8)], axis=-2)
    return _in_units(block, _halves(block[..., 48:], 32) | fifth << 4)


def q6_k(block: UInt8[Array, "*batch 210"]) -> Float32[Array, "*batch 256"]:
    """Decodes scale · (code - 32); each 16 columns have a scale of eight bits."""
    pairs = block[..., 128:192].reshape(*block.shape[:-1], 2, 32)
    upper = jnp.stack([pairs >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    lower = _halves(block[..., :128], 64).reshape(*block.shape[:-1], 2, 4, 32)
    codes = _floats(lower | upper << 4).reshape(*block.shape[:-1], 16, 16) - 32
    scales = _half(block, 208) * _floats(lax.bitcast_convert_type(block[..., 192:208], jnp.int8))
    return (scales[..., None] * codes).reshape(*block.shape[:-1], 256)


def iq4_nl(block: UInt8[Array, "*batch 18"]) -> Float32[Array, "*batch 32"]:
    """Decodes scale · level of the code."""
    return _half(block, 0) * jnp.asarray(IQ4_NL, jnp.float32)[_nibbles(block[..., 2:])]


def mxfp4(block: UInt8[Array, "*batch 17"]) -> Float32[Array, "*batch 32"]:
    """Decodes 2^(exponent - 128) · the doubled number of E2M1. The power of two may be subnormal."""
    exponent, codes = block[..., :1].astype(jnp.int32), _nibbles(block[..., 1:]).astype(jnp.int32)
    power = lax.bitcast_convert_type((jnp.maximum(exponent, 2) - 1) << 23, jnp.float32)
    small = np.multiply.outer(np.ldexp(1.0, [-128, -127]), E2M1).astype(np.float32)  # XLA may flush their factors
    bits = jnp.asarray(small.reshape(-1).view(np.int32))[jnp.minimum(exponent, 1) * 16 + codes]
    return jnp.where(
        exponent < 2, lax.bitcast_convert_type(bits, jnp.float32), power * jnp.asarray(E2M1, jnp.float32)[codes]
    )


BLOCKS: Mapping[str, BlockType] = {
    "Q4_0": BlockType(32, 18, q4_0, 4.64, {0: 1}),
    "Q4_1": BlockType(32, 20, q4_1, 4.61, {0: 1, 2: -7.5}),
    "Q5_0": BlockType(32, 22, q5_0, 9.25, {0: 1}),
    "Q5_1": BlockType(32, 24, q5_1, 9.23, {0: 1, 2: -15.5}),
    "Q8_0": BlockType(32, 34, q8_0, 73.9, {0: 1}),
    "Q4_K": BlockType(256, 144, q4_k, 258, {0: 1, 2: 7.5}),
    "Q5_K": BlockType(256, 176, q5_k, 527, {0: 1, 2: 15.5}),
    "Q6_K": BlockType(256, 210, q6_k, 1366, {208: 1}),
    "IQ4_NL": BlockType(32, 18, iq4_nl, 67.4, {0: 1}),
    "MXFP4": BlockType(32, 17, mxfp4, 2.93, {}),
}
"""The block types by their names in ggml."""


def _half(block: UInt8[Array, "*batch bytes"], place: int) -> Float32[Array, "*batch 1"]:
    """The float16 at this byte."""
    return lax.bitcast_convert_type(block[..., place : place + 2], jnp.float16).astype(jnp.float32)[..., None]


def _floats(codes: Integer[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return codes.astype(jnp.float32)


def _nibbles(packed: UInt8[Array, "*batch bytes"]) -> UInt8[Array, "*batch 2*bytes"]:
    """The lower four bits of all bytes, then the upper."""
    return jnp.concatenate([packed & 15, packed >> 4], axis=-1)


def _halves(packed: UInt8[Array, "*batch bytes"], size: int) -> UInt8[Array, "*batch units size"]:
    """The nibbles of each `size` bytes."""
    return _nibbles(packed.reshape(*packed.shape[:-1], -1, size)).reshape(*packed.shape[:-1], -1, size)


def _bits(packed: UInt8[Array, "*batch bytes"]) -> UInt8[Array, "*batch 8*bytes"]:
    """The bits of bytes, the lowest first."""
    return jnp.stack([packed >> i & 1 for i in range(8)], axis=-1).reshape(*packed.shape[:-1], -1)


def _in_units(block: UInt8[Array, "*batch bytes"], codes: UInt8[Array, "*batch 8 32"]) -> Float32[Array, "*batch 256"]:
    """The numbers of Q4_K and Q5_K. Units 4 to 7 have the two upper bits of their scales beside those of 0 to 3."""
    scale, minimum, rest = block[..., 4:8], block[..., 8:12], block[..., 12:16]
    scales = jnp.concatenate([scale & 63, rest & 15 | scale >> 2 & 48], axis=-1)
    minima = jnp.concatenate([minimum & 63, rest >> 4 | minimum >> 2 & 48], axis=-1)
    wide, least = _half(block, 0) * _floats(scales), _half(block, 2) * _floats(minima)
    return (wide[..., None] * _floats(codes) - least[..., None]).reshape(*block.shape[:-1], 256)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key: PRNGKeyArray, shape: tuple[int, ...], block: str, std: float) -> UInt8[Array, "*stack rows bytes"]:
    """Random codes under equal scales, for a matrix of this shape. Traced once for all matrices of one shape."""
    (*rest, inner), own = shape, BLOCKS[block]
    blocks = jax.random.bits(key, (*rest, inner // own.columns, own.bytes), jnp.uint8)
    scale = std / own.rms
    for place, value in own.scales.items():
        stored = np.frombuffer(np.float16(value * scale).tobytes(), np.uint8)
        blocks = blocks.at[..., place : place + 2].set(stored)
    if not own.scales:
        blocks = blocks.at[..., 0].set(min(254, max(0, 127 + round(float(np.log2(scale))))))
    return blocks.reshape(*rest, inner // own.columns * own.bytes)
