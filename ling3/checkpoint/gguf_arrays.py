"""The arrays of a checkpoint from the tensors of a GGUF file that has them in another arrangement."""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Int, Shaped, UInt8

from ling3.checkpoint.gguf_file import Gguf
from ling3.checkpoint.safetensors_file import CheckpointError, StoredTensor
from ling3.families.gguf import AS_STORED, Arrangement
from ling3.formats.gguf_blocks import BLOCKS, BlockType


@dataclasses.dataclass(frozen=True, eq=False)
class ArrangedArray:
    """The array at `path` of the module tree, which is made of the tensors `stored` of a file.

    Rows keep their blocks in any order, and columns in an order that moves whole blocks. In float32 are two tensors of
    different types, columns in another order, `A_log` from the file's ±exp(A_log), and MLA's `kv_b_proj` from its two
    halves, of which the first is transposed for each head.
    """

    gguf: Gguf
    path: str
    stored: tuple[str, ...]
    how: Arrangement

    def tensor(self, published: str, read: "Callable[[ArrangedArray], np.ndarray]") -> StoredTensor:
        """The array as a tensor with this name. `read(self)` is its `made()`, perhaps one that is kept for a while.

        Raises CheckpointError for tensors whose shapes do not belong together.
        """
        first = self.gguf.tensors[self.stored[0]]
        if len(self.stored) == 1 and self.how is AS_STORED and not self._logarithm:
            return first._replace(name=published, shape=self._published_shape(first.shape))

        def put(out: np.ndarray) -> None:
            out[...] = read(self).reshape(out.shape)

        shape, how = self._published_shape(self._shape()), {"put": put, "made": functools.partial(read, self)}
        if self._decoded:
            return StoredTensor(first.file, published, "F32", shape, first.start, **how)
        return first._replace(name=published, shape=shape, **how)

    def made(self) -> Shaped[np.ndarray, "..."]:
        """The array's numbers, or its rows of blocks."""
        if self._halves:
            keys, values = map(self.gguf.numbers, self.stored)
            return np.concatenate([keys.swapaxes(1, 2), values], axis=1).reshape(-1, keys.shape[1])
        read = self.gguf.numbers if self._decoded else lambda name: self.gguf.tensors[name].array()
        own = [read(name) for name in self.stored]
        joined = own[0] if len(own) == 1 else np.concatenate(own)
        if self._logarithm:
            joined = np.log(np.abs(joined)).reshape(-1)
        if self.how.offset:
            joined = joined + np.float32(self.how.offset)
        if self.how.rows is not None:
            joined = joined[self.how.rows]
        if self.how.columns is None:
            return joined
        if self._blocks is None:
            return np.take(joined, self.how.columns, axis=1)
        return _moved(joined, self.how.columns, self._blocks)

    @property
    def _logarithm(self) -> bool:
        return self.path.endswith(".A_log")

    @property
    def _halves(self) -> bool:
        return self.path.endswith(".kv_b_proj.weight") and len(self.stored) == 2

    @property
    def _blocks(self) -> BlockType | None:
        """The blocks that stay as they are; None for numbers."""
        block = self.gguf.tensors[self.stored[0]].block
        return BLOCKS[block] if block and not self._decoded else None

    @property
    def _decoded(self) -> bool:
        """True if the array is computed in float32, False if the file's bytes only move."""
        tensors = [self.gguf.tensors[name] for name in self.stored]
        if self._halves or self._logarithm or self.how.offset or len({(own.block, own.dtype) for own in tensors}) > 1:
            return True
        block, columns = tensors[0].block, self.how.columns
        return bool(block) and columns is not None and not _moves_whole(columns, BLOCKS[block].columns)

    def _shape(self) -> tuple[int, ...]:
        tensors = self.gguf.tensors
        shapes = [self.gguf.shape(name) if self._decoded else tensors[name].shape for name in self.stored]
        if self._halves:
            keys, values = shapes
            if len(keys) == 3 and len(values) == 3 and (keys[0], keys[1]) == (values[0], values[2]):
                return keys[0] * (keys[2] + values[1]), keys[1]
            raise CheckpointError(
                f"{self.gguf.path}: tensors {' and '.join(self.stored)}: found {list(keys)} and {list(values)}; "
                "expected [heads, latent, nope] and [heads, value, latent]"
            )
        if len({shape[1:] for shape in shapes}) > 1:
            found = " and ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"{self.gguf.path}: tensors {' and '.join(self.stored)}: found {found}; expected rows of one length"
            )
        return sum(shape[0] for shape in shapes), *shapes[0][1:]

    def _published_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint, where a convolution has an axis of 1 before its taps, and `A_log` one axis."""
        if self._logarithm:
            return (math.prod(shape),)
        return (math.prod(shape[:-1]), 1, shape[-1]) if "conv1d." in self.path else shape


def _moves_whole(columns: Int[np.ndarray, " columns"], size: int) -> bool:
    """True if this order of columns moves blocks of `size` neighbours, and none apart."""
    if len(columns) % size:
        return False
    blocks = columns.reshape(-1, size)
    return not np.any(blocks[:, 0] % size) and np.array_equal(blocks, blocks[:, :1] + np.arange(size))


def _moved(
    stored: UInt8[np.ndarray, "rows bytes"], columns: Int[np.ndarray, " columns"], blocks: BlockType
) -> UInt8[np.ndarray, "rows bytes"]:
    """The rows with their blocks in the order that `columns` has them in."""
    by_block = stored.reshape(stored.shape[0], -1, blocks.bytes)
    return by_block[:, columns[:: blocks.columns] // blocks.columns].reshape(stored.shape)
