"""Weight matrices: one type that owns the product, whatever the numbers are stored as, and the layers made of one."""

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

    What a layer may know of it is here. A kind decides how the numbers are stored: its array fields are the tensors of
    the checkpoint, under the names that the checkpoint has for them, and `checkpoint/names.py` asks for no more.
    """

    axes: eqx.AbstractVar[tuple[str, ...]]
    """What each dimension counts, in the words of the shapes: `vocab hidden heads latent experts intermediate …`. A
    dimension of several factors (heads·key) bears the name of the first, along which it can be cut. Empty where nothing
    names them: such a matrix cannot lie on a mesh."""
    name: eqx.AbstractVar[str]
    """The field that holds it, which a profile shows."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape [*stack, out, in] of the matrix."""

    @property
    @abstractmethod
    def dtype(self) -> jnp.dtype:
        """The dtype in which its numbers are computed."""

    @property
    @abstractmethod
    def operand(self) -> Any:
        """The form in which operators over several matrices (`Execution.experts`) take this kind."""

    @abstractmethod
    def dense(self) -> Array:
        """All its numbers as one array of `shape` and `dtype`."""

    @abstractmethod
    def product(self, x: Array, execution: Execution) -> Array:
        """x Wᵀ for the rows `x`, in the execution's accumulation dtype."""

    @abstractmethod
    def row(self, index: Array, execution: Execution) -> Array:
        """W[index], for indices in any shape."""

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
        """W[index]. An index outside the matrix is the caller's error: JAX would read another row."""
        return self.row(index, execution)


class Linear(Matrix):
    """The dense kind: the numbers are stored as they are, `[out, in]` as in checkpoints, so that no load transposes."""

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
        """Random weights from N(0, std²): `Linear.init(out_features, in_features, …)`, or a stack of such."""
        own = jnp.zeros(shape[:-1], dtype) if bias else None
        return Linear(weight=normal(key, shape, dtype, std), bias=own, axes=axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape [*stack, out, in] of the array."""
        return self.weight.shape

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the array, in which it is computed."""
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
        """W[index], for indices in any shape."""
        known = index.reshape(-1)[0] > jnp.iinfo(index.dtype).min  # true of every id, and unknown to the compiler
        return execution.read(lambda: self.weight[index], self.weight.dtype, known)


class LowRank(eqx.Module):
    """y = b_proj(a_proj(x)): takes the place of a matrix whose rank is at most that of `a_proj`."""

    a_proj: Matrix  # [rank, in]
    b_proj: Matrix  # [out, rank]
    name: str = eqx.field(static=True, default="")

    @scoped
    def __call__(
        self, x: Float[Array, "*batch {self.a_proj.in_features}"], execution: Execution, dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch {self.b_proj.out_features}"]:
        """The product in `dtype` or that of `x`, which the `rank` channels between have too."""
        return self.b_proj(self.a_proj(x, execution), execution, dtype)


class Constant(eqx.Module):
    """y = bias, for every x: takes the place of a projection whose output is held constant."""

    bias: Float[Array, " heads"]  # or heads·value

    @staticmethod
    def init(out_features: int) -> "Constant":
        """A projection whose constant output is zero, in float32."""
        return Constant(jnp.zeros(out_features, jnp.float32))

    def __call__(
        self, x: Float[Array, "*batch in_features"], execution: Execution = PLAIN, dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch {self.bias.shape[0]}"]:
        """The bias for each token of `x`, in `dtype` or that of `x`."""
        bias = self.bias.astype(x.dtype if dtype is None else dtype)
        return jnp.broadcast_to(bias, (*x.shape[:-1], bias.shape[0]))


def normal(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike, std: float) -> Float[Array, "..."]:
    """A weight drawn from N(0, std²)."""
    return (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
