"""Weights stored in 8 or 4 bits with scales, as DeepSeek publishes them: what is where, and which numbers it means.

    F8_E4M3 [out, in]          times the scale of its block of 128 × 128, [⌈out/128⌉, ⌈in/128⌉]
    I8 [out, in/2]             two E2M1 numbers a byte, the even column in the low four bits,
                               times the scale of 32 neighbours in a row, [out, in/32]

The scales of `X.weight` are `X.scale` or `X.weight_scale_inv`, in F8_E8M0 (powers of two) or F32.
"""

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Shaped

from ling3.checkpoint.safetensors_file import DTYPES, CheckpointError, StoredTensor, StoredTensors

BLOCK, GROUP = 128, 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
"""The numbers of four bits, of which the highest is the sign."""
QUANTIZED, SCALES = ("F8_E4M3", "I8"), ("F8_E8M0", "F32")
"""The types of such weights, and those of their scales."""


class QuantizedTensor(NamedTuple):
    """A matrix [rows, columns] in one of the formats, and its scales."""

    tensor: StoredTensor
    scales: StoredTensor
    columns: int

    @property
    def packed(self) -> bool:
        """True for four bits a number."""
        return self.tensor.dtype == "I8"

    def bytes(self, numbers: int) -> int:
        """What so many numbers take in the file, without their scales."""
        return numbers // 2 if self.packed else numbers

    def read(self, first: int, rows: int, left: int, columns: int) -> Float[np.ndarray, "{rows} {columns}"]:
        """The numbers of the rows and columns from `first` and `left` on.

        CheckpointError if a file cannot be read, or for a scale that is not above 0 and multiplies more than zeros.
        """
        width, right, pair = self.bytes(self.columns), left + columns, 2 if self.packed else 1
        stored = np.empty((rows, -(-right // pair) - left // pair), np.int8)
        self.tensor.read(first * width + left // pair, stored, width)
        above, side = (1, GROUP) if self.packed else (BLOCK, BLOCK)
        across, begin, before = -(-self.columns // side), first // above, left // side
        scales = np.empty((-(-(first + rows) // above) - begin, -(-right // side) - before), DTYPES[self.scales.dtype])
        self.scales.read(begin * across + before, scales, across)
        row, column = np.arange(first, first + rows) // above - begin, left - before * side
        wide = np.repeat(scales.astype(np.float32), side, axis=1)[row, column : column + columns]
        numbers = self._numbers(stored)[:, left % pair : left % pair + columns]
        if (wrong := (wide < 0) | ((wide == 0) & (numbers != 0))).any():
            raise CheckpointError(
                f"{self.scales.file.path}: {self.scales.name}: found a scale of {wide[wrong][0]:g}; "
                "expected one above 0; fetch the file again"
            )
        return numbers * wide

    def _numbers(self, stored: Shaped[np.ndarray, "rows bytes"]) -> Float[np.ndarray, "rows numbers"]:
        if not self.packed:
            return stored.view(DTYPES["F8_E4M3"]).astype(np.float32)
        codes = stored.view(np.uint8)
        return np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1).reshape(stored.shape[0], -1)


def scales_of(name: str, source: StoredTensors) -> StoredTensor | None:
    """A weight's scales, if the checkpoint has them."""
    stem = name.removesuffix(".weight")
    names = (f"{stem}.scale", f"{stem}.weight_scale_inv", f"{name}_scale_inv")
    return next((source[each] for each in names if each in source and each != name), None)


def misfit(shape: tuple[int, ...], stored: str, found: tuple[int, ...], scales: tuple[str, tuple[int, ...]]) -> str:
    """What does not fit of a quantized tensor of type `stored` and shape `found`, and its `scales`; empty if it fits.

    `shape` is that of the weight, and `scales` has the type and the shape of its scales.
    """
    if len(shape) != 2 or (stored == "I8" and shape[1] % GROUP):
        return f"found {stored}; expected a matrix, in I8 with a multiple of {GROUP} columns"
    packed = stored == "I8"
    expected = (shape[0], shape[1] // 2) if packed else shape
    if found != expected:
        return f"found {list(found)} in {stored}; expected {list(expected)}"
    blocks = (shape[0], shape[1] // GROUP) if packed else tuple(math.ceil(size / BLOCK) for size in shape)
    dtype, size = scales
    if dtype not in SCALES or size != blocks:
        return f"scales: found {dtype}{list(size)}; expected {list(blocks)} of {' or '.join(SCALES)}"
    return ""
