"""AWQ's and GPTQ's integers, and those with an activation order, as tensors of `formats/integers.py`.

All of them are (q - zero) · scale, with the same q and zero in other places:

               numbers, a word has           zero points, a word has        scales
    AWQ        [in, out / 8], 8 outputs      [groups, out / 8], 8 outputs   [groups, out]
    GPTQ       [in / 8, out], 8 inputs       [groups, out / 8], 8 outputs   [groups, out]
    ling3      [out, in / 8], 8 inputs       [out / 8, groups], 8 outputs   [out, groups]

(8 is 4 for integers of 8 bits.) AWQ's words have their outputs in the order `AWQ_ORDER` (AutoAWQ 0.2.9,
`packing_utils.py`). GPTQ's first format has zero - 1 in place of zero, modulo 2^bits (AutoGPTQ 0.7.1,
`qlinear_cuda_old.py`); its `gptq_v2` has zero. With an activation order (`desc_act`, `actorder: group`), `g_idx` has
the group of each input, and the inputs are sorted by group here: `weight_g_idx` becomes the order of the sorted inputs.
Nothing is rounded.
"""

import functools
from collections.abc import Callable, Iterator
from typing import no_type_check

import numpy as np
from jaxtyping import Int32, Shaped

from ling3.checkpoint.safetensors_file import CheckpointError, StoredTensor, StoredTensors
from ling3.families.quantization import Quantization
from ling3.families.quantization_methods import REPACKED
from ling3.formats import PackedIntegers

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that the lowest four bits of a word of AWQ have, among its eight, then the next ones."""
SLICE = 2**22
"""The most words of a tensor that are laid out anew at a time, or with an activation order the most integers."""


def repacked(source: StoredTensors, quantization: Quantization | None) -> StoredTensors:
    """The tensors of a checkpoint, with those of AWQ, GPTQ and activation orders as `PackedIntegers` has them.

    Others stay as they are. Raises CheckpointError for tensors of other shapes or types than these methods write, and
    when one of the new tensors is read, for an activation order whose groups are not of one size.
    """
    if quantization is None:
        return source
    if quantization.method not in REPACKED:
        return _with_orders(source)
    options = dict(quantization.groups[0].scheme.options)
    raw = quantization.to_dict()
    adds_one = quantization.method == "gptq" and "gptq_v2" not in (raw.get("format"), raw.get("checkpoint_format"))
    new: StoredTensors = {}
    for name, tensor in source.items():
        module, _, field = name.rpartition(".")
        if field == "qweight":
            own = _Integers(module, source, options["bits"], quantization.method == "awq", adds_one)
            new.update(own.tensors("ordered" in options))
        elif field not in ("qzeros", "scales", "g_idx") or f"{module}.qweight" not in source:
            new[name] = tensor
    return new


def _with_orders(source: StoredTensors) -> StoredTensors:
    """The tensors, with the packed numbers of modules that have an activation order sorted by group."""
    new = dict(source)
    for name, groups in source.items():
        module, _, field = name.rpartition(".")
        words, scales = source.get(f"{module}.weight_packed"), source.get(f"{module}.weight_scale")
        if field != "weight_g_idx" or words is None or scales is None:
            continue
        count = scales.shape[-1]
        new[name] = groups._replace(put=functools.partial(_put_order, groups, count))
        new[words.name] = words._replace(put=functools.partial(_put_sorted, words, groups, count))
    return new


def _put_sorted(words: StoredTensor, groups: StoredTensor, count: int, out: Int32[np.ndarray, "outer words"]) -> None:
    """The packed numbers with their columns sorted by group."""
    order, (outer, across) = _order(groups, count), words.shape
    bits = 32 * across // order.shape[0]
    for first, some in _slices(outer, order.shape[0]):
        stored = np.empty((some, across), np.int32)
        words.read(first * across, stored, across)
        out[first : first + some] = _packed(np.take(_unpacked(stored, bits), order, axis=1), bits)


def _put_order(groups: StoredTensor, count: int, out: Int32[np.ndarray, " inner"]) -> None:
    out[:] = _order(groups, count)


class _Integers:
    """The tensors of one matrix of AWQ or GPTQ."""

    def __init__(self, module: str, source: StoredTensors, bits: int, awq: bool, adds_one: bool):
        self.module, self.source, self.bits, self.awq, self.adds_one = module, source, bits, awq, adds_one
        self.per = 32 // bits
        words, zeros, scales = (self._stored(field) for field in ("qweight", "qzeros", "scales"))
        if any(len(tensor.shape) != 2 for tensor in (words, zeros, scales)):
            raise CheckpointError(f"{words}: found tensors that are no matrices beside it; expected matrices")
        self.inner, self.outer = (
            (words.shape[0], words.shape[1] * self.per) if awq else (words.shape[0] * self.per, words.shape[1])
        )
        self.groups = scales.shape[0]
        expected = {zeros: (self.groups, -(-self.outer // self.per)), scales: (self.groups, self.outer)}
        for tensor, shape in expected.items():
            if tensor.shape != shape:
                raise CheckpointError(f"{tensor}: found {list(tensor.shape)}; expected {list(shape)}")
        for tensor in (words, zeros):
            if tensor.dtype != "I32":
                raise CheckpointError(f"{tensor}: found {tensor.dtype}; expected I32")
        if self.inner % self.per:
            raise CheckpointError(f"{words}: found {self.inner} inputs; expected a multiple of {self.per}")

    def tensors(self, ordered: bool) -> Iterator[tuple[str, StoredTensor]]:
        """The tensors of `PackedIntegers` for this matrix, by name; with an order of its inputs if `ordered`."""
        words, zeros, scales = (self._stored(field) for field in ("qweight", "qzeros", "scales"))
        put_words = self._put_awq if self.awq else functools.partial(self._put_gptq, ordered)
        arrays: dict[str, tuple[StoredTensor, str, tuple[int, ...], Callable[[np.ndarray], None]]] = {
            "weight_packed": (words, "I32", (self.outer, self.inner // self.per), put_words),
            "weight_scale": (scales, scales.dtype, scales.shape[::-1], functools.partial(_put_transposed, scales)),
            "weight_zero_point": (zeros, "I32", zeros.shape[::-1], self._put_zeros),
            "weight_shape": (words, "I64", (2,), lambda out: np.copyto(out, (self.outer, self.inner))),
        }
        if ordered:
            groups = self._stored("g_idx")
            arrays["weight_g_idx"] = (groups, "I32", groups.shape, functools.partial(_put_order, groups, self.groups))
        for field, (tensor, dtype, shape, put) in arrays.items():
            assert field in PackedIntegers.STORED
            name = f"{self.module}.{field}"
            yield name, StoredTensor(tensor.file, name, dtype, shape, tensor.start, put=put)

    @no_type_check  # called several times for each expert
    def _stored(self, field: str) -> StoredTensor:
        name = f"{self.module}.{field}"
        if name not in self.source:
            raise CheckpointError(
                f"{self.source[f'{self.module}.qweight']}: found no {name}, which {'AWQ' if self.awq else 'GPTQ'} "
                "stores beside it; fetch the checkpoint again"
            )
        return self.source[name]

    @no_type_check
    def _put_awq(self, out: Int32[np.ndarray, "outer inner_words"]) -> None:
        words = self._stored("qweight")
        across = words.shape[1]
        for first, some in _slices(across, self.inner):
            stored = np.empty((self.inner, some), np.int32)
            words.read(first, stored, across)
            _put_squares(stored, out[8 * first : 8 * (first + some)])

    @no_type_check
    def _put_gptq(self, ordered: bool, out: Int32[np.ndarray, "outer inner_words"]) -> None:
        words = self._stored("qweight")
        if not ordered:
            self._check_neighbours()
            _put_transposed(words, out)
            return
        order = _order(self._stored("g_idx"), self.groups)
        for first, some in _slices(self.outer, self.inner):
            stored = np.empty((words.shape[0], some), np.int32)
            words.read(first, stored, self.outer)
            out[first : first + some] = _packed(np.take(_unpacked(stored.T, self.bits), order, axis=1), self.bits)

    def _check_neighbours(self) -> None:
        """Raises CheckpointError if a file has an activation order and its config denies that (`desc_act: false`)."""
        groups = self.source.get(f"{self.module}.g_idx")
        if groups is None:
            return
        if not np.array_equal(groups.array(), np.arange(self.inner) // (self.inner // self.groups)):
            raise CheckpointError(
                f"{groups}: found an activation order, which quantization_config denies (desc_act: false); correct it"
            )

    @no_type_check
    def _put_zeros(self, out: Int32[np.ndarray, "words groups"]) -> None:
        stored = self._stored("qzeros").array()
        if self.awq:
            codes = _unpacked(stored, 4).reshape(self.groups, -1, 8)[..., np.argsort(AWQ_ORDER)]
            stored = _packed(codes.reshape(self.groups, -1), 4)
        elif self.adds_one:
            stored = _packed(_unpacked(stored, self.bits) + np.uint8(1) & np.uint8(2**self.bits - 1), self.bits)
        out[:] = stored.T


def _slices(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Cuts `count` rows of `size` words into slices of at most `SLICE`: each first row and length."""
    some = max(1, SLICE // max(1, size))
    return ((first, min(some, count - first)) for first in range(0, count, some))


@no_type_check
def _put_transposed(tensor: StoredTensor, out: Shaped[np.ndarray, "columns rows"]) -> None:
    rows, columns = tensor.shape
    for first, some in _slices(rows, columns):
        stored = np.empty((some, columns), out.dtype)
        tensor.read(first * columns, stored, columns)
        out[:, first : first + some] = stored.T


def _order(groups: StoredTensor, count: int) -> Int32[np.ndarray, " inner"]:
    """The inputs sorted by group, from the group of each input. Raises CheckpointError for groups of several sizes."""
    if groups.dtype not in ("I32", "I64") or len(groups.shape) != 1:
        raise CheckpointError(f"{groups}: found {groups.dtype}{list(groups.shape)}; expected a vector of I32")
    own = groups.array()
    inner = own.shape[0]
    sizes = np.bincount(own, minlength=count) if own.min() >= 0 else np.zeros(0, np.int64)
    if sizes.shape != (count,) or inner % count or (sizes != inner // count).any():
        raise CheckpointError(
            f"{groups}: found groups of several sizes; expected {count} groups of {inner // count} columns each; "
            "fetch the checkpoint again"
        )
    return np.argsort(own, kind="stable").astype(np.int32)


@no_type_check
def _put_squares(words: Int32[np.ndarray, "inner outer_words"], out: Int32[np.ndarray, "outer inner_words"]) -> None:
    """AWQ's words of eight outputs as words of eight inputs."""
    (inner, across), word = words.shape, np.uint32
    # Word i of a square of eight has the outputs of input i. Swapping ever smaller quarters transposes the square.
    squares = np.ascontiguousarray(words.reshape(inner // 8, 8, across).transpose(1, 2, 0)).view(word)
    for size, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):
        for i in range(8):
            if i & size == 0:
                swapped = (squares[i] >> word(4 * size) ^ squares[i + size]) & word(mask)
                squares[i + size] ^= swapped
                squares[i] ^= swapped << word(4 * size)
    for place, output in enumerate(AWQ_ORDER):
        out[output::8] = squares[place].view(np.int32)


@no_type_check
def _unpacked(words: Int32[np.ndarray, "rows words"], bits: int) -> Shaped[np.ndarray, "rows columns"]:
    """The unsigned integers of words, one byte for each, the lowest bits of a word first."""
    own = np.ascontiguousarray(words).view(np.uint8)
    return own if bits == 8 else np.stack([own & 15, own >> 4], axis=-1).reshape(own.shape[0], -1)


@no_type_check
def _packed(codes: Shaped[np.ndarray, "rows columns"], bits: int) -> Int32[np.ndarray, "rows words"]:
    """The words of unsigned integers, with zeros behind those of a row."""
    whole = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (32 // bits))))
    if bits == 4:
        whole = whole[:, ::2] | whole[:, 1::2] << 4
    return np.ascontiguousarray(whole).view(np.int32)
