"""A GGUF file as the checkpoint directory that it was made from, so that all of ling3 reads it like one.

`directory` writes the small files (`config.json` and the tokenizer's) to a temporary directory, which is removed when
the process ends. `tensors_of` has the file's tensors under their published names, read where they lie.
"""

import atexit
import functools
import json
import pathlib
import re
import shutil
import tempfile
from typing import Any, NamedTuple

from ling3 import families
from ling3.checkpoint.gguf_arrays import ArrangedArray
from ling3.checkpoint.gguf_file import Gguf, open_gguf
from ling3.checkpoint.gguf_vocabulary import PREFIX, tokenizer_files
from ling3.checkpoint.names import structure
from ling3.checkpoint.safetensors_file import CheckpointError, StoredTensors
from ling3.families.gguf import ROPE_FREQUENCIES
from ling3.leaves import array_leaves
from ling3.runtime import quoting
from ling3.runtime.quoting import shown


class _Opened(NamedTuple):
    gguf: Gguf
    config: Any
    tokenizer_error: CheckpointError | FileNotFoundError | None
    """Why there is no tokenizer, if there is none; the model can be used without it."""


_OPENED: dict[pathlib.Path, _Opened] = {}
"""Each file whose `directory` has been made, by that directory."""


def directory(path: pathlib.Path) -> pathlib.Path:
    """The directory of a GGUF file's `config.json` and tokenizer files; the same one for an unchanged file.

    `path` may be the first file of a split set. Raises CheckpointError for a damaged file or an unknown type, and
    ConfigError for metadata that ling3 does not compute with.
    """
    status = path.stat()
    return _directory(path.resolve(), (status.st_ino, status.st_size, status.st_mtime_ns))


@functools.lru_cache(maxsize=64)
def _directory(path: pathlib.Path, version: tuple[int, int, int]) -> pathlib.Path:
    gguf = open_gguf(path)
    config = families.gguf_config(gguf, str(path))
    files, problem = {}, None
    try:
        files = tokenizer_files(gguf.metadata, str(path))
        if not files:
            kind = gguf.metadata.get(f"{PREFIX}model")
            found = "none" if kind is None else shown(kind)
            problem = FileNotFoundError(f"{path}: {PREFIX}model: found {found}, so the file has no tokenizer")
    except CheckpointError as error:
        problem = error
    raw = config.to_dict()
    if any(tensor.block for tensor in gguf.tensors.values()):
        raw["quantization_config"] = {"quant_method": "gguf"}
    target = pathlib.Path(tempfile.mkdtemp(prefix="ling3-gguf-")) / path.stem
    atexit.register(shutil.rmtree, target.parent, ignore_errors=True)
    for name, content in {"config.json": json.dumps(raw, indent=2).encode(), **files}.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    quoting.unpacked(target, path)
    _OPENED[target] = _Opened(_without_vocabulary(gguf), config, problem)
    return target


def _without_vocabulary(gguf: Gguf) -> Gguf:
    """The same without the tokenizer's metadata, whose files have been written: it would stay in memory."""
    return gguf._replace(metadata={k: v for k, v in gguf.metadata.items() if not k.startswith("tokenizer.")})


def tensors_of(directory: pathlib.Path) -> StoredTensors | None:
    """The tensors of the GGUF file that `directory` was made of, under their published names; None for another one."""
    if (opened := _OPENED.get(directory)) is None:
        return None
    return published_tensors(opened.gguf, opened.config)


def check_tokenizer(directory: pathlib.Path) -> None:
    """Raises CheckpointError or FileNotFoundError if the GGUF file of `directory` has no tokenizer that can be read."""
    if (opened := _OPENED.get(directory)) is not None and opened.tokenizer_error is not None:
        raise opened.tokenizer_error


def published_tensors(gguf: Gguf, config: Any) -> StoredTensors:
    """A file's tensors under their published names. Unknown ones keep the name that they have there.

    `rope_freqs.weight` is left out, as the config has its scaling.
    """
    predicts, family = families.without_mtp(config) is None, families.family_of(config)
    paths = {leaf.path for leaf in array_leaves(structure(config, mtp=predicts))}
    decoder_layers = config.num_hidden_layers if predicts else None
    arrangement = families.gguf_architecture(gguf).arrangement
    tensors: StoredTensors = {}
    stored: dict[str, list[str]] = {}
    for name, tensor in sorted(gguf.tensors.items()):
        if name == ROPE_FREQUENCIES:
            continue
        path = _path(name, paths, decoder_layers)
        if path is None:
            tensors[name] = tensor
        elif "{}" in path:
            one = tensor._replace(shape=tensor.shape[1:])
            for expert in range(tensor.shape[0]):
                own = family.published(path.replace("{}", str(expert)), config)
                tensors[own] = one._replace(name=own, start=tensor.start + expert * one.nbytes)
        else:
            whole = ".kv_b_proj." in path and not _in_blocks(gguf, name)
            stored.setdefault(_of_halves(path) if whole else path, []).append(name)
    read = functools.lru_cache(maxsize=2)(ArrangedArray.made)  # a tensor is read in blocks, one after the other
    for path, names in stored.items():
        published = family.published(path, config)
        array = ArrangedArray(gguf, path, tuple(names), arrangement(path, names, config))
        tensors[published] = array.tensor(published, read)
    return tensors


def _in_blocks(gguf: Gguf, name: str) -> bool:
    """True if both halves of the `kv_b_proj` that has the tensor `name` are in blocks: they stay as they are then."""
    halves = (gguf.tensors.get(re.sub("attn_[kv]_b", half, name)) for half in ("attn_k_b", "attn_v_b"))
    return all(half is not None and half.block for half in halves)


def _of_halves(path: str) -> str:
    """The path of the array that has the half of `kv_b_proj` at this path; any other path as it is."""
    return re.sub(r"\.[kv]_b\.", ".", path)


_LAYER = re.compile(r"blk\.(\d+)\.(.+)")

OUTSIDE = {
    "token_embd.weight": "model.word_embeddings.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
"""The paths of arrays outside of layers, by the names in a file."""

LAYER: dict[str, tuple[str, ...]] = {
    "attn_norm": ("input_layernorm",),
    **dict.fromkeys(("ffn_norm", "post_attention_norm"), ("post_attention_layernorm",)),
    **{f"attn_{name}": (f"attention.{name}_proj",) for name in ("q", "k", "v")},
    **{f"attn_{name}_norm": (f"attention.{name}_norm",) for name in ("q", "k")},
    "attn_output": ("attention.o_proj", "attention.dense"),
    **{f"ffn_{name}": (f"mlp.{name}_proj",) for name in ("gate", "up", "down")},
    **{f"ffn_{name}_exps": (f"mlp.experts.{name}_proj",) for name in ("gate", "up", "down")},
    **{f"ffn_{name}_shexp": (f"mlp.shared_experts.{name}_proj",) for name in ("gate", "up", "down")},
    "ffn_gate_inp": ("mlp.gate",),
    "ffn_gate_inp_shexp": ("mlp.shared_expert_gate",),
    **{f"ssm_conv1d_{name}": (f"attention.{name}_conv1d",) for name in ("q", "k", "v")},
    "ssm_beta": ("attention.b_proj", "attention.in_proj_b"),
    "ssm_f_a": ("attention.f_proj", "attention.f_proj.a_proj"),
    "ssm_f_b": ("attention.f_proj.b_proj",),
    "ssm_g_a": ("attention.g_proj", "attention.g_proj.a_proj"),
    "ssm_g_b": ("attention.g_proj.b_proj",),
    "ssm_norm": ("attention.o_norm", "attention.norm"),
    "ssm_alpha": ("attention.in_proj_a",),
    "ssm_ba": ("attention.in_proj_ba",),
    "ssm_in": ("attention.in_proj_qkvz",),
    "attn_qkv": ("attention.in_proj_qkv", "attention.in_proj_qkvz"),
    "ssm_conv1d": ("attention.conv1d",),
    "ssm_out": ("attention.out_proj",),
    "attn_q_a": ("attention.q_a_proj",),
    "attn_q_a_norm": ("attention.q_a_layernorm",),
    "attn_q_b": ("attention.q_b_proj",),
    "attn_kv_a_mqa": ("attention.kv_a_proj_with_mqa",),
    "attn_kv_a_norm": ("attention.kv_a_layernorm",),
    **{f"attn_{half}_b": (f"attention.kv_b_proj.{half}_b",) for half in ("k", "v")},
    "attn_gate": ("attention.g_proj", "attention.in_proj_z", "attention.in_proj_qkvz"),
    "indexer.attn_q_b": ("attention.indexer.wq_b",),
    "indexer.attn_k": ("attention.indexer.wk",),
    "indexer.k_norm": ("attention.indexer.k_norm",),
    "indexer.proj": ("attention.indexer.weights_proj",),
    # A multi-token-prediction layer.
    **{f"nextn.{name}": (name,) for name in ("eh_proj", "enorm", "hnorm")},
    **dict.fromkeys(("nextn.shared_head_norm", "layer_output_norm"), ("final_layernorm",)),
}
"""The modules of a layer, by the names of their tensors in a file; of several, the one that the layer has."""

FIELDS = {
    "ssm_a": "attention.A_log",
    "ssm_dt.bias": "attention.dt_bias",
    "exp_probs_b.bias": "mlp.gate.expert_bias",
    **{f"hc_{part}_{name}.weight": f"{part}_hc.{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")},
    **{
        f"indexer_compressor_{name}.weight": f"attention.indexer.index_kpool_compress_{name}"
        for name in ("gate", "ape")
    },
}
"""The arrays of a layer that are named as a whole."""


def _path(name: str, paths: set[str], decoder_layers: int | None) -> str | None:
    """The path in the module tree of the tensor `name`; `{}` stands for an expert's number. None if it is unknown.

    Layers from `decoder_layers` on, if it is not None, are those of multi-token prediction.
    """
    if name in OUTSIDE:
        return OUTSIDE[name]
    if (found := _LAYER.fullmatch(name)) is None:
        return None
    number, stored = int(found[1]), found[2]
    if decoder_layers is None or number < decoder_layers:
        layer = f"model.layers.{number}"
    else:
        layer = f"mtp.{number - decoder_layers}"
    if stored in FIELDS:
        return f"{layer}.{FIELDS[stored]}"
    module, _, field = stored.rpartition(".")
    candidates = [f"{layer}.{path}.{field}" for path in LAYER.get(module, ())]
    candidates += [path.replace(".attention.", ".attention.mla.") for path in candidates]  # beside an indexer
    known = (path for path in candidates if _of_halves(path) in paths)
    path = next(known, next(iter(candidates), None))
    return None if path is None else path.replace(".mlp.experts.", ".mlp.experts.{}.")
