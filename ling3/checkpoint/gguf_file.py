"""Reads the header of a GGUF file: its metadata, and where its tensors lie.

Versions 2 and 3 of the format, little-endian (ggml, docs/gguf.md). Everything is checked against the size of the file
before memory is taken for it. The format's own reader, the package `gguf`, makes an array of each string, which takes
six seconds for a vocabulary of 150,000 tokens and their merges, and shortens what a truncated file lacks.
"""

import itertools
import math
import pathlib
import re
from typing import Any, NamedTuple, no_type_check

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from ling3.checkpoint.safetensors_file import CheckpointError, OpenFile, StoredTensor
from ling3.formats.gguf_blocks import BLOCKS, GgufBlocks
from ling3.runtime import regular_file
from ling3.runtime.quoting import printable, shown

MAGIC = b"GGUF"
HEADER_BYTES = 2**28
"""The largest header that is read; a vocabulary of 262,144 tokens with its merges takes 13 million bytes."""
MOST_TENSORS = 200_000
MOST_PARTS = 1000
"""The most files of a split set: all are open while it is read, and many systems let a process open 1,024."""

DENSE = {0: "F32", 1: "F16", 30: "BF16"}
"""The types of plain numbers that are read, by ggml's number."""
QUANTIZED = {
    2: "Q4_0",
    3: "Q4_1",
    6: "Q5_0",
    7: "Q5_1",
    8: "Q8_0",
    12: "Q4_K",
    13: "Q5_K",
    14: "Q6_K",
    20: "IQ4_NL",
    39: "MXFP4",
}
"""The types of blocks that are read, by ggml's number."""
_OTHERS = {
    **{9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M"},
    **{34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4"},
}

_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
"""The numbers of the metadata's types and NumPy's codes for them; 8 is a string, and 9 an array."""
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


class Gguf(NamedTuple):
    """The contents of a GGUF file, or of a split set."""

    path: pathlib.Path
    """The first file."""
    metadata: dict[str, Any]
    """The values by key: str, int, float, bool, or a list of these."""
    tensors: dict[str, StoredTensor]
    """The tensors by their names in the file. Of a matrix in blocks, the last axis counts bytes."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, in numbers."""
        tensor = self.tensors[name]
        if not tensor.block:
            return tensor.shape
        own = BLOCKS[tensor.block]
        return *tensor.shape[:-1], tensor.shape[-1] // own.bytes * own.columns

    def numbers(self, name: str) -> Float32[np.ndarray, "..."]:
        """A tensor's numbers in float32; blocks are decoded. Raises CheckpointError if they cannot be read."""
        tensor = self.tensors[name]
        stored = tensor.array()
        if not tensor.block:
            return stored.astype(np.float32)
        return np.asarray(GgufBlocks(weight=jnp.asarray(stored), block=tensor.block).decoded())


def open_gguf(path: pathlib.Path) -> Gguf:
    """Opens a GGUF file, or a split set by its first file; only headers are read.

    Raises CheckpointError, which names the file and the key or tensor, for a file that is truncated or damaged or of
    another format, version or byte order, and for types that ling3 does not read.
    """
    first = _read(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= MOST_PARTS:
        raise CheckpointError(f"{path}: split.count: found {shown(count)}; expected at most {MOST_PARTS:,} files")
    if first.metadata.get("split.no", 0) != 0:
        raise CheckpointError(f"{path}: this is file {first.metadata['split.no'] + 1} of {count}; give the first one")
    tensors = dict(first.tensors)
    for number, part in enumerate(_parts(path, count)[1:], 1):
        other = _read(part)
        found = other.metadata.get("split.no"), other.metadata.get("split.count")
        if found != (number, count):
            raise CheckpointError(
                f"{part}: split.no and split.count: found {shown(found)}; expected {(number, count)}; the files are "
                "not of one set: fetch them again"
            )
        if twice := tensors.keys() & other.tensors.keys():
            raise CheckpointError(f"{part}: tensor {printable(min(twice))} is in an earlier file of the set, too")
        tensors |= other.tensors
    said = first.metadata.get("split.tensors.count", len(tensors))
    if said != len(tensors):
        raise CheckpointError(
            f"{path}: split.tensors.count: found {shown(said)}; expected {len(tensors):,}, which its {count} files have"
        )
    return first._replace(tensors=tensors)


def _parts(path: pathlib.Path, count: int) -> list[pathlib.Path]:
    """The files of the set whose first file is `path`."""
    if count < 2:
        return [path]
    named = _PART.match(path.name)
    if named is None or (int(named[2]), int(named[3])) != (1, count):
        raise CheckpointError(
            f"{path}: is the first of {count} files; expected the name NAME-00001-of-{count:05}.gguf, by which the "
            "others are found; name it so"
        )
    parts = [path.with_name(f"{named[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if absent := [part.name for part in parts if not part.exists()]:
        raise CheckpointError(f"{path}: found no {absent[0]} beside it ({len(absent)} of {count} files are missing)")
    return parts


def _read(path: pathlib.Path) -> Gguf:
    try:
        regular_file.check(path)
        file = OpenFile(path)
        size = path.stat().st_size
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error
    return _Header(file, size).read()


@no_type_check  # a header has hundreds of thousands of strings
class _Header:
    """Reads a header from the start of a file to its end."""

    def __init__(self, file: OpenFile, size: int):
        self.file = file
        self.size = size
        self.read_until = min(size, 2**20)
        self.content = bytearray(self.read_until)
        file.fill(memoryview(self.content), 0, "its header")
        self.at = 0

    def read(self) -> Gguf:
        """The metadata and the tensors."""
        path = self.file.path
        if self.content[:4] != MAGIC:
            raise CheckpointError(f"{path}: found {bytes(self.content[:4])!r}; expected {MAGIC!r}, a GGUF file's start")
        self.at = 4
        version, tensors, keys = self.scalar("u4", "version"), 0, 0
        if version in (2 << 24, 3 << 24):
            raise CheckpointError(f"{path}: version: found a big-endian file; ling3 reads little-endian ones")
        if version not in (2, 3):
            raise CheckpointError(f"{path}: version: found {version}; expected 2 or 3")
        tensors, keys = self.scalar("u8", "tensor_count"), self.scalar("u8", "metadata_kv_count")
        if tensors > MOST_TENSORS or keys > MOST_TENSORS:
            raise CheckpointError(
                f"{path}: found {tensors:,} tensors and {keys:,} keys; expected at most {MOST_TENSORS:,} of each; the "
                "file is damaged: fetch it again"
            )
        metadata: dict[str, Any] = {}
        for number in range(keys):
            key = self.string(f"key {number + 1} of {keys}")
            if key in metadata:
                raise CheckpointError(f"{path}: {printable(key)}: is in the metadata twice")
            metadata[key] = self.value(self.scalar("u4", key), key)
        infos = [self.info(number, tensors) for number in range(tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 8 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{path}: general.alignment: found {shown(alignment)}; expected a power of two from 8"
            )
        start = -(-self.at // alignment) * alignment
        return Gguf(path, metadata, self.placed(infos, start, alignment))

    def take(self, count: int, what: str) -> bytearray:
        """The next `count` bytes. Raises CheckpointError if the file ends before them."""
        end = self.at + count
        if end > self.read_until:
            self.read_on(end, what)
        taken = self.content[self.at : end]
        self.at = end
        return taken

    def read_on(self, end: int, what: str) -> None:
        """Reads at least up to the byte `end`. Raises CheckpointError if the file ends before."""
        most = min(self.size, HEADER_BYTES)
        if end > most:
            raise CheckpointError(
                f"{self.file.path}: {printable(what)}: takes {end - self.at:,} bytes from byte {self.at:,} on, and the "
                f"file has {self.size:,}; it is truncated or damaged: fetch it again"
            )
        more = bytearray(min(most, max(end, 2 * self.read_until)) - self.read_until)
        self.file.fill(memoryview(more), self.read_until, what)
        self.content += more
        self.read_until += len(more)

    def scalar(self, code: str, what: str) -> Any:
        """A number, with NumPy's code for its type."""
        return self.scalars(code, 1, what)[0]

    def scalars(self, code: str, count: int, what: str) -> list[Any]:
        """Numbers, with NumPy's code for their type.

        A float32 becomes the shortest decimal number that is rounded to it: the one that a config.json had.
        """
        dtype = np.dtype(f"<{code}")
        numbers = np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        return [float(str(number)) for number in numbers] if code == "f4" else numbers.tolist()

    def string(self, what: str) -> str:
        """A string with its length before it."""
        # Vocabularies have hundreds of thousands of strings: reading their lengths by NumPy would double the time.
        text = self.take(int.from_bytes(self.take(8, what), "little"), what)
        try:
            return text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(
                f"{self.file.path}: {printable(what)}: found {shown(bytes(text))}, no UTF-8"
            ) from error

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """A value of the metadata."""
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], key)
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY or depth > 1:
            raise CheckpointError(f"{self.file.path}: {printable(key)}: found a value of type {kind}; expected 0 to 12")
        item, count = self.scalar("u4", key), self.scalar("u8", key)
        if item in _SCALARS:
            return self.scalars(_SCALARS[item], count, key)
        if 8 * count > self.size - self.at:  # every string and array has its length before it
            self.take(8 * count, key)
        if item == _STRING:
            return [self.string(key) for _ in range(count)]
        return [self.value(item, key, depth + 1) for _ in range(count)]

    def info(self, number: int, count: int) -> tuple[str, tuple[int, ...], int, int]:
        """A tensor's name, its shape with the innermost axis last, the number of its type, and its offset."""
        name = self.string(f"tensor {number + 1} of {count}")
        axes = self.scalar("u4", name)
        if not 1 <= axes <= 4:
            raise CheckpointError(f"{self.file.path}: tensor {printable(name)}: found {axes} axes; expected 1 to 4")
        shape = tuple(self.scalar("u8", name) for _ in range(axes))[::-1]
        return name, shape, self.scalar("u4", name), self.scalar("u8", name)

    def placed(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, StoredTensor]:
        """The tensors, whose data begins at the byte `start`."""
        tensors: dict[str, StoredTensor] = {}
        for name, shape, number, offset in infos:
            at = f"{self.file.path}: tensor {printable(name)}"
            block, stored = self.stored(number, shape, at)
            tensor = StoredTensor(self.file, name, DENSE.get(number, "U8"), stored, start + offset, block=block)
            if name in tensors:
                raise CheckpointError(f"{at}: is in the file twice")
            if offset % alignment:
                raise CheckpointError(f"{at}: begins at {offset}, no multiple of the alignment, {alignment}")
            if tensor.start + tensor.nbytes > self.size:
                raise CheckpointError(
                    f"{at}: ends at byte {tensor.start + tensor.nbytes:,}, and the file has {self.size:,}; it is "
                    "truncated: fetch it again"
                )
            tensors[name] = tensor
        by_place = sorted(tensors.values(), key=lambda tensor: tensor.start)
        for one, other in itertools.pairwise(by_place):
            if one.start + one.nbytes > other.start:
                raise CheckpointError(f"{self.file.path}: tensors {one.name} and {other.name} overlap")
        return tensors

    @staticmethod
    def stored(number: int, shape: tuple[int, ...], at: str) -> tuple[str, tuple[int, ...]]:
        """The type of the tensor's blocks, empty for plain numbers, and the shape in which it is stored."""
        if math.prod(shape) == 0 or math.prod(shape) >= 2**48:
            raise CheckpointError(f"{at}: found the shape {list(shape)}; expected sizes from 1 on; it is damaged")
        if number in DENSE:
            return "", shape
        if number not in QUANTIZED:
            known = ", ".join([*DENSE.values(), *QUANTIZED.values()])
            raise CheckpointError(
                f"{at}: found the type {_OTHERS.get(number, number)}; expected one of {known}; use another file"
            )
        block = BLOCKS[QUANTIZED[number]]
        *outer, inner = shape
        if inner % block.columns:
            raise CheckpointError(
                f"{at}: found rows of {inner} numbers in {QUANTIZED[number]}; expected a multiple of {block.columns}"
            )
        return QUANTIZED[number], (*outer, inner // block.columns * block.bytes)
