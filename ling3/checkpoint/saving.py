"""Saves a module tree as a published checkpoint, atomically."""

import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Shaped

from ling3.checkpoint import replacing, safetensors_file, shards, tokenizer_files
from ling3.checkpoint.names import Weight, structure, weights_of
from ling3.checkpoint.safetensors_file import DTYPES, FLOATS, CheckpointError
from ling3.families import family_of, read_config, without_mtp
from ling3.families.ling3_config import ConfigError
from ling3.formats import QuantizedMatrix
from ling3.layers.adapted import AdaptedMatrix
from ling3.leaves import ArrayLeaf, array_leaves
from ling3.mesh import sharding
from ling3.mesh.agreement import Together
from ling3.mesh.gathering import gathered
from ling3.mesh.placement import Placement
from ling3.mesh.sharded import placement_of
from ling3.mesh.sharding import check, processes
from ling3.mesh.share import WHOLE, Share
from ling3.model import CausalLM
from ling3.runtime.progress import progress
from ling3.runtime.quoting import shown

CONFIG = "config.json"
TOKENIZER = (*tokenizer_files.NAMES, tokenizer_files.TEMPLATES)

_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
_DTYPES = tuple(DTYPES[name] for name in FLOATS)


def save(
    model: CausalLM,
    path: str | os.PathLike[str],
    *,
    tokenizer_from: str | os.PathLike[str] | bool | None = True,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    check_finite: bool = True,
) -> None:
    """Write `model` to the directory `path` in the published layout, each array in the dtype it has.

    Saving a loaded checkpoint of the published layout gives the same tensors, with three exceptions:
    multi-token-prediction layers that `load` skipped are missing (`num_nextn_predict_layers` is 0), a copy of a tied
    `lm_head` is not repeated, and `A_log` has the shape that its family publishes ([heads] for Ling-3). More than
    `max_shard_bytes` goes into several files with an index. The tokenizer's files are copied from the checkpoint
    `tokenizer_from`: by default the one that the model was loaded from, if it has them; with None there are none.
    `check_finite` refuses weights that are NaN or infinite, as `load` does.

    An existing directory must be empty, or with `overwrite` hold a checkpoint: its configuration and weights are
    replaced, with a tokenizer to copy its tokenizer too, and every other file stays.

    Atomic: all files are written to a hidden directory, in `path` or beside it, and moved into place at the end; after
    an error all is as it was. If the process is killed meanwhile, the next `load` or `save` completes or undoes it.

    A sharded model is saved as the same files. All processes of the mesh call this at once; the first one writes, and
    holds one array at a time in host memory. An error in one process fails all, as in `load`.

    Raises CheckpointError if `path` is taken, another process is saving there, or the model does not fit its
    configuration or is not finite, and OSError if the files cannot be written.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: found {max_shard_bytes}; expected at least 1")
    _check_kinds(model, path)
    target = pathlib.Path(path).expanduser().resolve()
    placement = placement_of(model)
    mesh = None if placement is None else placement.mesh
    check(mesh, None)
    with Together(mesh, CheckpointError) as together:
        writes = mesh is None or processes(mesh)[0] == jax.process_index()
        if writes:
            if target.is_dir():
                replacing.recover(target)
            replaced(target, overwrite, ())
        found = _checked_arrays(model)
        tokenizer = tokenizer_files.chosen(model.origin, tokenizer_from) if writes else {}
        together.check()
        if check_finite:
            _check_finite(found)
        plan = plan_files([array.leaf for array in found], max_shard_bytes)
        reader = _Reader(found, together)
        if writes:
            replace(target, model, plan, reader.tensor, tokenizer, overwrite)
        else:
            for shard in plan:
                for name in safetensors_file.in_order(_specs(shard)):
                    reader.whole(shard[name][0])


def _check_kinds(model: CausalLM, path: str | os.PathLike[str]) -> None:
    """Raises CheckpointError for a matrix of a kind that no checkpoint has."""
    for leaf in array_leaves(model):
        if isinstance(leaf.module, AdaptedMatrix):
            raise CheckpointError(
                f"{path}: {leaf.path} is of an adapter, which a checkpoint has no place for; save_adapter writes the "
                "adapter by itself, and merge_adapter makes a model that can be saved"
            )
        if isinstance(leaf.module, QuantizedMatrix) and (why := leaf.module.unsaved) is not None:
            raise CheckpointError(f"{path}: {leaf.path} {why}; load the model with dequantize=True to save it")


def replace(
    target: pathlib.Path,
    model: CausalLM,
    plan: list[dict[str, tuple[ArrayLeaf, Weight]]],
    read: Callable[[ArrayLeaf, Weight], np.ndarray],
    tokenizer: dict[str, bytes],
    overwrite: bool,
    doing: str = "saving",
) -> None:
    """Writes the shards of `plan`, the config and the tokenizer, then moves them into `target`. Raises like `save`."""
    total = sum(weight.size * _stored_dtype(leaf).itemsize for shard in plan for leaf, weight in shard.values())
    with replacing.advised(target, f"a checkpoint of {total:,} bytes"), replacing.workspace(target) as new:
        old, foreign = replaced(target, overwrite, TOKENIZER if tokenizer else ())
        for name, content in tokenizer.items():
            write_file(new / name, content)
        _write_shards(new, plan, read, total, indexed=len(plan) > 1 or foreign, doing=doing)
        config = family_of(model.config).with_mtp_layers(model.config, len(model.mtp))
        raw = config.to_dict() | {"torch_dtype": str(model.dtype)}
        write_file(new / CONFIG, _json(raw))
        replacing.commit(new, target, old)


def replaced(target: pathlib.Path, overwrite: bool, tokenizer: tuple[str, ...]) -> tuple[list[str], bool]:
    """The files in `target` to replace, and whether other safetensors files remain. Raises CheckpointError if taken."""
    if not target.exists():
        return [], False
    if not target.is_dir():
        raise CheckpointError(f"{target}: is a file; give a directory for the checkpoint")
    there = {path.name for path in target.iterdir()} - {replacing.WORK, replacing.TRAINING}
    if not there:
        return [], False
    if not overwrite:
        raise CheckpointError(
            f"{target}: is not empty; give another directory, or overwrite it (overwrite=True, --overwrite)"
        )
    try:
        read_config(target)
    except ConfigError as error:
        raise CheckpointError(
            f"{target}: holds no checkpoint, so nothing in it is replaced; give another directory\n{error}"
        ) from error
    own = {CONFIG, shards.INDEX, shards.SINGLE, *tokenizer, *(shards.index(target) or {}).values()}
    old = sorted(name for name in there if name in own or _SHARD.fullmatch(name))
    files = [target / name for name in old if name != tokenizer_files.TEMPLATES]
    if strange := [path.name for path in files if not path.is_file() and not path.is_symlink()]:
        raise CheckpointError(f"{target}: found {', '.join(strange)}, which is no file; give another directory")
    return old, any(name.endswith(".safetensors") for name in there.difference(old))


class _Stored(NamedTuple):
    """One array of the model to save."""

    leaf: ArrayLeaf
    """The leaf, with the shape and dtype of the unsharded array."""
    value: jax.Array
    share: Share
    placement: Placement | None

    def whole(self) -> np.ndarray:
        """The unsharded array in the process that writes, and an empty one in the others."""
        if self.placement is not None:
            return gathered(self.value, self.share, self.placement.mesh)
        # Of a copy, as a JAX array caches its conversion to numpy.
        return np.asarray(jnp.array(self.value, copy=True))


def _checked_arrays(model: CausalLM) -> list[_Stored]:
    found, placement = list(array_leaves(model)), placement_of(model)
    if model.mtp and (problem := without_mtp(model.config)):
        raise CheckpointError(f"the model has multi-token-prediction layers, and its configuration none: {problem}")
    built = structure(model.config, mtp=bool(model.mtp))
    wholes, shares = [leaf.value for leaf in array_leaves(built)], [WHOLE] * len(found)
    if placement is not None:
        layout = sharding.plan(built, placement.mesh, placement.rules)
        shapes = [share.stored(value.shape) for share, value in zip(layout.shares, wholes, strict=True)]
        parts = [jax.ShapeDtypeStruct(shape, value.dtype) for shape, value in zip(shapes, wholes, strict=True)]
        built, shares = eqx.filter_eval_shape(functools.partial(layout.model, built), parts), layout.shares
    expected = {leaf.path: leaf.value for leaf in array_leaves(built)}
    wrong = []
    for leaf in found:
        shape, own = (), None
        if leaf.path in expected:
            shape, own = expected[leaf.path].shape, expected[leaf.path].dtype
        dtypes = _dtypes(leaf) or (_DTYPES if own is None or own in _DTYPES else (own,))
        if leaf.value.shape != shape or leaf.value.dtype not in dtypes:
            there = f"{leaf.value.dtype}{list(leaf.value.shape)}"
            wrong.append(f"{leaf.path}: found {there}; expected {list(shape)} of {', '.join(map(str, dtypes))}")
    wrong += [f"{path}: absent" for path in expected.keys() - {leaf.path for leaf in found}]
    own = dict(_statics(model))
    other = [
        f"{path}: found {shown(own[path])}; expected {shown(value)}"
        for path, value in _statics(built)
        if path in own and own[path] != value
    ]
    if wrong or other:
        kinds = [
            ("arrays that do not fit its configuration", wrong),
            ("fields that do not fit its configuration, as after an ablation that it has no word for", other),
        ]
        raise CheckpointError(shards.complaint("the model", kinds))
    arrays = []
    for leaf, whole, share in zip(found, wholes, shares, strict=True):
        shaped = dataclasses.replace(leaf, value=jax.ShapeDtypeStruct(whole.shape, leaf.value.dtype))
        arrays.append(_Stored(shaped, leaf.value, share, placement))
    return arrays


def _statics(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The static fields of all modules, by path: they change what is computed, and no tensor's shape shows them.

    Leaves out names, and `wide`, which follows from the dtype in which a quantized model is loaded.
    """
    if isinstance(node, tuple):
        for i, each in enumerate(node):
            yield from _statics(each, f"{path}.{i}")
    elif isinstance(node, eqx.Module):
        for field in dataclasses.fields(node):
            value, own = getattr(node, field.name), f"{path}.{field.name}".lstrip(".")
            if not field.metadata.get("static"):
                yield from _statics(value, own)
            elif field.name not in ("name", "wide"):
                yield own, value


def _check_finite(found: list[_Stored]) -> None:
    infinite = []
    for leaf, value, share, placement in found:
        if not jnp.issubdtype(leaf.value.dtype, jnp.floating):
            continue
        weights = tuple(weights_of(leaf))
        by_expert = weights[0].expert is not None  # then each weight is a row of the leaf
        where = None if placement is None else placement.sharding(PartitionSpec())
        finite = np.asarray(_are_finite(value, by_expert, where))
        finite = share.whole(finite) if by_expert and share.axis == 0 else finite
        infinite += [weight.name for weight, well in zip(weights, finite.reshape(-1), strict=True) if not well]
    if infinite:
        kind = "weights that are NaN or infinite; mend them, or save with check_finite=False"
        raise CheckpointError(shards.complaint("the model", [(kind, infinite)]))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _are_finite(stack: Shaped[Array, "..."], by_row: bool, where: NamedSharding | None) -> Bool[Array, "..."]:
    narrow = stack.dtype.itemsize == 1
    finite = jnp.isfinite(stack.astype(jnp.float32) if narrow else stack).all(
        axis=tuple(range(int(by_row), stack.ndim))
    )
    return finite if where is None else lax.with_sharding_constraint(finite, where)


def plan_files(found: list[ArrayLeaf], max_shard_bytes: int) -> list[dict[str, tuple[ArrayLeaf, Weight]]]:
    """Assigns tensors to files in the tree's order; a file exceeds `max_shard_bytes` only with a single tensor."""
    plan: list[dict[str, tuple[ArrayLeaf, Weight]]] = [{}]
    size = 0
    for leaf in found:
        for weight in weights_of(leaf):
            nbytes = weight.size * _stored_dtype(leaf).itemsize
            if plan[-1] and size + nbytes > max_shard_bytes:
                plan.append({})
                size = 0
            plan[-1][weight.name] = (leaf, weight)
            size += nbytes
    return plan


def _stored_dtype(leaf: ArrayLeaf) -> np.dtype:
    """The dtype in the file: the array's, but int64 for int32, unless a quantized format allows only int32."""
    if (known := _dtypes(leaf)) and leaf.value.dtype == jnp.int32 and np.dtype(np.int64) not in known:
        return np.dtype(np.int32)
    return np.dtype(np.int64) if leaf.value.dtype == jnp.int32 else np.dtype(leaf.value.dtype)


def _dtypes(leaf: ArrayLeaf) -> tuple[np.dtype, ...]:
    """The dtypes that a format allows for a tensor of a quantized matrix; empty for other arrays."""
    stored = leaf.module.STORED.get(leaf.field, ()) if isinstance(leaf.module, QuantizedMatrix) else ()
    return tuple(DTYPES[name] for name in stored)


def write_file(path: pathlib.Path, content: bytes) -> None:
    """Writes a file and syncs it to disk."""
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _json(value: Mapping[str, object]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _specs(shard: dict[str, tuple[ArrayLeaf, Weight]]) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    return {name: (_stored_dtype(leaf), weight.shape) for name, (leaf, weight) in shard.items()}


def _write_shards(
    directory: pathlib.Path,
    plan: list[dict[str, tuple[ArrayLeaf, Weight]]],
    read: Callable[[ArrayLeaf, Weight], np.ndarray],
    total: int,
    indexed: bool,
    doing: str,
) -> None:
    weight_map = {}
    with progress(doing, total) as advance:
        for i, shard in enumerate(plan):
            name = shards.SINGLE if len(plan) == 1 else f"model-{i + 1:05}-of-{len(plan):05}.safetensors"
            weight_map |= dict.fromkeys(shard, name)

            def tensor(name: str, shard: dict[str, tuple[ArrayLeaf, Weight]] = shard) -> np.ndarray:
                array = read(*shard[name])
                advance(array.nbytes)
                return array

            safetensors_file.write(directory / name, _specs(shard), tensor)
    if indexed:
        write_file(directory / shards.INDEX, _json({"metadata": {"total_size": total}, "weight_map": weight_map}))


class _Reader:
    """Reads a model's tensors with at most one array in host memory; all processes must read in the same order."""

    def __init__(self, found: list[_Stored], together: Together):
        self._found = {array.leaf.path: array for array in found}
        self._together = together
        self._held = "", np.empty(0)

    def whole(self, leaf: ArrayLeaf) -> np.ndarray:
        """The unsharded array in the process that writes, and an empty one in the others."""
        if self._held[0] != leaf.path:
            self._held = "", np.empty(0)
            self._together.check()
            self._held = leaf.path, self._found[leaf.path].whole()
        return self._held[1]

    def tensor(self, leaf: ArrayLeaf, weight: Weight) -> np.ndarray:
        """The tensor `weight` as the checkpoint stores it."""
        whole = self.whole(leaf)
        array = (whole if weight.expert is None else whole[weight.expert]).reshape(weight.shape)
        return array.astype(_stored_dtype(leaf), copy=False)
