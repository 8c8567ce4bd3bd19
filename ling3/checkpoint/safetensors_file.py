"""Reads and writes one safetensors file: the header is checked first, and tensors can be read in parts."""

import json
import math
import os
import pathlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, no_type_check

import ml_dtypes
import numpy as np
import safetensors
from jaxtyping import Shaped

from ling3.runtime import regular_file, strict_json
from ling3.runtime.quoting import QuotingError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
"""The dtypes of the format that can be read, by the format's names."""

FLOATS = ("F32", "BF16", "F16")
"""The dtypes that unquantized weights may have."""

HEADER_BYTES = 2**25
"""The largest header that is read: enough for 200,000 tensors."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_FOREIGN = {
    b"PK\x03\x04": "a zip archive, as torch.save writes, with pickle inside, which ling3 never reads",
    b"\x80": "a pickle, which ling3 never reads",
    b"GGUF": "a GGUF file",
    b"\x89HDF": "an HDF5 file",
    b"version https://git-lfs": "a Git LFS pointer; fetch the file itself with `git lfs pull`",
    b"<": "a web page or another markup file",
}


class CheckpointError(QuotingError):
    """Raised for a checkpoint that cannot be loaded or saved; the message names the file, the tensor and what to do."""


class OpenFile:
    """A safetensors file, opened for reading and closed with the last of its tensors."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def header(self) -> tuple[dict, int]:
        """The checked header, and the data's offset. Raises ValueError if this is no safetensors file, and OSError."""
        head = os.pread(self._file, 32, 0)
        length = int.from_bytes(head[:8], "little")
        _check(self.path, head, length)
        return strict_json.parse(os.pread(self._file, length, 8), f"{self.path}: header"), 8 + length

    @no_type_check
    def fill(self, left: memoryview, offset: int, name: str) -> None:
        """Fills `left` with the file's bytes from `offset` on, which are part of `name`. Raises CheckpointError."""
        while left:
            try:
                count = os.preadv(self._file, [left], offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {name} cannot be read ({error})") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: ends within {name}; it has been cut since it was opened")
            left, offset = left[count:], offset + count


class StoredTensor(NamedTuple):
    """A tensor of an open file: `dtype` is the format's name for it, `start` a byte offset into the file.

    `str` gives the names of the tensor and its file, for messages.
    """

    file: OpenFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    block: str = ""
    """ggml's name of the blocks that it consists of, if the file is a GGUF file; their bytes are its elements."""
    put: Callable[[np.ndarray], None] | None = None
    """Puts the tensor into an array of its shape; None if it is read as it is stored."""
    made: Callable[[], np.ndarray] | None = None
    """Returns the numbers that `put` puts, if they are kept somewhere, so that parts of them are read from there."""

    def __str__(self) -> str:
        return f"{self.name}, in {self.file.path.name}"

    @property
    @no_type_check  # called for every tensor
    def nbytes(self) -> int:
        """The size in the file, in bytes; 0 for a dtype that cannot be read."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0

    @no_type_check
    def read(self, start: int, out: Shaped[np.ndarray, "rows columns"], stride: int) -> None:
        """Fills row i of `out` with the tensor's elements from `start + i · stride` on, counted in row-major order.

        Each row of `out` must be contiguous, in the tensor's dtype or another one of that size: the stored bytes are
        copied. Thread-safe. Raises CheckpointError if the file cannot be read or was truncated since it was opened.
        """
        rows, columns = out.shape
        itemsize = DTYPES[self.dtype].itemsize
        end = start + (rows - 1) * stride + columns
        if self.put is not None:
            self._put(start, out.view(DTYPES[self.dtype]), stride)
            return
        assert out.itemsize == itemsize and end <= math.prod(self.shape), "no such part of the tensor"
        if columns == stride and out.flags.c_contiguous:
            out = out.reshape(1, -1)
        for i, row in enumerate(out):
            self.file.fill(row.view(np.uint8).data, self.start + (start + i * stride) * itemsize, self.name)

    @no_type_check
    def _put(self, start: int, out: Shaped[np.ndarray, "rows columns"], stride: int) -> None:
        """Puts the tensor into `out`; if `out` is only a part of it, makes the whole tensor and copies that part."""
        assert self.put is not None
        if out.size == math.prod(self.shape) and out.flags.c_contiguous:
            self.put(out.reshape(self.shape))
            return
        if self.made is not None:
            whole = self.made()
        else:
            whole = np.empty(self.shape, out.dtype)
            self.put(whole)
        for i, row in enumerate(out):
            row[:] = whole.reshape(-1)[start + i * stride : start + i * stride + out.shape[1]]

    @no_type_check
    def array(self) -> Shaped[np.ndarray, "..."]:
        """Reads the entire tensor. Raises CheckpointError if the file cannot be read."""
        array = np.empty(self.shape, DTYPES[self.dtype])
        self.read(0, array.reshape(1, -1), array.size)
        return array


StoredTensors = dict[str, StoredTensor]
"""A checkpoint's tensors by name, whichever files they are in."""


@no_type_check  # called for every block of every stack of experts
def read_stack(tensors: Sequence[StoredTensor], start: int, out: Shaped[np.ndarray, "rows columns"]) -> None:
    """Fills the contiguous `out` from the concatenation of `tensors` of one file, dtype and size, from `start` on.

    Tensors that are adjacent in the file are read in one call. Otherwise like `StoredTensor.read`.
    """
    first = tensors[0]
    itemsize, size = DTYPES[first.dtype].itemsize, math.prod(first.shape)
    assert out.itemsize == itemsize and start + out.size <= size * len(tensors), "no such part of the tensors"
    left, nbytes = memoryview(out.reshape(-1).view(np.uint8)), size * itemsize
    number, skipped = divmod(start * itemsize, max(1, nbytes))
    while left:
        tensor = tensors[number]
        end = tensor.start + nbytes
        while end - tensor.start - skipped < len(left) and tensors[number + 1].start == end:
            number, end = number + 1, end + nbytes
        piece = left[: end - tensor.start - skipped]
        first.file.fill(piece, tensor.start + skipped, tensor.name)
        left, number, skipped = left[len(piece) :], number + 1, 0


def open_file(path: str | os.PathLike[str]) -> StoredTensors:
    """The tensors of a safetensors file in the header's order; only the header is read.

    The `safetensors` package checks the header against the file (length, overlaps, holes, sizes); duplicate names are
    refused too. Raises CheckpointError if the file is damaged or no safetensors file.
    """
    path = pathlib.Path(path)
    try:
        regular_file.check(path)
        file = OpenFile(path)
        header, data = file.header()
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return {
        name: StoredTensor(file, name, entry["dtype"], tuple(entry["shape"]), data + entry["data_offsets"][0])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _check(path: pathlib.Path, head: bytes, length: int) -> None:
    try:
        if length > HEADER_BYTES:
            raise ValueError(f"its header would have {length:,} bytes; expected at most {HEADER_BYTES:,}")
        with safetensors.safe_open(path, framework="numpy"):
            pass
    except (ValueError, safetensors.SafetensorError) as error:
        # Only after that failed: a valid file begins with its header's length, which may look like any of these.
        for magic, what in _FOREIGN.items():
            if head.startswith(magic):
                raise CheckpointError(f"{path}: this is {what}; expected a safetensors file") from error
        raise CheckpointError(
            f"{path}: no valid safetensors file ({error}); it is damaged or incomplete: fetch it again"
        ) from error


def in_order(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> list[str]:
    """The names in the order in which `write` writes the tensors."""
    return sorted(tensors, key=lambda name: -tensors[name][0].itemsize)


def write(
    path: pathlib.Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
) -> None:
    """Writes tensors of these dtypes and shapes to `path`, one by one: `read(name)` returns each when it is its turn.

    Wider dtypes come first, so that every element is aligned. The file is synced to disk when this returns. Raises
    ValueError if `read` returns another dtype or shape.
    """
    names = in_order(tensors)
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            dtype, shape = tensors[name]
            array = read(name)
            if array.dtype != dtype or array.shape != shape:
                raise ValueError(f"{name}: found {array.dtype}{list(array.shape)}; expected {dtype}{list(shape)}")
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
