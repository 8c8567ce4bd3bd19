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

import numpy as np
from jaxtyping import Int32, Shaped

from ling3.checkpoint.safetensors_file import CheckpointError, StoredTensor, StoredTensors
from ling3.families.quantization import Quantization
from ling3.families.quantization_methods import REPACKED
from ling3.formats import PackedIntegers

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output that the lowest four bits of a word of AWQ have, among its eight, then the next ones."""


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
        order = functools.partial(_order, groups, scales.shape[-1])
        new[name] = groups._replace(made=order)
        new[words.name] = words._replace(made=functools.partial(_sorted, words, order))
    return new


def _sorted(words: StoredTensor, order: Callable[[], Int32[np.ndarray, " inner"]]) -> Int32[np.ndarray, "outer words"]:
    """The packed numbers with their columns in this order."""
    columns, stored = order(), words.array()
    bits = 32 * stored.shape[-1] // columns.shape[0]
    return _packed(_unpacked(stored, bits)[:, columns], bits)


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
        made: dict[str, tuple[StoredTensor, str, tuple[int, ...], Callable[[], np.ndarray]]] = {
            "weight_packed": (words, "I32", (self.outer, self.inner // self.per), lambda: self._words(ordered)),
            "weight_scale": (scales, scales.dtype, scales.shape[::-1], self._scales),
            "weight_zero_point": (zeros, "I32", zeros.shape[::-1], self._zeros),
            "weight_shape": (words, "I64", (2,), lambda: np.asarray([self.outer, self.inner], np.int64)),
        }
        if ordered:
            groups = self._stored("g_idx")
            order = functools.partial(_order, groups, self.groups)
            made["weight_g_idx"] = (groups, "I32", groups.shape, order)
        for field, (tensor, dtype, shape, make) in made.items():
            assert field in PackedIntegers.STORED
            name = f"{self.module}.{field}"
            yield name, StoredTensor(tensor.file, name, dtype, shape, tensor.start, made=make)

    def _stored(self, field: str) -> StoredTensor:
        name = f"{self.module}.{field}"
        if name not in self.source:
            raise CheckpointError(
                f"{self.source[f'{self.module}.qweight']}: found no {name}, which {'AWQ' if self.awq else 'GPTQ'} "
                "stores beside it; fetch the checkpoint again"
            )
        return self.source[name]

    def _words(self, ordered: bool) -> Int32[np.ndarray, "outer words"]:
        stored = self._stored("qweight").array()
        if self.awq:
            return _transposed(stored)
        if not ordered:
            self._check_neighbours()
            return np.ascontiguousarray(stored.T)
        codes = _unpacked(np.ascontiguousarray(stored.T), self.bits)
        return _packed(codes[:, _order(self._stored("g_idx"), self.groups)], self.bits)

    def _check_neighbours(self) -> None:
        """Raises CheckpointError if a file has an activation order and its config denies that (`desc_act: false`)."""
        groups = self.source.get(f"{self.module}.g_idx")
        if groups is None:
            return
        if not np.array_equal(groups.array(), np.arange(self.inner) // (self.inner // self.groups)):
            raise CheckpointError(
                f"{groups}: found an activation order, which quantization_config denies (desc_act: false); correct it"
            )

    def _scales(self) -> Shaped[np.ndarray, "outer groups"]:
        return np.ascontiguousarray(self._stored("scales").array().T)

    def _zeros(self) -> Int32[np.ndarray, "words groups"]:
        stored = np.ascontiguousarray(self._stored("qzeros").array().T)
        if self.awq:
            codes = _unpacked(stored.T, 4).reshape(self.groups, -1, 8)[..., np.argsort(AWQ_ORDER)]
            return np.ascontiguousarray(_packed(codes.reshape(self.groups, -1), 4).T)
        if not self.adds_one:
            return stored
        codes = _unpacked(stored.T, self.bits) + np.uint8(1) & np.uint8(2**self.bits - 1)
        return np.ascontiguousarray(_packed(codes, self.bits).T)


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


def _transposed(words: Int32[np.ndarray, "inner outer_words"]) -> Int32[np.ndarray, "outer inner_words"]:
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
    rows = np.empty((across, 8, inner // 8), word)
    for place, output in enumerate(AWQ_ORDER):
        rows[:, output] = squares[place]
    return rows.reshape(across * 8, inner // 8).view(np.int32)


def _unpacked(words: Int32[np.ndarray, "rows words"], bits: int) -> Shaped[np.ndarray, "rows columns"]:
    """The unsigned integers of words, one byte for each, the lowest bits of a word first."""
    own = np.ascontiguousarray(words).view(np.uint8)
    return own if bits == 8 else np.stack([own & 15, own >> 4], axis=-1).reshape(own.shape[0], -1)


def _packed(codes: Shaped[np.ndarray, "rows columns"], bits: int) -> Int32[np.ndarray, "rows words"]:
    """The words of unsigned integers, with zeros behind those of a row."""
    whole = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (32 // bits))))
    if bits == 4:
        whole = whole[:, ::2] | whole[:, 1::2] << 4
    return np.ascontiguousarray(whole).view(np.int32)
