"""The placement of a model's arrays on a mesh of devices, and how a function of the model runs on all of them."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, Shaped

from ling3.cache import State, shared_axes
from ling3.mesh.exchange import Exchange
from ling3.ops.spread import Spread

_Tree = TypeVar("_Tree")


@dataclasses.dataclass(frozen=True)
class Placement:
    """The mesh of a model, and how each of its arrays is cut over it; static, so that programs are compiled for it.

    On every device the model is a tree of the same modules with smaller arrays: fewer heads, channels or rows of the
    vocabulary. Functions of the model run on all devices at once (`jax.shard_map`).
    """

    mesh: Mesh
    heads: str | None
    """The axis of the mesh along which the memory of heads is cut."""
    batch: str | None
    """That along which the rows of a batch lie, with their memory."""
    specs: tuple[PartitionSpec, ...]
    """Of the model's arrays, in the order of `jax.tree.leaves`."""
    shares: tuple[Any, ...]
    """What each device has of them, a `ling3.mesh.rules.Share` each."""
    exchanges: tuple[tuple[str, Exchange | Spread], ...]
    """What devices exchange around matrices and stacks of experts, by their paths in the model."""
    rules: Any
    """The `ling3.mesh.Rules` by which they are cut."""

    def run(self, function: Callable[..., Any], inputs: tuple[Any, ...], where: Any, out: Any, part: eqx.Module) -> Any:
        """`function(part, *inputs)` on every device, with its own parts of the model and of the inputs.

        `where` are the specs of the inputs and `out` those of the results: prefixes of their trees. Not differentiable:
        without `check_vma`, JAX would transpose what devices exchange into wrong sums. NotImplementedError for that.
        """
        arrays, statics = eqx.partition(part, eqx.is_array)
        leaves, tree = jax.tree.flatten(arrays)

        def on_a_device(leaves: list[jax.Array], *inputs: Any) -> Any:
            return function(eqx.combine(jax.tree.unflatten(tree, leaves), statics), *inputs)

        specs = (list(self.specs), *where)
        mapped = jax.shard_map(on_a_device, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)
        return mapped(*_without_derivative((leaves, *inputs)))

    def rows(self, batch: int) -> str | None:
        """The axis over which so many rows are sharded; None if they are replicated, as it does not divide them."""
        return self.batch if self.batch is not None and batch % self.mesh.shape[self.batch] == 0 else None

    def states(self, states: State, rows: str | None) -> State:
        """The specs of some states (or of their shapes), whose rows and pages lie over the axis `rows`."""
        specs = [
            PartitionSpec(*(rows, *[None] * (axis - 1), self.heads) if axis else (rows,))
            for axis in shared_axes(states)
        ]
        return jax.tree.unflatten(jax.tree.structure(states), specs)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Where an array of this spec lies."""
        return NamedSharding(self.mesh, spec)

    def put(self, tree: _Tree, specs: Any) -> _Tree:
        """Arrays, of which every process has the whole, where they lie."""

        def placed(x: Any, spec: PartitionSpec) -> jax.Array:
            whole = np.asarray(x)
            return jax.make_array_from_callback(whole.shape, self.sharding(spec), lambda index: whole[index])

        return jax.tree.map(placed, tree, specs)

    def everywhere(self, tree: _Tree) -> _Tree:
        """Arrays, of which every process has the whole, on every device."""
        return self.put(tree, jax.tree.map(lambda _: PartitionSpec(), tree))

    def settled(self, tree: _Tree, specs: Any) -> _Tree:
        """Constrains the sharding of arrays inside jit."""
        return jax.tree.map(lambda x, spec: lax.with_sharding_constraint(x, self.sharding(spec)), tree, specs)

    def fetch(self, tree: _Tree) -> _Tree:
        """Copies the parts of some arrays on this process's devices to the host, for `back`."""
        return jax.tree.map(_Parts.of, tree)

    def back(self, tree: _Tree) -> _Tree:
        """The arrays of which `fetch` has taken the parts."""
        return jax.tree.map(_Parts.array, tree, is_leaf=lambda node: isinstance(node, _Parts))

    @property
    def processes(self) -> int:
        """How many processes have devices of the mesh."""
        return len({device.process_index for device in self.mesh.devices.flat})

    @property
    def sharers(self) -> int:
        """How many devices share the memory of a sequence's heads."""
        return 1 if self.heads is None else self.mesh.shape[self.heads]

    @property
    def row_groups(self) -> int:
        """How many groups of devices have different rows."""
        return 1 if self.batch is None else self.mesh.shape[self.batch]


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of an array that lie on this process's devices, each once."""

    like: jax.ShapeDtypeStruct
    parts: dict[str, np.ndarray]

    @staticmethod
    def of(x: jax.Array) -> "_Parts":
        shards = {str(shard.index): shard.data for shard in x.addressable_shards}
        return _Parts(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), jax.device_get(shards))

    def array(self) -> jax.Array:
        places = self.like.sharding.addressable_devices_indices_map(self.like.shape)
        arrays = [jax.device_put(self.parts[str(index)], device) for device, index in places.items()]
        return jax.make_array_from_single_device_arrays(self.like.shape, self.like.sharding, arrays)


@jax.custom_jvp
def _without_derivative(arrays: Any) -> Any:
    return arrays


@_without_derivative.defjvp
def _refuse_derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> Any:
    raise NotImplementedError(
        "a model that ling3.mesh.place has put on a mesh is for inference and has no gradients: take those of the "
        "model that `place` was given, or train that one with ling3.train.train(model, ..., mesh=mesh)"
    )


def here(numbers: Int32[Array, "*shape"], count: int, axis: str | None) -> Int32[Array, "*shape"]:
    """Numbers of slots or pages in terms of this device's `count`, one part of those along an axis.

    Numbers of other devices, and of none, become `count`.
    """
    if axis is None:
        return numbers
    own = numbers - lax.axis_index(axis) * count
    return jnp.where((own >= 0) & (own < count), own, count)


def everyones(x: Shaped[Array, "rows *rest"], axis: str | None) -> Shaped[Array, "all *rest"]:
    """The rows of all devices along an axis."""
    return x if axis is None else lax.all_gather(x, axis, axis=0, tiled=True)
