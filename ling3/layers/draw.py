"""Draws a layer's random matrices, with the shapes and axis names that its annotations state."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.layers.linear import Linear, LowRank


class Draw:
    """Draws matrices from N(0, std²) for the fields of a layer; each one takes the next of the `keys`.

    `q_proj: Annotated[Matrix, "heads·head_dim hidden"]` states a W of [heads·head_dim, hidden]. A word is a key of
    `sizes`; a dimension is a word, or a product of words and sums such as `heads·(nope+rope)`, and a product may be
    divided by a word.
    """

    def __init__(
        self, layer: type, sizes: Mapping[str, Any], keys: Iterator[PRNGKeyArray], dtype: DTypeLike, std: float
    ):
        self._layer, self._sizes, self._keys = layer, sizes, keys
        self._options: dict[str, Any] = {"dtype": dtype, "std": std}

    def __call__(self, field: str, *, bias: bool = False) -> Linear:
        """The matrix of a field, with a bias of zeros or without one."""
        return Linear.init(
            *self.shape(field), key=next(self._keys), axes=axes(self._layer, field), bias=bias, **self._options
        )

    def low_rank(self, field: str, rank: int | None) -> Linear | LowRank:
        """The matrix of a field, factored into two through `rank` channels unless that is None."""
        if rank is None:
            return self(field)
        first, second = jax.random.split(next(self._keys))
        (rows, columns), (outer, inner) = self.shape(field), axes(self._layer, field)
        return LowRank(
            Linear.init(rank, columns, key=first, axes=("rank", inner), **self._options),
            Linear.init(rows, rank, key=second, axes=(outer, "rank"), **self._options),
        )

    def shape(self, field: str) -> tuple[int, ...]:
        """The shape of a field's matrix, from its annotation."""
        return tuple(self._size(dimension) for dimension in _stated(self._layer, field))

    def _size(self, dimension: str) -> int:
        product, *divisors = dimension.split("/")
        factors = (factor.strip("()").split("+") for factor in product.split("·"))
        size = math.prod(sum(self._sizes[word] for word in factor) for factor in factors)
        return size // math.prod(self._sizes[word] for word in divisors)


def axes(layer: type, field: str) -> tuple[str, ...]:
    """The names of the dimensions of a field: each one's first word. Empty if the annotation states none."""
    return tuple(re.findall(r"\w+", dimension)[0] for dimension in _stated(layer, field))


def _stated(layer: type, field: str) -> Sequence[str]:
    return " ".join(getattr(layer.__annotations__[field], "__metadata__", ())).split()
