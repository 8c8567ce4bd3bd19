"""Tensors from files into arrays: block by block on several threads, widened and checked on the way."""

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
"""Numbers in a block, which is read, checked and widened while it is in a core's cache; the most in a thread's task."""
THREADS = 8
"""The most threads: more of them do not read faster, as memory bandwidth is the limit."""

_EXPONENTS = {
    "F32": np.uint32(0x7F800000),
    "BF16": np.uint16(0x7F80),
    "F16": np.uint16(0x7C00),
    "F8_E4M3": np.uint8(0x7F),
    "F8_E8M0": np.uint8(0xFF),
}
"""The bits of each type that are all set in infinities and NaN only; integers have none."""


class Copy(NamedTuple):
    """Rows of numbers of a stored tensor, and the array that receives them; one row, if they are contiguous.

    One row may also have the numbers of a `stack` of tensors, one after the other.
    """

    tensor: StoredTensor
    target: Shaped[np.ndarray, "rows columns"]
    start: int
    """Numbers of the tensor that come before those that are copied."""
    stride: int
    """Numbers of the tensor from the begin of one row to that of the next."""
    stack: Sequence[StoredTensor] = ()
    """All of a stack, from `tensor` on: of one dtype and size, and in one file."""
    largest: float = 0.0
    """Of scales: the largest magnitude of a number that they multiply. Else 0."""

    @no_type_check
    def blocks(self) -> Iterator[tuple[int, int, Shaped[np.ndarray, "rows columns"]]]:
        """Where a block begins, by row and column, and its place."""
        rows, columns = self.target.shape
        across = min(columns, BLOCK)
        down = max(1, BLOCK // max(1, across))
        for row in range(0, rows, down):
            for column in range(0, columns, max(1, across)):
                yield row, column, self.target[row : row + down, column : column + across]

    @no_type_check
    def read(self, start: int, out: Shaped[np.ndarray, "rows columns"]) -> None:
        """Fills `out` with the numbers as they are stored, from `start` on. Raises CheckpointError."""
        if self.stack:
            read_stack(self.stack, start, out)
        else:
            self.tensor.read(start, out, self.stride)


_Block = tuple[Copy, int, int, Shaped[np.ndarray, "rows columns"]]
"""A tensor, and one of its `blocks`."""


class Copied(NamedTuple):
    """A copied block: its size in the file, and its tensors with wrong numbers (none if not checked)."""

    nbytes: int
    infinite: Sequence[str] = ()
    """Those that have NaN or infinity."""
    scales: Mapping[str, float] = types.MappingProxyType({})
    """Of scales: those with one that is not above 0, or at which products may be infinite, and that scale.

    It is 0 only where there is no other such scale.
    """


class Copier:
    """Copies tensors on as many threads as the process has cores, up to `THREADS`. Use it in a `with` statement.

    Blocks are read straight into the array if the file has its dtype, else through one block of scratch memory per
    thread. Leaving by an exception cancels the blocks that have not begun.
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
        """Every block of `copies`, in order, once it is copied. What is one task is done in the thread that asks.

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
        if stored == "U8" and copy.tensor.name.endswith(".weight_scale"):  # E8M0 under another name
            exponent = _EXPONENTS["F8_E8M0"]
        if exponent is None:
            own = target if target.dtype == dtype else np.empty(target.shape, dtype)
            copy.read(start, own)
            if own is not target:  # wider integers: what does not fit is as wrong as any number out of bounds
                info = np.iinfo(target.dtype)
                target[:] = np.clip(own, info.min, info.max)
            return Copied(own.nbytes)
        scratches = self._of_this_thread(exponent.dtype)
        read, masked = (scratch[: target.size].reshape(target.shape) for scratch in scratches)
        bits = target.view(exponent.dtype) if target.dtype == dtype else read
        copy.read(start, bits)
        if stored == "BF16" and target.dtype == np.float32:
            # A bfloat16 is the upper half of the float32 of the same value; on integers numpy lets other threads run.
            np.left_shift(bits, 16, out=target.view(np.uint32), dtype=np.uint32)
        elif target.dtype != dtype:
            target[:] = bits.view(dtype)
        if not self.check_finite:
            return Copied(bits.nbytes)
        if np.bitwise_and(bits, exponent, out=masked).max() >= exponent:
            return Copied(bits.nbytes, _at(copy, start, masked == exponent))
        return Copied(bits.nbytes, scales=_wrong_scales(copy, start, target) if copy.largest else {})

    def _of_this_thread(self, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Scratch for a block's bits, and for their exponents."""
        if not hasattr(self._scratch, "memory"):
            self._scratch.memory = np.empty(BLOCK, np.uint32), np.empty(BLOCK, np.uint32)
        read, masked = self._scratch.memory
        return read.view(dtype), masked.view(dtype)


def _at(copy: Copy, start: int, wrong: Bool[np.ndarray, "rows columns"]) -> Sequence[str]:
    """The tensors in which the wrong numbers of a block are, whose first number is at `start`."""
    if not copy.stack:
        return [copy.tensor.name]
    size = copy.target.size // len(copy.stack)
    return [copy.stack[int(i)].name for i in np.unique((start + np.flatnonzero(wrong)) // size)]


def _wrong_scales(copy: Copy, start: int, target: Shaped[np.ndarray, "rows columns"]) -> Mapping[str, float]:
    """What `Copied` says of a block of scales, which are finite."""
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
    """All blocks in order, small ones together: handing one to a thread takes longer than copying a few kilobytes."""
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
