"""From a whole model to one that is cut over a mesh, and back."""

import copy
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from ling3.checkpoint.names import Leaf, leaves
from ling3.layers.linear import Matrix
from ling3.mesh.rules import Rules, Share, share_of
from ling3.model import CausalLM
from ling3.ops.exchange import Exchange
from ling3.placement import EVERYWHERE, Placement


def place(model: CausalLM, mesh: Mesh, rules: Rules | None = None) -> CausalLM:
    """The model on a mesh: each array cut by the rules, so that `step`, `generate` and engines run on all devices."""
    rules = Rules() if rules is None else rules
    devices = mesh.shape[rules.tensor]
    shares, exchanges = plan(model, devices, rules)
    specs = tuple(_spec(share, rules.tensor) for share in shares)
    arrays = []
    for leaf, share, spec in zip(leaves(model), shares, specs, strict=True):
        whole = np.asarray(leaf.value)
        sharding = jax.sharding.NamedSharding(mesh, spec)
        shape = stored_shape(whole.shape, share)
        arrays.append(jax.make_array_from_callback(shape, sharding, lambda index, w=whole, s=share: part(w, s, index)))
    placed = jax.tree.unflatten(jax.tree.structure(model), arrays)
    placement = Placement(mesh, rules.tensor, specs)
    return dataclasses.replace(with_exchanges(placed, exchanges), placement=placement)


def gathered(model: CausalLM, rules: Rules | None = None) -> CausalLM:
    """The whole model of one that `place` has cut, on one device, with the same bits."""
    assert model.placement is not None, "a model on a mesh"
    raise NotImplementedError


def plan(model: CausalLM, devices: int, rules: Rules) -> tuple[list[Share], dict[str, Exchange]]:
    """Of each array what a device has, and of each matrix (by its path) what devices exchange."""
    shares, exchanges = [], {}
    for leaf in leaves(model):
        share, exchange = share_of(leaf, devices, rules)
        shares.append(share)
        if isinstance(leaf.module, Matrix):
            exchanges[leaf.path.rpartition(".")[0]] = exchange
    return shares, exchanges


def stored_shape(shape: tuple[int, ...], share: Share) -> tuple[int, ...]:
    """That of the array over all devices, whose parts may repeat or end in zeros."""
    if share.axis is None:
        return shape
    return (*shape[: share.axis], share.width * len(share.spans), *shape[share.axis + 1 :])


def part(whole: np.ndarray, share: Share, index: tuple[slice, ...]) -> np.ndarray:
    """What one device has of a whole array; `index` is its place in the array over all devices."""
    if share.axis is None:
        return whole[index]
    axis = share.axis
    first, end = share.spans[(index[axis].start or 0) // share.width]
    own = whole[(slice(None),) * axis + (slice(first, end),)]
    missing = [(0, share.width - (end - first) if i == axis else 0) for i in range(whole.ndim)]
    return np.pad(own, missing)


def _spec(share: Share, tensor: str) -> PartitionSpec:
    return EVERYWHERE if share.axis is None else PartitionSpec(*[None] * share.axis, tensor)


def with_exchanges(node: Any, exchanges: dict[str, Exchange], path: str = "") -> Any:
    """The tree with the `exchange` of each matrix."""
    if isinstance(node, tuple | list):
        return type(node)(with_exchanges(item, exchanges, f"{path}.{i}".lstrip(".")) for i, item in enumerate(node))
    if isinstance(node, Matrix):
        return dataclasses.replace(node, exchange=exchanges[path])
    if not dataclasses.is_dataclass(node) or isinstance(node, type) or not hasattr(node, "__dataclass_fields__"):
        return node
    changed = copy.copy(node)
    for field in dataclasses.fields(node):
        if not field.metadata.get("static"):
            value = with_exchanges(getattr(node, field.name), exchanges, f"{path}.{field.name}".lstrip("."))
            object.__setattr__(changed, field.name, value)
    return changed
