"""The rules of a mesh: which logical axes of weights are sharded over it, and how each array is sharded then."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from ling3.formats import KeyValueHalves, QuantizedMatrix
from ling3.layers.adapted import Adapted
from ling3.layers.linear import Matrix
from ling3.leaves import ArrayLeaf
from ling3.mesh.exchange import LOCAL, Exchange
from ling3.mesh.share import WHOLE, Share, devices_along

WIDTH = 64
"""A device computes a multiple of this many outputs of a matrix, which keeps the order of the unsharded sums."""

HEADS = ("heads", "kv_heads", "groups")
"""The logical axes that count heads, or groups of heads."""

PACKED = "packed"
"""The logical axis of the channels of several kinds of heads: those of all heads of one kind, then of the next."""


@runtime_checkable
class PackedHeads(Protocol):
    """A layer with arrays along the axis `PACKED`."""

    @property
    def packing(self) -> tuple[int, ...]:
        """The number of channels of each kind of heads, in order."""
        ...

    @property
    def groups(self) -> int:
        """The number of groups of heads, of which a device has all kinds or none."""
        ...


Axes = str | tuple[str, ...] | None
"""One axis of the mesh, several (the first varies slowest), or none."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """Along which axes of the mesh each logical axis of the weights is sharded.

    `data` and `tensor` are ignored if the mesh has no such axis. All other logical axes (`hidden`, `latent`, …) are
    replicated, and so is the residual stream. Devices along `batch` have different tokens, so only experts, which
    gather the tokens of all devices, can be sharded along it too.

    With `sums`, a matrix whose inputs are sharded is sharded by columns, and the partial products are summed (psum).
    Without, it is sharded by rows and its inputs are gathered: each output is then the sum of the same products in the
    same order as on one device, whatever the interconnect, and a row's bits do not depend on its place in a batch.

    XLA may still order sums differently for fewer heads. With `same_bits` each device has the states of all heads and
    repeats the arithmetic between their projections for all, and XLA fuses nothing with a product: float32 logits then
    have the same bits on 1, 2, 4 and 8 devices along `tensor`; bfloat16 logits too if XLA must not keep float32 between
    operations (`XLA_FLAGS=--xla_allow_excess_precision=false`). A model without a mesh may still be fused differently,
    and so may other numbers of rows along `data`. Most matrices are still sharded, but MLA's `kv_b_proj` (attention
    reads its numbers), stacks of matrices per head and other arrays per head are replicated.
    """

    batch: str | None = "data"
    """Rows of a batch, and the slots and pages of an engine."""
    heads: str | None = "tensor"
    """Attention heads and their states; also key and value heads, and groups of heads."""
    intermediate: str | None = "tensor"
    """Channels of a feed-forward, and of each expert if `experts` are not sharded."""
    experts: Axes = "tensor"
    vocab: str | None = "tensor"
    sums: bool = False
    same_bits: bool = False

    def __post_init__(self):
        if self.sums and self.same_bits:
            raise ValueError(
                "Rules: sums of partial products depend on the number of devices: leave out sums or same_bits"
            )
        named = {name: getattr(self, name) for name in ("heads", "intermediate", "vocab")}
        if self.batch is not None and (shared := [name for name, axis in named.items() if axis == self.batch]):
            raise ValueError(
                f"Rules: {' and '.join(shared)} along {self.batch!r}, where devices have different rows of a batch and "
                "cannot share a product: give another axis, or batch=None"
            )
        if isinstance(self.experts, tuple) and len({*self.experts}) < len(self.experts):
            raise ValueError(f"Rules: experts are cut along {self.experts}, expected different axes")

    def check(self, mesh: Mapping[str, int]) -> None:
        """Raises MeshError if the rules name an axis that the mesh ({axis: size}) lacks, or leave one unused."""
        own = {name: getattr(self, name) for name in ("batch", "heads", "intermediate", "experts", "vocab")}
        axes = {name: (axis,) if isinstance(axis, str) else axis or () for name, axis in own.items()}
        shown = ", ".join(f"{axis!r} ({size})" for axis, size in mesh.items())
        for name, found in axes.items():
            if missing := [axis for axis in found if axis not in mesh and axis not in ("data", "tensor")]:
                raise MeshError(f"Rules: {name} along {missing[0]!r}, and the mesh has the axes {shown}")
        used = {axis for found in axes.values() for axis in found}
        if idle := [axis for axis, size in mesh.items() if size > 1 and axis not in used]:
            raise MeshError(
                f"the mesh has the axes {shown}, and the rules put nothing along {idle[0]!r}, whose devices would all "
                "do the same: name the axes 'data' and 'tensor', or say in Rules what lies along yours"
            )

    def axes_of(self, logical: str, mesh: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of the mesh ({axis: size}) along which a logical axis is sharded; empty if it is replicated."""
        named = dict.fromkeys((*HEADS, PACKED), self.heads) | {"intermediate": self.intermediate}
        found = (named | {"experts": self.experts, "vocab": self.vocab}).get(logical)
        return tuple(axis for axis in ((found,) if isinstance(found, str) else found or ()) if axis in mesh)


_COMMON = {"lora_A": 1, "A": 1, "lora_B": 0, "B": 0}
"""The axis of its matrix that an array of an adapter has too, by the array's field: outputs are 0, and inputs 1."""


class MeshError(ValueError):
    """Raised for a model that cannot be sharded over a mesh as the rules say; the message says what would fit."""


def share_of(leaf: ArrayLeaf, mesh: Mapping[str, int], rules: Rules) -> tuple[Share, Exchange]:
    """Each device's part of an array, and the exchange around the product if the array belongs to a matrix.

    `mesh` has the size of each axis. Raises MeshError for an array whose axes have no names, and for an axis that
    cannot be sharded as the rules say.
    """
    if (adapted := leaf.adapted) is not None:
        return _of_update(leaf, adapted, mesh, rules), LOCAL
    if leaf.value.ndim and not leaf.axes:
        raise MeshError(
            f"{leaf.path}: its axes have no names, by which rules say how devices share it; state them, as in "
            "Linear.init(…, axes=('heads', 'hidden')) or x: Float[Array, 'heads key']"
        )
    if not isinstance(leaf.module, Matrix):
        return _of_heads(leaf, mesh, rules), LOCAL
    share, exchange = _of_matrix(leaf, mesh, rules)
    *stack, outer, inner = leaf.module.axes
    axes = rules.axes_of(outer, mesh) or rules.axes_of(inner, mesh)
    if rules.same_bits and axes and not stack:
        exchange = dataclasses.replace(exchange, axis=axes[0], fenced=True)
    return _in_elements(leaf, share), exchange


def _of_matrix(leaf: ArrayLeaf, mesh: Mapping[str, int], rules: Rules) -> tuple[Share, Exchange]:
    """The share of a matrix or of a stack of them, counted in rows, columns and matrices, and the exchange."""
    *stack, outer, inner = leaf.module.axes
    own = len(stack)  # the axis of the outputs, which is a bias's last one
    stacked = bool(stack) or isinstance(leaf.module, KeyValueHalves)  # which has two stacks
    counted, partial = [*stack, outer, inner], rules.sums or stacked
    over = {axis: rules.axes_of(axis, mesh) for axis in counted}
    if rules.same_bits and any(over[axis] for axis in counted if axis in (*HEADS, PACKED, "vocab")):
        return (WHOLE, LOCAL) if stack else _gathered(leaf, over[outer] or over[inner], mesh)
    if stack and (axes := over[stack[0]]):
        size = leaf.module.shape[0]
        repeats = 1 if stack[0] == "experts" else _repeats(leaf, stack[0], size, axes, mesh)
        return _cut(0, size, axes, mesh, repeats), LOCAL
    if axes := over[inner]:
        return _inputs(leaf, own, axes, mesh, partial)
    return _outputs(leaf, own, over[outer], mesh, partial) if over[outer] else (WHOLE, LOCAL)


def _of_update(leaf: ArrayLeaf, adapted: Adapted, mesh: Mapping[str, int], rules: Rules) -> Share:
    """The share of an array of an adapter: B has the rows of its matrix W that the device has, and A the columns.

    So x Aᵀ Bᵀ is sharded as x Wᵀ, and what is exchanged is their sum. All else is replicated.
    """
    above = itertools.takewhile(lambda module: module is not adapted, leaf.around)
    around = (*above, adapted, adapted.base)
    share, _ = _of_matrix(dataclasses.replace(leaf, around=around), mesh, rules)
    if share.axis is None or share.axis != _COMMON.get(leaf.field):
        return WHOLE
    return dataclasses.replace(share, axis=leaf.value.ndim - 2 + share.axis)


def _of_heads(leaf: ArrayLeaf, mesh: Mapping[str, int], rules: Rules) -> Share:
    """The share of an array that belongs to no matrix: sharded by heads, if it has any."""
    if rules.same_bits or not (axes := rules.axes_of("heads", mesh)):
        return WHOLE
    if PACKED in leaf.axes:
        return _packed(leaf, leaf.axes.index(PACKED), axes, mesh)
    if "heads" not in leaf.axes:
        return WHOLE
    at = leaf.axes.index("heads")
    return _cut(at, leaf.value.shape[at], axes, mesh, _repeats(leaf, "heads", leaf.units("heads"), axes, mesh))


def _gathered(leaf: ArrayLeaf, axes: tuple[str, ...], mesh: Mapping[str, int]) -> tuple[Share, Exchange]:
    """For `same_bits`: a matrix sharded by rows, whose inputs and gathered outputs every device has."""
    (rows, _), [axis], devices = leaf.module.shape, axes, devices_along(axes, mesh)
    if (
        rows % devices or not _aligned(leaf, rows // devices) or leaf.module.axes[1] == "latent"
    ):  # attention reads this matrix's numbers
        return WHOLE, LOCAL
    return Share.even(0, rows, axes, mesh), Exchange(axis, devices, y="gathered")


def _outputs(
    leaf: ArrayLeaf, own: int, axes: tuple[str, ...], mesh: Mapping[str, int], narrow: bool
) -> tuple[Share, Exchange]:
    """A matrix whose outputs are sharded; `narrow` allows parts of any width, not only aligned ones."""
    outer, rows, [axis], devices = leaf.module.axes[own], leaf.module.shape[own], axes, devices_along(axes, mesh)
    if outer == "vocab":
        return Share.even(own, rows, axes, mesh, math.lcm(WIDTH, _step(leaf.module, 0))), Exchange(
            axis, devices, y="gathered"
        )
    if outer == PACKED:
        share, repeats = _packed(leaf, own, axes, mesh), 1
    else:
        repeats = _repeats(leaf, outer, leaf.units(outer), axes, mesh)
        share = _cut(own, rows, axes, mesh, repeats)
    blocks = all(own % (devices * _step(leaf.module, 0)) == 0 for own in share.packed)
    if narrow or (blocks and _aligned(leaf, share.width)):
        return share, LOCAL
    return WHOLE, Exchange(axis, devices // repeats, repeats, y="sliced", packed=share.packed)


def _packed(leaf: ArrayLeaf, at: int, over: tuple[str, ...], mesh: Mapping[str, int]) -> Share:
    """An even share of each kind of heads. Raises MeshError if the devices cannot share the heads evenly."""
    layer = next(module for module in reversed(leaf.around) if isinstance(module, PackedHeads))
    if _repeats(leaf, "groups", layer.groups, over, mesh) > 1:
        raise MeshError(
            f"{leaf.path}: {devices_along(over, mesh)} devices cannot share {layer.groups} groups of heads, of which "
            f"no two can have the same; use at most {layer.groups}"
        )
    return dataclasses.replace(Share.even(at, sum(layer.packing), over, mesh), packed=layer.packing)


def _inputs(
    leaf: ArrayLeaf, own: int, axes: tuple[str, ...], mesh: Mapping[str, int], sums: bool
) -> tuple[Share, Exchange]:
    """A matrix whose inputs are sharded: by columns with `sums`, otherwise by rows."""
    weight, inner, [axis], devices = leaf.module.shape, leaf.module.axes[own + 1], axes, devices_along(axes, mesh)
    repeats = _repeats(leaf, inner, leaf.units(inner), axes, mesh)
    if sums:
        if leaf.field == "bias":
            raise MeshError(f"{leaf.path}: a bias would be added by each device; use Rules(sums=False)")
        how = Exchange(axis, devices // repeats, repeats, y="summed")
        return _cut(own + 1, weight[own + 1], axes, mesh, repeats), how
    gathered = Exchange(axis, devices // repeats, repeats, x="gathered")
    if repeats > 1 or weight[own] % devices or not _aligned(leaf, weight[own] // devices):
        return WHOLE, gathered
    return Share.even(own, weight[own], axes, mesh), dataclasses.replace(gathered, y="gathered")


def _aligned(leaf: ArrayLeaf, width: int) -> bool:
    """True if parts of `width` rows keep the unsharded order of sums, and are full quantized blocks or inside one."""
    step = _step(leaf.module, 0)
    return width % WIDTH == 0 and (width % step == 0 or step % width == 0)


def _step(matrix: Matrix, axis: int) -> int:
    """The number of rows (axis 0) or columns (1) that are stored together, as they share scales or a packed word."""
    if not isinstance(matrix, QuantizedMatrix):
        return 1
    return math.lcm(*(matrix.steps(field)[axis] or 1 for field in matrix.STORED))


def _in_elements(leaf: ArrayLeaf, share: Share) -> Share:
    """Converts a share of a matrix to the elements of one of its tensors; parts of one block all get its scale.

    Raises MeshError if a part would have a fraction of a block or of a packed word next to something else.
    """
    matrix = leaf.module
    if share.axis is None or not isinstance(matrix, QuantizedMatrix):
        return share
    axis, size = share.axis - len(matrix.shape) + 2, matrix.shape[share.axis]
    if axis < 0:  # a stack is sharded by matrices
        return share
    if (step := matrix.steps(leaf.field)[axis]) is None:
        if leaf.field == next(iter(matrix.STORED)) and (parts := len(set(share.spans))) > 1:
            raise MeshError(
                f"{leaf.path}: {parts} devices would have {share.width} columns each of {size}, and a row's blocks are "
                f"stored together; leave {matrix.axes[share.axis]} whole in Rules"
            )
        return WHOLE
    spans = [(first // step, -(-end // step)) for first, end in share.spans]
    whole = all(edge % step == 0 or edge == size for span in share.spans for edge in span)
    whole = whole and all(own % (step * len(spans)) == 0 for own in share.packed)
    within = "scale" in leaf.field and not share.packed and all(end - first <= 1 for first, end in spans)
    if not whole and not within:
        what, parts = ("rows", "columns")[axis], len(set(share.spans))
        shares = {d: size // d for d in range(1, parts + 1) if size % d == 0}
        fits = [d for d, part in shares.items() if d == 1 or part % step == 0 or step % part == 0]
        raise MeshError(
            f"{leaf.path}: {parts} devices would have {share.width} {what} each of {size}, which cuts blocks of {step} "
            f"that are stored together; {', '.join(map(str, fits))} can share them, or leave "
            f"{matrix.axes[share.axis]} whole in Rules"
        )
    packed = tuple(own // step for own in share.packed)
    return dataclasses.replace(share, spans=tuple(spans), width=-(-share.width // step), packed=packed)


def _cut(axis: int, size: int, over: tuple[str, ...], mesh: Mapping[str, int], repeats: int) -> Share:
    return Share.even(axis, size, over, mesh) if repeats == 1 else Share.repeated(axis, size, over, mesh, repeats)


def _repeats(leaf: ArrayLeaf, axis: str, units: int, over: tuple[str, ...], mesh: Mapping[str, int]) -> int:
    """How many neighbours have the same part of an axis of `units` heads; raises MeshError if no even split exists."""
    devices = devices_along(over, mesh)
    if axis not in HEADS or units % devices == 0:
        return 1
    if devices % units:
        fits = ", ".join(str(d) for d in range(1, units + 1) if units % d == 0)
        raise MeshError(
            f"{leaf.path}: {axis} are {units}, which {devices} devices cannot share evenly; {fits} can, and any "
            f"multiple of {units}, where several devices have the same"
        )
    return devices // units
