"""Quantizes a float checkpoint to 8 or 4 bits, one tensor at a time, from file to file."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import jax
import numpy as np
from jaxtyping import Float, Shaped

from ling3 import families
from ling3.checkpoint import hub, replacing, shards, tokenizer_files
from ling3.checkpoint.accounting import account
from ling3.checkpoint.loading import PATTERNS
from ling3.checkpoint.names import Weight, stored_parts, structure, weights_of
from ling3.checkpoint.safetensors_file import DTYPES, CheckpointError, StoredTensors
from ling3.checkpoint.saving import plan_files, replace, replaced
from ling3.families.quantization import quantization_of
from ling3.families.quantization_methods import Scheme, as_compressed
from ling3.formats import Mxfp4, PackedIntegers, QuantizedMatrix, fp8
from ling3.formats.integers import GROUPS
from ling3.layers.linear import Matrix
from ling3.leaves import ArrayLeaf, array_leaves
from ling3.model import CausalLM

Format = Literal["int4", "int8", "fp8", "mxfp4"]
"""The formats that `quantize` writes."""


def quantize(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str,
    *,
    group: int | None = None,
    keep: Iterable[str] = ("lm_head",),
    revision: str | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = 5_000_000_000,
    mtp: bool = False,
) -> None:
    """Write the checkpoint `source` to the directory `out` with its matrices in 8 or 4 bits, in a published layout.

        int4, int8  compressed-tensors' pack-quantized: q = round(w / scale), scale = amax / ((2^bits - 1) / 2) of each
                    `group` of 32 (the default) or 128 neighbours in a row; scales have the dtype of the weights
        fp8         E4M3 with scale = amax / 448 for each block of 128 × 128, as in DeepSeek-V3 and Ling-3
        mxfp4       compressed-tensors' mxfp4-pack-quantized: E2M1 with the exponent floor(log2 amax) - 2 for every 32
                    neighbours (OCP Microscaling Formats v1.0, §6.3)

    Quotients are computed in float32, and ties are rounded to even. The embedding, norms, convolutions and routers stay
    unchanged, and so do the modules that `keep` names: by one or several consecutive parts of their name (`lm_head`,
    `attention`, `layers.0.mlp`), or by a regex from the start of the name (`re:…`). Multi-token-prediction layers are
    left out, unless `mtp` is true; their matrices are then quantized too.

    Memory holds one tensor at a time, and the scales of one file. Atomic, like `save`, where `overwrite` and
    `max_shard_bytes` are explained. The tokenizer's files are copied.

    Raises CheckpointError if the source is quantized already, damaged, not finite or of a family that is never saved
    quantized, or if `out` is taken; ConfigError for columns that do not divide into groups; ValueError for another
    format or group, and for a `keep` that matches no matrix. `mtp` raises CheckpointError as it does in `load`.
    """
    if to not in get_args(Format):
        raise ValueError(f"to: found {to!r}; expected one of {', '.join(get_args(Format))}")
    if group is not None and (not to.startswith("int") or group not in GROUPS):
        allowed = (
            f"{' or '.join(map(str, GROUPS))}" if to.startswith("int") else f"none for {to}, whose blocks are fixed"
        )
        raise ValueError(f"group: found {group}; expected {allowed}")
    target = pathlib.Path(out).expanduser().resolve()
    if target.is_dir():
        replacing.recover(target)
    replaced(target, overwrite, ())
    directory = hub.resolve(source, PATTERNS, revision)
    plain, tensors = _in_floats(directory, mtp), shards.open_all(directory)
    parts = stored_parts(plain, tensors)
    account(directory, plain, parts, tensors)
    said = _config(to, group or 32, _ignored(plain, tuple(keep)))
    own = dataclasses.replace(plain.config, quantization_config=said)
    sources = {(leaf.path, weight.expert): weight for leaf, weights in parts for weight in weights}

    def stored(path: str) -> np.dtype:
        first = next(weight for (known, _), weight in sources.items() if known == path)
        return DTYPES[tensors[first.name].dtype]

    tree = structure(own, stored("model.word_embeddings.weight"), mtp=mtp)
    dtypes = {leaf.path: _dtype(leaf, stored) for leaf in array_leaves(tree)}
    found = [_with_dtype(leaf, dtypes[leaf.path]) for leaf in array_leaves(tree)]
    read, tokenizer = _Quantizer(tensors, sources).tensor, tokenizer_files.read(directory)
    replace(target, tree, plan_files(found, max_shard_bytes), read, tokenizer, overwrite, "quantizing")


def _in_floats(directory: pathlib.Path, mtp: bool) -> CausalLM:
    """The structure of a checkpoint's model. Raises CheckpointError if it is quantized, or could not be."""
    config = families.read_config(directory)
    if (quantization := quantization_of(config)) is not None:
        raise CheckpointError(
            f"{directory}: is quantized already ({quantization.method}); give the checkpoint in floats"
        )
    fields = {field.name for field in dataclasses.fields(config)}
    if "quantization_config" not in fields or families.family_of(config).formats_in_headers:
        name = families.family_of(config).name
        raise CheckpointError(f"{directory}: is a {name}, of which ling3 writes no quantized checkpoints")
    if mtp and (problem := families.without_mtp(config)):
        raise CheckpointError(f"{directory}: {problem}")
    return structure(config, mtp=mtp)


def _ignored(model: CausalLM, keep: tuple[str, ...]) -> list[str]:
    """`keep` as regexes that compressed-tensors and transformers read alike. Raises ValueError if one has no match."""
    modules = [name for leaf in array_leaves(model) if isinstance(leaf.module, Matrix) for name in _modules(leaf)]
    ignored = []
    for name in keep:
        if name == "lm_head":  # a tied one has no matrix here, but other programs have a module of that name
            ignored.append(name)
            continue
        try:
            pattern = re.compile(name.removeprefix("re:") if name.startswith("re:") else _parts(name))
        except re.error as error:
            raise ValueError(f"keep: found {name!r}, which is no pattern ({error}); correct it") from error
        if not any(pattern.match(module) for module in modules):
            raise ValueError(
                f"keep: found {name!r}, which names no matrix; expected parts of a name such as {modules[1]}"
            )
        ignored.append(name if name in modules else f"re:{pattern.pattern}")
    return ignored


def _parts(name: str) -> str:
    """A regex for the names of modules that contain these consecutive parts."""
    return rf"(?:.*\.)?{re.escape(name)}(?:\.|$)"


def _modules(leaf: ArrayLeaf) -> Iterator[str]:
    return (weight.name.removesuffix(".weight") for weight in weights_of(leaf) if leaf.field == "weight")


def _config(to: str, group: int, ignore: list[str]) -> dict[str, Any]:
    """The `quantization_config` to write for this format."""
    if to == "fp8":
        skipped = [name.removeprefix("re:") for name in ignore]
        return {"quant_method": "fp8", **fp8.WRITTEN, "modules_to_not_convert": skipped}
    options = {"bits": int(to.removeprefix("int")), "group": group} if to.startswith("int") else {}
    scheme = Scheme(PackedIntegers if options else Mxfp4, tuple(options.items()))
    return as_compressed(scheme, ["Linear"], ignore)


def _origin(leaf: ArrayLeaf) -> str:
    """The path of the source's array from which a tensor is computed or copied."""
    return f"{leaf.path.rpartition('.')[0]}.weight" if _is_new(leaf) else leaf.path


def _is_new(leaf: ArrayLeaf) -> bool:
    """True for a tensor that has to be computed: one of a quantized matrix."""
    return isinstance(leaf.module, QuantizedMatrix) and leaf.field in leaf.module.STORED


def _dtype(leaf: ArrayLeaf, stored: Callable[[str], np.dtype]) -> np.dtype:
    """The dtype to write: the source's for copied tensors and for the scales of integers, else the format's."""
    if not _is_new(leaf) or "F16" in leaf.module.STORED[leaf.field]:
        return stored(_origin(leaf))
    return np.dtype(leaf.value.dtype)


def _with_dtype(leaf: ArrayLeaf, dtype: np.dtype) -> ArrayLeaf:
    return dataclasses.replace(leaf, value=jax.ShapeDtypeStruct(leaf.value.shape, dtype))


class _Quantizer:
    """Computes the new checkpoint's tensors on request; scales computed along with others are kept until their turn."""

    def __init__(self, tensors: StoredTensors, sources: Mapping[tuple[str, int | None], Weight]):
        self._tensors, self._sources = tensors, sources
        self._kept: dict[str, np.ndarray] = {}

    def tensor(self, leaf: ArrayLeaf, weight: Weight) -> np.ndarray:
        """The tensor `weight` as the new checkpoint stores it."""
        if (kept := self._kept.pop(weight.name, None)) is not None:
            return kept
        source = self._sources[_origin(leaf), weight.expert]
        if leaf.field == "weight_shape":
            return np.asarray(source.shape, np.int64)
        array = self._read(source)
        if not _is_new(leaf):
            return array.reshape(weight.shape)
        tensors = _quantized(array, leaf.module, source.name)
        scale = next(field for field in tensors if "scale" in field)
        if leaf.field != scale:
            self._kept[f"{weight.name.rpartition('.')[0]}.{scale}"] = tensors[scale]
            if scale == "weight_scale_inv":  # written already, as wider dtypes come first in a file
                self._kept.clear()
        return tensors[leaf.field]

    def _read(self, weight: Weight) -> Shaped[np.ndarray, "..."]:
        tensor = self._tensors[weight.name]
        array = np.empty((1, weight.size), DTYPES[tensor.dtype])
        tensor.read(weight.start, array, weight.size)
        return array.reshape(weight.shape)


def _quantized(
    weight: Float[np.ndarray, "rows columns"], like: QuantizedMatrix, name: str
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """The tensors of `weight` in the format of `like`, by field. Raises CheckpointError for NaN and infinity."""
    numbers = weight.astype(np.float32)
    if not np.isfinite(numbers).all():
        raise CheckpointError(f"{name}: has numbers that are NaN or infinite; fetch the file again")
    return like.encode(numbers, weight.dtype)
