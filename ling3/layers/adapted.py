"""A weight matrix with a low-rank adapter (LoRA) beside it."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ling3.execution import Execution
from ling3.layers.linear import Matrix
from ling3.ops.matmul import matmul_transposed
from ling3.ops.precision import Wide, wide


class AdaptedMatrix(Matrix):
    """y = x Wᵀ + scale · (x Aᵀ) Bᵀ: a matrix of any kind with an adapter (LoRA, arXiv 2106.09685, §4.1).

    `base` keeps its weights, its bias and its format: over a quantized one this is QLoRA's sum (arXiv 2305.14314, §3).
    The adapter's two products are computed in float32 or wider, whatever the base is.
    """

    base: Matrix
    lora_A: Float[Array, "rank in_features"]
    lora_B: Float[Array, "out_features rank"]
    scale: float = eqx.field(static=True)
    """alpha / rank, or alpha / sqrt(rank) for rank-stabilized LoRA."""
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [out, in] of the base."""
        return self.base.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the base's weights, to which `dense` rounds the sum."""
        return self.base.dtype

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
        return y + self._times_update(x, execution).astype(y.dtype)

    def row(self, index: Int[Array, "*batch"], execution: Execution) -> Float[Array, "*batch {self.in_features}"]:
        """W[index] + scale · B[index] A, for indices of any shape."""
        rows = self.base.row(index, execution)
        update = self.update()[index]
        return (rows.astype(update.dtype) + update).astype(rows.dtype)

    def _times_update(
        self, x: Float[Array, "rows {self.in_features}"], execution: Execution
    ) -> Wide[Array, "rows {self.out_features}"]:
        dtype = wide(x.dtype)
        inner = execution.times(x.astype(dtype), self.lora_A.astype(dtype)).astype(dtype)
        return self.scale * execution.times(inner, self.lora_B.astype(dtype))
