"""Matrix layers: the linear map and the embedding table."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray

from ling3.execution import PLAIN, Execution
from ling3.ops.in_place import read_in_place
from ling3.ops.matmul import matmul_transposed


class Linear(eqx.Module):
    """y = x Wᵀ, without bias. The weight is `[out, in]`, as checkpoints have it, so that no load transposes."""

    weight: Float[Array, "out_features in_features"]

    @staticmethod
    def init(out_features: int, in_features: int, *, key: PRNGKeyArray, dtype: DTypeLike, std: float) -> "Linear":
        """Random weights from N(0, std²)."""
        return Linear(normal(key, (out_features, in_features), dtype, std))

    def __call__(
        self,
        x: Float[Array, "*batch {self.weight.shape[1]}"],
        execution: Execution = PLAIN,
        dtype: DTypeLike | None = None,
    ) -> Float[Array, "*batch {self.weight.shape[0]}"]:
        """Products are summed in float32 or wider; the result has `dtype`, or that of `x`."""
        y = matmul_transposed(x.reshape(-1, x.shape[-1]), self.weight, execution.lowering)
        return y.reshape(*x.shape[:-1], y.shape[-1]).astype(x.dtype if dtype is None else dtype)


class Constant(eqx.Module):
    """y = bias, whatever x is: stands where a projection was whose output is held still."""

    bias: Float[Array, " out_features"]

    @staticmethod
    def init(out_features: int) -> "Constant":
        """Zeros, float32."""
        return Constant(jnp.zeros(out_features, jnp.float32))

    def __call__(
        self, x: Float[Array, "*batch in_features"], execution: Execution = PLAIN, dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch {self.bias.shape[0]}"]:
        """The bias for each token of `x`, in `dtype` or that of `x`."""
        bias = self.bias.astype(x.dtype if dtype is None else dtype)
        return jnp.broadcast_to(bias, (*x.shape[:-1], bias.shape[0]))


class Embedding(eqx.Module):
    """x = W[token]. Ids outside the table are the caller's error: JAX would read another row."""

    weight: Float[Array, "vocab hidden"]

    @staticmethod
    def init(vocab: int, hidden: int, *, key: PRNGKeyArray, dtype: DTypeLike, std: float) -> "Embedding":
        """Random weights from N(0, std²)."""
        return Embedding(normal(key, (vocab, hidden), dtype, std))

    def __call__(
        self, tokens: Int[Array, "batch seq"], execution: Execution = PLAIN
    ) -> Float[Array, "batch seq {self.weight.shape[1]}"]:
        """One row of the table per token id."""
        known = tokens.reshape(-1)[0] > jnp.iinfo(tokens.dtype).min  # as every id is, which are signed
        return read_in_place(lambda: self.weight[tokens], self.weight.dtype, known, execution.lowering)


def normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike, std: float) -> Float[Array, "..."]:
    """A weight drawn from N(0, std²)."""
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
