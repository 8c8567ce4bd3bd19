"""Sharding a model over a mesh: the plan (`plan`) and its execution (`place`)."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from ling3.layers.adapted import Adapted
from ling3.layers.linear import Matrix
from ling3.layers.moe import Experts
from ling3.leaves import ArrayLeaf, array_leaves
from ling3.mesh.exchange import LOCAL, Exchange
from ling3.mesh.placement import Placement
from ling3.mesh.rules import MeshError, Rules, share_of
from ling3.mesh.sharded import Sharded, placement_of
from ling3.mesh.share import Share
from ling3.model import CausalLM
from ling3.ops.spread import Spread


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a model's arrays are sharded over a mesh, in the order of `jax.tree.leaves`."""

    placement: Placement
    shares: tuple[Share, ...]

    @property
    def shardings(self) -> list[NamedSharding]:
        """The sharding of each array, in the same order."""
        return [self.placement.sharding(spec) for spec in self.placement.specs]

    def array(self, i: int, whole: tuple[int, ...], read: Callable[[Share, int], np.ndarray]) -> jax.Array:
        """Array i on the mesh: `read(share, number)` returns one part of it, called for this process's parts only.

        `whole` is the shape of the unsharded array. A part that several devices of this process have is read once.
        """
        share, arrays = self.shares[i], []
        for number, devices in self.local(i, whole).items():
            part = read(share, number)
            arrays += [jax.device_put(part, device) for device in devices]
        return jax.make_array_from_single_device_arrays(share.stored(whole), self.shardings[i], arrays)

    def put(self, i: int, whole: jax.Array) -> jax.Array:
        """Array i on the mesh, from the unsharded one, which every process passes and reads on the host."""
        read = np.asarray(whole)
        return self.array(i, read.shape, lambda share, number: share.part(read, number))

    def local(self, i: int, whole: tuple[int, ...]) -> dict[int, list[Any]]:
        """The numbers of the parts of array i that this process has, with their devices; repeated parts count once."""
        share, parts = self.shares[i], {}
        for device, index in self.shardings[i].addressable_devices_indices_map(share.stored(whole)).items():
            assert index is not None, "a sharding over a mesh has a place for each device"
            number = share.number(index)
            parts.setdefault(share.spans[number] if share.spans else None, (number, []))[1].append(device)
        return dict(parts.values())

    def structure(self, tree: CausalLM) -> Sharded:
        """The model with a `ShapeDtypeStruct` (shape, dtype and sharding) in place of each array."""
        arrays = [
            jax.ShapeDtypeStruct(share.stored(x.shape), x.dtype, sharding=sharding)
            for share, x, sharding in zip(self.shares, jax.tree.leaves(tree), self.shardings, strict=True)
        ]
        traced = eqx.filter_eval_shape(lambda arrays: self.model(tree, arrays), arrays)
        return jax.tree.unflatten(jax.tree.structure(traced), arrays)

    def model(self, tree: CausalLM, arrays: Sequence[jax.Array]) -> Sharded:
        """The model made of these arrays, with the structure of `tree`."""
        placed = jax.tree.unflatten(jax.tree.structure(tree), arrays)
        fields = placed.model, placed.lm_head, placed.config, placed.origin
        return Sharded(*fields, mtp=placed.mtp, placement=self.placement)


def plan(model: CausalLM, mesh: Mesh, rules: Rules | None = None) -> Layout:
    """How a model (or its structure) is sharded over a mesh.

    Raises MeshError if it cannot be sharded as the rules say, with the axis, its size and what would fit; and for a
    model that is on a mesh already.
    """
    rules, sizes = Rules() if rules is None else rules, dict(mesh.shape)
    rules.check(sizes)
    if (placement := placement_of(model)) is not None:
        raise MeshError(
            f"the model lies on a mesh of {placement.mesh.size} devices already, and its arrays are padded and "
            "repeated for it: place the whole model, or load it again with this mesh"
        )
    shares: list[Share] = []
    exchanges: dict[str, Exchange | Spread] = {}
    for leaf in array_leaves(model):
        share, exchange = share_of(leaf, sizes, rules)
        _check_size(leaf, share)
        shares.append(share)
        if isinstance(leaf.module, Matrix) and isinstance(around := leaf.around[-2], Experts):
            if (spread := _spread(around, share, exchange, rules.batch)) is not None:
                exchanges[leaf.path.rsplit(".", 2)[0]] = spread
        elif exchange != LOCAL:
            levels = 2 if isinstance(leaf.around[-2], Adapted) else 1  # a base's exchange is the adapted matrix's
            exchanges[leaf.path.rsplit(".", levels)[0]] = exchange
    memory = None if rules.same_bits else rules.heads
    batch, heads = (axis if axis in sizes else None for axis in (rules.batch, memory))
    specs, around = tuple(share.spec for share in shares), tuple(exchanges.items())
    placement = Placement(automatic(mesh), heads, batch, specs, tuple(shares), around, rules)
    return Layout(placement, tuple(shares))


def automatic(mesh: Mesh) -> Mesh:
    """The mesh with axes of type Auto: JAX reshards arrays as needed, which other types leave to the caller."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def check(mesh: Mesh | None, rules: Rules | None) -> None:
    """Raises ValueError for rules without a mesh, and for a mesh on which this process has no device."""
    if mesh is None and rules is not None:
        raise ValueError("rules: found some, and no mesh; give the mesh that they are for, as mesh=")
    if mesh is not None and jax.process_index() not in processes(mesh):
        raise ValueError(
            f"mesh: none of its {mesh.size} devices is one of process {jax.process_index()}; "
            "call this in the processes of the mesh alone"
        )


def processes(mesh: Mesh) -> list[int]:
    """The sorted indices of the processes that have devices of a mesh."""
    return sorted({device.process_index for device in mesh.devices.flat})


def _check_size(leaf: ArrayLeaf, share: Share) -> None:
    """Raises MeshError if an array does not have the size along its sharded axis that its matrix has."""
    shape, size = leaf.value.shape, max((end for _, end in share.spans), default=0)
    if share.axis is not None and (share.axis >= len(shape) or shape[share.axis] != size):
        kind = type(leaf.module).__name__
        raise MeshError(
            f"{leaf.path}: found {list(shape)}, which cannot be cut along axis {share.axis} in step with its {kind}; "
            "dequantize the matrix, or leave that axis whole in Rules"
        )


def _spread(experts: Experts, share: Share, exchange: Exchange, batch: str | None) -> Spread | None:
    """How devices share experts, from the share of one of their matrices; None if the matrix does not show it."""
    if share.axis == 0:
        return Spread(share.over, experts.count, batch if batch in share.over else None)
    return Spread((exchange.axis,), experts.count, parts=True) if exchange.y == "summed" else None


def place(model: CausalLM, mesh: Mesh, rules: Rules | None = None) -> Sharded:
    """Shards a model over a mesh by the rules, so that `step`, `generate` and engines run on all devices.

    The arrays pass through the host's memory one by one. Raises MeshError as `plan` does.
    """
    layout = plan(model, mesh, rules)
    return layout.model(model, [layout.put(i, value) for i, value in enumerate(jax.tree.leaves(model))])


def beside(model: Sharded, changed: CausalLM) -> Sharded:
    """Places arrays beside those of a model that is on a mesh already, by the same rules.

    `changed` is `model.whole` with more arrays: those are placed, and the arrays of `model`, which stay where they are,
    take the place of their structures, in the same order. Raises MeshError as `plan` does.
    """
    layout, there = plan(changed, model.placement.mesh, model.placement.rules), iter(jax.tree.leaves(model))
    leaves = enumerate(jax.tree.leaves(changed))
    arrays = [next(there) if isinstance(x, jax.ShapeDtypeStruct) else layout.put(i, x) for i, x in leaves]
    return layout.model(changed, arrays)
