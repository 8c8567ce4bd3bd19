"""Finds the quantized matrices of a checkpoint from its files' headers, if its config does not say (DeepSeek-V4)."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from ling3.checkpoint.names import stored_parts, structure, weights_of
from ling3.checkpoint.safetensors_file import CheckpointError, StoredTensors
from ling3.families import family_of
from ling3.families.quantization import Quantization, Scheme, SchemeGroup, in_floats
from ling3.formats import Fp4, Fp8, QuantizedMatrix, fp8
from ling3.layers.linear import Matrix

FORMATS: Mapping[str, type[QuantizedMatrix]] = {"F8_E4M3": Fp8, "I8": Fp4}
"""The format of a matrix, by the stored dtype of its `weight`."""


def with_stored_formats(config: Any, source: StoredTensors) -> Any:
    """The config with each matrix in the format that the headers show; unchanged if it agrees with them already.

    Raises CheckpointError for FP8 blocks that would span several matrices of a stack.
    """
    if not family_of(config).formats_in_headers:
        return config
    plain = in_floats(config)
    stored: dict[str, type[QuantizedMatrix] | None] = {}
    for leaf, placed in stored_parts(structure(plain), source):
        if not isinstance(leaf.module, Matrix) or leaf.field != "weight":
            continue
        for published, own in zip(weights_of(leaf), placed, strict=True):
            tensor = source.get(own.name)
            kind = None if tensor is None else FORMATS.get(tensor.dtype)
            *stack, rows, _ = leaf.module.shape
            if kind is Fp8 and own.expert is None and math.prod(stack) > 1 and rows % fp8.BLOCK:
                raise CheckpointError(
                    f"{tensor}: found F8_E4M3, whose blocks of {fp8.BLOCK} rows would span several of its matrices of "
                    f"{rows} rows; expected multiples of {fp8.BLOCK}; give the checkpoint in floats"
                )
            stored[published.name.removesuffix(".weight")] = kind
    if not any(stored.values()):
        return plain
    if config.quantization_config is None:
        experts = {"expert_dtype": "fp4"} if Fp4 in stored.values() else {}
        config = dataclasses.replace(config, quantization_config={"quant_method": "fp8", **fp8.WRITTEN, **experts})
    said = config.quantization_config
    schemes = {module: said.scheme(module) for module in stored}
    if all((own and own.kind) is stored[module] for module, own in schemes.items()):
        return config
    return dataclasses.replace(config, quantization_config=Quantization(said.source, "headers", _groups(stored), ()))


def _groups(stored: Mapping[str, type[QuantizedMatrix] | None]) -> tuple[SchemeGroup, ...]:
    """The modules of each format: as a regex where all layers and experts have the same one, else as names."""
    alike: dict[str, list[str]] = {}
    for module in stored:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", re.escape(module).replace(r"\.", ".")), []).append(module)
    targets: dict[type[QuantizedMatrix], list[str]] = {}
    for pattern, modules in alike.items():
        kinds = {stored[module] for module in modules}
        for kind in kinds:
            if kind is None:
                continue
            own = [module for module in modules if stored[module] is kind]
            targets.setdefault(kind, []).extend([f"re:{pattern}$"] if len(kinds) == 1 else own)
    return tuple(SchemeGroup(tuple(names), Scheme(kind)) for kind, names in targets.items())
