"""Checks the tensors in a checkpoint's files against its configuration, before any weight is loaded."""

import itertools
import math
import pathlib
import re
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from ling3 import families
from ling3.checkpoint import shards
from ling3.checkpoint.copying import BLOCK
from ling3.checkpoint.names import Parts, Weight
from ling3.checkpoint.safetensors_file import (
    DTYPES,
    FLOATS,
    CheckpointError,
    OpenFile,
    StoredTensor,
    StoredTensors,
    read_stack,
)
from ling3.formats import QuantizedMatrix
from ling3.leaves import ArrayLeaf
from ling3.mesh.sharding import processes
from ling3.model import CausalLM

ROTARY = re.compile(r"(?:^|\.)rotary_emb\.(?:inv_freq|cos_cached|sin_cached)$")
"""RoPE tables that older checkpoints store, such as Llama 2's. They follow from the configuration, so are ignored."""


def account(
    directory: pathlib.Path,
    tree: CausalLM,
    parts: Parts,
    source: StoredTensors,
    wanted: np.dtype | None = None,
    mesh: Mesh | None = None,
) -> None:
    """Checks every name, shape and dtype in the headers against the structure of the model, in both directions.

    RoPE tables may be left over, and tensors that the family skips, unless the model has its multi-token-prediction
    layers. A copy of a tensor (a tied `lm_head`) must equal the original; on a mesh, each process compares its part of
    the bytes. `wanted` is the dtype to load floats in; with None, all tensors of a stack must have one dtype. Raises
    CheckpointError with all problems, by kind.
    """
    missing, shapes, dtypes, mixed, quantized = [], [], [], [], []
    expected, config, family = set(), tree.config, families.family_of(tree.config)

    def skips(name: str) -> bool:
        return ROTARY.search(name) is not None or (not tree.mtp and family.skips(name, config))

    for leaf, weights in parts:
        stored, known, fitting = {}, stored_as(leaf), []
        for weight in weights:
            expected.add(weight.name)
            if (tensor := source.get(weight.name)) is None:
                missing.append(f"{weight.name} {list(weight.shape)}")
                continue
            if tensor.shape not in ((weight.shape, *weight.also) if weight.whole is None else (weight.whole,)):
                wanted_shape = weight.shape if weight.whole is None else weight.whole
                shapes.append(f"{tensor}: found {list(tensor.shape)}; expected {list(wanted_shape)}")
            elif tensor.dtype not in known:
                dtypes.append(f"{tensor}: found {tensor.dtype}; expected {', '.join(known)}")
            else:
                fitting.append(weight)
            stored.setdefault(tensor.dtype, weight.name)
        quantized += _wrong_shapes(leaf, fitting, source)
        if len(stored) > 1 and (wanted is None or isinstance(leaf.module, QuantizedMatrix)):
            mixed.append(", ".join(f"{name} is {dtype}" for dtype, name in stored.items()))
    others = [name for name in source if name not in expected and not skips(name)]
    copies = {name: original for name in others if (original := family.copies(name, config)) is not None}
    left = [str(source[name]) for name in others if name not in copies]
    if missing or left or shapes or dtypes or mixed or quantized:
        kinds = [
            ("tensors that the configuration asks for and no file has", missing),
            ("tensors that the configuration has no place for", left),
            ("tensors of another shape than the configuration's", shapes),
            ("tensors of a type that ling3 does not compute with here; use another checkpoint", dtypes),
            ("quantized tensors that cannot be read", quantized),
            ("experts of one layer in several types; load with dtype=jnp.float32 or jnp.bfloat16", mixed),
        ]
        raise CheckpointError(shards.complaint(directory, kinds) + _hint(missing, left))
    if differing := [
        f"{source[name]}: differs from {original}"
        for name, original in copies.items()
        if original not in source or not _equal(source[name], source[original], mesh)
    ]:
        kind = "tensors that the configuration ties to another one and that differ from it; correct tie_word_embeddings"
        raise CheckpointError(shards.complaint(directory, [(kind, differing)]))


def _wrong_shapes(leaf: ArrayLeaf, weights: Sequence[Weight], source: StoredTensors) -> Iterator[str]:
    """The problems of `weight_shape` tensors that do not hold the shape of their matrix; none for other leaves."""
    if leaf.field != "weight_shape" or not isinstance(leaf.module, QuantizedMatrix):
        return
    shape = leaf.module.shape[-2:]
    for (_, stored, _), group in itertools.groupby([source[weight.name] for weight in weights], kind_of):
        own = list(group)
        found = np.empty((len(own), 2), DTYPES[stored])
        if own[0].put is None:
            read_stack(own, 0, found)
        else:
            found[:] = [tensor.array() for tensor in own]
        for i in np.flatnonzero((found != shape).any(axis=1)):
            yield f"{own[i]}: found {found[i].tolist()}; expected {list(shape)}"


def _equal(tensor: StoredTensor, other: StoredTensor, mesh: Mesh | None) -> bool:
    """True if two tensors have the same shape, dtype and bytes; each process of the mesh compares its part of these."""
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    mine, theirs = np.empty((2, 1, BLOCK), DTYPES[tensor.dtype])
    sharers = [0] if mesh is None else processes(mesh)
    size, own = math.prod(tensor.shape), 0 if mesh is None else sharers.index(jax.process_index())
    end = size * (own + 1) // len(sharers)
    for start in range(size * own // len(sharers), end, BLOCK):
        here, there = mine[:, : end - start], theirs[:, : end - start]
        tensor.read(start, here, size)
        other.read(start, there, size)
        if not np.array_equal(here.view(np.uint8), there.view(np.uint8)):
            return False
    return True


def _hint(missing: list[str], left: list[str]) -> str:
    stored = {name.partition(",")[0].rpartition(".")[0]: name for name in left}
    for name in missing:
        module, _, field = name.partition(" ")[0].rpartition(".")
        if field in ("weight_packed", "weight_scale", "weight_scale_inv") and module in stored:
            return f"\n  quantization_config names {module}, which is stored in floats: add it to the modules to ignore"
        if field == "weight" and re.search(r"\.weight_(packed|scale\w*)$", stored.get(module, "").partition(",")[0]):
            return f"\n  {module} is quantized, and quantization_config does not say so: correct it"
    if any(".attention.dense." in name for name in left) and any(".attention.o_proj." in name for name in missing):
        return "\n  transformers 5 writes KDA's o_proj under the name dense: rename those tensors"
    return ""


def stored_as(leaf: ArrayLeaf) -> tuple[str, ...]:
    """The safetensors dtypes that a leaf may be stored in: its format's; else any float for floats, I64 too for I32."""
    if isinstance(leaf.module, QuantizedMatrix) and leaf.field in leaf.module.STORED:
        return leaf.module.STORED[leaf.field]
    own = next(name for name, dtype in DTYPES.items() if dtype == leaf.value.dtype)
    return FLOATS if own in FLOATS else ("I64", "I32") if own == "I32" else (own,)


def kind_of(tensor: StoredTensor) -> tuple[OpenFile, str, bool]:
    """A tensor's file and dtype, and whether it is stored as it is: tensors in a row of one kind are read together."""
    return tensor.file, tensor.dtype, tensor.put is None
