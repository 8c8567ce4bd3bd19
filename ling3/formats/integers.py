"""Integers of 4 or 8 bits with a scale for each group: compressed-tensors' `pack-quantized`.

W = (q - zero) · scale of its group, rounded to the scale's dtype. q is stored as q + 2^(bits-1) in 32-bit words, the
first column in the lowest bits. A group is a number of columns of a row, which share a scale and a zero point: columns
that are neighbours, or with an activation order (`weight_g_idx`) any columns, the same ones in all rows. Symmetric
integers have no zero points. AWQ and GPTQ store the same numbers otherwise (`checkpoint/repacking.py`).
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
from ling3.formats.matrix import along, rounded, rows_of
from ling3.layers.linear import Linear
from ling3.ops.rounding import Rounding

GROUPS = (32, 64, 128)
"""The group sizes that ling3 reads."""
ORDERS = ("group", "dynamic")
"""The values of `actorder` for which files have a `weight_g_idx`."""


class PackedIntegers(CompressedTensors):
    """A matrix of packed integers, with a scale for each group or row, and a zero point unless it is symmetric."""

    FORMAT: ClassVar[str] = "pack-quantized"
    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight_packed": ("I32",),
        "weight_scale": ("BF16", "F16", "F32"),
        "weight_zero_point": ("I32",),
        "weight_g_idx": ("I32",),
        "weight_shape": ("I64", "I32"),
    }
    weight_packed: Int32[Array, "*stack out_features words"]
    weight_scale: Float[Array, "*stack out_features groups"]
    weight_shape: Int32[Array, "*stack 2"]
    """[out, in], for other programs; `load` checks it."""
    bits: int = eqx.field(static=True)
    weight_zero_point: Int32[Array, "*stack outer_words groups"] | None = None
    """The zero points, packed like the numbers along the rows of W; None if the matrix is symmetric."""
    weight_g_idx: Int32[Array, "*stack in_features"] | None = None
    """The activation order, in which the columns are sorted by group: packed column i is column `weight_g_idx[i]` of W.

    None if neighbours share a group. Files have the inverse: the group of each column, and columns in W's order.
    """
    padding: int = eqx.field(static=True, default=0)
    """The number of unused places in the last word of each row."""
    wide: bool = eqx.field(static=True, default=False)
    """True if decoded numbers stay in float32, False if they are rounded to the dtype of the scales.

    As in transformers, this depends on the dtype of the model.
    """
    bias: Float[Array, "*stack out_features"] | None = None
    rounding: Rounding | None = eqx.field(static=True, default=None)
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @classmethod
    def readable(cls, weights: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """The values that ling3 reads: integers in groups, or with a scale for each row."""
        return {
            "num_bits": (4, 8),
            "type": ("int",),
            "strategy": ("group", "channel"),
            "symmetric": (True, False),
            "group_size": (None, -1) if weights.get("strategy") == "channel" else GROUPS,
            # "weight" and "static" change only the order of calibration.
            "actorder": (None, False, "weight", "static", *(() if weights.get("strategy") == "channel" else ORDERS)),
            "scale_dtype": (None,),
        }

    @classmethod
    def options(cls, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The options of `init`; the group size is None for one scale per row."""
        group = None if weights["strategy"] == "channel" else weights["group_size"]
        options = {"bits": weights["num_bits"], "group": group}
        options |= {} if weights["symmetric"] else {"symmetric": False}
        return options | ({"ordered": True} if weights.get("actorder") in ORDERS else {})

    @classmethod
    def weights(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The `weights` fields of a config group for these options."""
        fields = {"num_bits": options["bits"], "type": "int", "group_size": options["group"]}
        if options["group"] is None:
            fields["strategy"] = "channel"
        if not options.get("symmetric", True):
            fields["symmetric"] = False
        return fields | ({"actorder": "group"} if options.get("ordered", False) else {})

    @staticmethod
    def init(
        like: Linear,
        *,
        key: PRNGKeyArray,
        std: float,
        bits: int = 4,
        group: int | None = None,
        symmetric: bool = True,
        ordered: bool = False,
    ) -> "PackedIntegers":
        """Uniform random integers; without a `group`, each row has one scale.

        Raises ValueError if the columns do not divide into groups.
        """
        (*stack, outer, inner), per = like.shape, 32 // bits
        if group is not None and inner % group:
            raise ValueError(f"found {inner} columns; expected a multiple of the group size, {group}")
        words, scale, groups = -(-inner // per), std * 12**0.5 / 2**bits, 1 if group is None else inner // group
        middle = sum(2 ** (bits - 1) << bits * i for i in range(per)) - 2**32
        zeros = None if symmetric else jnp.full((*stack, -(-outer // per), groups), middle, jnp.int32)
        order = jnp.broadcast_to(jnp.arange(inner, dtype=jnp.int32), (*stack, inner)) if ordered else None
        return PackedIntegers(
            weight_packed=lax.bitcast_convert_type(jax.random.bits(key, (*stack, outer, words), jnp.uint32), jnp.int32),
            weight_scale=jnp.full((*stack, outer, groups), scale, jnp.bfloat16),
            weight_shape=jnp.broadcast_to(jnp.asarray([outer, inner], jnp.int32), (*stack, 2)),
            weight_zero_point=zeros,
            weight_g_idx=order,
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

    @property
    def unsaved(self) -> str | None:
        """The reason if its columns are sorted by group, which they are not in files."""
        return None if self.weight_g_idx is None else "has an activation order, which ling3 reads and does not write"

    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that one element of this tensor describes; None for all of them."""
        per, ordered = 32 // self.bits, self.weight_g_idx is not None
        groups = None if ordered or self.weight_scale.shape[-1] == 1 else self._group
        return {
            "weight_packed": (1, None if ordered else per),
            "weight_scale": (1, groups),
            "weight_zero_point": (self.step, groups),
            "weight_g_idx": (None, None),
            "weight_shape": (None, None),
        }.get(field, (1, 1))

    @property
    def step(self) -> int:
        """The number of rows whose zero points share a word; 1 if the matrix is symmetric."""
        return 1 if self.weight_zero_point is None else 32 // self.bits

    @property
    def largest(self) -> float:
        """The largest magnitude of an integer minus its zero point: 8 or 15, or for 8 bits 128 or 255."""
        return 2.0 ** (self.bits - 1) if self.weight_zero_point is None else 2.0**self.bits - 1

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

    @property
    def zero_points(self) -> Int32[Array, "*stack outer_words groups"] | None:
        """The packed zero points; None if the matrix is symmetric."""
        return self.weight_zero_point

    @property
    def layout(self) -> str:
        """Names columns that are sorted by group, which kernels do not read; else empty."""
        return "" if self.weight_g_idx is None else "columns in an activation order"

    def sides(self, x: Float[Array, "*stack rows inner"]) -> tuple[Float[Array, "*stack rows inner"], "PackedIntegers"]:
        """x with its columns in the activation order, and the matrix without bias and in that order."""
        if self.weight_g_idx is None:
            return x, dataclasses.replace(self, bias=None)
        own = jnp.take_along_axis(x, self.weight_g_idx[..., None, :], axis=-1)
        return own, dataclasses.replace(self, bias=None, weight_g_idx=None)

    def decoded(self) -> Float32[Array, "*stack outer inner"]:
        """Decodes all its numbers to float32."""
        zeros = None
        if self.weight_zero_point is not None:
            per_word = jnp.moveaxis(self._codes(self.weight_zero_point), -1, -2)
            zeros = per_word.reshape(*per_word.shape[:-3], -1, per_word.shape[-1])[..., : self.shape[-2], :]
        return self._numbers(self.weight_packed, self.weight_scale, zeros)

    def rows(self, index: Int[Array, "*batch"]) -> Float32[Array, "*batch inner"]:
        """W[index], for indices in any shape."""
        zeros = None
        if self.weight_zero_point is not None:
            codes = self._codes(self.weight_zero_point[index // self.step])
            zeros = jnp.take_along_axis(codes, (index % self.step)[..., None, None], axis=-1)[..., 0]
        return self._numbers(self.weight_packed[index], self.weight_scale[index], zeros)

    def in_model(self, dtype: DTypeLike) -> "PackedIntegers":
        """The same matrix; in a float32 model it is decoded without rounding to the scales' dtype (`wide`)."""
        return dataclasses.replace(self, wide=True) if dtype == jnp.float32 else self

    def cut(self, start: Int32[Array, ""], size: int) -> "PackedIntegers":
        """`size` rows of W from `start` on, which must be a multiple of `step`."""
        own = self._with_rows(start, size, "weight_packed", "weight_scale")
        if self.weight_zero_point is None:
            return own
        zeros = rows_of(self.weight_zero_point, start // self.step, -(-size // self.step))
        return dataclasses.replace(own, weight_zero_point=zeros)

    @property
    def _group(self) -> int:
        return self.shape[-1] // self.weight_scale.shape[-1]

    def _codes(self, packed: Int32[Array, "*shape"]) -> Int32[Array, "*shape per_word"]:
        """The unsigned integers of each word, along a new last axis."""
        shifts = jnp.arange(0, 32, self.bits, dtype=jnp.int32).reshape((1,) * packed.ndim + (-1,))
        return lax.shift_right_logical(*jnp.broadcast_arrays(packed[..., None], shifts)) & (2**self.bits - 1)

    def _numbers(
        self,
        packed: Int32[Array, "*batch words"],
        scale: Float[Array, "*batch groups"],
        zeros: Int32[Array, "*batch groups"] | None,
    ) -> Float32[Array, "*batch inner"]:
        columns = self.shape[-1]
        q = self._codes(packed).reshape(*packed.shape[:-1], -1)[..., :columns]
        q = q - (2 ** (self.bits - 1) if zeros is None else along(zeros, self._group, columns))
        numbers = rounded(q.astype(jnp.float32) * along(scale.astype(jnp.float32), self._group, columns), self.dtype)
        if self.weight_g_idx is None:
            return numbers
        *stack, inner = self.weight_g_idx.shape
        places = jnp.argsort(self.weight_g_idx, axis=-1).reshape(*stack, *(1,) * (numbers.ndim - len(stack) - 1), inner)
        return jnp.take_along_axis(numbers, places, axis=-1)


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
