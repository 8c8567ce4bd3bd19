"""The arrays of a model: their paths in the module tree, and the names of their axes."""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_args

import jax

from ling3.layers.adapted import Adapted
from ling3.layers.conv import ShortConv
from ling3.layers.draw import axes
from ling3.layers.linear import Matrix


@dataclasses.dataclass(frozen=True)
class ArrayLeaf:
    """One array of the module tree (or its shape and dtype)."""

    path: str
    value: Any
    around: tuple[Any, ...]
    """The modules that contain it, from the model down."""

    @property
    def module(self) -> Any:
        """The module that has it as a field."""
        return self.around[-1]

    @property
    def field(self) -> str:
        """The name of the field that holds it."""
        return self.path.rpartition(".")[2]

    @property
    def adapted(self) -> Adapted | None:
        """The matrix whose adapter it is an array of; None for the arrays of the model without adapters."""
        found = next((module for module in self.around if isinstance(module, Adapted)), None)
        return None if found is None or any(module is found.base for module in self.around) else found

    @property
    def axes(self) -> tuple[str, ...]:
        """The name of each dimension, from its matrix or the field's annotation; empty if neither states them."""
        if isinstance(self.module, Matrix | ShortConv):
            return self.module.axes[: self.value.ndim]  # a bias has only the first ones
        if stated := axes(type(self.module), self.field):
            return stated
        annotation = type(self.module).__annotations__[self.field]
        found = (one.dim_str.split() for one in (annotation, *get_args(annotation)) if hasattr(one, "dim_str"))
        return tuple(next(found, ()))

    def units(self, axis: str) -> int:
        """The number of units along the axis of this name; for heads, that of heads and not of their channels."""
        known = (getattr(module, axis, None) for module in reversed(self.around))
        if (count := next((count for count in known if isinstance(count, int)), None)) is not None:
            return count
        own = self.module if isinstance(self.module, Matrix) else self
        shape = own.shape if isinstance(own, Matrix) else self.value.shape
        return shape[own.axes.index(axis)]


def array_leaves(model: Any) -> Iterator[ArrayLeaf]:
    """The arrays of a model, or of its shapes and dtypes, in the order of `jax.tree.leaves`."""
    for path, value in jax.tree_util.tree_flatten_with_path(model)[0]:
        around: list[Any] = [model]
        for key in path[:-1]:
            own = around[-1]
            around.append(own[key.idx] if isinstance(key, jax.tree_util.SequenceKey) else getattr(own, key.name))
        yield ArrayLeaf(dotted(path), value, tuple(around))


def dotted(path: tuple[Any, ...]) -> str:
    """A path of `jax.tree_util` as attributes: `model.layers.0.attention`."""
    return ".".join(str(key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.name) for key in path)
