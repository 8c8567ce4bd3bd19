"""Copies tensors from files into arrays, block by block on several threads, converting dtypes and checking values."""

import itertools
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import NamedTuple, no_type_check

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Shaped

from ling3.checkpoint.safetensors_file import DTYPES, StoredTensor, read_stack
from ling3.runtime.cores import cores

BLOCK = 2**18
"""The most elements of a block or a task: few enough to be read, checked and converted within a core's cache."""
THREADS = 8
"""The most threads used: more do not read faster, because memory bandwidth is the limit."""

_EXPONENTS = {
    "F32": np.uint32(0x7F800000),
    "BF16": np.uint16(0x7F80),
    "F16": np.uint16(0x7C00),
    "F8_E4M3": np.uint8(0x7F),
    "F8_E8M0": np.uint8(0xFF),
}
"""For each float dtype, the bits that are all set only in NaN and infinities; integers have no entry."""


class Copy(NamedTuple):
    """A copy of equally spaced rows of a stored tensor into the array `target`; one row, if they are contiguous.

    With a `stack`, the one row holds the elements of all its tensors, one after the other.
    """

    tensor: StoredTensor
    target: Shaped[np.ndarray, "rows columns"]
    start: int
    """The element of the flattened tensor at which the copy begins."""
    stride: int
    """Elements of the tensor from the start of one row to the start of the next."""
    stack: Sequence[StoredTensor] = ()
    """The tensors to concatenate, `tensor` first: all of one dtype and size, in one file. Empty for one tensor."""
    largest: float = 0.0
    """If the tensor holds scales, the largest magnitude that they multiply; else 0."""

    @no_type_check
    def blocks(self) -> Iterator[tuple[int, int, Shaped[np.ndarray, "rows columns"]]]:
        """The row and the column at which each block begins, and its view of `target`.

        A tensor that is not stored as it is would be made once for each block; if its numbers are not checked, all of
        it is one block.
        """
        rows, columns = self.target.shape
        if self.tensor.put is not None and self.tensor.dtype not in _EXPONENTS:
            yield 0, 0, self.target
            return
        across = min(columns, BLOCK)
        down = max(1, BLOCK // max(1, across))
        for row in range(0, rows, down):
            for column in range(0, columns, max(1, across)):
                yield row, column, self.target[row : row + down, column : column + across]

    @no_type_check
    def read(self, start: int, out: Shaped[np.ndarray, "rows columns"]) -> None:
        """Fills `out` with the stored elements from `start` on. Raises CheckpointError if the file cannot be read."""
        if self.stack:
            read_stack(self.stack, start, out)
        else:
            self.tensor.read(start, out, self.stride)


_Block = tuple[Copy, int, int, Shaped[np.ndarray, "rows columns"]]
"""A copy, and one of its `blocks`."""


class Copied(NamedTuple):
    """The result of copying one block: its bytes in memory and, if checked, the names of tensors with bad values."""

    nbytes: int
    infinite: Sequence[str] = ()
    """Names of the tensors that have NaN or infinity in this block."""
    scales: Mapping[str, float] = types.MappingProxyType({})
    """Tensors with a bad scale, and that scale: negative, 0, or so large that products may overflow.

    0 is reported only for a tensor without another bad scale in this block.
    """


class Copier:
    """Copies tensors on as many threads as the process has cores, up to `THREADS`. Use it in a `with` statement.

    A block is read straight into the array if the file has its dtype, else converted from a scratch block of the
    thread. Leaving the `with` statement cancels blocks that have not begun.
    """

    def __init__(self, check_finite: bool):
        self.check_finite = check_finite
        self._threads = ThreadPoolExecutor(min(cores(), THREADS), "ling3-load")
        self._scratch = threading.local()

    def __enter__(self) -> "Copier":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def run(self, copies: Sequence[Copy]) -> Iterator[Copied]:
        """Copies all blocks of `copies` and yields their results in order. A single task runs in the calling thread.

        Raises CheckpointError if a file cannot be read: of several errors, that of the first block.
        """
        tasks = list(_tasks(copies))
        done = self._threads.map(self._task, tasks) if len(tasks) > 1 else map(self._task, tasks)
        return itertools.chain.from_iterable(done)

    @no_type_check
    def _task(self, blocks: Sequence[_Block]) -> list[Copied]:
        return [self._block(*block) for block in blocks]

    @no_type_check
    def _block(self, copy: Copy, row: int, column: int, target: Shaped[np.ndarray, "rows columns"]) -> Copied:
        start = copy.start + row * copy.stride + column
        stored = copy.tensor.dtype
        dtype, exponent = DTYPES[stored], _EXPONENTS.get(stored)
        if stored == "U8" and copy.tensor.name.endswith(".weight_scale"):  # MXFP4's E8M0 scales, stored as U8
            exponent = _EXPONENTS["F8_E8M0"]
        if exponent is None:
            own = target if target.dtype == dtype else np.empty(target.shape, dtype)
            copy.read(start, own)
            if own is not target:  # wider integers: clipped ones stay out of range, so later checks find them
                info = np.iinfo(target.dtype)
                target[:] = np.clip(own, info.min, info.max)
            return Copied(target.nbytes)
        scratches = self._of_this_thread(exponent.dtype)
        read, masked = (scratch[: target.size].reshape(target.shape) for scratch in scratches)
        bits = target.view(exponent.dtype) if target.dtype == dtype else read
        copy.read(start, bits)
        if stored == "BF16" and target.dtype == np.float32:
            # A bfloat16 is the upper half of the float32 of the same value; numpy's integer shift releases the GIL.
            np.left_shift(bits, 16, out=target.view(np.uint32), dtype=np.uint32)
        elif target.dtype != dtype:
            target[:] = bits.view(dtype)
        if not self.check_finite:
            return Copied(target.nbytes)
        if np.bitwise_and(bits, exponent, out=masked).max() >= exponent:
            return Copied(target.nbytes, _at(copy, start, masked == exponent))
        return Copied(target.nbytes, scales=_wrong_scales(copy, start, target) if copy.largest else {})

    def _of_this_thread(self, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """This thread's scratch memory: for the bits of a block, and for their exponents."""
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
        read, masked = self._scratch.memory
        return read.view(dtype), masked.view(dtype)


def _at(copy: Copy, start: int, wrong: Bool[np.ndarray, "rows columns"]) -> Sequence[str]:
    """The names of the tensors that have the `wrong` elements of a block whose first element is `start`."""
    if not copy.stack:
        return [copy.tensor.name]
    size = copy.target.size // len(copy.stack)
    return [copy.stack[int(i)].name for i in np.unique((start + np.flatnonzero(wrong)) // size)]


def _wrong_scales(copy: Copy, start: int, target: Shaped[np.ndarray, "rows columns"]) -> Mapping[str, float]:
    """`Copied.scales` for a block of finite scales."""
    stored = target.view(DTYPES["F8_E8M0"]) if target.dtype == np.uint8 else target
    scales, names = stored.astype(np.float32).reshape(-1), [tensor.name for tensor in copy.stack or [copy.tensor]]
    most = float(ml_dtypes.finfo(np.float32 if stored.dtype.itemsize == 1 else stored.dtype).max) / copy.largest
    wrong: dict[str, float] = {}
    for at in (np.flatnonzero(scales == 0), np.flatnonzero((scales < 0) | (scales > most))):
        numbers = (start + at) // (copy.target.size // len(copy.stack)) if copy.stack else np.zeros_like(at)
        for number, first in zip(*np.unique(numbers, return_index=True), strict=True):
            wrong[names[int(number)]] = float(scales[at[first]])
    return wrong


@no_type_check
def _tasks(copies: Sequence[Copy]) -> Iterator[list[_Block]]:
    """All blocks in order, small ones in one task: handing a task to a thread takes longer than copying a few KB."""
    task: list[_Block] = []
    numbers = 0
    for copy in copies:
        for block in copy.blocks():
            if numbers + block[2].size > BLOCK and task:
                yield task
                task, numbers = [], 0
            task.append((copy, *block))
            numbers += block[2].size
    if task:
        yield task
