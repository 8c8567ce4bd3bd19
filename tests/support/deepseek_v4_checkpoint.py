"""Random DeepSeek-V4 checkpoints under release names, every gate open, so that a wrong entry or expert shows."""

import itertools
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import deepseek_v4_reference as reference
import ml_dtypes
import numpy as np
import safetensors.numpy
from reference import Array

from ling3.families.deepseek_v4_config import HEAVY, SPARSE

SMALL: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "compress_ratios": [0, 4, 128, 4, 0],
    "compress_rope_theta": 1600.0,
    "eos_token_id": 1,
    "hc_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "index_head_dim": 16,
    "index_n_heads": 8,
    "index_topk": 3,
    "initializer_range": 0.02,
    "max_position_embeddings": 1024,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 48,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "num_hash_layers": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 2,
    "o_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "original_max_position_embeddings": 256,
        "type": "yarn",
    },
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 8,
    "swiglu_limit": 0.8,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
    "use_cache": True,
    "vocab_size": 97,
}
"""A release's `config.json` at 300 thousand parameters: each kind of layer, looked-up and chosen experts.

Three entries are chosen of up to 75, the limits of SwiGLU bite, and YaRN keeps, mixes and divides the frequencies of
the four pairs. With fewer index heads, entries whose scores are all cut to zero would tie.
"""

WIDE: dict[str, Any] = {name: value for name, value in SMALL.items() if name != "compress_ratios"} | {
    "compress_rates": {SPARSE: 4, HEAVY: 8},
    "hc_mult": 1,
    "head_dim": 512,
    "hidden_size": 32,
    "index_head_dim": 128,
    "initializer_range": 0.2,
    "layer_types": [SPARSE, HEAVY],
    "max_position_embeddings": 512,
    "n_routed_experts": 4,
    "num_hash_layers": 0,
    "num_hidden_layers": 2,
    "qk_rope_head_dim": 64,
    "sliding_window": 5,
    "vocab_size": 64,
}
"""Every kind of packed entry, in a model as small as they permit."""

REAL_HEADS = SMALL | {
    "compress_rope_theta": 160000.0,
    "head_dim": 512,
    "index_head_dim": 128,
    "index_topk": 16,
    "max_position_embeddings": 1048576,
    "qk_rope_head_dim": 64,
    "rope_scaling": SMALL["rope_scaling"] | {"factor": 16, "original_max_position_embeddings": 65536},
    "sliding_window": 128,
    "swiglu_limit": 10.0,
}
"""V4-Flash's head sizes, window, ratios and rotary parameters."""

FLASH = REAL_HEADS | {
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "hidden_size": 4096,
    "index_n_heads": 64,
    "index_topk": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "vocab_size": 129280,
}
"""V4-Flash's own sizes."""

BLOCKS = SMALL | {
    "hidden_size": 160,
    "moe_intermediate_size": 192,
    "o_lora_rank": 128,
    "q_lora_rank": 136,
}
"""Sizes at which blocks of 128 are one and a part, in rows and in columns; experts' are multiples of 32.

No block of `wo_a` spans two of its groups, which are matrices of their own: `o_lora_rank` is a multiple of 128.
"""


def shapes(config: reference.Config) -> dict[str, tuple[int, ...]]:
    """The release's tensors, those of multi-token prediction aside, and their shapes."""
    hidden, streams, heads, size = config.hidden_size, config.hc_mult, config.num_attention_heads, config.head_dim
    found: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocab_size, hidden)}

    def hyper(name: str, rows: int, scales: int) -> None:
        found.update({f"{name}_fn": (rows, streams * hidden), f"{name}_base": (rows,), f"{name}_scale": (scales,)})

    def compressor(name: str, m: int, size: int, series: int) -> None:
        found[f"{name}.wkv.weight"] = found[f"{name}.wgate.weight"] = series * size, hidden
        found.update({f"{name}.norm.weight": (size,), f"{name}.ape": (m, series * size)})

    for i, (kind, m, hashed) in enumerate(zip(config.kinds, config.ratios, config.hashed, strict=True)):
        attn, ffn = f"layers.{i}.attn", f"layers.{i}.ffn"
        found |= {
            f"{attn}.wq_a.weight": (config.q_lora_rank, hidden),
            f"{attn}.q_norm.weight": (config.q_lora_rank,),
            f"{attn}.wq_b.weight": (heads * size, config.q_lora_rank),
            f"{attn}.wkv.weight": (size, hidden),
            f"{attn}.kv_norm.weight": (size,),
            f"{attn}.wo_a.weight": (config.o_groups * config.o_lora_rank, heads * size // config.o_groups),
            f"{attn}.wo_b.weight": (hidden, config.o_groups * config.o_lora_rank),
            f"{attn}.attn_sink": (heads,),
            f"{ffn}.gate.weight": (config.n_routed_experts, hidden),
        }
        if kind != "sliding":
            compressor(f"{attn}.compressor", m, size, series=2 if kind == "csa" else 1)
        if kind == "csa":
            compressor(f"{attn}.indexer.compressor", m, config.index_head_dim, series=2)
            found[f"{attn}.indexer.wq_b.weight"] = config.index_n_heads * config.index_head_dim, config.q_lora_rank
            found[f"{attn}.indexer.weights_proj.weight"] = config.index_n_heads, hidden
        if hashed:
            found[f"{ffn}.gate.tid2eid"] = config.vocab_size, config.num_experts_per_tok
        else:
            found[f"{ffn}.gate.bias"] = (config.n_routed_experts,)
        for mlp in ("shared_experts", *(f"experts.{e}" for e in range(config.n_routed_experts))):
            found[f"{ffn}.{mlp}.w1.weight"] = found[f"{ffn}.{mlp}.w3.weight"] = config.moe_intermediate_size, hidden
            found[f"{ffn}.{mlp}.w2.weight"] = hidden, config.moe_intermediate_size
        for part in ("attn", "ffn"):
            found[f"layers.{i}.{part}_norm.weight"] = (hidden,)
            hyper(f"layers.{i}.hc_{part}", (2 + streams) * streams, 3)
    hyper("hc_head", streams, 1)
    return found | {"norm.weight": (hidden,), "head.weight": (config.vocab_size, hidden)}


def draw(config: reference.Config, seed: int) -> dict[str, Array]:
    """Weights in float32 under release names; the experts looked up for a token's id are distinct."""
    rng, weights = np.random.default_rng(seed), {}
    for name, shape in shapes(config).items():
        if name.endswith("tid2eid"):
            weights[name] = rng.permuted(np.tile(np.arange(config.n_routed_experts), (shape[0], 1)), axis=1)
            weights[name] = weights[name][:, : shape[1]].astype(np.int64)
            continue
        if name.endswith(("norm.weight", "_scale")):
            w = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("gate.bias"):
            w = rng.uniform(-0.4, 0.4, shape)
        elif name.endswith((".attn_sink", ".ape", "embed.weight")):
            w = rng.standard_normal(shape)
        elif name.endswith("_base"):
            w = 0.5 * rng.standard_normal(shape)
        else:
            gain = 1.5 if re.search(r"\.wo_[ab]|\.ffn\.gate", name) else 1.0
            w = gain / np.sqrt(shape[-1]) * rng.standard_normal(shape)
        weights[name] = w.astype(np.float32)
    return weights


class Drawn(NamedTuple):
    """Weights in float32, a release's tensors that stand for them, tokens, and their logits and stages in float64."""

    weights: dict[str, Array]
    stored: dict[str, Array]
    tokens: list[int]
    logits: Array
    stages: dict[str, Array]


def draw_well_posed(
    config: reference.Config,
    length: int,
    first: int = 1,
    store: Callable[[Mapping[str, Array]], dict[str, Array]] = dict,
) -> Drawn:
    """From the first seed on that asks fp32 a fair question, in the form that `store` gives to drawn tensors.

    No token's choice of experts, nor of compressed entries, may hang on less than 2e-5: ten times the rounding of a
    score.
    """
    for seed in itertools.count(first):
        stored = store(draw(config, seed))
        weights = dequantise(stored)
        tokens = np.random.default_rng(seed).integers(2, config.vocab_size, length).tolist()
        logits, stages = reference.forward(reference.wide(weights), config, tokens)
        if min(stage.min() for name, stage in stages.items() if name.endswith(".margin")) > 2e-5:
            return Drawn(weights, stored, tokens, logits, stages)
    raise AssertionError("unreachable: seeds do not end")


def transformers_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A release's `config.json` in transformers' spelling, which has names for the ratios, so that they may be any."""
    config = reference.Config(raw)
    own = {"compress_ratios", "num_hash_layers", "qk_rope_head_dim", "rope_scaling", "topk_method", "torch_dtype"}
    long = {
        "sliding": "sliding_attention",
        "csa": "compressed_sparse_attention",
        "hca": "heavily_compressed_attention",
    }
    partial = {"partial_rotary_factor": config.rope / config.head_dim}
    yarn = {"yarn": {"rope_type": "yarn", "attention_factor": 1.0}}.get((config.rope_scaling or {}).get("type"), {})
    compress = {name: value for name, value in (config.rope_scaling or {}).items() if name != "type"} | yarn
    return {
        **{name: value for name, value in raw.items() if name not in own},
        **partial,
        "dtype": raw["torch_dtype"],
        "layer_types": [long[kind] for kind in config.kinds],
        "compress_rates": {long[kind]: m for kind, m in zip(config.kinds, config.ratios, strict=True) if m},
        "mlp_layer_types": ["hash_moe" if hashed else "moe" for hashed in config.hashed],
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": config.rope_theta} | partial,
            "compress": {"rope_type": "default", "rope_theta": config.compress_rope_theta} | partial | compress,
        },
    }


def write(directory: pathlib.Path, raw: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
    """`config.json` and `model.safetensors`, into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw, indent=2))
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    safetensors.numpy.save_file(contiguous, directory / "model.safetensors", metadata={"format": "pt"})


def mtp(raw: Mapping[str, Any]) -> dict[str, Array]:
    """Some of the tensors that a release has beside the model's, for multi-token prediction."""
    hidden = raw["hidden_size"]
    return {
        "mtp.0.attn_norm.weight": np.ones(hidden, np.float32),
        "mtp.0.e_proj.weight": np.ones((hidden, hidden), np.float32),
        "mtp.0.hc_head_scale": np.ones(1, np.float32),
    }


FP8_BLOCK, FP4_GROUP = 128, 32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
IN_FP8 = (".wq_a.weight", ".wq_b.weight", ".attn.wkv.weight", ".wo_a.weight", ".wo_b.weight")
IN_FLOAT32 = ("_fn", "_base", "_scale", ".attn_sink", ".ape", ".gate.bias")

QUANTISED = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
    },
    "torch_dtype": "bfloat16",
}
"""What the release's `config.json` says of its storage."""


def quantise(weights: Mapping[str, Array], experts_in_fp4: bool = True) -> dict[str, Array]:
    """The tensors as a release stores them: experts in FP4 and the other large matrices in FP8, each with its scales.

    Otherwise as its base model does: experts in FP8, too, and all scales in float32. Before, each block is multiplied
    by a power of two of its own: between blocks of one scale, a wrong scale would not show.
    """
    rng, stored = np.random.default_rng(0), {}
    scales_dtype = ml_dtypes.float8_e8m0fnu if experts_in_fp4 else np.float32
    for name, w in weights.items():
        scales_name = name.removesuffix("weight") + "scale"
        if ".ffn.experts." in name and experts_in_fp4:
            stored[name], stored[scales_name] = to_fp4(w, rng)
        elif name.endswith(IN_FP8) or "experts." in name:
            stored[name], scales = to_fp8(w, rng)
            stored[scales_name] = scales.astype(scales_dtype)
        elif name.endswith(IN_FLOAT32) or w.dtype.kind == "i":
            stored[name] = w
        else:
            stored[name] = w.astype(ml_dtypes.bfloat16)
    return stored


def to_fp8(w: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """E4M3 `[rows, columns]`, and a power of two for each block of 128 by 128, which may be cut at the end."""
    codes = np.zeros(w.shape, ml_dtypes.float8_e4m3fn)
    scales = np.zeros([-(-size // FP8_BLOCK) for size in w.shape])
    for i, j in np.ndindex(*scales.shape):
        block = np.s_[i * FP8_BLOCK : (i + 1) * FP8_BLOCK, j * FP8_BLOCK : (j + 1) * FP8_BLOCK]
        part = w[block] * 2.0 ** rng.integers(-2, 2)
        scales[i, j] = 2.0 ** np.ceil(np.log2(np.abs(part).max() / 448))
        codes[block] = (part / scales[i, j]).astype(codes.dtype)
    return codes, scales


def to_fp4(w: Array, rng: np.random.Generator) -> tuple[Array, Array]:
    """Two E2M1 to a byte `[rows, columns/2]`, the even column in the low half, and E8M0 for each 32 of a row."""
    groups = w.reshape(len(w), -1, FP4_GROUP) * 2.0 ** rng.integers(-2, 2, (len(w), w.shape[1] // FP4_GROUP, 1))
    scales = 2.0 ** np.ceil(np.log2(np.abs(groups).max(axis=-1, keepdims=True) / 6))
    nearest = np.abs(np.abs(groups / scales)[..., None] - E2M1).argmin(axis=-1)
    codes = (nearest + 8 * (groups < 0)).reshape(w.shape).astype(np.uint8)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8), scales[..., 0].astype(ml_dtypes.float8_e8m0fnu)


def dequantise(stored: Mapping[str, Array]) -> dict[str, Array]:
    """The float32 weights that a release's tensors stand for."""
    weights = {}
    for name, codes in stored.items():
        prefix = name.removesuffix("weight")
        scales = stored.get(f"{prefix}scale", stored.get(f"{prefix}weight_scale_inv"))
        if name.endswith((".scale", ".weight_scale_inv")):
            continue
        if codes.dtype == np.int8:
            halves = np.stack([codes.view(np.uint8) & 15, codes.view(np.uint8) >> 4], axis=-1).reshape(len(codes), -1)
            signed = np.where(halves < 8, E2M1[halves % 8], -E2M1[halves % 8])
            weights[name] = (signed * np.repeat(scales.astype(np.float32), FP4_GROUP, axis=1)).astype(np.float32)
        elif scales is not None:
            blocks = np.repeat(np.repeat(scales.astype(np.float32), FP8_BLOCK, axis=0), FP8_BLOCK, axis=1)
            weights[name] = codes.astype(np.float32) * blocks[: codes.shape[0], : codes.shape[1]]
        else:
            weights[name] = codes if codes.dtype.kind == "i" else codes.astype(np.float32)
    return weights
