"""From a published checkpoint to the module tree; `save` goes the other way."""

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
from typing import Any

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
from ling3.checkpoint.stored_formats import with_stored_formats
from ling3.families.quantization import in_floats
from ling3.formats import QuantizedMatrix, in_float32
from ling3.layers.linear import Linear, Matrix
from ling3.leaves import ArrayLeaf
from ling3.mesh.agreement import Together
from ling3.mesh.rules import WHOLE, Rules, Share
from ling3.mesh.sharding import Layout, check, place, plan
from ling3.model import CausalLM, Origin
from ling3.runtime.entry_checks import refuse_fork
from ling3.runtime.progress import progress

__all__ = ["CheckpointError", "load", "save", "weight_names"]

EMBEDDING = "model.word_embeddings.weight"
"""Its dtype is the model's."""
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
) -> CausalLM:
    """The model in `path`: a checkpoint directory, a hub id, or `"nano"` for the one in the package.

    `revision` is a branch, a tag or a commit of the hub's repository.

    With `dtype` None every array has the dtype it is stored in. With `jnp.float32` or `jnp.bfloat16` the matrices have
    that one, and what the structure keeps in float32 (norms, convolutions, the router, `A_log`, `dt_bias`) is float32.

    Quantized weights stay in their format in memory, whatever `dtype` says: it is that of the rest and of activations,
    which are not rounded to 8 bits, though a checkpoint's servers may do so. Integers times their scales are rounded to
    the dtype of the scales, but not in a model in float32: both as in transformers. With `dequantize` they become
    matrices in `dtype`, or bfloat16 with `dtype` None, as the training of a model needs them.

    All headers are checked against the configuration before any weight is read: nothing may be missing or left over
    but the multi-token-prediction layers, which are skipped, and a tied `lm_head`, which must equal the embedding.
    Files are read by all cores, block by block, straight into the arrays, so memory peaks at the model (on an
    accelerator: at its largest array on the host); a progress bar goes to stderr when that takes over two seconds.
    `check_finite` looks at every weight for NaN and infinity, and at every scale: it must be above 0, or at 0 multiply
    nothing but zeros, and its products must be finite.

    With a `mesh` the model lies on it, cut by the `rules` as in `ling3.mesh.place`. All processes of the mesh call this
    at once. Each reads the bytes of its own devices' parts, every one once (of a tied `lm_head` also its share of the
    comparison), and its memory peaks at these parts. What fails in one process fails in all: the others raise a
    CheckpointError that names the process, its host and its error.

    Raises CheckpointError for files that are damaged or do not fit, ConfigError for a configuration of no known family,
    `hub.resolve`'s errors where there is no checkpoint, MeshError for a model that cannot be cut so, and ValueError for
    rules without a mesh, or a mesh without a device of this process.
    """
    if dequantize:
        options = {"revision": revision, "check_finite": check_finite}
        model = dequantized(load(path, dtype, **options), jnp.bfloat16 if dtype is None else dtype)
        return model if mesh is None else place(model, mesh, rules)
    refuse_fork()
    check(mesh, rules)
    wanted = None if dtype is None else np.dtype(dtype)
    if wanted not in (None, np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)):
        raise ValueError(f"dtype: found {wanted}; expected None, jnp.float32 or jnp.bfloat16")
    with _uncollected(), Together(mesh, CheckpointError) as together:
        directory = hub.resolve(path, PATTERNS, revision)
        version = _version(directory)
        config = families.read_config(directory)
        source = shards.open_all(directory)
        if _version(directory) != version:
            raise CheckpointError(f"{directory}: was replaced while it was being loaded; load it again")
        config = with_stored_formats(config, source)
        tree = dataclasses.replace(structure(config), origin=Origin(hub.lasting(path), revision))
        parts = stored_parts(tree, source)
        account(directory, config, parts, source, wanted, mesh)
        dtypes = [_target_dtype(leaf, weights, source, wanted) for leaf, weights in parts]
        if any(leaf.path == EMBEDDING and own == np.float32 for (leaf, _), own in zip(parts, dtypes, strict=True)):
            tree = eqx.filter_eval_shape(in_float32, tree)
        layout = None if mesh is None else plan(tree, mesh, rules)
        together.check(same=hashlib.sha256(repr((config, dtypes)).encode()).hexdigest())

        arrays = _read(directory, parts, dtypes, source, layout, check_finite)
        together.check()
        model = jax.tree.unflatten(jax.tree.structure(tree), arrays) if layout is None else layout.model(tree, arrays)
        if wrong := list(families.family_of(config).misfits(model)):
            kind = "numbers out of range; fetch the file again"
            raise CheckpointError(shards.complaint(directory, [(kind, wrong)]))
    return model


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pauses Python's garbage collector, which looks through every object of the process again and again otherwise.

    It is set off by the number of new objects, and a header has several for each of tens of thousands of tensors.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def dequantized(model: CausalLM, dtype: DTypeLike) -> CausalLM:
    """The model with each quantized matrix as one in `dtype`, and a config that says so."""

    def dense(matrix: Any) -> Any:
        if not isinstance(matrix, QuantizedMatrix):
            return matrix
        options = {"bias": matrix.bias, "axes": matrix.axes, "name": matrix.name}
        return Linear(jax.jit(lambda own: own.dense().astype(dtype))(matrix), **options)

    plain = jax.tree.map(dense, model, is_leaf=lambda node: isinstance(node, Matrix))
    return dataclasses.replace(plain, config=in_floats(model.config))


def _read(
    directory: pathlib.Path,
    parts: Parts,
    dtypes: list[np.dtype],
    source: StoredTensors,
    layout: Layout | None,
    check_finite: bool,
) -> list[jax.Array]:
    """The arrays: all of each without a layout, else what this process has of it."""
    infinite: dict[str, None] = {}
    scales: dict[str, float] = {}

    def total(i: int) -> int:
        leaf, weights = parts[i]
        if layout is None:
            return _stored_bytes(leaf, weights, source, WHOLE, 0)
        share, own = layout.shares[i], layout.local(i, leaf.value.shape)
        return sum(_stored_bytes(leaf, weights, source, share, number) for number in own)

    def read(i: int, share: Share, number: int) -> np.ndarray:
        leaf, weights = parts[i]
        array = _aligned(share.shape(leaf.value.shape), dtypes[i])
        largest = leaf.module.largest if is_scale(leaf) else 0.0
        copies = [copy._replace(largest=largest) for copy in _copies(leaf, weights, source, array, share, number)]
        for copied in copier.run(copies):
            advance(copied.nbytes)
            infinite.update(dict.fromkeys(copied.infinite))
            for name, scale in copied.scales.items():
                if scale or not is_of_zeros(leaf, name, source):
                    scales[name] = scale
        return array

    def placed(i: int) -> jax.Array:
        # Zero-copy on the CPU: the buffer is aligned, and nobody else has it.
        if layout is None:
            return jax.device_put(read(i, WHOLE, 0))
        return layout.array(i, parts[i][0].value.shape, functools.partial(read, i))

    every = range(len(parts))
    with progress(f"loading {directory.name}", sum(map(total, every))) as advance, Copier(check_finite) as copier:
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
        raise CheckpointError(shards.complaint(directory, kinds))
    return arrays


def _version(directory: pathlib.Path) -> tuple[int, int] | None:
    """The identity of a `config.json`, to detect a replacement: `save` moves the old one away first."""
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


def _copies(
    leaf: ArrayLeaf,
    weights: tuple[Weight, ...],
    source: StoredTensors,
    array: np.ndarray,
    share: Share,
    number: int,
) -> Iterator[Copy]:
    """What fills `array`, one part of a leaf: of each of its tensors the rows, or columns, that the part has."""
    if share.axis is None:
        yield from _whole(weights, source, array)
        return
    first, end = share.spans[number]
    array[(slice(None),) * share.axis + (slice(end - first, None),)] = 0
    if share.axis == 0 and weights[0].expert is not None:
        yield from _whole(weights[first:end], source, array[: end - first])
        return
    for weight in weights:
        if weight.expert is None:
            yield from _rows(weight, source, array, leaf.value.shape, share.axis, first, end)
        else:
            yield from _rows(weight, source, array[weight.expert], leaf.value.shape[1:], share.axis - 1, first, end)


def _whole(weights: Sequence[Weight], source: StoredTensors, array: np.ndarray) -> Iterator[Copy]:
    """What fills `array` with all of a weight, or with a stack of them: neighbours of one kind in one file together."""
    if weights and weights[0].expert is None:
        yield from _rows(weights[0], source, array)
        return
    for _, group in itertools.groupby(enumerate(weights), lambda item: kind_of(source[item[1].name])):
        numbers, own = zip(*group, strict=True)
        if own[0].whole is not None:
            for number, weight in zip(numbers, own, strict=True):
                yield from _rows(weight, source, array[number])
            continue
        target, stack = array[numbers[0] : numbers[-1] + 1].reshape(1, -1), [source[weight.name] for weight in own]
        yield Copy(stack[0], target, 0, target.size, stack=stack)


def _rows(
    weight: Weight,
    source: StoredTensors,
    target: np.ndarray,
    shape: tuple[int, ...] = (),
    axis: int = 0,
    first: int = 0,
    end: int = 0,
) -> Iterator[Copy]:
    """A weight's way into its target: all of it, or along an axis of the `shape` that it has there a part of it."""
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


def _stored_bytes(
    leaf: ArrayLeaf, weights: tuple[Weight, ...], source: StoredTensors, share: Share, number: int
) -> int:
    """What the tensors of a part of a leaf take in their files."""
    first, end = (0, 1) if share.axis is None else share.spans[number]
    experts = share.axis == 0 and weights[0].expert is not None
    total = 0
    for weight in weights[first:end] if experts else weights:
        tensor = source[weight.name]
        total += tensor.nbytes if weight.whole is None else tensor.nbytes * weight.size // math.prod(tensor.shape)
    return total if experts or share.axis is None else total * (end - first) // leaf.value.shape[share.axis]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An uninitialized array at an address that XLA's CPU backend takes over without a copy."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)
