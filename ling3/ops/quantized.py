"""`Quantized`: the interface through which operators read a matrix stored in few bits.

The formats that implement it are in `ling3.formats`. Scales keep the dtype in which they are stored, since rounding a
scale would change the weights.
"""

from abc import ABC, abstractmethod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped


class Quantized(ABC):
    """A matrix W `[out, in]`, or a stack of them, stored in fewer bits than it is computed in."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape [*stack, out, in] of the matrix."""

    @property
    @abstractmethod
    def dtype(self) -> jnp.dtype:
        """The dtype that holds its decoded values without rounding."""

    @property
    def ndim(self) -> int:
        """The number of dimensions: 2, or more for a stack."""
        return len(self.shape)

    @property
    def step(self) -> int:
        """The number of rows of W that share scales; `cut` begins at a multiple of it."""
        return 1

    @property
    def rounds(self) -> bool:
        """True if products round the activations that they multiply by the matrix to 8 bits."""
        return False

    def rounded(self, x: Float[Array, "*batch inner"]) -> Float[Array, "*batch inner"]:
        """The activations as products multiply them by the matrix."""
        return x

    @property
    @abstractmethod
    def arrays(self) -> tuple[Shaped[Array, "*stack outer stored"], Shaped[Array, "*stack scales groups"]]:
        """The stored numbers and their scales, as the CPU kernels read them."""

    @property
    def zero_points(self) -> Int32[Array, "*stack outer_words groups"] | None:
        """The integers that are subtracted from the stored ones before scaling; None if there are none."""
        return None

    @property
    def layout(self) -> str:
        """The name of the block type if scales and numbers are stored together in ggml's blocks, else empty."""
        return ""

    @abstractmethod
    def decoded(self) -> Float32[Array, "*stack outer inner"]:
        """Decodes the matrix, or all of a stack, to float32."""

    @abstractmethod
    def rows(self, index: Int[Array, "*batch"]) -> Float32[Array, "*batch inner"]:
        """W[index] decoded to float32, for indices of any shape."""

    @abstractmethod
    def cut(self, start: Int32[Array, ""], size: int) -> "Quantized":
        """`size` rows of W from `start` on, still quantized."""

    def at(self, i: Int[Array, ""] | int) -> "Quantized":
        """Matrix number `i` of the stack."""
        return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, i, keepdims=False), self)


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
    """The same matrix, but a gradient with respect to it raises TypeError: only its scales could have one."""
    leaves, structure = jax.tree.flatten(matrix)
    floats = [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    own = iter(_constant(floats) if floats else ())
    return jax.tree.unflatten(
        structure, [next(own) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf for leaf in leaves]
    )


def matrix_of(stack: Float[Array, "*stack rows columns"] | Quantized, i: Int[Array, ""]) -> Array | Quantized:
    """Matrix `i` of a stack, which is an array or quantized."""
    return stack.at(i) if isinstance(stack, Quantized) else lax.dynamic_index_in_dim(stack, i, keepdims=False)


def numbers(stack: Float[Array, "*stack rows columns"] | Quantized) -> Float[Array, "*stack rows columns"]:
    """A stack as an array; decoded to float32 if it is quantized."""
    return stack.decoded() if isinstance(stack, Quantized) else stack


def rounded_for(
    matrix: Float[Array, "*stack rows columns"] | Quantized, x: Float[Array, "*batch columns"]
) -> Float[Array, "*batch columns"]:
    """The activations as products multiply them by a matrix, which is an array or quantized."""
    return matrix.rounded(x) if isinstance(matrix, Quantized) else x
