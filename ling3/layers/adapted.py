"""Weight matrices with low-rank adapters (LoRA) beside them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ling3.execution import Execution
from ling3.layers.linear import Matrix
from ling3.ops.absorption import AdaptedLatents
from ling3.ops.adapters import AdapterRows, RowUpdates, StackedUpdates, added, low_rank
from ling3.ops.matmul import matmul_transposed
from ling3.ops.precision import Wide, wide


class Adapted(Matrix):
    """A matrix of any kind, with one or several adapters beside it: its outputs and inputs are those of `base`."""

    base: eqx.AbstractVar[Matrix]
    """The matrix itself, which keeps its weights, its bias and its format."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [out, in] of the base."""
        return self.base.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the base's weights, to which `dense` rounds the sum."""
        return self.base.dtype


class AdaptedMatrix(Adapted):
    """y = x Wᵀ + scale · (x Aᵀ) Bᵀ: a matrix of any kind with an adapter (LoRA, arXiv 2106.09685, §4.1).

    Over a quantized base this is QLoRA's sum (arXiv 2305.14314, §3). The adapter's two products are computed in float32
    or wider, whatever the base is.
    """

    base: Matrix
    lora_A: Float[Array, "rank in_features"]
    lora_B: Float[Array, "out_features rank"]
    scale: float = eqx.field(static=True)
    """alpha / rank, or alpha / sqrt(rank) for rank-stabilized LoRA."""
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @property
    def operand(self) -> Float[Array, "{self.out_features} {self.in_features}"]:
        """The same numbers as `dense`, for operators."""
        return self.dense()

    def update(self) -> Wide[Array, "{self.out_features} {self.in_features}"]:
        """scale · B A, in float32 or wider."""
        dtype = wide(self.lora_B.dtype)
        return self.scale * matmul_transposed(self.lora_B.astype(dtype), self.lora_A.T.astype(dtype))

    def dense(self) -> Float[Array, "{self.out_features} {self.in_features}"]:
        """W + scale · B A, summed in float32 or wider and rounded once to `dtype`."""
        update = self.update()
        return (self.base.dense().astype(update.dtype) + update).astype(self.dtype)

    def product(
        self, x: Float[Array, "rows {self.in_features}"], execution: Execution
    ) -> Wide[Array, "rows {self.out_features}"]:
        """x Wᵀ + scale · (x Aᵀ) Bᵀ for the rows `x`, in the execution's accumulation dtype."""
        y = self.base.product(x, execution)
        return y + low_rank(x, self.lora_A, self.lora_B, self.scale, execution.times).astype(y.dtype)

    def row(self, index: Int[Array, "*batch"], execution: Execution) -> Float[Array, "*batch {self.in_features}"]:
        """W[index] + scale · B[index] A, for indices of any shape."""
        rows = self.base.row(index, execution)
        update = self.update()[index]
        return (rows.astype(update.dtype) + update).astype(rows.dtype)


class RowAdaptedMatrix(Adapted):
    """A matrix of any kind with several adapters, of which each row of a call may have another, or none.

    A row with adapter i has y = x Wᵀ + scale_i · (x A_iᵀ) B_iᵀ, in the order of sums of `AdaptedMatrix`. A row without
    one has the bits of the base, and so has every row without `rows`.
    """

    base: Matrix
    updates: tuple[StackedUpdates, ...]
    """A stack for each rank."""
    rows: tuple[AdapterRows, ...] | None = None
    """For each stack, the rows of the call that have one of its adapters."""
    stacks: tuple[tuple[int, ...], ...] = eqx.field(static=True, default=())
    """For each stack, the indices of its adapters."""
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    def for_rows(self, rows: Mapping[tuple[int, ...], AdapterRows]) -> "RowAdaptedMatrix":
        """The matrix for a call whose `rows` have the adapters of each stack, given by their indices."""
        return dataclasses.replace(self, rows=tuple(rows[stack] for stack in self.stacks))

    @property
    def operand(self) -> Any:
        """The base's operand, and the updates beside it if rows have adapters: for MLA's absorbed products alone."""
        return AdaptedLatents(self.base.operand, self._by_row) if self._by_row else self.base.operand

    def dense(self) -> Float[Array, "{self.out_features} {self.in_features}"]:
        """W + scale · B A for a call of one row, summed in float32 or wider and rounded once to `dtype`.

        Raises ValueError for a call of several rows, which have no matrix in common.
        """
        weight = self.base.dense()
        if not self._by_row:
            return weight
        if (count := len(self._by_row[0][1].which)) != 1:
            raise ValueError(f"{self.name or 'a matrix'}: {count} rows with adapters; expected 1 for a dense matrix")
        total = weight.astype(wide(weight.dtype))[None]
        return added(total, self._by_row, lambda own, place: own.dense(place)[None])[0].astype(self.dtype)

    def product(
        self, x: Float[Array, "rows {self.in_features}"], execution: Execution
    ) -> Wide[Array, "rows {self.out_features}"]:
        """x Wᵀ, with each row's update if it has an adapter, in the execution's accumulation dtype."""
        y = self.base.product(x, execution)
        return added(y, self._by_row, lambda own, place: own.product(x, place, execution.times))

    def row(self, index: Int[Array, "*batch"], execution: Execution) -> Float[Array, "*batch {self.in_features}"]:
        """W[index] of the base. Raises ValueError if rows have adapters: an embedding takes none."""
        if self._by_row:
            raise ValueError(f"{self.name or 'a matrix'}: adapters by row are for products, and not for an embedding")
        return self.base.row(index, execution)

    @property
    def _by_row(self) -> RowUpdates:
        return () if self.rows is None else tuple(zip(self.updates, self.rows, strict=True))
