"""MXFP4: pairs of E2M1 in a byte, an exponent for 32 neighbours in a row; in compressed-tensors' or DeepSeek's layout.

W = e2m1 · 2^(scale - 127), exact (OCP Microscaling Formats v1.0, §5.3.3). The numbers of E2M1 are ±0, 0.5, 1, 1.5, 2,
3, 4 and 6. The even column of a pair is in the low four bits of the byte.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import AbstractDtype, Array, Float, Float32, Int, Int8, Int32, PRNGKeyArray, Shaped, UInt8

from ling3.formats.compressed_tensors import CompressedTensors
from ling3.formats.matrix import QuantizedMatrix, along, exponents, power_of_two
from ling3.layers.linear import Linear
from ling3.ops.rounding import Rounding

if TYPE_CHECKING:
    from typing import Annotated as PowersOfTwo
else:

    class PowersOfTwo(AbstractDtype):
        """`PowersOfTwo[Array, "..."]`: exponents, one in a byte (E8M0)."""

        dtypes = ("float8_e8m0fnu",)


GROUP = 32
"""Neighbours in a row that share an exponent."""
MOST = 6.0
"""The largest number of E2M1."""
_RMS = (sum(x * x for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8) ** 0.5
"""The root mean square of all sixteen codes."""


class FourBits(QuantizedMatrix):
    """The common part of both layouts, which differ in the names and dtypes of their two tensors."""

    @property
    @abstractmethod
    def arrays(self) -> tuple[UInt8[Array, "*stack outer bytes"], UInt8[Array, "*stack outer groups"]]:
        """The arrays of packed pairs and of exponents."""

    def encode(
        self, numbers: Float32[np.ndarray, "rows columns"], dtype: np.dtype
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        """The packed pairs, and the exponent floor(log2 amax) - 2 of each group, by field."""
        return dict(zip(self.STORED, encoded(numbers), strict=True))

    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that one element of this tensor describes."""
        return dict(zip(self.STORED, ((1, 2), (1, GROUP)), strict=True)).get(field, (1, 1))

    @property
    def largest(self) -> float:
        """The largest number of E2M1, 6."""
        return MOST

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*stack, out, in] of the matrix."""
        packed: tuple[int, ...] = getattr(self, next(iter(self.STORED))).shape
        return (*packed[:-1], 2 * packed[-1])

    @property
    def dtype(self) -> jnp.dtype:
        """bfloat16, which represents every E2M1 number times a power of two exactly."""
        return jnp.dtype(jnp.bfloat16)

    def decoded(self) -> Float32[Array, "*stack outer inner"]:
        """Decodes all its numbers to float32."""
        return numbers_of(*self.arrays)

    def rows(self, index: Int[Array, "*batch"]) -> Float32[Array, "*batch inner"]:
        """W[index], for indices in any shape."""
        return numbers_of(*(array[index] for array in self.arrays))

    def cut(self, start: Int32[Array, ""], size: int) -> "FourBits":
        """`size` rows of W from `start` on."""
        return self._with_rows(start, size, *self.STORED)


class Mxfp4(FourBits, CompressedTensors):
    """MXFP4 in the layout of compressed-tensors."""

    FORMAT: ClassVar[str] = "mxfp4-pack-quantized"
    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight_packed": ("U8",), "weight_scale": ("U8",)}
    weight_packed: UInt8[Array, "*stack out_features bytes"]
    weight_scale: UInt8[Array, "*stack out_features groups"]
    bias: Float[Array, "*stack out_features"] | None = None
    rounding: Rounding | None = eqx.field(static=True, default=None)
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @classmethod
    def readable(cls, weights: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """The values that ling3 reads: E2M1 in groups of 32."""
        del weights
        own = {"num_bits": (4,), "type": ("float",), "strategy": ("group",), "group_size": (GROUP,)}
        return own | {"scale_dtype": ("torch.uint8", "uint8", None)}

    @classmethod
    def weights(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The `weights` fields of this format."""
        del options
        return {"num_bits": 4, "type": "float", "group_size": GROUP, "scale_dtype": "torch.uint8"}

    @staticmethod
    def init(like: Linear, *, key: PRNGKeyArray, std: float) -> "Mxfp4":
        """Random pairs. ValueError if the columns are no multiple of 32."""
        packed, scale = _random(key, like.shape, std)
        return Mxfp4(weight_packed=packed, weight_scale=scale, bias=like.bias, axes=like.axes)

    @property
    def arrays(self) -> tuple[UInt8[Array, "*stack outer bytes"], UInt8[Array, "*stack outer groups"]]:
        """The arrays of packed pairs and of exponents."""
        return self.weight_packed, self.weight_scale


class Fp4(FourBits):
    """DeepSeek's layout, for FP8 checkpoints whose experts have four bits (`expert_dtype: fp4`)."""

    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("I8",), "weight_scale_inv": ("F8_E8M0",)}
    weight: Int8[Array, "*stack out_features bytes"]
    weight_scale_inv: PowersOfTwo[Array, "*stack out_features groups"]
    bias: Float[Array, "*stack out_features"] | None = None
    rounding: Rounding | None = eqx.field(static=True, default=None)
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def init(like: Linear, *, key: PRNGKeyArray, std: float) -> "Fp4":
        """Random pairs. ValueError if the columns are no multiple of 32."""
        packed, scale = _random(key, like.shape, std)
        weight, powers = (lax.bitcast_convert_type(x, t) for x, t in ((packed, jnp.int8), (scale, jnp.float8_e8m0fnu)))
        return Fp4(weight=weight, weight_scale_inv=powers, bias=like.bias, axes=like.axes)

    @property
    def arrays(self) -> tuple[UInt8[Array, "*stack outer bytes"], UInt8[Array, "*stack outer groups"]]:
        """The arrays of packed pairs and of exponents."""
        packed, scale = (lax.bitcast_convert_type(own, jnp.uint8) for own in (self.weight, self.weight_scale_inv))
        return packed, scale


def numbers_of(
    packed: UInt8[Array, "*batch bytes"], scale: UInt8[Array, "*batch groups"]
) -> Float32[Array, "*batch inner"]:
    """Decodes pairs of E2M1 and their exponents to float32."""
    codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1).astype(jnp.int32)
    exponent = codes >> 1 & 3
    normal = (exponent + 126) << 23 | (codes & 1) << 22  # 2^(exponent - 1) · (1 + mantissa / 2)
    subnormal = (codes & 1) * (126 << 23)  # 0 or 0.5
    bits = jnp.where(exponent > 0, normal, subnormal) | (codes & 8) << 28
    return lax.bitcast_convert_type(bits, jnp.float32) * along(power_of_two(scale), GROUP, codes.shape[-1])


def encoded(
    numbers: Float32[np.ndarray, "rows columns"],
) -> tuple[Shaped[np.ndarray, "rows bytes"], Shaped[np.ndarray, "rows groups"]]:
    """Pairs of E2M1, and the exponent e = floor(log2 amax) - 2 of each group: amax / 2^e is in [4, 8), clipped to 6."""
    groups = numbers.reshape(numbers.shape[0], -1, GROUP)
    amax = np.abs(groups).max(axis=-1)
    exponent = np.where(amax > 0, np.clip(np.frexp(amax)[1] - 1 - 2, -127, 127), -127)
    scaled = np.ldexp(groups, -exponent[..., None]).astype(np.float32)
    codes = np.clip(scaled, -MOST, MOST).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    pairs = codes.reshape(numbers.shape[0], -1, 2)
    return pairs[..., 0] | pairs[..., 1] << 4, (exponent + 127).astype(np.uint8)


def _random(
    key: PRNGKeyArray, shape: tuple[int, ...], std: float
) -> tuple[UInt8[Array, "*stack rows bytes"], UInt8[Array, "*stack rows groups"]]:
    """Random pairs of E2M1, and their exponents."""
    (*rest, inner), scale = shape, std / _RMS
    if inner % GROUP:
        raise ValueError(f"found {inner} columns; expected a multiple of the group size, {GROUP}")
    return jax.random.bits(key, (*rest, inner // 2), jnp.uint8), exponents((*rest, inner // GROUP), scale)
