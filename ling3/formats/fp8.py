"""FP8: E4M3 with a scale for each block of 128 × 128, as published by DeepSeek-V3, Qwen3 and Ling-3.

W = weight · scale of its block, multiplied in float32 (DeepSeek-V3, arXiv 2412.19437, §3.3).
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import AbstractDtype, Array, Float, Float8e4m3fn, Float32, Int, Int32, PRNGKeyArray, Shaped

from ling3.formats.matrix import QuantizedMatrix, along, exponents, power_of_two, rows_of
from ling3.layers.linear import Linear
from ling3.ops.rounding import Rounding

if TYPE_CHECKING:
    from typing import Annotated as BlockScale
else:

    class BlockScale(AbstractDtype):
        """`BlockScale[Array, "..."]`: float32, bfloat16, or powers of two in a byte."""

        dtypes = ("float32", "bfloat16", "float8_e8m0fnu")


BLOCK = 128
"""Rows and columns that share a scale."""
MOST = 448.0
"""The largest finite number of E4M3."""
READABLE = {
    "weight_block_size": ([BLOCK, BLOCK],),
    "activation_scheme": ("dynamic", None),
    "fmt": ("e4m3", None),
    "scale_fmt": ("ue8m0", "float", None),
    "expert_dtype": ("fp8", "fp4", None),
}
"""The values that ling3 reads for fields of a `quantization_config`."""
WRITTEN = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
"""The values that `quantize` writes."""


class Fp8(QuantizedMatrix):
    """A matrix in FP8: `weight` is E4M3, with numbers up to ±448, NaN, and no infinities."""

    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight": ("F8_E4M3",),
        "weight_scale_inv": ("F32", "BF16", "F8_E8M0"),
    }
    weight: Float8e4m3fn[Array, "*stack out_features in_features"]
    weight_scale_inv: BlockScale[Array, "*stack blocks columns"]
    """A multiplier for each block, despite the suffix `_inv`."""
    bias: Float[Array, "*stack out_features"] | None = None
    rounding: Rounding | None = eqx.field(static=True, default=None)
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def init(like: Linear, *, key: PRNGKeyArray, std: float, powers: bool = False) -> "Fp8":
        """Uniform random numbers; with `powers`, the scales are powers of two (E8M0)."""
        *stack, outer, inner = like.shape
        codes = jax.random.uniform(key, like.shape, jnp.float32, -MOST, MOST).astype(jnp.float8_e4m3fn)
        blocks, scale = (*stack, -(-outer // BLOCK), -(-inner // BLOCK)), std * 3**0.5 / MOST
        full = jnp.full(blocks, scale, jnp.float32)
        if powers:
            full = lax.bitcast_convert_type(exponents(blocks, scale), jnp.float8_e8m0fnu)
        return Fp8(weight=codes, weight_scale_inv=full, bias=like.bias, axes=like.axes)

    def encode(
        self, numbers: Float32[np.ndarray, "rows columns"], dtype: np.dtype
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        """The numbers in E4M3, and the scale amax / 448 of each block, by field."""
        return dict(zip(self.STORED, encoded(numbers), strict=True))

    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that one element of this tensor describes."""
        return (BLOCK, BLOCK) if field == "weight_scale_inv" else (1, 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*stack, out, in] of the matrix."""
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of its decoded numbers, float32."""
        return jnp.dtype(jnp.float32)

    @property
    def largest(self) -> float:
        """The largest finite number of E4M3, 448."""
        return MOST

    @property
    def step(self) -> int:
        """Rows and columns of a block, 128."""
        return BLOCK

    @property
    def arrays(self) -> tuple[Float8e4m3fn[Array, "*stack outer inner"], BlockScale[Array, "*stack blocks columns"]]:
        """The E4M3 numbers, and the scales in float32 or E8M0."""
        narrow = self.weight_scale_inv.dtype == jnp.bfloat16
        return self.weight, self._scale if narrow else self.weight_scale_inv

    def decoded(self) -> Float32[Array, "*stack outer inner"]:
        """Decodes all its numbers to float32."""
        outer, inner = self.shape[-2:]
        scale = jnp.repeat(self._scale, BLOCK, axis=-2)[..., :outer, :]
        return self.weight.astype(jnp.float32) * along(scale, BLOCK, inner)

    def rows(self, index: Int[Array, "*batch"]) -> Float32[Array, "*batch inner"]:
        """W[index], for indices in any shape."""
        bits = lax.bitcast_convert_type(self.weight, jnp.uint8)[index]  # XLA would convert all of an FP8 array first
        numbers = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
        return numbers * along(self._scale[index // BLOCK], BLOCK, self.shape[-1])

    def cut(self, start: Int32[Array, ""], size: int) -> "Fp8":
        """`size` rows of W from `start` on, which must be a multiple of 128."""
        scale = rows_of(self.weight_scale_inv, start // BLOCK, -(-size // BLOCK))
        return dataclasses.replace(self, weight=rows_of(self.weight, start, size), weight_scale_inv=scale, bias=None)

    @property
    def _scale(self) -> Float32[Array, "*stack blocks columns"]:
        if self.weight_scale_inv.dtype == jnp.float8_e8m0fnu:
            return power_of_two(lax.bitcast_convert_type(self.weight_scale_inv, jnp.uint8))
        return self.weight_scale_inv.astype(jnp.float32)


def encoded(
    numbers: Float32[np.ndarray, "rows columns"],
) -> tuple[Shaped[np.ndarray, "rows columns"], Float32[np.ndarray, "blocks across"]]:
    """The numbers in E4M3, and the scale of each block: amax / 448, or 1 for a block of zeros."""
    rows, columns = numbers.shape
    whole = np.pad(numbers, ((0, -rows % BLOCK), (0, -columns % BLOCK)))
    blocks = whole.reshape(whole.shape[0] // BLOCK, BLOCK, whole.shape[1] // BLOCK, BLOCK)
    scale = np.abs(blocks).max(axis=(1, 3)) / np.float32(MOST)
    scale = np.where(scale == 0, np.float32(1), scale)
    codes = np.clip(blocks / scale[:, None, :, None], -MOST, MOST).reshape(whole.shape)[:rows, :columns]
    return codes.astype(ml_dtypes.float8_e4m3fn), scale
