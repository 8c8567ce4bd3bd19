"""MLA's `kv_b_proj` as GGUF files store it: the rows that make keys and those that make values, in two tensors."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ling3.execution import Execution
from ling3.formats.gguf_blocks import GgufBlocks
from ling3.layers.linear import Linear, Matrix
from ling3.ops.absorption import LatentHalves
from ling3.ops.precision import Wide


class KeyValueHalves(Matrix):
    """`kv_b_proj` as two stacks over heads, each in one block type: k_b is W_uk, transposed, and v_b is W_uv.

    A decode step multiplies by both as they are stored (`operand`); `dense` has the rows in the published order.
    """

    EMBEDS: ClassVar[bool] = False
    k_b: GgufBlocks  # [heads, latent, nope]
    v_b: GgufBlocks  # [heads, value, latent]
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def init(
        like: Linear, *, key: PRNGKeyArray, std: float, blocks: tuple[str, str], nope: int, value: int
    ) -> "KeyValueHalves":
        """Random codes in the block types of k_b and v_b, for heads of `nope` and `value` rows.

        Raises ValueError if the columns of a half are no multiple of its block.
        """
        channels, latent = like.shape
        heads, keys = channels // (nope + value), jax.random.split(key, 4)
        options = {"dtype": like.dtype, "std": std}
        uk = Linear.init(heads, latent, nope, key=keys[0], axes=("heads", "latent", "nope"), **options)
        uv = Linear.init(heads, value, latent, key=keys[1], axes=("heads", "value", "latent"), **options)
        return KeyValueHalves(
            k_b=GgufBlocks.init(uk, key=keys[2], std=std, block=blocks[0]),
            v_b=GgufBlocks.init(uv, key=keys[3], std=std, block=blocks[1]),
            axes=like.axes,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """The shape [heads·(nope + value), latent] of the published matrix."""
        heads, latent, nope = self.k_b.shape
        return heads * (nope + self.v_b.shape[1]), latent

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of `dense`, which both halves have."""
        return self.v_b.dtype

    @property
    def operand(self) -> LatentHalves:
        """Both halves as they are stored."""
        return LatentHalves(self.k_b.operand, self.v_b.operand)

    def dense(self) -> Float[Array, "{self.out_features} {self.in_features}"]:
        """The published matrix: for each head the rows of W_uk, then those of W_uv."""
        rows = [jnp.swapaxes(self.k_b.dense(), 1, 2), self.v_b.dense()]
        return jnp.concatenate(rows, axis=1).reshape(self.shape)

    def product(
        self, x: Float[Array, "rows {self.in_features}"], execution: Execution
    ) -> Wide[Array, "rows {self.out_features}"]:
        """x Wᵀ for the rows `x`, in the execution's accumulation dtype."""
        return execution.times(x, self.dense().astype(x.dtype))

    def row(self, index: Int[Array, "*batch"], execution: Execution) -> Float[Array, "*batch {self.in_features}"]:
        """W[index], for indices of any shape."""
        return self.dense()[index]
