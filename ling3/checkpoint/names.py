"""The published name of each of a model's arrays: the path in the module tree, but for two exceptions.

The checkpoint has the experts' matrices one by one, where the tree has them stacked, and the convolutions' weights as
[channels, 1, taps], where the tree has [channels, taps].
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from ling3.families import init
from ling3.layers.conv import ShortConv
from ling3.layers.moe import Experts
from ling3.model import CausalLM


@dataclasses.dataclass(frozen=True)
class Weight:
    """One published tensor: its name and shape, and the leaf of the module tree (its row `expert`) that it is."""

    name: str
    shape: tuple[int, ...]
    path: str
    expert: int | None = None

    @property
    def size(self) -> int:
        """The number of parameters."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of the module tree (or its shape and dtype), and how the checkpoint has it."""

    path: str
    value: Any
    kind: type | None = None

    def weights(self) -> Iterator[Weight]:
        """The published tensors that make up this leaf."""
        shape = tuple(self.value.shape)
        if self.kind is Experts:
            module, _, field = self.path.rpartition(".")
            for expert in range(shape[0]):
                yield Weight(f"{module}.{expert}.{field}.weight", shape[1:], self.path, expert)
        elif self.kind is ShortConv:
            yield Weight(self.path, (shape[0], 1, shape[1]), self.path)
        else:
            yield Weight(self.path, shape, self.path)


def structure(config: Any, dtype: DTypeLike = jnp.bfloat16) -> CausalLM:
    """The model of `config` with a `jax.ShapeDtypeStruct` for each array: nothing is allocated."""
    return eqx.filter_eval_shape(lambda: init(config, key=jax.random.key(0), dtype=dtype))  # the key too is none


def leaves(model: CausalLM) -> Iterator[Leaf]:
    """The arrays of `model`, or of its `structure`, in the order of `jax.tree.leaves`."""
    for path, node in jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_exception)[0]:
        if _is_exception(node):
            for inner, value in jax.tree_util.tree_flatten_with_path(node)[0]:
                yield Leaf(_dotted((*path, *inner)), value, type(node))
        else:
            yield Leaf(_dotted(path), node)


def weight_names(config: Any) -> Iterator[Weight]:
    """Every tensor that a checkpoint of `config` has, but for those of multi-token prediction."""
    for leaf in leaves(structure(config)):
        yield from leaf.weights()


def _is_exception(node: object) -> bool:
    return isinstance(node, Experts | ShortConv)


def _dotted(path: tuple[Any, ...]) -> str:
    return ".".join(str(key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.name) for key in path)
