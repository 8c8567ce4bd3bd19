"""INT8 and FP8 with one scale for each row: compressed-tensors' `int-quantized` and `float-quantized`.

W = number · scale of its row, rounded to the scale's dtype. Published checkpoints in these formats want activations in
the same 8 bits, which ling3 does only on request (`Rounding`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float8e4m3fn, Float32, Int, Int8, Int32, PRNGKeyArray, Shaped

from ling3.formats.compressed_tensors import CompressedTensors
from ling3.formats.fp8 import MOST
from ling3.formats.matrix import rounded
from ling3.layers.linear import Linear
from ling3.ops.rounding import Rounding

_Own = TypeVar("_Own", bound="Channels")


class Channels(CompressedTensors):
    """A matrix of numbers in 8 bits, with a scale for each row."""

    TYPE: ClassVar[str]
    """The name of the numbers' type in a config: `int` or `float`."""
    LARGEST: ClassVar[float]
    weight: eqx.AbstractVar[Array]
    weight_scale: eqx.AbstractVar[Array]
    wide: eqx.AbstractVar[bool]
    """True if decoded numbers stay in float32, False if they are rounded to the dtype of the scales, which depends on
    the dtype of the model, as in transformers."""

    @classmethod
    def readable(cls, weights: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """The values that ling3 reads: symmetric numbers of 8 bits with a scale for each row."""
        del weights
        return {
            "num_bits": (8,),
            "type": (cls.TYPE,),
            "strategy": ("channel",),
            "group_size": (None, -1),
            "scale_dtype": (None,),
        }

    @classmethod
    def weights(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The `weights` fields of a config group."""
        del options
        return {"num_bits": 8, "type": cls.TYPE, "group_size": None, "strategy": "channel"}

    def encode(self, numbers: Float32[np.ndarray, "rows columns"], dtype: np.dtype) -> NoReturn:
        """Raises TypeError, since ling3 reads these formats and does not write them."""
        raise TypeError(f"ling3 does not quantize to {self.FORMAT}; use llm-compressor")

    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that one element of this tensor describes; None for all of them."""
        return (1, None) if field == "weight_scale" else (1, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*stack, out, in] of the matrix."""
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of decoded numbers: float32 if `wide`, else that of the scales."""
        return jnp.dtype(jnp.float32) if self.wide else self.weight_scale.dtype

    @property
    def largest(self) -> float:
        """The largest magnitude of a stored number: 128, or 448 for FP8."""
        return self.LARGEST

    @property
    def arrays(self) -> tuple[Shaped[Array, "*stack outer inner"], Float[Array, "*stack outer 1"]]:
        """The numbers, and the scales in `dtype`."""
        return self.weight, self.weight_scale.astype(self.dtype)

    @property
    def layout(self) -> str:
        """The name of this layout, since FP8 has blocks too."""
        return "channels"

    def decoded(self) -> Float32[Array, "*stack outer inner"]:
        """Decodes all its numbers to float32."""
        return rounded(self.weight.astype(jnp.float32) * self.weight_scale.astype(jnp.float32), self.dtype)

    def rows(self, index: Int[Array, "*batch"]) -> Float32[Array, "*batch inner"]:
        """W[index], for indices in any shape."""
        bits = lax.bitcast_convert_type(self.weight, jnp.uint8)[index]  # XLA would convert all of an FP8 array first
        own = lax.bitcast_convert_type(bits, self.weight.dtype).astype(jnp.float32)
        return rounded(own * self.weight_scale[index].astype(jnp.float32), self.dtype)

    def in_model(self: _Own, dtype: DTypeLike) -> _Own:
        """The same matrix; in a float32 model it is decoded without rounding to the scales' dtype (`wide`)."""
        return dataclasses.replace(self, wide=True) if dtype == jnp.float32 else self

    def cut(self: _Own, start: Int32[Array, ""], size: int) -> _Own:
        """`size` rows of W from `start` on."""
        return self._with_rows(start, size, "weight", "weight_scale")


class Int8Channels(Channels):
    """A matrix in INT8, with a scale for each row: format `int-quantized`."""

    FORMAT: ClassVar[str] = "int-quantized"
    TYPE: ClassVar[str] = "int"
    LARGEST: ClassVar[float] = 128.0
    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("I8",), "weight_scale": ("BF16", "F16", "F32")}
    weight: Int8[Array, "*stack out_features in_features"]
    weight_scale: Float[Array, "*stack out_features 1"]
    wide: bool = eqx.field(static=True, default=False)
    bias: Float[Array, "*stack out_features"] | None = None
    rounding: Rounding | None = eqx.field(static=True, default=None)
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def init(like: Linear, *, key: PRNGKeyArray, std: float) -> "Int8Channels":
        """Uniform random integers, with equal scales."""
        codes = lax.bitcast_convert_type(jax.random.bits(key, like.shape, jnp.uint8), jnp.int8)
        return Int8Channels(weight=codes, **_around(like, std * 12**0.5 / 256))


class Fp8Channels(Channels):
    """A matrix in E4M3, with a scale for each row: format `float-quantized`, often called FP8-dynamic."""

    FORMAT: ClassVar[str] = "float-quantized"
    TYPE: ClassVar[str] = "float"
    LARGEST: ClassVar[float] = MOST
    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("F8_E4M3",), "weight_scale": ("BF16", "F16", "F32")}
    weight: Float8e4m3fn[Array, "*stack out_features in_features"]
    weight_scale: Float[Array, "*stack out_features 1"]
    wide: bool = eqx.field(static=True, default=False)
    bias: Float[Array, "*stack out_features"] | None = None
    rounding: Rounding | None = eqx.field(static=True, default=None)
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def init(like: Linear, *, key: PRNGKeyArray, std: float) -> "Fp8Channels":
        """Uniform random numbers, with equal scales."""
        codes = jax.random.uniform(key, like.shape, jnp.float32, -MOST, MOST).astype(jnp.float8_e4m3fn)
        return Fp8Channels(weight=codes, **_around(like, std * 3**0.5 / MOST))


def _around(like: Linear, scale: float) -> dict[str, Any]:
    """The other fields of a matrix with the shape and bias of `like`, whose rows all have this scale."""
    scales = jnp.full((*like.shape[:-1], 1), scale, jnp.bfloat16)
    return {"weight_scale": scales, "wide": like.dtype == jnp.float32, "bias": like.bias, "axes": like.axes}
