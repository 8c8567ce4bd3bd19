"""The formats' common part: everything but which tensors they have, and what these mean."""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, PRNGKeyArray, Shaped, UInt8

from ling3.execution import Execution
from ling3.layers.linear import Linear, Matrix
from ling3.ops.precision import Wide
from ling3.ops.quantized import Quantized

_Own = TypeVar("_Own", bound="QuantizedMatrix")


class QuantizedMatrix(Matrix, Quantized):
    """A matrix, or a stack of them, whose tensors keep the bits that a checkpoint has."""

    STORED: ClassVar[Mapping[str, tuple[str, ...]]]
    """The types in which files may have each of its tensors: the numbers first, then their scales."""
    bias: eqx.AbstractVar[Array | None]

    @staticmethod
    @abstractmethod
    def init(like: Linear, *, key: PRNGKeyArray, std: float) -> "QuantizedMatrix":
        """Random numbers of about this standard deviation, in the shape of `like` and with its bias."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest magnitude that a number has before it is multiplied by its scale."""

    @abstractmethod
    def encode(
        self, numbers: Float32[np.ndarray, "rows columns"], dtype: np.dtype
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        """The tensors of a matrix in this one's format, by field; `dtype` is what a checkpoint in floats has it in."""

    @abstractmethod
    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that an element of this tensor stands for; None if for all of them."""

    @property
    def operand(self) -> Quantized:
        """The same matrix without its bias, for operators."""
        return self if self.bias is None else dataclasses.replace(self, bias=None)

    def dense(self) -> Float[Array, "*stack {self.out_features} {self.in_features}"]:
        """All its numbers as one array."""
        return self.decoded().astype(self.dtype)

    def product(
        self, x: Float[Array, "*stack rows {self.in_features}"], execution: Execution
    ) -> Wide[Array, "*stack rows {self.out_features}"]:
        """x Wᵀ for the rows `x`, in the execution's accumulation dtype. A row's bits do not depend on the others."""
        y = execution.times(x, self.operand)
        return y if self.bias is None else y + self.bias.astype(y.dtype)[..., None, :]

    def row(self, index: Int[Array, "*batch"], execution: Execution) -> Float[Array, "*batch {self.in_features}"]:
        """W[index], for indices in any shape."""
        return self.rows(index).astype(self.dtype)

    def in_float32(self: _Own) -> _Own:
        """The matrix of a model in float32."""
        return self

    def _with_rows(self: _Own, start: Int32[Array, ""], size: int, *fields: str) -> _Own:
        """The matrix with `size` rows of these fields, from `start` on."""
        cut = {name: rows_of(getattr(self, name), start, size) for name in fields}
        return dataclasses.replace(self, bias=None, **cut)


def in_float32(tree: Any) -> Any:
    """The tree of a model in float32: integers times their scales are not rounded to the scales' dtype."""

    def wide(node: Any) -> Any:
        return node.in_float32() if isinstance(node, QuantizedMatrix) else node

    return jax.tree.map(wide, tree, is_leaf=lambda node: isinstance(node, QuantizedMatrix))


def weights_per_element(tree: Any) -> list[Fraction]:
    """How many of its weights an element of each array of a model stands for, in the order of `jax.tree.leaves`.

    One, but for quantized matrices: several for packed ones, and none for scales.
    """
    counts: list[Fraction] = []
    for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, QuantizedMatrix)):
        if not isinstance(node, QuantizedMatrix):
            counts.append(Fraction(1))
            continue
        fields = [jax.tree_util.keystr(path, simple=True) for path, _ in jax.tree_util.tree_leaves_with_path(node)]
        first = getattr(node, fields[0])
        packed = Fraction(math.prod(node.shape), max(1, math.prod(first.shape)))
        counts += [packed if i == 0 else Fraction(int(field == "bias")) for i, field in enumerate(fields)]
    return counts


def rows_of(array: Shaped[Array, "..."], start: Int32[Array, ""], size: int) -> Shaped[Array, "..."]:
    """`size` rows of a matrix, or of each matrix of a stack, from `start` on."""
    return lax.dynamic_slice_in_dim(array, start, size, axis=array.ndim - 2)


def along(scale: Float32[Array, "*batch groups"], group: int, columns: int) -> Float32[Array, "*batch columns"]:
    """Each group's scale at every column of the group."""
    return jnp.repeat(scale, group, axis=-1)[..., :columns]


def power_of_two(byte: UInt8[Array, "..."]) -> Float32[Array, "..."]:
    """2^(byte - 127), the numbers of E8M0; NaN for 255."""
    own = byte.astype(jnp.int32)
    bits = jnp.where(own == 0, 1 << 22, jnp.where(own == 255, 0x7FC00000, own << 23))  # 2^-127 is subnormal
    return lax.bitcast_convert_type(bits, jnp.float32)


def exponents(shape: tuple[int, ...], scale: float) -> UInt8[Array, "..."]:
    """The power of two that is nearest to a scale, as E8M0 has it."""
    return jnp.full(shape, min(254, max(0, 127 + round(math.log2(scale)))), jnp.uint8)
