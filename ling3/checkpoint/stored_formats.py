"""Finds the quantized matrices of a checkpoint from its files' headers, if no config says them.

That is so for DeepSeek-V4, GGUF, AWQ and GPTQ.
"""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from ling3.checkpoint.names import stored_parts, structure, weights_of
from ling3.checkpoint.repacking import repacked
from ling3.checkpoint.safetensors_file import CheckpointError, StoredTensors
from ling3.families import family_of
from ling3.families.quantization import Quantization, in_floats, quantization_of
from ling3.families.quantization_methods import REPACKED, Scheme, SchemeGroup, as_compressed
from ling3.formats import Fp4, Fp8, GgufBlocks, KeyValueHalves, fp8
from ling3.formats.gguf_blocks import BLOCKS
from ling3.layers.linear import Matrix
from ling3.layers.mla import MLA
from ling3.leaves import ArrayLeaf

FORMATS: Mapping[str, Scheme] = {
    "F8_E4M3": Scheme(Fp8),
    "I8": Scheme(Fp4),
    **{block: Scheme(GgufBlocks, (("block", block),)) for block in BLOCKS},
}
"""The format of a matrix, by the stored dtype of its `weight`, or by its blocks in a GGUF file."""


def as_stored(config: Any, source: StoredTensors, *, mtp: bool = False) -> tuple[Any, StoredTensors]:
    """The config with each matrix in the format that the headers show, and the tensors as that format has them.

    AWQ and GPTQ become integers of compressed-tensors, in the config too. Matrices of multi-token-prediction layers are
    looked at only with `mtp`. Raises CheckpointError for tensors that these methods do not write, and for FP8 blocks
    that would span several matrices of a stack.
    """
    said = quantization_of(config)
    source = repacked(source, said)
    if said is None or said.method not in REPACKED:
        return _with_stored_formats(config, source, mtp), source
    [scheme] = {group.scheme for group in said.groups}
    stored: dict[str, Scheme | None] = {}
    for leaf, placed in stored_parts(structure(in_floats(config), mtp=mtp), source):
        if isinstance(leaf.module, Matrix) and leaf.field == "weight":
            modules = [own.name.removesuffix(".weight") for own in placed]
            stored |= {module: scheme if f"{module}.weight_packed" in source else None for module in modules}
    targets = [name for group in _groups(stored) for name in group.targets]
    written = as_compressed(scheme, targets, [])
    return dataclasses.replace(config, quantization_config=written if targets else None), source


def _with_stored_formats(config: Any, source: StoredTensors, mtp: bool) -> Any:
    """The config with each matrix in the format that the headers show; unchanged if it agrees with them already."""
    said = quantization_of(config)
    by_headers = family_of(config).formats_in_headers and (said is None or said.method == "fp8")
    if not by_headers and not any(tensor.block for tensor in source.values()):
        return config
    plain = in_floats(config)
    stored: dict[str, Scheme | None] = {}
    for leaf, placed in stored_parts(structure(plain, mtp=mtp), source):
        if not isinstance(leaf.module, Matrix) or leaf.field != "weight":
            continue
        for published, own in zip(weights_of(leaf), placed, strict=True):
            tensor = source.get(own.name)
            scheme = _halves(leaf, own.name, source) if tensor is None else FORMATS.get(tensor.block or tensor.dtype)
            *stack, rows, _ = leaf.module.shape
            if (
                scheme is not None
                and scheme.kind is Fp8
                and own.expert is None
                and math.prod(stack) > 1
                and rows % fp8.BLOCK
            ):
                raise CheckpointError(
                    f"{tensor}: found F8_E4M3, whose blocks of {fp8.BLOCK} rows would span several of its matrices of "
                    f"{rows} rows; expected multiples of {fp8.BLOCK}; give the checkpoint in floats"
                )
            stored[published.name.removesuffix(".weight")] = scheme
    if not any(stored.values()):
        return plain
    if said is None:
        experts = {"expert_dtype": "fp4"} if FORMATS["I8"] in stored.values() else {}
        config = dataclasses.replace(config, quantization_config={"quant_method": "fp8", **fp8.WRITTEN, **experts})
        said = config.quantization_config
    schemes = {module: said.scheme(module) for module in stored}
    if all((own and own.kind) is (found and found.kind) for own, found in zip(schemes.values(), stored.values())):
        return config
    return dataclasses.replace(config, quantization_config=Quantization(said.source, "headers", _groups(stored), ()))


def _halves(leaf: ArrayLeaf, name: str, source: StoredTensors) -> Scheme | None:
    """The format of an MLA layer's `kv_b_proj` that the files have as two tensors in blocks; None if they do not."""
    layer, module = leaf.around[-2], name.removesuffix(".weight")
    keys, values = (source.get(f"{module}.{half}.weight") for half in ("k_b", "v_b"))
    if not isinstance(layer, MLA) or keys is None or values is None:
        return None
    blocks = keys.block, values.block
    return Scheme(KeyValueHalves, (("blocks", blocks), ("nope", layer.nope), ("value", layer.value)))


def _groups(stored: Mapping[str, Scheme | None]) -> tuple[SchemeGroup, ...]:
    """The modules of each format: as a regex where all layers and experts have the same one, else as names."""
    alike: dict[str, list[str]] = {}
    for module in stored:
        alike.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", re.escape(module).replace(r"\.", ".")), []).append(module)
    targets: dict[Scheme, list[str]] = {}
    for pattern, modules in alike.items():
        schemes = {stored[module] for module in modules}
        for scheme in schemes:
            if scheme is None:
                continue
            own = [module for module in modules if stored[module] == scheme]
            targets.setdefault(scheme, []).extend([f"re:{pattern}$"] if len(schemes) == 1 else own)
    return tuple(SchemeGroup(tuple(names), scheme) for scheme, names in targets.items())
