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
    """How each array of a model is sharded over its mesh; static under `jit`, so programs are compiled for it.

    On every device the model is a tree of the same modules with smaller arrays: fewer heads, channels or rows of the
    vocabulary. Functions of the model run on all devices at once (`jax.shard_map`).
    """

    mesh: Mesh
    heads: str | None
    """The mesh axis along which the states of heads are sharded; None if they are replicated."""
    batch: str | None
    """The mesh axis along which the rows of a batch and their states are sharded; None if they are replicated."""
    specs: tuple[PartitionSpec, ...]
    """For each array of the model, in the order of `jax.tree.leaves`."""
    shares: tuple[Any, ...]
    """The parts of each array, a `ling3.mesh.rules.Share`, in the same order."""
    exchanges: tuple[tuple[str, Exchange | Spread], ...]
    """The collectives around matrices and stacks of experts, by their paths in the model."""
    rules: Any
    """The `ling3.mesh.Rules` that the placement follows."""

    def run(self, function: Callable[..., Any], inputs: tuple[Any, ...], where: Any, out: Any, part: eqx.Module) -> Any:
        """Runs `function(part, *inputs)` on every device, with its parts of the model `part` and of the inputs.

        `where` has the specs of the inputs and `out` those of the results, as prefixes of their trees. Raises
        NotImplementedError if differentiated: without `check_vma`, JAX transposes the collectives into wrong sums.
        """
        arrays, statics = eqx.partition(part, eqx.is_array)
        leaves, tree = jax.tree.flatten(arrays)

        def on_a_device(leaves: list[jax.Array], *inputs: Any) -> Any:
            return function(eqx.combine(jax.tree.unflatten(tree, leaves), statics), *inputs)

        specs = (list(self.specs), *where)
        mapped = jax.shard_map(on_a_device, mesh=self.mesh, in_specs=specs, out_specs=out, check_vma=False)
        return mapped(*_without_derivative((leaves, *inputs)))

    def rows(self, batch: int) -> str | None:
        """The axis over which `batch` rows are sharded; None (replicated) if they do not divide evenly."""
        return self.batch if self.batch is not None and batch % self.mesh.shape[self.batch] == 0 else None

    def states(self, states: State, rows: str | None) -> State:
        """The specs of states (or of their shapes) whose slots and pages are sharded over the axis `rows`."""
        specs = [
            PartitionSpec(*(rows, *[None] * (axis - 1), self.heads) if axis else (rows,))
            for axis in shared_axes(states)
        ]
        return jax.tree.unflatten(jax.tree.structure(states), specs)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """The sharding of an array with this spec on the mesh."""
        return NamedSharding(self.mesh, spec)

    def put(self, tree: _Tree, specs: Any) -> _Tree:
        """Shards arrays over the mesh by these specs; every process passes the complete arrays."""

        def placed(x: Any, spec: PartitionSpec) -> jax.Array:
            whole = np.asarray(x)
            return jax.make_array_from_callback(whole.shape, self.sharding(spec), lambda index: whole[index])

        return jax.tree.map(placed, tree, specs)

    def everywhere(self, tree: _Tree) -> _Tree:
        """Replicates arrays on all devices of the mesh; every process passes the complete arrays."""
        return self.put(tree, jax.tree.map(lambda _: PartitionSpec(), tree))

    def settled(self, tree: _Tree, specs: Any) -> _Tree:
        """Constrains the sharding of arrays inside jit."""
        return jax.tree.map(lambda x, spec: lax.with_sharding_constraint(x, self.sharding(spec)), tree, specs)

    def fetch(self, tree: _Tree) -> _Tree:
        """Copies this process's shards of some arrays to the host; `back` puts them on the devices again."""
        return jax.tree.map(_Parts.of, tree)

    def back(self, tree: _Tree) -> _Tree:
        """Puts the shards that `fetch` copied back on the devices, and returns the arrays."""
        return jax.tree.map(_Parts.array, tree, is_leaf=lambda node: isinstance(node, _Parts))

    @property
    def processes(self) -> int:
        """The number of processes that have devices of the mesh."""
        return len({device.process_index for device in self.mesh.devices.flat})

    @property
    def sharers(self) -> int:
        """The number of devices over which the states of a sequence's heads are sharded."""
        return 1 if self.heads is None else self.mesh.shape[self.heads]

    @property
    def row_groups(self) -> int:
        """The number of groups of devices that have different rows of a batch."""
        return 1 if self.batch is None else self.mesh.shape[self.batch]


@dataclasses.dataclass(frozen=True)
class _Parts:
    """A host copy of the shards that this process has of an array, each distinct one once, by index."""

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
    """This device's local indices of slots or pages, from their global ones: it has `count` of those along `axis`.

    Indices that are not on this device become `count`, which is out of range. With no axis, nothing changes.
    """
    if axis is None:
        return numbers
    own = numbers - lax.axis_index(axis) * count
    return jnp.where((own >= 0) & (own < count), own, count)


def everyones(x: Shaped[Array, "rows *rest"], axis: str | None) -> Shaped[Array, "all *rest"]:
    """All-gathers the rows of all devices along an axis; with no axis, `x` itself."""
    return x if axis is None else lax.all_gather(x, axis, axis=0, tiled=True)
