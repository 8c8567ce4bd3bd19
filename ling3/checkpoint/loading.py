"""Loads published checkpoints into module trees; `save` does the reverse."""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import itertools
import math
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, no_type_check

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jaxtyping import DTypeLike

from ling3 import families
from ling3.checkpoint import hub, shards
from ling3.checkpoint.accounting import account, kind_of, stored_as
from ling3.checkpoint.copying import Copier, Copy
from ling3.checkpoint.names import Parts, Weight, stored_parts, structure, weight_names
from ling3.checkpoint.safetensors_file import DTYPES, FLOATS, CheckpointError, StoredTensors
from ling3.checkpoint.saving import save
from ling3.checkpoint.scales import is_of_zeros, is_scale
from ling3.checkpoint.stored_formats import as_stored
from ling3.families.quantization import in_floats, with_rounding
from ling3.formats import KeyValueHalves, QuantizedMatrix, in_model
from ling3.layers.linear import Linear
from ling3.leaves import ArrayLeaf
from ling3.mesh.agreement import Together
from ling3.mesh.rules import Rules
from ling3.mesh.sharding import Layout, check, place, plan
from ling3.mesh.share import WHOLE, Share
from ling3.model import CausalLM, Origin
from ling3.runtime.entry_checks import refuse_fork
from ling3.runtime.progress import progress

__all__ = ["CheckpointError", "load", "save", "weight_names"]

EMBEDDING = "model.word_embeddings.weight"
"""The path of the embedding, whose dtype is the model's."""
PATTERNS = ("config.json", "*.safetensors", shards.INDEX)


def load(
    path: str | os.PathLike[str],
    dtype: DTypeLike | None = None,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
    revision: str | None = None,
    check_finite: bool = True,
    dequantize: bool = False,
    rounded_activations: bool = False,
    mtp: bool = False,
) -> CausalLM:
    """Loads the model in `path`: a checkpoint directory, a GGUF file, a hub id, or `"nano"`, which the package has.

    `revision` is a branch, a tag or a commit of the hub's repository. With `dtype` None, every array keeps the dtype it
    is stored in, and a model whose embedding is quantized (as in GGUF files) computes in float32. With `jnp.float32` or
    `jnp.bfloat16`, matrices get that dtype, and what a model keeps in float32 (norms, convolutions, the router,
    `A_log`, `dt_bias`) is float32.

    Quantized weights stay in their format in memory, whatever `dtype` is: it applies to all other weights and to
    activations, which are rounded to 8 bits only with `rounded_activations`, where the format says how (and never
    before MLA's `kv_b_proj`). Numbers times their scales are rounded to the dtype of the scales, except in a float32
    model, as in transformers. With `dequantize`, quantized weights become dense matrices in `dtype` (bfloat16 if it is
    None), which training needs. With `mtp`, multi-token-prediction layers are kept as `model.mtp`, for `mtp_logits`.

    All headers are checked against the configuration before any weight is read: no tensor may be missing, and none left
    over except RoPE tables and multi-token-prediction layers, which are skipped, and a tied `lm_head`, which must equal
    the embedding. Several threads read the files straight into the arrays, so memory peaks at the model's size (with an
    accelerator, host memory at its largest array). A progress bar goes to stderr if this takes over two seconds.
    `check_finite` rejects weights that are NaN or infinite, and scales whose products may overflow or that are not
    above 0, unless a scale of 0 multiplies only zeros.

    With a `mesh`, the model is sharded over it by `rules`, as in `ling3.mesh.place`. All processes of the mesh call
    this at once. Each reads only the shards of its devices, every byte once (and its part of a tied `lm_head`, to
    compare it), and its memory peaks at their size; with `dequantize`, each reads the entire model first. An error in
    one process fails all: the others raise a CheckpointError that names the process, its host and its error.

    Raises CheckpointError for files that are damaged or do not fit the configuration or `mtp`, ConfigError for an
    invalid configuration or one of an unknown family, `hub.resolve`'s errors if there is no checkpoint, MeshError for a
    model that cannot be sharded by the rules, and ValueError for arguments that do not fit each other or the format.
    """
    refuse_fork()
    check(mesh, rules)
    if dequantize:
        if rounded_activations:
            raise ValueError("dequantize, rounded_activations: found True for both; expected it for one at most")
        options = {"revision": revision, "check_finite": check_finite, "mtp": mtp}
        with Together(mesh, CheckpointError):
            model = dequantized(load(path, dtype, **options), jnp.bfloat16 if dtype is None else dtype)
        return model if mesh is None else place(model, mesh, rules)
    wanted = None if dtype is None else np.dtype(dtype)
    if wanted not in (None, np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        raise ValueError(f"dtype: found {wanted}; expected None, jnp.float32 or jnp.bfloat16")
    with _uncollected(), Together(mesh, CheckpointError) as together:
        directory, source, parts, dtypes, tree = _planned(path, wanted, mesh, revision, mtp, rounded_activations)
        layout = None if mesh is None else plan(tree, mesh, rules)
        together.check(same=hashlib.sha256(repr((tree.config, dtypes)).encode()).hexdigest())

        arrays = _read(directory, parts, dtypes, source, layout, check_finite)
        together.check()
        model = jax.tree.unflatten(jax.tree.structure(tree), arrays) if layout is None else layout.model(tree, arrays)
        if wrong := list(families.family_of(tree.config).misfits(model)):
            kind = "numbers out of range; fetch the file again"
            raise CheckpointError(shards.complaint(directory, [(kind, wrong)]))
    return model


def planned(
    path: str | os.PathLike[str], dtype: DTypeLike | None = None, *, revision: str | None = None, mtp: bool = False
) -> CausalLM:
    """The model that `load` would give, with a `jax.ShapeDtypeStruct` for each array; reads headers, and no weights.

    Raises the same errors for these arguments and headers.
    """
    *_, parts, dtypes, tree = _planned(path, None if dtype is None else np.dtype(dtype), None, revision, mtp, False)
    arrays = [jax.ShapeDtypeStruct(leaf.value.shape, own) for (leaf, _), own in zip(parts, dtypes, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), arrays)


def _planned(
    path: str | os.PathLike[str],
    wanted: np.dtype | None,
    mesh: Mesh | None,
    revision: str | None,
    mtp: bool,
    rounded_activations: bool,
) -> tuple[pathlib.Path, StoredTensors, Parts, list[np.dtype], CausalLM]:
    """The directory of a checkpoint, its tensors, the arrays made of them and their dtypes, and the model's structure.

    The headers are checked against the configuration.
    """
    directory, tree, source = _opened(path, revision, mtp, rounded_activations)
    parts = stored_parts(tree, source)
    account(directory, tree, parts, source, wanted, mesh)
    dtypes = [_target_dtype(leaf, weights, source, wanted) for leaf, weights in parts]
    tree = eqx.filter_eval_shape(functools.partial(in_model, dtype=_activations(parts, dtypes, wanted)), tree)
    return directory, source, parts, dtypes, tree


def _opened(
    path: str | os.PathLike[str], revision: str | None, mtp: bool, rounded_activations: bool
) -> tuple[pathlib.Path, CausalLM, StoredTensors]:
    """The directory of a checkpoint, the structure of its model in the stored formats, and its tensors."""
    directory = hub.resolve(path, PATTERNS, revision)
    version = _version(directory)
    config = families.read_config(directory)
    source = shards.open_all(directory)
    if _version(directory) != version:
        raise CheckpointError(f"{directory}: was replaced while it was being loaded; load it again")
    if mtp and (problem := families.without_mtp(config)):
        raise CheckpointError(f"{directory}: {problem}")
    config, source = as_stored(config, source, mtp=mtp)
    config = with_rounding(config) if rounded_activations else config
    tree = structure(config, mtp=mtp)
    return directory, dataclasses.replace(tree, origin=Origin(hub.lasting(path), revision)), source


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pauses Python's garbage collector, which would otherwise scan all objects of the process many times.

    New objects trigger it, and a header creates several for each of tens of thousands of tensors.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def dequantized(model: CausalLM, dtype: DTypeLike) -> CausalLM:
    """The model with every quantized matrix as a dense one in `dtype`, and its config without quantization."""

    def dense(matrix: Any) -> Any:
        if not isinstance(matrix, QuantizedMatrix | KeyValueHalves):
            return matrix
        bias = matrix.bias if isinstance(matrix, QuantizedMatrix) else None
        options = {"bias": bias, "axes": matrix.axes, "name": matrix.name}
        return Linear(jax.jit(lambda own: own.dense().astype(dtype))(matrix), **options)

    plain = jax.tree.map(dense, model, is_leaf=lambda node: isinstance(node, QuantizedMatrix | KeyValueHalves))
    return dataclasses.replace(plain, config=in_floats(model.config))


def _read(
    name: pathlib.Path,
    parts: Parts,
    dtypes: list[np.dtype],
    source: StoredTensors,
    layout: Layout | None,
    check_finite: bool,
) -> list[jax.Array]:
    """Reads the arrays: entire ones without a `layout`, else only the shards of this process's devices."""
    infinite: dict[str, None] = {}
    scales: dict[str, float] = {}

    def total(i: int) -> int:
        shape = parts[i][0].value.shape
        share, count = (WHOLE, 1) if layout is None else (layout.shares[i], len(layout.local(i, shape)))
        return count * math.prod(share.shape(shape)) * dtypes[i].itemsize

    def read(i: int, share: Share, number: int) -> np.ndarray:
        leaf, weights = parts[i]
        array = _aligned(share.shape(leaf.value.shape), dtypes[i])
        largest = leaf.module.largest if is_scale(leaf) else 0.0
        copies = [copy._replace(largest=largest) for copy in _copies(leaf, weights, source, array, share, number)]
        for copied in copier.run(copies):
            advance(copied.nbytes)
            infinite.update(dict.fromkeys(copied.infinite))
            for tensor, scale in copied.scales.items():
                if scale or not is_of_zeros(leaf, tensor, source):
                    scales[tensor] = scale
        return array

    def placed(i: int) -> jax.Array:
        # Zero-copy on the CPU: the buffer is aligned, and nothing else refers to it.
        if layout is None:
            return jax.device_put(read(i, WHOLE, 0))
        return layout.array(i, parts[i][0].value.shape, functools.partial(read, i))

    every = range(len(parts))
    with progress(f"loading {name.name}", sum(map(total, every))) as advance, Copier(check_finite) as copier:
        arrays = [placed(i) for i in every]
    if infinite or scales:
        advice = "fetch the file again, or load with check_finite=False"
        kinds = [
            (
                f"weights that are NaN or infinite; {advice}",
                [str(source[name]) for name in infinite],
            ),
            (
                f"scales that are not above 0, or so large that products are infinite; {advice}",
                [f"{source[name]}: found {scale:g}" for name, scale in scales.items()],
            ),
        ]
        raise CheckpointError(shards.complaint(name, kinds))
    return arrays


def _version(directory: pathlib.Path) -> tuple[int, int] | None:
    """The inode and mtime of `config.json`, to detect a replacement: `save` moves the old file away first."""
    try:
        status = (directory / "config.json").stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _target_dtype(
    leaf: ArrayLeaf, weights: tuple[Weight, ...], source: StoredTensors, wanted: np.dtype | None
) -> np.dtype:
    stored = source[weights[0].name].dtype
    if isinstance(leaf.module, QuantizedMatrix) and leaf.field in leaf.module.STORED:
        if stored in FLOATS and wanted == np.float32:
            return np.dtype(np.float32)
        return np.dtype(np.int32) if stored == "I64" else DTYPES[stored]
    if stored_as(leaf) != FLOATS:
        return np.dtype(leaf.value.dtype)
    if wanted is None:
        return DTYPES[stored]
    return np.dtype(np.float32) if leaf.value.dtype == jnp.float32 else wanted


def _activations(parts: Parts, dtypes: list[np.dtype], wanted: np.dtype | None) -> np.dtype:
    """The dtype of a model's activations: that of its embedding, or `wanted` or float32 if that is quantized."""
    [(embedding, own)] = [(leaf, own) for (leaf, _), own in zip(parts, dtypes, strict=True) if leaf.path == EMBEDDING]
    if not isinstance(embedding.module, QuantizedMatrix):
        return own
    return np.dtype(np.float32) if wanted is None else wanted


def _copies(
    leaf: ArrayLeaf,
    weights: tuple[Weight, ...],
    source: StoredTensors,
    array: np.ndarray,
    share: Share,
    number: int,
) -> Iterator[Copy]:
    """The copies that fill `array`, shard `number` of a leaf: from each tensor, the rows or columns of that shard."""
    if share.axis is None:
        yield from _whole(weights, source, array)
        return
    for at, first, end in share.runs(number):
        own = array[share.rows(at, array.shape[share.axis])] if at else array
        own[share.rows(end - first, own.shape[share.axis])] = 0  # padding, or what follows
        if share.axis == 0 and weights[0].expert is not None:
            yield from _whole(weights[first:end], source, own[: end - first])
            continue
        for weight in weights:
            if weight.expert is None:
                yield from _rows(weight, source, own, leaf.value.shape, share.axis, first, end)
            else:
                yield from _rows(weight, source, own[weight.expert], leaf.value.shape[1:], share.axis - 1, first, end)


def _whole(weights: Sequence[Weight], source: StoredTensors, array: np.ndarray) -> Iterator[Copy]:
    """The copies of an entire weight, or of a stack: consecutive tensors of one file and dtype are read together."""
    if weights and weights[0].expert is None:
        yield from _rows(weights[0], source, array)
        return
    for _, group in itertools.groupby(enumerate(weights), lambda item: kind_of(source[item[1].name])):
        numbers, own = zip(*group, strict=True)
        if own[0].whole is not None or source[own[0].name].put is not None:
            for number, weight in zip(numbers, own, strict=True):
                yield from _rows(weight, source, array[number])
            continue
        target, stack = array[numbers[0] : numbers[-1] + 1].reshape(1, -1), [source[weight.name] for weight in own]
        yield Copy(stack[0], target, 0, target.size, stack=stack)


@no_type_check
def _rows(
    weight: Weight,
    source: StoredTensors,
    target: np.ndarray,
    shape: tuple[int, ...] = (),
    axis: int = 0,
    first: int = 0,
    end: int = 0,
) -> Iterator[Copy]:
    """The copy of a weight into `target`: all of it, or with a `shape` only `first` to `end` along an axis of that."""
    rows, stride, start, columns = 1, weight.size, 0, weight.size
    if shape:
        inner = math.prod(shape[axis + 1 :])
        rows, stride = math.prod(shape[:axis]), shape[axis] * inner
        start, columns = first * inner, (end - first) * inner
    tensor, start = source[weight.name], weight.start + start
    target = target.reshape(rows, -1)[:, :columns]
    if columns == stride and target.flags.c_contiguous:
        target, stride = target.reshape(1, -1), weight.size
    yield Copy(tensor, target, start, stride)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array, aligned so that XLA's CPU backend uses its memory without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
