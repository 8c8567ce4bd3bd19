"""The rules of a mesh: which logical axes of weights are cut over it, and what that means for each array."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Int, Shaped

from ling3.formats import QuantizedMatrix
from ling3.layers.linear import Matrix
from ling3.leaves import ArrayLeaf
from ling3.mesh.exchange import LOCAL, Exchange

WIDTH = 64
"""Outputs that a device computes of a matrix are a multiple of this, which keeps the order of the unsharded sums."""

HEADS = ("heads", "kv_heads", "groups")
"""The logical axes that count heads, or several of them."""

Axes = str | tuple[str, ...] | None
"""One axis of a mesh, several of them (the first varying slowest), or none."""


@dataclasses.dataclass(frozen=True)
class Rules:
    """Along which axes of the mesh each logical axis is cut.

    `data` and `tensor` cut nothing where the mesh has no such axis. All other logical axes (`hidden`, `latent`, …) are
    whole on every device, and so is the residual stream. Devices along `batch` have different tokens, so only experts,
    to which all tokens come, can be cut along it too.

    With `sums`, a matrix whose inputs are cut is cut by its columns, and the devices' products are summed. Without, it
    is cut by its rows and gets all inputs: each number is then the sum of the same products in the same order as on one
    device, whatever carries the messages, and no row's bits depend on its place in a batch.

    XLA may still order the sums within fewer heads otherwise than within all. With `same_bits` each device has what all
    heads remember and does the arithmetic between their projections for all, and XLA fuses nothing over a product:
    logits in float32 then have the same bits for 1, 2, 4 and 8 devices along `tensor`. (In bfloat16 if XLA may not keep
    float32 between operations, with `XLA_FLAGS=--xla_allow_excess_precision=false`.) A model without a mesh may still
    be fused otherwise, and so may other numbers of rows along `data`. The weights are cut as without it, but for those
    that attention reads as numbers (MLA's `kv_b_proj`).
    """

    batch: str | None = "data"
    """Rows of a batch, and the slots and pages of an engine."""
    heads: str | None = "tensor"
    """Heads of attention and their memory; with them key and value heads, and groups of heads."""
    intermediate: str | None = "tensor"
    """Channels of a feed-forward, and those of experts where `experts` are not cut."""
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
        """MeshError for rules that name axes which a mesh of such sizes lacks, or leave some of its devices idle."""
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
        """The axes of a mesh of such sizes along which a logical axis of weights is cut; none if it is not."""
        named = {"heads": self.heads, "kv_heads": self.heads, "groups": self.heads, "intermediate": self.intermediate}
        found = (named | {"experts": self.experts, "vocab": self.vocab}).get(logical)
        return tuple(axis for axis in ((found,) if isinstance(found, str) else found or ()) if axis in mesh)


@dataclasses.dataclass(frozen=True)
class Share:
    """Each device's part of an array: along `axis`, the numbers from `first` to `end` and zeros up to `width`."""

    axis: int | None = None
    over: tuple[str, ...] = ()
    """The axes of the mesh."""
    spans: tuple[tuple[int, int], ...] = ()
    width: int = 0

    @staticmethod
    def even(axis: int, size: int, over: tuple[str, ...], mesh: Mapping[str, int], multiple: int = 1) -> "Share":
        """Equal widths, of a multiple of `multiple`; the last devices may have fewer numbers, or none."""
        devices = _devices(over, mesh)
        width = -(-size // (devices * multiple)) * multiple
        spans = tuple((min(d * width, size), min((d + 1) * width, size)) for d in range(devices))
        return Share(axis, over, spans, width)

    @staticmethod
    def repeated(axis: int, size: int, over: tuple[str, ...], mesh: Mapping[str, int], repeats: int) -> "Share":
        """Equal parts of which `repeats` neighbours have the same one."""
        devices = _devices(over, mesh)
        width = size * repeats // devices
        spans = tuple((d // repeats * width, (d // repeats + 1) * width) for d in range(devices))
        return Share(axis, over, spans, width)

    @property
    def spec(self) -> PartitionSpec:
        """Of an array that has all devices' parts side by side."""
        return PartitionSpec() if self.axis is None else PartitionSpec(*[None] * self.axis, self.over)

    def stored(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of all devices' parts side by side, for an array of shape `whole`."""
        return self._sized(whole, self.width * len(self.spans))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's part of the array."""
        return self._sized(whole, self.width)

    def unstored(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the array that is cut, where all parts side by side have the shape `stored`."""
        return self._sized(stored, max((end for _, end in self.spans), default=0))

    def _sized(self, whole: tuple[int, ...], size: int) -> tuple[int, ...]:
        return whole if self.axis is None else (*whole[: self.axis], size, *whole[self.axis + 1 :])

    def places(self, index: tuple[Int[np.ndarray, " n"], ...]) -> tuple[Int[np.ndarray, " n"], ...]:
        """Where numbers of the array that is cut, at an index for each axis, are among all parts side by side."""
        if self.axis is None:
            return index
        begins = np.asarray([begin for begin, _ in self.spans])
        part = np.searchsorted(begins, begins[np.searchsorted(begins, index[self.axis], side="right") - 1])
        own = index[self.axis] - begins[part] + part * self.width
        return (*index[: self.axis], own, *index[self.axis + 1 :])

    def number(self, index: tuple[slice, ...]) -> int:
        """The number of the part at such a place in `stored`."""
        return 0 if self.axis is None else (index[self.axis].start or 0) // self.width

    def part(self, whole: Shaped[np.ndarray, "..."], number: int) -> Shaped[np.ndarray, "..."]:
        """One part of a whole array."""
        if self.axis is None:
            return whole
        first, end = self.spans[number]
        own = whole[(slice(None),) * self.axis + (slice(first, end),)]
        missing = [(0, self.width - (end - first) if i == self.axis else 0) for i in range(whole.ndim)]
        return np.pad(own, missing)

    def whole(self, stored: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """The array of which `stored` has all devices' parts: each number once, and no zeros at the end."""
        if self.axis is None:
            return stored
        kept, seen = [], set()
        for number, (first, end) in enumerate(self.spans):
            if (first, end) not in seen and first < end:
                kept.append(np.arange(number * self.width, number * self.width + end - first))
                seen.add((first, end))
        return np.take(stored, np.concatenate(kept), axis=self.axis)


WHOLE = Share()
"""All of it on every device."""


class MeshError(ValueError):
    """A model that cannot be cut over so many devices; the message names the axis, its size and what would fit."""


def share_of(leaf: ArrayLeaf, mesh: Mapping[str, int], rules: Rules) -> tuple[Share, Exchange]:
    """Each device's part of an array, and the exchange around its product if it is a matrix's.

    `mesh` has the size of each axis. Raises MeshError for an array whose axes have no names, and for an axis that
    cannot be cut so.
    """
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
    """What each device has of a matrix, in rows, columns and matrices of a stack."""
    *stack, outer, inner = leaf.module.axes
    own = len(stack)  # the axis of the outputs, the last one of a bias
    counted, partial = [*stack, outer, inner], rules.sums or bool(stack)
    over = {axis: rules.axes_of(axis, mesh) for axis in counted}
    if rules.same_bits and any(over[axis] for axis in counted if axis in (*HEADS, "vocab")):
        return (WHOLE, LOCAL) if stack else _gathered(leaf, over[outer] or over[inner], mesh)
    if stack and (axes := over[stack[0]]):
        size = leaf.module.shape[0]
        repeats = 1 if stack[0] == "experts" else _repeats(leaf, stack[0], size, axes, mesh)
        return _cut(0, size, axes, mesh, repeats), LOCAL
    if axes := over[inner]:
        return _inputs(leaf, own, axes, mesh, partial)
    return _outputs(leaf, own, over[outer], mesh, partial) if over[outer] else (WHOLE, LOCAL)


def _of_heads(leaf: ArrayLeaf, mesh: Mapping[str, int], rules: Rules) -> Share:
    """Of an array that is no matrix: along its heads, if it has any."""
    if rules.same_bits or "heads" not in leaf.axes or not (axes := rules.axes_of("heads", mesh)):
        return WHOLE
    at = leaf.axes.index("heads")
    return _cut(at, leaf.value.shape[at], axes, mesh, _repeats(leaf, "heads", leaf.units("heads"), axes, mesh))


def _gathered(leaf: ArrayLeaf, axes: tuple[str, ...], mesh: Mapping[str, int]) -> tuple[Share, Exchange]:
    """Of a matrix whose inputs and outputs are whole on every device."""
    (rows, _), [axis], devices = leaf.module.shape, axes, _devices(axes, mesh)
    if (
        rows % devices or not _aligned(leaf, rows // devices) or leaf.module.axes[1] == "latent"
    ):  # attention reads its numbers
        return WHOLE, LOCAL
    return Share.even(0, rows, axes, mesh), Exchange(axis, devices, y="gathered")


def _outputs(
    leaf: ArrayLeaf, own: int, axes: tuple[str, ...], mesh: Mapping[str, int], narrow: bool
) -> tuple[Share, Exchange]:
    """Of a matrix whose outputs are cut; into parts of any width, if `narrow` ones may be."""
    outer, rows, [axis], devices = leaf.module.axes[own], leaf.module.shape[own], axes, _devices(axes, mesh)
    if outer == "vocab":
        return Share.even(own, rows, axes, mesh, math.lcm(WIDTH, _step(leaf.module, 0))), Exchange(
            axis, devices, y="gathered"
        )
    repeats = _repeats(leaf, outer, leaf.units(outer), axes, mesh)
    share = _cut(own, rows, axes, mesh, repeats)
    if narrow or _aligned(leaf, share.width):
        return share, LOCAL
    return WHOLE, Exchange(axis, devices // repeats, repeats, y="sliced")


def _inputs(
    leaf: ArrayLeaf, own: int, axes: tuple[str, ...], mesh: Mapping[str, int], sums: bool
) -> tuple[Share, Exchange]:
    """Of a matrix whose inputs are cut."""
    weight, inner, [axis], devices = leaf.module.shape, leaf.module.axes[own + 1], axes, _devices(axes, mesh)
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
    """True if parts of so many rows are computed as the whole is, and cut no block of a quantized matrix in two."""
    step = _step(leaf.module, 0)
    return width % WIDTH == 0 and (width % step == 0 or step % width == 0)


def _step(matrix: Matrix, axis: int) -> int:
    """Rows (axis 0) or columns (1) of a matrix that belong together, as they share scales or a word."""
    if not isinstance(matrix, QuantizedMatrix):
        return 1
    return math.lcm(*(matrix.steps(field)[axis] or 1 for field in matrix.STORED))


def _in_elements(leaf: ArrayLeaf, share: Share) -> Share:
    """A share of a matrix in the elements of one of its tensors; parts within one block all have its scale.

    MeshError if a part has a piece of a block or of a word beside something else.
    """
    matrix = leaf.module
    if share.axis is None or not isinstance(matrix, QuantizedMatrix):
        return share
    axis, size = share.axis - len(matrix.shape) + 2, matrix.shape[share.axis]
    if axis < 0:  # whole matrices of a stack
        return share
    if (step := matrix.steps(leaf.field)[axis]) is None:
        return WHOLE
    spans = [(first // step, -(-end // step)) for first, end in share.spans]
    whole = all(edge % step == 0 or edge == size for span in share.spans for edge in span)
    within = "scale" in leaf.field and all(end - first <= 1 for first, end in spans)
    if not whole and not within:
        what, parts = ("rows", "columns")[axis], len(set(share.spans))
        shares = {d: size // d for d in range(1, parts + 1) if size % d == 0}
        fits = [d for d, part in shares.items() if d == 1 or part % step == 0 or step % part == 0]
        raise MeshError(
            f"{leaf.path}: {parts} devices would have {share.width} {what} each of {size}, which cuts blocks of {step} "
            f"that are stored together; {', '.join(map(str, fits))} can share them, or leave "
            f"{matrix.axes[share.axis]} whole in Rules"
        )
    return dataclasses.replace(share, spans=tuple(spans), width=-(-share.width // step))


def _cut(axis: int, size: int, over: tuple[str, ...], mesh: Mapping[str, int], repeats: int) -> Share:
    return Share.even(axis, size, over, mesh) if repeats == 1 else Share.repeated(axis, size, over, mesh, repeats)


def _repeats(leaf: ArrayLeaf, axis: str, units: int, over: tuple[str, ...], mesh: Mapping[str, int]) -> int:
    """How many neighbours have the same part of a logical axis of so many units; MeshError if it cannot be cut so."""
    devices = _devices(over, mesh)
    if axis not in HEADS or units % devices == 0:
        return 1
    if devices % units:
        fits = ", ".join(str(d) for d in range(1, units + 1) if units % d == 0)
        raise MeshError(
            f"{leaf.path}: {axis} are {units}, which {devices} devices cannot share evenly; {fits} can, and any "
            f"multiple of {units}, where several devices have the same"
        )
    return devices // units


def _devices(axes: tuple[str, ...], mesh: Mapping[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)
