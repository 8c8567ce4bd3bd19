"""Which logical axes of weights are cut over a mesh, and what that means for each array: the one table."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ling3.checkpoint.names import Leaf
from ling3.layers.linear import Matrix
from ling3.ops.exchange import LOCAL, Exchange

WIDTH = 64
"""Outputs that a device computes of a matrix are a multiple of this, so that XLA sums each as it would with all."""

STAYS = ("heads", "kv_heads", "intermediate", "groups")
"""Outputs that are read where they are computed: the next matrix has them as its inputs."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """The logical axes that are cut along the axis `tensor` of the mesh; all others are whole on every device.

    With `sums`, a matrix whose inputs are cut is cut by its columns, and the devices' products are summed. Without, it
    is cut by its rows and gets all inputs: each number is then the sum of the same products in the same order as on one
    device, and has the same bits.
    """

    tensor: str = "tensor"
    cut: tuple[str, ...] = ("heads", "kv_heads", "intermediate", "vocab", "experts", "groups")
    sums: bool = False


@dataclasses.dataclass(frozen=True)
class Share:
    """What each device has of an array: along `axis`, the numbers from `first` to `end` and zeros up to `width`."""

    axis: int | None = None
    spans: tuple[tuple[int, int], ...] = ()
    width: int = 0

    @staticmethod
    def even(axis: int, size: int, devices: int, multiple: int = 1) -> "Share":
        """Equal widths, of a multiple of `multiple`; the last device may have fewer numbers, or none."""
        width = -(-size // (devices * multiple)) * multiple
        return Share(axis, tuple((min(d * width, size), min((d + 1) * width, size)) for d in range(devices)), width)

    @staticmethod
    def repeated(axis: int, size: int, devices: int, units: int) -> "Share":
        """One of `units` equal parts for each device, neighbours having the same one."""
        width, same = size // units, devices // units
        return Share(axis, tuple((d // same * width, (d // same + 1) * width) for d in range(devices)), width)


WHOLE = Share()
"""All of it on every device."""


class MeshError(ValueError):
    """A model that cannot be cut over so many devices; the message names the axis, its size and what would fit."""


def share_of(leaf: Leaf, devices: int, rules: Rules) -> tuple[Share, Exchange]:
    """What each of so many devices has of an array, and what they exchange around its product if it is a matrix's.

    Raises MeshError for an axis that cannot be cut so.
    """
    axes, shape = leaf.axes, leaf.value.shape
    cut = [axis in rules.cut for axis in axes]
    if not isinstance(leaf.module, Matrix):
        if not any(cut):
            return WHOLE, LOCAL
        axis = cut.index(True)
        _check(leaf, axes[axis], shape[axis], devices)
        return Share.even(axis, shape[axis], devices), LOCAL
    *stack, outer, inner = leaf.module.axes
    own = len(stack)  # of the outputs, the last axis of a bias
    weight = leaf.module.shape
    if stack and stack[0] in rules.cut:
        _check(leaf, stack[0], weight[0], devices)
        return Share.even(0, weight[0], devices), LOCAL
    if inner in rules.cut:
        return _inputs(leaf, own, devices, rules)
    if outer not in rules.cut:
        return WHOLE, LOCAL
    if outer == "vocab":
        share = Share.even(own, weight[own], devices, WIDTH)
        return share, Exchange(rows=rules.tensor, gather_outputs=rules.tensor)
    units = leaf.units(outer)
    if outer == "kv_heads" and units < devices and devices % units == 0:
        return Share.repeated(own, weight[own], devices, units), LOCAL
    _check(leaf, outer, units, devices)
    if not rules.sums and weight[own] // devices % WIDTH:
        return WHOLE, Exchange(slice_outputs=rules.tensor)
    return Share.even(own, weight[own], devices), LOCAL


def _inputs(leaf: Leaf, own: int, devices: int, rules: Rules) -> tuple[Share, Exchange]:
    """Of a matrix whose inputs are cut."""
    weight, tensor = leaf.module.shape, rules.tensor
    if rules.sums:
        if leaf.field == "bias":
            raise MeshError(f"{leaf.path}: a bias would be added by each device; use Rules(sums=False)")
        return Share.even(own + 1, weight[own + 1], devices), Exchange(sum_outputs=tensor)
    if weight[own] % (devices * WIDTH):
        return WHOLE, Exchange(gather_inputs=tensor)
    return Share.even(own, weight[own], devices), Exchange(gather_inputs=tensor, gather_outputs=tensor)


def _check(leaf: Leaf, axis: str, size: int, devices: int) -> None:
    if size % devices:
        fits = ", ".join(str(d) for d in _divisors(size))
        raise MeshError(f"{leaf.path}: {axis} are {size}, which {devices} devices cannot share evenly; {fits} can")


def _divisors(size: int) -> Iterator[int]:
    return (d for d in range(1, size + 1) if size % d == 0)
