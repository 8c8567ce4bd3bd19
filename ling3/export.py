"""From the module tree to a published checkpoint, written whole or not at all."""

import json
import os
import pathlib
import secrets
import shutil
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from ling3 import hub, safetensors_file, shards
from ling3.families import family_of
from ling3.model import Ling3ForCausalLM
from ling3.progress import progress
from ling3.safetensors_file import DTYPES, FLOATS, CheckpointError
from ling3.weights import Leaf, Weight, leaves, structure

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""What is copied from the checkpoint that a tokenizer comes from."""

_DTYPES = tuple(DTYPES[name] for name in FLOATS)


def save(
    model: Ling3ForCausalLM,
    path: str | os.PathLike[str],
    *,
    tokenizer_from: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write `model` to the directory `path` in the published layout, each array in the dtype it has.

    `export(load(x)) == x`, tensor by tensor; but multi-token-prediction layers, which `load` skips, are not there,
    `num_nextn_predict_layers` is 0, and an `A_log` that was stored as [1, 1, heads, 1] is [heads]. More than
    `max_shard_bytes` goes into several files with an index. The files of a tokenizer come from the checkpoint
    `tokenizer_from`, if one is given.

    Atomic: everything is written to a hidden directory beside `path`, which then takes its name; on an error nothing
    is left behind. An existing directory must be empty, or with `overwrite` a checkpoint, which is replaced whole.

    Raises CheckpointError when `path` is taken or the model's arrays do not fit its configuration.
    """
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: found {max_shard_bytes}; expected at least 1")
    target = pathlib.Path(path).expanduser().resolve()
    taken = _taken(target, overwrite)
    plan = _plan(_checked_leaves(model), max_shard_bytes)
    tokenizer = () if tokenizer_from is None else _tokenizer_files(tokenizer_from)

    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        for file in tokenizer:
            shutil.copyfile(file, partial / file.name)
        _write_shards(partial, plan)
        config = family_of(model.config).without_skipped(model.config)
        raw = config.to_dict() | {"torch_dtype": str(model.lm_head.weight.dtype)}
        (partial / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        _take_place(partial, target, taken)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _taken(target: pathlib.Path, overwrite: bool) -> bool:
    """Whether a checkpoint is to be replaced."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise CheckpointError(f"{target}: is a file; give a directory for the checkpoint")
    if not any(target.iterdir()):
        return False
    if not overwrite:
        raise CheckpointError(f"{target}: is not empty; give another directory, or overwrite=True to replace it")
    if not (target / "config.json").is_file():
        raise CheckpointError(
            f"{target}: holds no checkpoint (no config.json), so it is not replaced; remove it yourself"
        )
    return True


def _checked_leaves(model: Ling3ForCausalLM) -> list[Leaf]:
    found = list(leaves(model))
    expected = {leaf.path: tuple(leaf.value.shape) for leaf in leaves(structure(model.config))}
    wrong = [
        f"{leaf.path}: found {leaf.value.dtype}{list(leaf.value.shape)}; expected {list(expected.get(leaf.path, ()))} "
        f"of {', '.join(map(str, _DTYPES))}"
        for leaf in found
        if tuple(leaf.value.shape) != expected.get(leaf.path) or leaf.value.dtype not in _DTYPES
    ]
    wrong += [f"{path}: absent" for path in expected.keys() - {leaf.path for leaf in found}]
    if wrong:
        raise CheckpointError(shards.complaint("the model", [("arrays that do not fit its configuration", wrong)]))
    return found


def _plan(found: list[Leaf], max_shard_bytes: int) -> list[dict[str, tuple[Leaf, Weight]]]:
    """Which tensors go into which file, in the tree's order."""
    plan: list[dict[str, tuple[Leaf, Weight]]] = [{}]
    size = 0
    for leaf in found:
        for weight in leaf.weights():
            nbytes = weight.size * leaf.value.dtype.itemsize
            if plan[-1] and size + nbytes > max_shard_bytes:
                plan.append({})
                size = 0
            plan[-1][weight.name] = (leaf, weight)
            size += nbytes
    return plan


def _tokenizer_files(source: str | os.PathLike[str]) -> tuple[pathlib.Path, ...]:
    directory = hub.resolve(source, TOKENIZER_FILES)
    files = tuple(directory / name for name in TOKENIZER_FILES if (directory / name).is_file())
    if not any(file.name == "tokenizer.json" for file in files):
        raise CheckpointError(f"{directory}: found no tokenizer.json; give tokenizer_from a checkpoint that has one")
    return files


def _write_shards(directory: pathlib.Path, plan: list[dict[str, tuple[Leaf, Weight]]]) -> None:
    total = sum(weight.size * leaf.value.dtype.itemsize for shard in plan for leaf, weight in shard.values())
    weight_map = {}
    with progress("saving", total) as advance:
        for i, shard in enumerate(plan):
            name = shards.SINGLE if len(plan) == 1 else f"model-{i + 1:05}-of-{len(plan):05}.safetensors"
            weight_map |= dict.fromkeys(shard, name)
            specs = {key: (np.dtype(leaf.value.dtype), weight.shape) for key, (leaf, weight) in shard.items()}
            safetensors_file.write(directory / name, specs, _reader(shard, advance))
    if len(plan) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / shards.INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _reader(shard: dict[str, tuple[Leaf, Weight]], advance: Callable[[int], None]) -> Callable[[str], np.ndarray]:
    """The arrays of `shard` by name, with at most one leaf in the host's memory."""
    held: tuple[str, np.ndarray] | None = None

    def read(name: str) -> np.ndarray:
        nonlocal held
        leaf, weight = shard[name]
        if held is None or held[0] != leaf.path:
            # A copy, as a JAX array keeps the host's version of itself once it was asked for it.
            held = (leaf.path, np.asarray(jnp.array(leaf.value, copy=True)))
        array = (held[1] if weight.expert is None else held[1][weight.expert]).reshape(weight.shape)
        advance(array.nbytes)
        return array

    return read


def _take_place(partial: pathlib.Path, target: pathlib.Path, taken: bool) -> None:
    if not taken:
        if target.exists():
            target.rmdir()
        partial.rename(target)
        return
    old = target.with_name(f".{target.name}.{secrets.token_hex(4)}.old")
    target.rename(old)
    try:
        partial.rename(target)
    except BaseException:
        old.rename(target)
        raise
    shutil.rmtree(old)
