"""How an array is shared by the devices of a mesh: which of its rows or columns each of them has."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Int, Shaped


@dataclasses.dataclass(frozen=True)
class Share:
    """The part of an array on device d: [first, end) = spans[d] along `axis`, padded with zeros to `width`.

    Along a `packed` axis, which has that many rows of one thing and then of the next, each thing is cut evenly: device
    d has its part of the first, then its part of the second, and so on; `spans` then only count rows.
    """

    axis: int | None = None
    over: tuple[str, ...] = ()
    """The mesh axes that `axis` is sharded over."""
    spans: tuple[tuple[int, int], ...] = ()
    width: int = 0
    packed: tuple[int, ...] = ()

    @staticmethod
    def even(axis: int, size: int, over: tuple[str, ...], mesh: Mapping[str, int], multiple: int = 1) -> "Share":
        """Parts of equal width, a multiple of `multiple`; the last ones may be padding in part, or entirely."""
        devices = devices_along(over, mesh)
        width = -(-size // (devices * multiple)) * multiple
        spans = tuple((min(d * width, size), min((d + 1) * width, size)) for d in range(devices))
        return Share(axis, over, spans, width)

    @staticmethod
    def repeated(axis: int, size: int, over: tuple[str, ...], mesh: Mapping[str, int], repeats: int) -> "Share":
        """Equal parts, each of which is on `repeats` neighbouring devices."""
        devices = devices_along(over, mesh)
        width = size * repeats // devices
        spans = tuple((d // repeats * width, (d // repeats + 1) * width) for d in range(devices))
        return Share(axis, over, spans, width)

    def runs(self, number: int) -> tuple[tuple[int, int, int], ...]:
        """For each (at, first, end), part `number` has the rows [first, end) of the array, from its row `at` on."""
        if not self.packed:
            return ((0, *self.spans[number]),)
        devices, found, at, before = len(self.spans), [], 0, 0
        for size in self.packed:
            own = size // devices
            found.append((at, before + number * own, before + (number + 1) * own))
            at, before = at + own, before + size
        return tuple(found)

    @property
    def spec(self) -> PartitionSpec:
        """The spec of the stored array, which concatenates all devices' parts."""
        return PartitionSpec() if self.axis is None else PartitionSpec(*[None] * self.axis, self.over)

    def stored(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the stored array (all devices' parts concatenated) for an array of shape `whole`."""
        return self._sized(whole, self.width * len(self.spans))

    def shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one device's part of an array of shape `whole`."""
        return self._sized(whole, self.width)

    def unstored(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the unsharded array, given that of the stored one, which has padding and repeats."""
        return self._sized(stored, max((end for _, end in self.spans), default=0))

    def _sized(self, whole: tuple[int, ...], size: int) -> tuple[int, ...]:
        return whole if self.axis is None else (*whole[: self.axis], size, *whole[self.axis + 1 :])

    def places(self, index: tuple[Int[np.ndarray, " n"], ...]) -> tuple[Int[np.ndarray, " n"], ...]:
        """Converts indices of elements (an array per axis) from the unsharded array to the stored one."""
        if self.axis is None:
            return index
        runs = [
            (number * self.width + at, first) for number in range(len(self.spans)) for at, first, _ in self.runs(number)
        ]
        stored, begins = np.asarray(sorted(runs, key=lambda run: run[1]), np.int64).T
        run = np.searchsorted(begins, begins[np.searchsorted(begins, index[self.axis], side="right") - 1])
        own = index[self.axis] - begins[run] + stored[run]
        return (*index[: self.axis], own, *index[self.axis + 1 :])

    def number(self, index: tuple[slice, ...]) -> int:
        """The number of the part that this index (a slice per axis) selects in the stored array."""
        return 0 if self.axis is None else (index[self.axis].start or 0) // self.width

    def part(self, whole: Shaped[np.ndarray, "..."], number: int) -> Shaped[np.ndarray, "..."]:
        """Part `number` of an unsharded array, padded to `width`."""
        if self.axis is None:
            return whole
        runs = [whole[self.rows(first, end)] for _, first, end in self.runs(number)]
        own = runs[0] if len(runs) == 1 else np.concatenate(runs, axis=self.axis)
        missing = [(0, self.width - own.shape[i] if i == self.axis else 0) for i in range(whole.ndim)]
        return np.pad(own, missing)

    def whole(self, stored: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """The unsharded array, from the stored one: without repeats and padding."""
        if self.axis is None:
            return stored
        whole = np.empty(self.unstored(stored.shape), stored.dtype)
        for number in range(len(self.spans)):
            for at, first, end in self.runs(number):
                place = number * self.width + at
                whole[self.rows(first, end)] = stored[self.rows(place, place + end - first)]
        return whole

    def rows(self, first: int, end: int) -> tuple[slice, ...]:
        """The index of the rows [first, end) along the axis."""
        return (slice(None),) * (self.axis or 0) + (slice(first, end),)


WHOLE = Share()
"""Replicated: every device has all of the array."""


def devices_along(axes: tuple[str, ...], mesh: Mapping[str, int]) -> int:
    """The number of devices along these axes of a mesh ({axis: size})."""
    return math.prod(mesh[axis] for axis in axes)
