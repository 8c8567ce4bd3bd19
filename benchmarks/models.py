"""The models that are measured: Ling-3.0-tiny, its full width with four layers, a mid-size one, dense ones, and toys.

`checkpoint` writes random weights in the published layout, scaled so that rows of a batch give different tokens and the
router spreads them over the experts: logits have a standard deviation near 1. Each tensor is drawn with its name as the
seed and written straight into the file.
"""

import dataclasses
import json
import math
import shutil
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import ling3
from ling3.checkpoint import safetensors_file
from ling3.checkpoint.names import weight_names
from ling3.families.llama import LlamaConfig
from ling3.families.qwen3 import Qwen3Config
from ling3.families.rope_scaling import RopeScaling

TINY = ling3.Ling3Config(
    vocab_size=157184,
    hidden_size=1536,
    intermediate_size=4608,
    num_hidden_layers=24,
    layer_group_size=4,
    first_k_dense_replace=1,
    num_attention_heads=16,
    head_dim=128,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_theta=6000000.0,
    max_position_embeddings=131072,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    moe_shared_expert_intermediate_size=512,
    n_group=8,
    topk_group=4,
    eos_token_id=(156895,),
    pad_token_id=156892,
)
"""Ling-3.0-tiny: 7.89 billion parameters."""

INT4_TINY = dataclasses.replace(
    TINY,
    quantization_config={
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": 32,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
    },
)
"""Ling-3.0-tiny in INT4, as it is published: 5 GB."""

FOUR_LAYERS = dataclasses.replace(TINY, num_hidden_layers=4, q_lora_rank=None)
"""Ling-3.0-tiny's full width with four layers, 1.49 billion parameters; no Q-LoRA, which transformers lacks."""

MID = ling3.Ling3Config(
    vocab_size=16384,
    hidden_size=640,
    intermediate_size=1920,
    num_hidden_layers=8,
    layer_group_size=4,
    first_k_dense_replace=1,
    num_attention_heads=10,
    head_dim=64,
    q_lora_rank=None,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    v_head_dim=64,
    max_position_embeddings=131072 + 1024,  # room for the steps that are measured at 131,072
    num_experts=32,
    num_experts_per_tok=4,
    moe_intermediate_size=160,
    moe_shared_expert_intermediate_size=160,
    n_group=4,
    topk_group=2,
    eos_token_id=(2,),
    pad_token_id=0,
)
"""Ling-3.0-tiny's proportions at 114 million parameters."""

TOY = dataclasses.replace(
    MID,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    layer_group_size=2,
    num_attention_heads=2,
    head_dim=16,
    kv_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=32,
)
"""One layer of each kind, 0.2 million parameters: to see that a case runs, not for its numbers."""

LLAMA = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=4,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(
        "llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
    tie_word_embeddings=True,
    attention_bias=False,
    mlp_bias=False,
    initializer_range=0.02,
    bos_token_id=128000,
    eos_token_id=(128001,),
)
"""Llama-3.2-1B's full width with four of its 16 layers, 506 million parameters."""

SMOLLM2 = dataclasses.replace(
    LLAMA,
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=8192,
    rope_theta=100000.0,
    rope_scaling=None,
    bos_token_id=1,
    eos_token_id=(2,),
)
"""SmolLM2-135M, with all its layers: its largest matrix but the embedding has 884,736 numbers."""

QWEN3 = Qwen3Config(
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling=None,
    tie_word_embeddings=True,
    attention_bias=False,
    use_sliding_window=False,
    sliding_window=None,
    max_window_layers=28,
    initializer_range=0.02,
    bos_token_id=151643,
    eos_token_id=(151645,),
)
"""Qwen3-0.6B, with all its layers."""

DENSE_TOY = dataclasses.replace(
    QWEN3,
    vocab_size=512,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    max_window_layers=2,
    num_attention_heads=2,
    head_dim=32,
    num_key_value_heads=1,
    bos_token_id=None,
    eos_token_id=(2,),
)
"""A dense model to see that a case runs."""

STORED_WIDE = ("expert_bias", "A_log", "dt_bias")
"""Tensors that published checkpoints have in float32; their other floats are bfloat16."""


def checkpoint(config: Any, scratch: Path) -> Path:
    """The directory of a checkpoint of `config` with random weights, written into `scratch` if it is not there yet."""
    fingerprint = zlib.crc32(repr(dataclasses.asdict(config)).encode())
    family = type(config).__name__.removesuffix("Config").lower()
    directory = scratch / f"{family}-{config.num_hidden_layers}x{config.hidden_size}-{fingerprint:08x}"
    if (directory / "config.json").exists():
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    weights = {weight.name: weight.shape for weight in weight_names(config)}
    specs = {name: (_dtype(name), shape) for name, shape in weights.items()}

    def tensor(name: str) -> np.ndarray:
        module, _, field = name.rpartition(".")
        if not field.startswith("weight_"):
            return draw(name, weights[name]).astype(_dtype(name))
        rows, words = weights[f"{module}.weight_packed"]
        return draw_int4(name, (rows, 8 * words), weights[name]).astype(_dtype(name), copy=False)

    safetensors_file.write(directory / "model.safetensors", specs, tensor)
    # Written last, so that a directory with a config is complete.
    raw = config.to_dict() | {"torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
    return directory


def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One published tensor of floats, in float32, with its name as the seed.

    Matrices keep the scale of their inputs; MLA's queries and the router's scores are 1.5 times as large. Decays range
    from almost none to almost all; expert biases are mostly negative, and so are many biased scores.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    bounds = {"expert_bias": (-0.9, 0.1), "A_log": (-1.0, 1.0), "dt_bias": (-5.0, 1.0)}
    kind = name.removesuffix(".weight").rpartition(".")[2]
    if kind in bounds:
        return rng.uniform(*bounds[kind], shape).astype(np.float32)
    if kind.endswith("norm"):
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    std = {"word_embeddings": 1.0}.get(kind, 0.5 if kind.endswith("conv1d") else _std(kind, shape[-1]))
    return std * rng.standard_normal(shape, np.float32)


def draw_int4(name: str, matrix: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """One stored tensor of an INT4 matrix, whose numbers have the standard deviation of those of `draw`.

    Every q from -8 to 7 is equally likely, so the numbers of a group have a standard deviation of 4.6 scales.
    """
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    module, _, field = name.rpartition(".")
    if field == "weight_shape":
        return np.asarray(matrix, np.int64)
    if field == "weight_packed":
        return rng.integers(0, 2**32, shape, np.uint32).view(np.int32)
    return rng.uniform(0.8, 1.2, shape) * _std(module.rpartition(".")[2], matrix[1]) / 4.6


def _std(kind: str, columns: int) -> float:
    return (1.5 if kind in ("gate", "q_b_proj") else 1.0) / math.sqrt(columns)


def prompts(config: Any, count: int, length: int) -> list[list[int]]:
    """`count` different prompts of `length` random ids."""
    return np.random.default_rng(0).integers(0, config.vocab_size, (count, length)).tolist()


def _dtype(name: str) -> np.dtype:
    stored = {"weight_packed": np.int32, "weight_shape": np.int64}.get(name.rpartition(".")[2])
    return np.dtype(stored or (np.float32 if name.endswith(STORED_WIDE) else ml_dtypes.bfloat16))
