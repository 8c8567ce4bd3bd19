"""Weight matrices: the interface `Matrix`, which hides how weights are stored, and layers made of one."""

from abc import abstractmethod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, PRNGKeyArray

from ling3.execution import PLAIN, Execution
from ling3.layers.scope import scoped
from ling3.ops.precision import Wide


class Matrix(eqx.Module):
    """A weight matrix W `[out, in]`, or a stack of them: y = x Wᵀ, without bias.

    Layers use only this interface. A subclass decides how the weights are stored: its array fields are the checkpoint's
    tensors under the checkpoint's names, and `checkpoint/names.py` needs nothing else.
    """

    axes: eqx.AbstractVar[tuple[str, ...]]
    """The name of each dimension, in the words of the shapes: `vocab hidden heads latent experts intermediate …`. A
    dimension of several factors (heads·key) has the name of the first, along which it can be sharded. Empty if unnamed:
    such a matrix cannot be placed on a mesh."""
    name: eqx.AbstractVar[str]
    """The name of the field that holds it, for profiles."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape [*stack, out, in] of the matrix."""

    @property
    @abstractmethod
    def dtype(self) -> jnp.dtype:
        """The dtype of its weights, or of the decoded ones if it is quantized."""

    @property
    @abstractmethod
    def operand(self) -> Any:
        """The weights as operators such as `Execution.experts` take them: an array, `Quantized`, or `LatentHalves`."""

    @abstractmethod
    def dense(self) -> Array:
        """The weights as one array of `shape` and `dtype`."""

    @abstractmethod
    def product(self, x: Array, execution: Execution) -> Array:
        """x Wᵀ for the rows `x`, in the execution's accumulation dtype."""

    @abstractmethod
    def row(self, index: Array, execution: Execution) -> Array:
        """W[index], for indices of any shape."""

    @property
    def out_features(self) -> int:
        """The number of outputs, the rows of W."""
        return self.shape[-2]

    @property
    def in_features(self) -> int:
        """The number of inputs, the columns of W."""
        return self.shape[-1]

    @scoped
    def __call__(
        self, x: Float[Array, "*batch {self.in_features}"], execution: Execution = PLAIN, dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch {self.out_features}"]:
        """x Wᵀ. Products are summed in the execution's accumulation dtype; the result has `dtype`, or that of `x`."""
        y = self.product(x.reshape(-1, x.shape[-1]), execution)
        return y.reshape(*x.shape[:-1], y.shape[-1]).astype(x.dtype if dtype is None else dtype)

    @scoped
    def embed(
        self, index: Int[Array, "*batch"], execution: Execution = PLAIN
    ) -> Float[Array, "*batch {self.in_features}"]:
        """W[index]. The caller ensures that indices are in range: JAX would silently read another row."""
        return self.row(index, execution)


class Linear(Matrix):
    """The dense kind: an array `[out, in]` as in checkpoints, so that loading transposes nothing."""

    weight: Float[Array, "*stack out_features in_features"]
    bias: Float[Array, "*stack out_features"] | None = None
    axes: tuple[str, ...] = eqx.field(static=True, default=())
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def init(
        *shape: int,
        key: PRNGKeyArray,
        dtype: DTypeLike,
        std: float,
        axes: tuple[str, ...] = (),
        bias: bool = False,
    ) -> "Linear":
        """Random weights from N(0, std²): `Linear.init(out_features, in_features, …)`, or a stack with more sizes."""
        own = jnp.zeros(shape[:-1], dtype) if bias else None
        return Linear(weight=normal(key, shape, dtype, std), bias=own, axes=axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*stack, out, in] of the array."""
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the stored array of weights."""
        return self.weight.dtype

    @property
    def operand(self) -> Float[Array, "*stack {self.out_features} {self.in_features}"]:
        """The array itself, which operators take as it is."""
        return self.weight

    def dense(self) -> Float[Array, "*stack {self.out_features} {self.in_features}"]:
        """The array itself, which is dense already."""
        return self.weight

    def product(
        self, x: Float[Array, "*stack rows {self.in_features}"], execution: Execution
    ) -> Wide[Array, "*stack rows {self.out_features}"]:
        """x Wᵀ for the rows `x`, in the execution's accumulation dtype."""
        y = execution.times(x, self.weight)
        return y if self.bias is None else y + self.bias.astype(y.dtype)[..., None, :]

    def row(self, index: Int[Array, "*batch"], execution: Execution) -> Float[Array, "*batch {self.in_features}"]:
        """W[index], for indices of any shape."""
        known = index.reshape(-1)[0] > jnp.iinfo(index.dtype).min  # always True, but the compiler cannot know
        return execution.read(lambda: self.weight[index], self.weight.dtype, known)


class LowRank(eqx.Module):
    """y = b_proj(a_proj(x)): a matrix of low rank, as the product of two."""

    a_proj: Matrix  # [rank, in]
    b_proj: Matrix  # [out, rank]
    name: str = eqx.field(static=True, default="")

    @scoped
    def __call__(
        self, x: Float[Array, "*batch {self.a_proj.in_features}"], execution: Execution, dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch {self.b_proj.out_features}"]:
        """The product in `dtype`, by default x's, which the `rank` channels in between always have."""
        return self.b_proj(self.a_proj(x, execution), execution, dtype)


class Constant(eqx.Module):
    """y = bias for every x: replaces a projection by a learned constant."""

    bias: Float[Array, " heads"]  # or heads·value

    @staticmethod
    def init(out_features: int) -> "Constant":
        """A bias of zeros in float32, for this many outputs."""
        return Constant(jnp.zeros(out_features, jnp.float32))

    def __call__(
        self, x: Float[Array, "*batch in_features"], execution: Execution = PLAIN, dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch {self.bias.shape[0]}"]:
        """The bias for each token of `x`, in `dtype`, by default x's."""
        bias = self.bias.astype(x.dtype if dtype is None else dtype)
        return jnp.broadcast_to(bias, (*x.shape[:-1], bias.shape[0]))


def normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike, std: float) -> Float[Array, "..."]:
    """A weight drawn from N(0, std²)."""
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
