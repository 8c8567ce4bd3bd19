"""Where each array of a model lies on a mesh: from a whole model to its parts, and back."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from ling3.layers.linear import Matrix
from ling3.layers.moe import Experts
from ling3.leaves import leaves
from ling3.mesh.rules import Rules, Share, share_of
from ling3.model import CausalLM
from ling3.ops.exchange import Exchange, Spread
from ling3.placement import Placement


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which part of each of a model's arrays every device of a mesh has, in the order of `jax.tree.leaves`."""

    placement: Placement
    shares: tuple[Share, ...]
    exchanges: dict[str, Exchange | Spread | None]
    """Of matrices and stacks of experts, by path."""

    @property
    def shardings(self) -> list[NamedSharding]:
        """Where the arrays lie."""
        return [self.placement.sharding(spec) for spec in self.placement.specs]

    def array(self, i: int, whole: tuple[int, ...], read: Callable[[Share, int], np.ndarray]) -> jax.Array:
        """Array i over the devices of this process and others: `read(share, part)` gives one part of it.

        `whole` is the shape of the array that is cut. A part that several devices of this process have is read once.
        """
        share, sharding = self.shares[i], self.shardings[i]
        shape, parts = share.stored(whole), {}
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None, "a sharding over a mesh has a place for each device"
            number = share.number(index)
            parts.setdefault(share.spans[number] if share.spans else None, (number, []))[1].append(device)
        arrays = []
        for number, devices in parts.values():
            part = read(share, number)
            arrays += [jax.device_put(part, device) for device in devices]
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    def structure(self, tree: CausalLM) -> CausalLM:
        """The model with the shape, dtype and place of each array instead of its numbers."""
        arrays = [
            jax.ShapeDtypeStruct(share.stored(x.shape), x.dtype, sharding=sharding)
            for share, x, sharding in zip(self.shares, jax.tree.leaves(tree), self.shardings, strict=True)
        ]
        traced = eqx.filter_eval_shape(lambda arrays: self.model(tree, arrays), arrays)
        return jax.tree.unflatten(jax.tree.structure(traced), arrays)

    def model(self, tree: CausalLM, arrays: Sequence[jax.Array]) -> CausalLM:
        """The model of such arrays; `tree` has its structure."""
        placed = jax.tree.unflatten(jax.tree.structure(tree), arrays)
        return dataclasses.replace(_exchanging(placed, self.exchanges), placement=self.placement)


def plan(model: CausalLM, mesh: Mesh, rules: Rules | None = None) -> Layout:
    """How a model (or its structure) lies on a mesh.

    Raises MeshError, with the axis, its size and what would fit, if it cannot be cut so.
    """
    rules, sizes = Rules() if rules is None else rules, dict(mesh.shape)
    shares, exchanges = [], {}
    for leaf in leaves(model):
        share, exchange = share_of(leaf, sizes, rules)
        shares.append(share)
        if isinstance(leaf.module, Matrix):
            exchanges[leaf.path.rpartition(".")[0]] = exchange
            if isinstance(around := leaf.around[-2], Experts):
                path = leaf.path.rsplit(".", 2)[0]
                exchanges[path] = _spread(around, share, exchange, rules.batch) or exchanges.get(path)
    batch, heads = (axis if axis in sizes else None for axis in (rules.batch, rules.heads))
    # Arrays are moved to where a function takes them: axes of other types ask the caller to do so.
    auto = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    placement = Placement(auto, heads, batch, tuple(share.spec for share in shares))
    return Layout(placement, tuple(shares), exchanges)


def _spread(experts: Experts, share: Share, exchange: Exchange, batch: str | None) -> Spread | None:
    """How devices share the experts of which one matrix lies so."""
    if share.axis == 0:
        return Spread(share.over, experts.count, batch if batch in share.over else None)
    return Spread((exchange.axis,), experts.count, parts=True) if exchange.y == "summed" else None


def place(model: CausalLM, mesh: Mesh, rules: Rules | None = None) -> CausalLM:
    """The model on a mesh: each array cut by the rules, so that `step`, `generate` and engines run on all devices.

    The arrays pass through the host's memory one by one. Raises MeshError as `plan` does.
    """
    layout = plan(model, mesh, rules)
    arrays = []
    for i, value in enumerate(jax.tree.leaves(model)):
        whole = np.asarray(value)
        arrays.append(layout.array(i, whole.shape, lambda share, number, x=whole: share.part(x, number)))
    return layout.model(model, arrays)


def _exchanging(node: Any, exchanges: dict[str, Exchange | Spread | None], path: str = "") -> Any:
    """The tree with the `exchange` of each matrix, and the `spread` of experts that devices share."""
    if isinstance(node, tuple):
        return tuple(_exchanging(item, exchanges, f"{path}.{i}") for i, item in enumerate(node))
    own = path.lstrip(".")
    if isinstance(node, Matrix):
        return dataclasses.replace(node, exchange=exchanges[own])
    if not dataclasses.is_dataclass(node):
        return node
    changed = dataclasses.replace(node, spread=exchanges.get(own)) if isinstance(node, Experts) else copy.copy(node)
    for field in dataclasses.fields(node):
        if not field.metadata.get("static"):
            value = _exchanging(getattr(node, field.name), exchanges, f"{path}.{field.name}")
            object.__setattr__(changed, field.name, value)
    return changed
