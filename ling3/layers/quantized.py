"""Matrices that checkpoints store in 8 and 4 bits: kinds of `Matrix` whose fields are the published tensors.

Products multiply unrounded activations by the numbers that the bits mean, whatever a checkpoint says of activations:
that is nearer to the model than the servers that round them to 8 bits too.
"""

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import AbstractDtype, Array, Float, Float8e4m3fn, Int, Int8, Int32, PRNGKeyArray, UInt8

from ling3.execution import Execution
from ling3.layers.linear import Matrix
from ling3.ops.exchange import LOCAL, Exchange
from ling3.ops.precision import Wide
from ling3.ops.quantized import FP8_BLOCK, MXFP4_GROUP, BlockScale, Fp8, Integers, Mxfp4, Quantized

if TYPE_CHECKING:
    from typing import Annotated as PowersOfTwo
else:

    class PowersOfTwo(AbstractDtype):
        """`PowersOfTwo[Array, "..."]`: exponents in a byte."""

        dtypes = ("float8_e8m0fnu",)


class QuantizedMatrix(Matrix):
    """What the kinds below have in common: everything but which tensors they have, and what these mean."""

    STORED: ClassVar[Mapping[str, tuple[str, ...]]]
    """The types in which files may have each of its tensors, which keep the one that they are stored in."""
    bias: eqx.AbstractVar[Array | None]

    @property
    @abstractmethod
    def largest(self) -> float:
        """The largest magnitude that a number has before it is multiplied by its scale."""

    @property
    @abstractmethod
    def operand(self) -> Quantized:
        """The tensors as a matrix, or a stack, of their format."""

    @abstractmethod
    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that an element of this tensor stands for; None if for all of them."""

    def dense(self) -> Float[Array, "*stack {self.out_features} {self.in_features}"]:
        """All its numbers as one array."""
        return self.operand.dense()

    def product(
        self, x: Float[Array, "*stack rows {self.in_features}"], execution: Execution
    ) -> Wide[Array, "*stack rows {self.out_features}"]:
        """x Wᵀ for the rows `x`, in the execution's accumulation dtype. A row's bits do not depend on the others."""
        y = execution.times(x, self.operand)
        return y if self.bias is None else y + self.bias.astype(y.dtype)[..., None, :]

    def row(self, index: Int[Array, "*batch"], execution: Execution) -> Float[Array, "*batch {self.in_features}"]:
        """W[index], for indices in any shape."""
        return self.operand.rows(index).astype(self.dtype)


class Fp8Linear(QuantizedMatrix):
    """E4M3 with a scale for each block of 128 × 128, as DeepSeek-V3, Qwen3 and Ling-3 publish it (`fp8`)."""

    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight": ("F8_E4M3",),
        "weight_scale_inv": ("F32", "BF16", "F8_E8M0"),
    }
    weight: Float8e4m3fn[Array, "*stack out_features in_features"]
    weight_scale_inv: BlockScale[Array, "*stack blocks columns"]
    """What the numbers of a block are multiplied by, in spite of its name."""
    bias: Float[Array, "*stack out_features"] | None = None
    axes: tuple[str, ...] = eqx.field(static=True, default=("out_features", "in_features"))
    name: str = eqx.field(static=True, default="")
    exchange: Exchange = eqx.field(static=True, default=LOCAL)

    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that an element of this tensor stands for; None if for all of them."""
        return (FP8_BLOCK, FP8_BLOCK) if field == "weight_scale_inv" else (1, 1)

    @staticmethod
    def init(
        shape: tuple[int, ...],
        *,
        powers: bool = False,
        key: PRNGKeyArray,
        std: float,
        axes: tuple[str, ...],
        bias: Float[Array, "*stack out_features"] | None = None,
    ) -> "Fp8Linear":
        """Random numbers, evenly spread, of about this standard deviation."""
        codes, (outer, inner) = jax.random.uniform(key, shape, jnp.float32, -_E4M3, _E4M3), shape[-2:]
        blocks, scale = (*shape[:-2], -(-outer // FP8_BLOCK), -(-inner // FP8_BLOCK)), std * 3**0.5 / _E4M3
        return Fp8Linear(
            weight=codes.astype(jnp.float8_e4m3fn),
            weight_scale_inv=_powers(_exponents(blocks, scale)) if powers else jnp.full(blocks, scale, jnp.float32),
            bias=bias,
            axes=axes,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """[*stack, out, in]."""
        return self.weight.shape

    @property
    def largest(self) -> float:
        """448."""
        return _E4M3

    @property
    def dtype(self) -> jnp.dtype:
        """float32."""
        return jnp.dtype(jnp.float32)

    @property
    def operand(self) -> Fp8:
        """The tensors as a matrix, or a stack, of their format."""
        return Fp8(self.weight, self.weight_scale_inv)


class PackedLinear(QuantizedMatrix):
    """Integers of 4 or 8 bits, packed into words, with a scale for each group: compressed-tensors' `pack-quantized`."""

    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "weight_packed": ("I32",),
        "weight_scale": ("BF16", "F16", "F32"),
        "weight_shape": ("I64", "I32"),
    }
    weight_packed: Int32[Array, "*stack out_features words"]
    weight_scale: Float[Array, "*stack out_features groups"]
    weight_shape: Int32[Array, "*stack 2"]
    """[out, in], for other programs: `load` has compared it."""
    bits: int = eqx.field(static=True)
    padding: int = eqx.field(static=True, default=0)
    """Numbers of a row's last word that are none of W's."""
    wide: bool = eqx.field(static=True, default=False)
    """True if W's numbers are float32, and False if they are rounded to the dtype of the scales.

    As in transformers, that depends on the dtype of the model around it.
    """
    bias: Float[Array, "*stack out_features"] | None = None
    axes: tuple[str, ...] = eqx.field(static=True, default=("out_features", "in_features"))
    name: str = eqx.field(static=True, default="")
    exchange: Exchange = eqx.field(static=True, default=LOCAL)

    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that an element of this tensor stands for; None if for all of them."""
        groups = self.weight_scale.shape[-1]
        steps = {"weight_packed": (1, 32 // self.bits), "weight_shape": (None, None)}
        steps["weight_scale"] = (1, None if groups == 1 else self.in_features // groups)
        return steps.get(field, (1, 1))

    @staticmethod
    def init(
        shape: tuple[int, ...],
        *,
        bits: int,
        group: int | None,
        wide: bool = False,
        key: PRNGKeyArray,
        std: float,
        axes: tuple[str, ...],
        bias: Float[Array, "*stack out_features"] | None = None,
    ) -> "PackedLinear":
        """Random numbers, evenly spread, of about this standard deviation.

        ValueError if the columns do not divide into groups.
        """
        (outer, inner), rest, per = shape[-2:], shape[:-2], 32 // bits
        if group is not None and inner % group:
            raise ValueError(f"found {inner} columns; expected a multiple of the group size, {group}")
        words, scale = -(-inner // per), std * 12**0.5 / 2**bits
        return PackedLinear(
            weight_packed=lax.bitcast_convert_type(jax.random.bits(key, (*rest, outer, words), jnp.uint32), jnp.int32),
            weight_scale=jnp.full((*rest, outer, 1 if group is None else inner // group), scale, jnp.bfloat16),
            weight_shape=jnp.broadcast_to(jnp.asarray([outer, inner], jnp.int32), (*rest, 2)),
            bits=bits,
            padding=words * per - inner,
            wide=wide,
            bias=bias,
            axes=axes,
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """[*stack, out, in]."""
        return (*self.weight_packed.shape[:-1], self.weight_packed.shape[-1] * (32 // self.bits) - self.padding)

    @property
    def largest(self) -> float:
        """8, or 128 for 8 bits."""
        return 2.0 ** (self.bits - 1)

    @property
    def dtype(self) -> jnp.dtype:
        """That of the scales, or float32."""
        return jnp.dtype(jnp.float32) if self.wide else self.weight_scale.dtype

    @property
    def operand(self) -> Integers:
        """The tensors as a matrix, or a stack, of their format."""
        return Integers(self.weight_packed, self.weight_scale.astype(self.dtype), self.bits, self.padding)


class Mxfp4Linear(QuantizedMatrix):
    """E2M1, two in a byte, with an exponent for 32 neighbours in a row: compressed-tensors' `mxfp4-pack-quantized`."""

    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight_packed": ("U8",), "weight_scale": ("U8",)}
    weight_packed: UInt8[Array, "*stack out_features bytes"]
    weight_scale: UInt8[Array, "*stack out_features groups"]
    bias: Float[Array, "*stack out_features"] | None = None
    axes: tuple[str, ...] = eqx.field(static=True, default=("out_features", "in_features"))
    name: str = eqx.field(static=True, default="")
    exchange: Exchange = eqx.field(static=True, default=LOCAL)

    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that an element of this tensor stands for; None if for all of them."""
        return {"weight_packed": (1, 2), "weight_scale": (1, MXFP4_GROUP)}.get(field, (1, 1))

    @staticmethod
    def init(
        shape: tuple[int, ...],
        *,
        key: PRNGKeyArray,
        std: float,
        axes: tuple[str, ...],
        bias: Float[Array, "*stack out_features"] | None = None,
    ) -> "Mxfp4Linear":
        """Random numbers of about this standard deviation. ValueError if the columns are no multiple of 32."""
        packed, exponents = _fp4(key, shape, std)
        return Mxfp4Linear(weight_packed=packed, weight_scale=exponents, bias=bias, axes=axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """[*stack, out, in]."""
        return (*self.weight_packed.shape[:-1], 2 * self.weight_packed.shape[-1])

    @property
    def largest(self) -> float:
        """6."""
        return _E2M1

    @property
    def dtype(self) -> jnp.dtype:
        """bfloat16."""
        return jnp.dtype(jnp.bfloat16)

    @property
    def operand(self) -> Mxfp4:
        """The tensors as a matrix, or a stack, of their format."""
        return Mxfp4(self.weight_packed, self.weight_scale)


class Fp4Linear(QuantizedMatrix):
    """The same in DeepSeek's layout, for FP8 checkpoints whose experts have four bits (`expert_dtype: fp4`)."""

    STORED: ClassVar[Mapping[str, tuple[str, ...]]] = {"weight": ("I8",), "weight_scale_inv": ("F8_E8M0",)}
    weight: Int8[Array, "*stack out_features bytes"]
    weight_scale_inv: PowersOfTwo[Array, "*stack out_features groups"]
    bias: Float[Array, "*stack out_features"] | None = None
    axes: tuple[str, ...] = eqx.field(static=True, default=("out_features", "in_features"))
    name: str = eqx.field(static=True, default="")
    exchange: Exchange = eqx.field(static=True, default=LOCAL)

    def steps(self, field: str) -> tuple[int | None, int | None]:
        """Rows and columns of W that an element of this tensor stands for; None if for all of them."""
        return {"weight": (1, 2), "weight_scale_inv": (1, MXFP4_GROUP)}.get(field, (1, 1))

    @staticmethod
    def init(
        shape: tuple[int, ...],
        *,
        key: PRNGKeyArray,
        std: float,
        axes: tuple[str, ...],
        bias: Float[Array, "*stack out_features"] | None = None,
    ) -> "Fp4Linear":
        """Random numbers of about this standard deviation. ValueError if the columns are no multiple of 32."""
        packed, exponents = _fp4(key, shape, std)
        weight = lax.bitcast_convert_type(packed, jnp.int8)
        return Fp4Linear(weight=weight, weight_scale_inv=_powers(exponents), bias=bias, axes=axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """[*stack, out, in]."""
        return (*self.weight.shape[:-1], 2 * self.weight.shape[-1])

    @property
    def largest(self) -> float:
        """6."""
        return _E2M1

    @property
    def dtype(self) -> jnp.dtype:
        """bfloat16."""
        return jnp.dtype(jnp.bfloat16)

    @property
    def operand(self) -> Mxfp4:
        """The tensors as a matrix, or a stack, of their format."""
        packed, scale = (lax.bitcast_convert_type(own, jnp.uint8) for own in (self.weight, self.weight_scale_inv))
        return Mxfp4(packed, scale)


def in_float32(tree: Any) -> Any:
    """The tree of a model in float32: integers times their scales are not rounded to the scales' dtype."""

    def wide(node: Any) -> Any:
        return dataclasses.replace(node, wide=True) if isinstance(node, PackedLinear) else node

    return jax.tree.map(wide, tree, is_leaf=lambda node: isinstance(node, PackedLinear))


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


_E4M3, _E2M1 = 448.0, 6.0
"""The largest numbers."""
_E2M1_RMS = (sum(x * x for x in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8) ** 0.5
"""Of all sixteen codes."""


def _fp4(
    key: PRNGKeyArray, shape: tuple[int, ...], std: float
) -> tuple[UInt8[Array, "*stack rows bytes"], UInt8[Array, "*stack rows groups"]]:
    """Random pairs of E2M1, and their exponents."""
    if shape[-1] % MXFP4_GROUP:
        raise ValueError(f"found {shape[-1]} columns; expected a multiple of the group size, {MXFP4_GROUP}")
    packed = jax.random.bits(key, (*shape[:-1], shape[-1] // 2), jnp.uint8)
    return packed, _exponents((*shape[:-1], shape[-1] // MXFP4_GROUP), std / _E2M1_RMS)


def _exponents(shape: tuple[int, ...], scale: float) -> UInt8[Array, "..."]:
    """The power of two that is nearest to a scale, as E8M0 has it."""
    return jnp.full(shape, min(254, max(0, 127 + round(math.log2(scale)))), jnp.uint8)


def _powers(exponents: UInt8[Array, "..."]) -> PowersOfTwo[Array, "..."]:
    return lax.bitcast_convert_type(exponents, jnp.float8_e8m0fnu)
