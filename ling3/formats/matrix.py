"""The common part of all formats: everything except their tensors and how these are decoded."""

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
from jaxtyping import Array, DTypeLike, Float, Float32, Int, Int32, PRNGKeyArray, Shaped, UInt8

from ling3.execution import Execution
from ling3.layers.linear import Linear, Matrix
from ling3.ops.precision import Wide
from ling3.ops.quantized import Quantized
from ling3.ops.rounding import Rounding

_Own = TypeVar("_Own", bound="QuantizedMatrix")


class QuantizedMatrix(Matrix, Quantized):
    """A quantized matrix, or a stack of them: its tensors are a checkpoint's, bit for bit."""

    STORED: ClassVar[Mapping[str, tuple[str, ...]]]
    """The safetensors dtypes that each tensor may be stored in, by field: the numbers first, then their scales."""
    EMBEDS: ClassVar[bool] = False
    """True if an embedding may have this format."""
    bias: eqx.AbstractVar[Array | None]
    rounding: eqx.AbstractVar[Rounding | None]
    """How products round the activations that they multiply by the matrix; None if they do not."""

    @staticmethod
    @abstractmethod
    def init(like: Linear, *, key: PRNGKeyArray, std: float) -> "QuantizedMatrix":
        """A random matrix of about the standard deviation `std`, with the shape and bias of `like`."""

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest magnitude of a number before it is multiplied by its scale."""

    @abstractmethod
    def encode(
        self, numbers: Float32[np.ndarray, "rows columns"], dtype: np.dtype
    ) -> dict[str, Shaped[np.ndarray, "..."]]:
        """Encodes a matrix in this one's format: its tensors by field. `dtype` is its dtype in the float checkpoint."""

    @property
    def unsaved(self) -> str | None:
        """Why `save` cannot write the matrix in its format, or None."""
        return None

    @abstractmethod
    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that one element of this tensor describes; None for all of them."""

    @property
    def rounds(self) -> bool:
        """True if products round the activations that they multiply by the matrix to 8 bits."""
        return self.rounding is not None

    def rounded(self, x: Float[Array, "*batch inner"]) -> Float[Array, "*batch inner"]:
        """The activations as products multiply them by the matrix."""
        return x if self.rounding is None else self.rounding(x)

    @property
    def operand(self) -> Quantized:
        """The same matrix without its bias, for operators."""
        return self if self.bias is None else dataclasses.replace(self, bias=None)

    def sides(self, x: Float[Array, "*stack rows inner"]) -> tuple[Float[Array, "*stack rows inner"], Quantized]:
        """The two sides of `product`: x, with its columns in the order of the stored ones, and the matrix."""
        return x, self.operand

    def dense(self) -> Float[Array, "*stack {self.out_features} {self.in_features}"]:
        """All its decoded numbers, as one array of `dtype`."""
        return self.decoded().astype(self.dtype)

    def product(
        self, x: Float[Array, "*stack rows {self.in_features}"], execution: Execution
    ) -> Wide[Array, "*stack rows {self.out_features}"]:
        """x Wᵀ plus the bias, in the execution's accumulation dtype. A row's bits do not depend on the other rows."""
        y = execution.times(*self.sides(x))
        return y if self.bias is None else y + self.bias.astype(y.dtype)[..., None, :]

    def row(self, index: Int[Array, "*batch"], execution: Execution) -> Float[Array, "*batch {self.in_features}"]:
        """W[index], for indices in any shape."""
        return self.rows(index).astype(self.dtype)

    def in_model(self: _Own, dtype: DTypeLike) -> _Own:
        """The same matrix as part of a model in `dtype`, on which it may depend to what its numbers are rounded."""
        del dtype
        return self

    def _with_rows(self: _Own, start: Int32[Array, ""], size: int, *fields: str) -> _Own:
        """The matrix without bias, with `size` rows of these fields from `start` on."""
        cut = {name: rows_of(getattr(self, name), start, size) for name in fields}
        return dataclasses.replace(self, bias=None, **cut)


def in_model(tree: Any, dtype: DTypeLike) -> Any:
    """The tree as a model in `dtype`: in float32, integers times their scales are not rounded to the scales' dtype."""

    def own(node: Any) -> Any:
        return node.in_model(dtype) if isinstance(node, QuantizedMatrix) else node

    return jax.tree.map(own, tree, is_leaf=lambda node: isinstance(node, QuantizedMatrix))


def weights_per_element(tree: Any) -> list[Fraction]:
    """How many weights one element of each array of a model holds, in the order of `jax.tree.leaves`.

    This is 1, except in quantized matrices: more for packed numbers, and 0 for scales.
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


def along(scale: Shaped[Array, "*batch groups"], group: int, columns: int) -> Shaped[Array, "*batch columns"]:
    """Repeats each group's scale, or its zero point, for every column of the group."""
    return jnp.repeat(scale, group, axis=-1)[..., :columns]


def rounded(numbers: Float32[Array, "..."], dtype: jnp.dtype) -> Float32[Array, "..."]:
    """The numbers rounded to `dtype`. XLA may remove a cast to it and back, but not these operations."""
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(numbers, exponent_bits=8, mantissa_bits=7)
    if dtype == jnp.float16:  # reduce_precision would flush its subnormal numbers to zero
        return lax.optimization_barrier(numbers.astype(jnp.float16)).astype(jnp.float32)
    return numbers


def power_of_two(byte: UInt8[Array, "..."]) -> Float32[Array, "..."]:
    """Decodes E8M0: 2^(byte - 127), or NaN for 255."""
    own = byte.astype(jnp.int32)
    bits = jnp.where(own == 0, 1 << 22, jnp.where(own == 255, 0x7FC00000, own << 23))  # 2^-127 is subnormal
    return lax.bitcast_convert_type(bits, jnp.float32)


def exponents(shape: tuple[int, ...], scale: float) -> UInt8[Array, "..."]:
    """An array filled with the power of two nearest to `scale`, in E8M0."""
    return jnp.full(shape, min(254, max(0, 127 + round(math.log2(scale)))), jnp.uint8)
