"""Where the arrays of a model lie on a mesh of devices, and how a function of the model runs on all of them."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ling3.cache import State, shared_axes

Model = TypeVar("Model", bound=eqx.Module)
EVERYWHERE = PartitionSpec()
"""Of an array that every device has whole."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh of a model, and how each of its arrays is cut over it; static, so that programs are compiled for it.

    On every device the model is a tree of the same modules with smaller arrays: fewer heads, channels or rows of the
    vocabulary. Functions of the model run on all devices at once (`jax.shard_map`), and what they exchange stands with
    the matrices (`ling3.ops.exchange`).
    """

    mesh: Mesh
    tensor: str
    """The axis of the mesh along which weights and states are cut."""
    specs: tuple[PartitionSpec, ...]
    """Of the model's arrays, in the order of `jax.tree.leaves`."""

    def run(self, model: Model, function: Callable[..., Any], inputs: tuple[Any, ...], where: Any, out: Any) -> Any:
        """`function(model, *inputs)` on every device, with its own part of the model.

        `where` are the specs of the inputs and `out` those of the results: prefixes of their trees.
        """
        arrays, statics = eqx.partition(model, eqx.is_array)
        leaves, tree = jax.tree.flatten(arrays)

        def on_a_device(leaves: list[jax.Array], *inputs: Any) -> Any:
            return function(eqx.combine(jax.tree.unflatten(tree, leaves), statics), *inputs)

        specs = (list(self.specs), *where)
        mapped = jax.shard_map(on_a_device, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)
        return mapped(leaves, *inputs)

    def states(self, states: State) -> State:
        """The specs of some states (or of their shapes)."""
        specs = [EVERYWHERE if axis is None else self.cut(axis) for axis in shared_axes(states)]
        return jax.tree.unflatten(jax.tree.structure(states), specs)

    def cut(self, axis: int) -> PartitionSpec:
        """The spec of an array that is cut along an axis."""
        return PartitionSpec(*[None] * axis, self.tensor)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Where an array of this spec lies."""
        return NamedSharding(self.mesh, spec)
