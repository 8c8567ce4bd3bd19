"""Reads and writes adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`."""

import collections
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ling3.adapters.adapter import Adaptable, Adapter, LowRankUpdate, adaptable, no_such_modules
from ling3.checkpoint import adapter_config, hub, replacing, safetensors_file, shards
from ling3.checkpoint.adapter_config import AdapterConfig
from ling3.checkpoint.safetensors_file import FLOATS, CheckpointError, StoredTensor, StoredTensors
from ling3.checkpoint.saving import write_file
from ling3.families.config_fields import ConfigError
from ling3.model import CausalLM
from ling3.runtime import strict_json

TENSORS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_PREFIX = "base_model.model."
_KEY = re.compile(rf"{re.escape(_PREFIX)}(.+)\.(lora_[AB])\.weight")


def load_adapter(model: CausalLM, path: str | os.PathLike[str], *, revision: str | None = None) -> Adapter:
    """Reads the LoRA adapter in `path`, a directory that PEFT wrote or a hub id, for `model`, its base.

    Its targets, layers, rank and alpha patterns and `use_rslora` mean what they mean in PEFT. Its modules have the
    names of transformers or those of the published checkpoint. Half-precision arrays are widened to float32. The model
    is only looked at: give both to `with_adapter` or `merge_adapter`.

    Everything is checked: no field that would change the function may be unknown, each target must be a module of the
    model, and the tensors must be exactly those of the selected modules, in their shapes, and finite.

    Raises ConfigError for `adapter_config.json`, CheckpointError for the tensors (also if there is only a pickle), and
    `hub.resolve`'s errors if there is no such directory.
    """
    directory = hub.resolve(path, (adapter_config.NAME, TENSORS), revision)
    config = _config(directory)
    known = adaptable(model)
    names = _selected(config, model, known, directory)
    if not (directory / TENSORS).exists():
        there = f"found {_PICKLE}, a pickle, which ling3 never reads" if (directory / _PICKLE).exists() else "absent"
        raise CheckpointError(
            f"{directory / TENSORS}: {there}; load the adapter with PEFT and save it again (save_pretrained)"
        )
    tensors, left = _by_module(safetensors_file.open_file(directory / TENSORS), known)
    by_spelling = [names[spelling] for spelling in names if names[spelling].keys() == tensors.keys()]
    chosen = by_spelling[0] if by_spelling else next(iter(names.values()))
    _account(directory, config, chosen, tensors, left, {own.module: own for own in known})
    modules = {
        module: LowRankUpdate(_array(parts["lora_A"]), _array(parts["lora_B"]), config.alpha(chosen[module]))
        for module, parts in sorted(tensors.items())
    }
    return Adapter(modules, config.use_rslora, config.base_model_name_or_path)


def save_adapter(adapter: Adapter, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Writes an adapter to the directory `path` as PEFT does, for `PeftModel.from_pretrained` or `load_adapter`.

    Modules have their names in transformers. The targets are listed by their entire names, with a pattern for each
    module whose rank or alpha is not the most frequent one. Arrays keep their dtype.

    An existing directory must be empty, or with `overwrite` hold an adapter, which is replaced; other files stay.
    Atomic, like `save`.

    Raises CheckpointError if `path` is taken, or the adapter is empty or not finite, and OSError if the files cannot be
    written.
    """
    if not adapter.modules:
        raise CheckpointError("the adapter changes no module, so there is nothing to save")
    arrays = {
        f"{_PREFIX}{module}.{side}.weight": np.asarray(getattr(update, side))
        for module, update in adapter.modules.items()
        for side in ("lora_A", "lora_B")
    }
    if infinite := [name for name, array in arrays.items() if not np.isfinite(array.astype(np.float32)).all()]:
        raise CheckpointError(shards.complaint("the adapter", [("tensors that are NaN or infinite", infinite)]))
    target = pathlib.Path(path).expanduser().resolve()
    if target.is_dir():
        replacing.recover(target)
    old = _replaced(target, overwrite)
    with (
        replacing.advised(target, f"an adapter of {sum(array.nbytes for array in arrays.values()):,} bytes"),
        replacing.workspace(target) as new,
    ):
        specs = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        safetensors_file.write(new / TENSORS, specs, arrays.__getitem__)
        write_file(new / adapter_config.NAME, (json.dumps(_written(adapter), indent=2) + "\n").encode())
        replacing.commit(new, target, old)


def _config(directory: pathlib.Path) -> AdapterConfig:
    file = directory / adapter_config.NAME
    try:
        raw = strict_json.read(file)
    except OSError as error:
        raise ConfigError(str(file), [f"cannot be read ({error}); expected the directory of an adapter"]) from error
    except ValueError as error:
        raise ConfigError(str(file), [str(error).removeprefix(f"{file}: ")]) from error
    return AdapterConfig.from_dict(raw, str(file))


def _selected(
    config: AdapterConfig, model: CausalLM, known: list[Adaptable], directory: pathlib.Path
) -> dict[str, dict[str, str]]:
    """For either spelling of names, the selected modules: the config's name of each, by its name in transformers.

    Only spellings in which every target is known. Raises ConfigError if neither is, or no module is selected.
    """
    found, unknown = {}, {}
    for spelling in ("module", "published"):
        names = {own.module: getattr(own, spelling) for own in known}
        unknown[spelling] = config.selection.unknown(names.values())
        if not unknown[spelling]:
            found[spelling] = {module: name for module, name in names.items() if config.selection(name)}
    source = str(directory / adapter_config.NAME)
    if not found:
        these = ", ".join(unknown["module"])
        raise ConfigError(source, [f"target_modules: found {these}; {no_such_modules(model)}"])
    if not any(found.values()):
        raise ConfigError(source, ["target_modules, exclude_modules, layers_to_transform: no module is selected"])
    return found


def _by_module(source: StoredTensors, known: list[Adaptable]) -> tuple[dict[str, dict[str, StoredTensor]], list[str]]:
    """The tensors of each module, by its name in transformers, and those that are of no module, or of one again."""
    modules = {own.published: own.module for own in known} | {own.module: own.module for own in known}
    found: dict[str, dict[str, StoredTensor]] = {}
    left = []
    for key, tensor in source.items():
        matched = _KEY.fullmatch(key)
        module = None if matched is None else modules.get(matched[1])
        if matched is None or module is None or matched[2] in found.get(module, {}):
            left.append(str(tensor))
        else:
            found.setdefault(module, {})[matched[2]] = tensor
    return found, left


def _account(
    directory: pathlib.Path,
    config: AdapterConfig,
    selected: Mapping[str, str],
    tensors: Mapping[str, Mapping[str, StoredTensor]],
    left: list[str],
    known: Mapping[str, Adaptable],
) -> None:
    """Checks that the tensors are those of the selected modules. Raises CheckpointError with all problems."""
    missing, shapes, dtypes = [], [], []
    for module, name in selected.items():
        (outer, inner), rank = known[module].matrix.shape, config.rank(name)
        for side, shape in (("lora_A", (rank, inner)), ("lora_B", (outer, rank))):
            if (tensor := tensors.get(module, {}).get(side)) is None:
                missing.append(f"{_PREFIX}{name}.{side}.weight {list(shape)}")
            elif tensor.shape != shape:
                shapes.append(f"{tensor}: found {list(tensor.shape)}; expected {list(shape)}")
            elif tensor.dtype not in FLOATS:
                dtypes.append(f"{tensor}: found {tensor.dtype}; expected {', '.join(FLOATS)}")
    unselected = [str(t) for module, parts in tensors.items() if module not in selected for t in parts.values()]
    if missing or left or unselected or shapes or dtypes:
        kinds = [
            (f"tensors that {adapter_config.NAME} asks for and {TENSORS} lacks", missing),
            ("tensors that are no update of a matrix of this model", left),
            (f"tensors of modules that {adapter_config.NAME} does not select", unselected),
            ("tensors of another shape than the model's, or of another rank than the config's", shapes),
            ("tensors of another type", dtypes),
        ]
        raise CheckpointError(shards.complaint(directory, kinds))
    infinite = [
        str(tensor)
        for parts in tensors.values()
        for tensor in parts.values()
        if not np.isfinite(tensor.array().astype(np.float32)).all()
    ]
    if infinite:
        kind = "tensors that are NaN or infinite; fetch the file again"
        raise CheckpointError(shards.complaint(directory, [(kind, infinite)]))


def _array(tensor: StoredTensor) -> Any:
    return jnp.asarray(tensor.array().astype(np.float32))


def _written(adapter: Adapter) -> dict[str, Any]:
    """The adapter's `adapter_config.json`: the fields that PEFT needs."""
    ranks = {name: update.rank for name, update in adapter.modules.items()}
    alphas = {name: _plain(update.alpha) for name, update in adapter.modules.items()}
    rank, alpha = (collections.Counter(sorted(each.values())).most_common(1)[0][0] for each in (ranks, alphas))
    return {
        "base_model_name_or_path": adapter.base,
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted(adapter.modules),
        "task_type": "CAUSAL_LM",
        "use_rslora": adapter.use_rslora,
        "rank_pattern": {re.escape(name): own for name, own in ranks.items() if own != rank},
        "alpha_pattern": {re.escape(name): own for name, own in alphas.items() if own != alpha},
    }


def _plain(number: float) -> float | int:
    """The number as an integer, as PEFT writes it, if it is one."""
    return int(number) if float(number).is_integer() else float(number)


def _replaced(target: pathlib.Path, overwrite: bool) -> list[str]:
    """The files in `target` to replace. Raises CheckpointError if it is taken."""
    if not target.exists():
        return []
    if not target.is_dir():
        raise CheckpointError(f"{target}: is a file; give a directory for the adapter")
    there = {path.name for path in target.iterdir()} - {replacing.WORK, replacing.TRAINING}
    if there and not overwrite:
        raise CheckpointError(f"{target}: is not empty; give another directory, or overwrite it (overwrite=True)")
    if there and adapter_config.NAME not in there:
        raise CheckpointError(f"{target}: holds no adapter, so nothing in it is replaced; give another directory")
    old = sorted(there & {adapter_config.NAME, TENSORS, _PICKLE})
    if strange := [name for name in old if not (target / name).is_file() and not (target / name).is_symlink()]:
        raise CheckpointError(f"{target}: found {', '.join(strange)}, which is no file; give another directory")
    return old
