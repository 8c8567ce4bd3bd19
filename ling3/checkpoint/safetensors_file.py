"""Reading and writing one safetensors file: its header is checked first, its tensors are read in parts."""

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
"""The format's element types that can be read."""

FLOATS = ("F32", "BF16", "F16")
"""The types that weights may have."""

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
    """A checkpoint that cannot be loaded as it should be; the message names the file, the key and what to do."""


class OpenFile:
    """A safetensors file, opened for reading and closed with the last of its tensors."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)

    def header(self) -> tuple[dict, int]:
        """The checked header, and the offset of the data. ValueError for what is no safetensors file, and OSError."""
        head = os.pread(self._file, 32, 0)
        length = int.from_bytes(head[:8], "little")
        _check(self.path, head, length)
        return strict_json.parse(os.pread(self._file, length, 8), f"{self.path}: header"), 8 + length

    @no_type_check
    def fill(self, left: memoryview, offset: int, name: str) -> None:
        """Fills `left` with the bytes from `offset` on, which are some of the tensor `name`. Raises CheckpointError."""
        while left:
            try:
                count = os.preadv(self._file, [left], offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: {name} cannot be read ({error})") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: ends within {name}; it has been cut since it was opened")
            left, offset = left[count:], offset + count


class StoredTensor(NamedTuple):
    """A tensor of an open file: `dtype` is the format's own name, `start` a byte offset into the file.

    For messages, `str` says its name and its file's.
    """

    file: OpenFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    def __str__(self) -> str:
        return f"{self.name}, in {self.file.path.name}"

    @property
    def nbytes(self) -> int:
        """The size in the file, in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize if self.dtype in DTYPES else 0

    def read(self, start: int, out: Shaped[np.ndarray, "rows columns"], stride: int) -> None:
        """Fills the rows of `out` with the tensor's numbers from `start`, `start + stride`, … on.

        Numbers are counted in row-major order. The rows of `out` are contiguous, and of the tensor's dtype, or of
        another one of that size: the stored bytes are copied. Safe to call from several threads. Raises CheckpointError
        if the file has been cut since it was opened.
        """
        rows, columns = out.shape
        itemsize = DTYPES[self.dtype].itemsize
        end = start + (rows - 1) * stride + columns
        assert out.itemsize == itemsize and end <= math.prod(self.shape), "no such part of the tensor"
        if columns == stride and out.flags.c_contiguous:
            out = out.reshape(1, -1)
        for i, row in enumerate(out):
            self.file.fill(row.view(np.uint8).data, self.start + (start + i * stride) * itemsize, self.name)


StoredTensors = dict[str, StoredTensor]
"""A checkpoint's tensors by name, whichever files they are in."""


@no_type_check  # called for every block of every stack of experts
def read_stack(tensors: Sequence[StoredTensor], start: int, out: Shaped[np.ndarray, "rows columns"]) -> None:
    """Fills the contiguous `out` with the numbers from `start` on of tensors of one file, dtype and size, end to end.

    Tensors that are neighbours in the file too are read at once. Else as `StoredTensor.read`.
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

    The `safetensors` package checks it against the file (length, overlaps, holes, sizes); duplicate names are refused
    too. Raises CheckpointError if the file is damaged or no safetensors file.
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
        # Not before: a valid file begins with its header's length, which may look like any of these.
        for magic, what in _FOREIGN.items():
            if head.startswith(magic):
                raise CheckpointError(f"{path}: this is {what}; expected a safetensors file") from error
        raise CheckpointError(
            f"{path}: no valid safetensors file ({error}); it is damaged or incomplete: fetch it again"
        ) from error


def in_order(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> list[str]:
    """The names as `write` asks for them."""
    return sorted(tensors, key=lambda name: -tensors[name][0].itemsize)


def write(
    path: pathlib.Path,
    tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]],
    read: Callable[[str], np.ndarray],
) -> None:
    """Writes the `tensors`, of these dtypes and shapes, to `path` one by one: `read(name)` gives each when it is due.

    The data is on the disk when this returns. Wider types come first, so that every tensor is aligned to its own size.
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
