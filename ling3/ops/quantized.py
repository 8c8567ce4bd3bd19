"""Matrices in 8 and 4 bits, and which numbers their bits mean.

Three formats, each a pytree of the arrays that a checkpoint has. Scales keep the dtype in which they are stored, since
a rounded scale would mean other numbers.
"""

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import AbstractDtype, Array, Float, Float8e4m3fn, Float32, Int, Int32, Shaped, UInt8

if TYPE_CHECKING:
    from typing import Annotated as BlockScale
else:

    class BlockScale(AbstractDtype):
        """`BlockScale[Array, "..."]`: float32, bfloat16, or powers of two in a byte."""

        dtypes = ("float32", "bfloat16", "float8_e8m0fnu")


_Kind = TypeVar("_Kind", bound=type)

FP8_BLOCK = 128
"""Rows and columns of an FP8 matrix that share a scale."""
MXFP4_GROUP = 32
"""Neighbours in a row of an MXFP4 matrix that share an exponent."""


def _tree(kind: _Kind) -> _Kind:
    """Makes a dataclass a pytree: its arrays are children, and integers are static."""
    names = [field.name for field in dataclasses.fields(kind)]
    arrays, rest = names[:2], names[2:]

    def unflatten(statics: tuple[Any, ...], children: Any) -> Any:
        node = object.__new__(kind)  # without the check of types, as children may be anything inside a transformation
        for name, value in zip(names, (*children, *statics), strict=True):
            object.__setattr__(node, name, value)
        return node

    jax.tree_util.register_pytree_with_keys(
        kind,
        lambda node: (
            [(jax.tree_util.GetAttrKey(name), getattr(node, name)) for name in arrays],
            tuple(getattr(node, name) for name in rest),
        ),
        unflatten,
    )
    return kind


class Quantized(ABC):
    """A matrix W `[out, in]`, or a stack of them, whose numbers are stored in fewer bits than they are computed in."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """[*stack, out, in]."""

    @property
    @abstractmethod
    def dtype(self) -> jnp.dtype:
        """What has its numbers without rounding them."""

    @property
    def ndim(self) -> int:
        """2, and more for a stack."""
        return len(self.shape)

    @property
    def step(self) -> int:
        """Rows of W that share scales: `cut` begins and ends at multiples of it."""
        return 1

    @abstractmethod
    def decoded(self) -> Float32[Array, "*stack outer inner"]:
        """All its numbers in float32."""

    @abstractmethod
    def rows(self, index: Int[Array, "*batch"]) -> Float32[Array, "*batch inner"]:
        """W[index], for indices in any shape."""

    @abstractmethod
    def cut(self, start: Int32[Array, ""], size: int) -> "Quantized":
        """`size` rows of W from `start` on."""

    def dense(self) -> Float[Array, "*stack outer inner"]:
        """All its numbers in `dtype`."""
        return self.decoded().astype(self.dtype)

    def at(self, i: Int[Array, ""] | int) -> "Quantized":
        """Matrix `i` of the stack."""
        return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, i, keepdims=False), self)


@_tree
@dataclasses.dataclass(frozen=True, eq=False)
class Fp8(Quantized):
    """W = weight · the scale of its block of 128 × 128, multiplied in float32 (DeepSeek-V3, arXiv 2412.19437, §3.3).

    `weight` is E4M3: numbers up to ±448, with NaN and without infinities.
    """

    weight: Float8e4m3fn[Array, "*stack outer inner"]
    scale: BlockScale[Array, "*stack blocks columns"]

    @property
    def shape(self) -> tuple[int, ...]:
        """[*stack, out, in]."""
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        """float32."""
        return jnp.dtype(jnp.float32)

    @property
    def step(self) -> int:
        """128."""
        return FP8_BLOCK

    def decoded(self) -> Float32[Array, "*stack outer inner"]:
        """All its numbers in float32."""
        outer, inner = self.shape[-2:]
        scale = jnp.repeat(fp8_scale(self.scale), FP8_BLOCK, axis=-2)[..., :outer, :]
        return self.weight.astype(jnp.float32) * _along(scale, FP8_BLOCK, inner)

    def rows(self, index: Int[Array, "*batch"]) -> Float32[Array, "*batch inner"]:
        """W[index], for indices in any shape."""
        bits = lax.bitcast_convert_type(self.weight, jnp.uint8)[index]  # XLA would convert all of an FP8 array first
        numbers = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
        return numbers * _along(fp8_scale(self.scale)[index // FP8_BLOCK], FP8_BLOCK, self.shape[-1])

    def cut(self, start: Int32[Array, ""], size: int) -> "Fp8":
        """`size` rows of W from `start` on, whole blocks but for the last."""
        scales = -(-size // FP8_BLOCK)
        return Fp8(_rows(self.weight, start, size), _rows(self.scale, start // FP8_BLOCK, scales))


@_tree
@dataclasses.dataclass(frozen=True, eq=False)
class Integers(Quantized):
    """W = q · the scale of its group, rounded to the scale's dtype (compressed-tensors, `pack-quantized`, symmetric).

    q has 4 or 8 bits and is stored as q + 2^(bits-1) in words of 32 bits, the first column in the lowest ones. A group
    is so many neighbours in a row as there are numbers to a scale.
    """

    packed: Int32[Array, "*stack outer words"]
    scale: Float[Array, "*stack outer groups"]
    bits: int
    padding: int = 0
    """Numbers of a row's last word that are none of W's."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[*stack, out, in]."""
        return (*self.packed.shape[:-1], self.packed.shape[-1] * (32 // self.bits) - self.padding)

    @property
    def dtype(self) -> jnp.dtype:
        """The scales'."""
        return self.scale.dtype

    @property
    def group(self) -> int:
        """Neighbours in a row that share a scale."""
        return self.shape[-1] // self.scale.shape[-1]

    def decoded(self) -> Float32[Array, "*stack outer inner"]:
        """All its numbers in float32."""
        return self._numbers(self.packed, self.scale)

    def rows(self, index: Int[Array, "*batch"]) -> Float32[Array, "*batch inner"]:
        """W[index], for indices in any shape."""
        return self._numbers(self.packed[index], self.scale[index])

    def cut(self, start: Int32[Array, ""], size: int) -> "Integers":
        """`size` rows of W from `start` on."""
        return Integers(_rows(self.packed, start, size), _rows(self.scale, start, size), self.bits, self.padding)

    def _numbers(
        self, packed: Int32[Array, "*batch words"], scale: Float[Array, "*batch groups"]
    ) -> Float32[Array, "*batch inner"]:
        shifts = jnp.arange(0, 32, self.bits, dtype=jnp.int32).reshape((1,) * packed.ndim + (-1,))
        codes = lax.shift_right_logical(*jnp.broadcast_arrays(packed[..., None], shifts)) & (2**self.bits - 1)
        q = codes.reshape(*packed.shape[:-1], -1)[..., : self.shape[-1]] - 2 ** (self.bits - 1)
        wide_scale = _along(scale.astype(jnp.float32), self.group, self.shape[-1])
        return _rounded(q.astype(jnp.float32) * wide_scale, self.dtype)


@_tree
@dataclasses.dataclass(frozen=True, eq=False)
class Mxfp4(Quantized):
    """W = e2m1 · 2^(scale - 127), exact (OCP Microscaling Formats v1.0, §5.3.3): an exponent for 32 columns.

    E2M1 are ±0, 0.5, 1, 1.5, 2, 3, 4 and 6; of the two numbers in a byte, the even column has the low four bits.
    """

    packed: UInt8[Array, "*stack outer bytes"]
    scale: UInt8[Array, "*stack outer groups"]

    @property
    def shape(self) -> tuple[int, ...]:
        """[*stack, out, in]."""
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    @property
    def dtype(self) -> jnp.dtype:
        """bfloat16, which has every E2M1 number times every power of two of float32."""
        return jnp.dtype(jnp.bfloat16)

    def decoded(self) -> Float32[Array, "*stack outer inner"]:
        """All its numbers in float32."""
        return self._numbers(self.packed, self.scale)

    def rows(self, index: Int[Array, "*batch"]) -> Float32[Array, "*batch inner"]:
        """W[index], for indices in any shape."""
        return self._numbers(self.packed[index], self.scale[index])

    def cut(self, start: Int32[Array, ""], size: int) -> "Mxfp4":
        """`size` rows of W from `start` on."""
        return Mxfp4(_rows(self.packed, start, size), _rows(self.scale, start, size))

    @staticmethod
    def _numbers(
        packed: UInt8[Array, "*batch bytes"], scale: UInt8[Array, "*batch groups"]
    ) -> Float32[Array, "*batch inner"]:
        codes = jnp.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1).astype(jnp.int32)
        exponent = codes >> 1 & 3
        normal = (exponent + 126) << 23 | (codes & 1) << 22  # 2^(exponent - 1) · (1 + mantissa / 2)
        subnormal = (codes & 1) * (126 << 23)  # 0 or 0.5
        bits = jnp.where(exponent > 0, normal, subnormal) | (codes & 8) << 28
        return lax.bitcast_convert_type(bits, jnp.float32) * _along(power_of_two(scale), MXFP4_GROUP, codes.shape[-1])


def power_of_two(byte: UInt8[Array, "..."]) -> Float32[Array, "..."]:
    """2^(byte - 127), the numbers of E8M0; NaN for 255."""
    own = byte.astype(jnp.int32)
    bits = jnp.where(own == 0, 1 << 22, jnp.where(own == 255, 0x7FC00000, own << 23))  # 2^-127 is subnormal
    return lax.bitcast_convert_type(bits, jnp.float32)


@jax.custom_jvp
def _constant(arrays: list[Array]) -> list[Array]:
    return arrays


def _no_tangent(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[list[Array], list[Any]]:
    (arrays,), (own,) = primals, tangents
    if any(not isinstance(tangent, jax.custom_derivatives.SymbolicZero) for tangent in own):
        raise TypeError(
            "a gradient was asked for with respect to a quantized weight, which has none; load the model with "
            "dequantize=True to train it, or differentiate by other arrays alone"
        )
    return arrays, own


_constant.defjvp(_no_tangent, symbolic_zeros=True)


def constant(matrix: Quantized) -> Quantized:
    """The same matrix; a gradient with respect to it raises TypeError, as it would be that of its scales alone."""
    leaves, structure = jax.tree.flatten(matrix)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    own = iter(_constant(floats) if floats else ())
    return jax.tree.unflatten(
        structure, [next(own) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf for leaf in leaves]
    )


def matrix_of(stack: Float[Array, "*stack rows columns"] | Quantized, i: Int[Array, ""]) -> Array | Quantized:
    """Matrix `i` of a stack of either sort."""
    return stack.at(i) if isinstance(stack, Quantized) else lax.dynamic_index_in_dim(stack, i, keepdims=False)


def numbers(stack: Float[Array, "*stack rows columns"] | Quantized) -> Float[Array, "*stack rows columns"]:
    """The numbers of a stack of either sort, in float32 if it is quantized."""
    return stack.decoded() if isinstance(stack, Quantized) else stack


def fp8_scale(scale: BlockScale[Array, "..."]) -> Float32[Array, "..."]:
    """The scales of FP8 blocks in float32."""
    if scale.dtype == jnp.float8_e8m0fnu:
        return power_of_two(lax.bitcast_convert_type(scale, jnp.uint8))
    return scale.astype(jnp.float32)


def _along(scale: Float32[Array, "*batch groups"], group: int, columns: int) -> Float32[Array, "*batch columns"]:
    """Each group's scale at every column of the group."""
    return jnp.repeat(scale, group, axis=-1)[..., :columns]


def _rounded(numbers: Float32[Array, "..."], dtype: jnp.dtype) -> Float32[Array, "..."]:
    """The numbers rounded to `dtype`. XLA may leave out a conversion there and back, but not these."""
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(numbers, exponent_bits=8, mantissa_bits=7)
    if dtype == jnp.float16:  # with its subnormal numbers, which reduce_precision makes zeros
        return lax.optimization_barrier(numbers.astype(jnp.float16)).astype(jnp.float32)
    return numbers


def _rows(array: Shaped[Array, "..."], start: Int32[Array, ""], size: int) -> Shaped[Array, "..."]:
    return lax.dynamic_slice_in_dim(array, start, size, axis=array.ndim - 2)
