"""Integers of 4 or 8 bits with a scale for each group: compressed-tensors' `pack-quantized`, symmetric.

W = q · scale of its group, rounded to the scale's dtype. q is stored as q + 2^(bits-1) in 32-bit words, the first
column in the lowest bits. A group is a number of neighbouring columns of a row, which share a scale.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Float32, Int, Int32, PRNGKeyArray, Shaped

from ling3.formats.compressed_tensors import CompressedTensors
from ling3.formats.matrix import along
from ling3.layers.linear import Linear

GROUPS = (32, 128)
"""The group sizes that ling3 reads."""


class PackedIntegers(CompressedTensors):
    """A matrix of packed integers, with a scale for each group or row."""

    FORMAT: ClassVar[str] = "pack-quantized"
    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight_packed": ("I32",),
        "weight_scale": ("BF16", "F16", "F32"),
        "weight_shape": ("I64", "I32"),
    }
    weight_packed: Int32[Array, "*stack out_features words"]
    weight_scale: Float[Array, "*stack out_features groups"]
    weight_shape: Int32[Array, "*stack 2"]
    """[out, in], for other programs; `load` checks it."""
    bits: int = eqx.field(static=True)
    padding: int = eqx.field(static=True, default=0)
    """The number of unused places in the last word of each row."""
    wide: bool = eqx.field(static=True, default=False)
    """True if decoded numbers stay in float32, False if they are rounded to the dtype of the scales.

    As in transformers, this depends on the dtype of the model.
    """
    bias: Float[Array, "*stack out_features"] | None = None
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def readable(weights: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """The values that ling3 reads: integers in groups, or with a scale for each row."""
        return {
            "num_bits": (4, 8),
            "type": ("int",),
            "strategy": ("group", "channel"),
            "group_size": (None, -1) if weights.get("strategy") == "channel" else GROUPS,
            "scale_dtype": (None,),
        }

    @staticmethod
    def options(weights: Mapping[str, Any]) -> dict[str, Any]:
        """The number of bits, and the group size, which is None for one scale per row."""
        group = None if weights["strategy"] == "channel" else weights["group_size"]
        return {"bits": weights["num_bits"], "group": group}

    @staticmethod
    def weights(options: Mapping[str, Any]) -> dict[str, Any]:
        """The `weights` fields for integers in groups."""
        return {"num_bits": options["bits"], "type": "int", "group_size": options["group"]}

    @staticmethod
    def init(
        like: Linear, *, key: PRNGKeyArray, std: float, bits: int = 4, group: int | None = None
    ) -> "PackedIntegers":
        """Uniform random integers; without a `group`, each row has one scale.

        Raises ValueError if the columns do not divide into groups.
        """
        (*stack, outer, inner), per = like.shape, 32 // bits
        if group is not None and inner % group:
            raise ValueError(f"found {inner} columns; expected a multiple of the group size, {group}")
        words, scale = -(-inner // per), std * 12**0.5 / 2**bits
        return PackedIntegers(
            weight_packed=lax.bitcast_convert_type(jax.random.bits(key, (*stack, outer, words), jnp.uint32), jnp.int32),
            weight_scale=jnp.full((*stack, outer, 1 if group is None else inner // group), scale, jnp.bfloat16),
            weight_shape=jnp.broadcast_to(jnp.asarray([outer, inner], jnp.int32), (*stack, 2)),
            bits=bits,
            padding=words * per - inner,
            wide=like.dtype == jnp.float32,
            bias=like.bias,
            axes=like.axes,
        )

    def encode(
        self, numbers: Float32[np.ndarray, "rows columns"], dtype: np.dtype
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        """The packed words, and the scale amax / (2^(bits-1) - 1/2) of each group in `dtype`, by field."""
        return dict(zip(self.STORED, encoded(numbers, self.bits, self._group, dtype), strict=False))

    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that one element of this tensor describes; None for all of them."""
        whole_rows = self.weight_scale.shape[-1] == 1
        steps = {"weight_packed": (1, 32 // self.bits), "weight_shape": (None, None)}
        steps["weight_scale"] = (1, None if whole_rows else self._group)
        return steps.get(field, (1, 1))

    @property
    def largest(self) -> float:
        """The largest magnitude of an integer: 8, or 128 for 8 bits."""
        return 2.0 ** (self.bits - 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*stack, out, in] of the matrix."""
        return (*self.weight_packed.shape[:-1], self.weight_packed.shape[-1] * (32 // self.bits) - self.padding)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of decoded numbers: float32 if `wide`, else that of the scales."""
        return jnp.dtype(jnp.float32) if self.wide else self.weight_scale.dtype

    @property
    def arrays(self) -> tuple[Int32[Array, "*stack outer words"], Float[Array, "*stack outer groups"]]:
        """The packed words, and the scales in `dtype`."""
        return self.weight_packed, self.weight_scale.astype(self.dtype)

    def decoded(self) -> Float32[Array, "*stack outer inner"]:
        """Decodes all its numbers to float32."""
        return self._numbers(self.weight_packed, self.weight_scale)

    def rows(self, index: Int[Array, "*batch"]) -> Float32[Array, "*batch inner"]:
        """W[index], for indices in any shape."""
        return self._numbers(self.weight_packed[index], self.weight_scale[index])

    def in_model(self, dtype: DTypeLike) -> "PackedIntegers":
        """The same matrix; in a float32 model it is decoded without rounding to the scales' dtype (`wide`)."""
        return dataclasses.replace(self, wide=True) if dtype == jnp.float32 else self

    def cut(self, start: Int32[Array, ""], size: int) -> "PackedIntegers":
        """`size` rows of W from `start` on."""
        return self._with_rows(start, size, "weight_packed", "weight_scale")

    @property
    def _group(self) -> int:
        return self.shape[-1] // self.weight_scale.shape[-1]

    def _numbers(
        self, packed: Int32[Array, "*batch words"], scale: Float[Array, "*batch groups"]
    ) -> Float32[Array, "*batch inner"]:
        shifts = jnp.arange(0, 32, self.bits, dtype=jnp.int32).reshape((1,) * packed.ndim + (-1,))
        codes = lax.shift_right_logical(*jnp.broadcast_arrays(packed[..., None], shifts)) & (2**self.bits - 1)
        q = codes.reshape(*packed.shape[:-1], -1)[..., : self.shape[-1]] - 2 ** (self.bits - 1)
        wide_scale = along(scale.astype(jnp.float32), self._group, self.shape[-1])
        return _rounded(q.astype(jnp.float32) * wide_scale, self.dtype)


def encoded(
    numbers: Float32[np.ndarray, "rows columns"], bits: int, group: int, dtype: np.dtype
) -> tuple[Shaped[np.ndarray, "rows words"], Shaped[np.ndarray, "rows groups"]]:
    """The words of q + 2^(bits-1), and the scale of each group in `dtype`."""
    (rows, columns), per, half = numbers.shape, 32 // bits, 2 ** (bits - 1)
    groups = numbers.reshape(rows, -1, group)
    scale = (np.abs(groups).max(axis=-1) / np.float32(half - 0.5)).astype(dtype)
    scale = np.where(scale == 0, ml_dtypes.finfo(dtype).eps, scale).astype(dtype)
    q = np.clip(np.rint(groups / scale.astype(np.float32)[..., None]), -half, half - 1).reshape(rows, columns)
    codes = np.pad((q + half).astype(np.uint32), ((0, 0), (0, -columns % per))).reshape(rows, -1, per)
    return np.bitwise_or.reduce(codes << np.arange(0, 32, bits, dtype=np.uint32), axis=-1).view(np.int32), scale


def _rounded(numbers: Float32[Array, "..."], dtype: jnp.dtype) -> Float32[Array, "..."]:
    """The numbers rounded to `dtype`. XLA may remove a cast to it and back, but not these operations."""
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(numbers, exponent_bits=8, mantissa_bits=7)
    if dtype == jnp.float16:  # reduce_precision would flush its subnormal numbers to zero
        return lax.optimization_barrier(numbers.astype(jnp.float16)).astype(jnp.float32)
    return numbers
