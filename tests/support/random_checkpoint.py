"""Random Ling-3 checkpoints in the published layout, every gate open, so that a wrong state or a wrong expert shows."""

import dataclasses
import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import reference
import safetensors.numpy

from ling3.families.ling3_config import Ling3Config

TINY_LIKE = Ling3Config(
    vocab_size=307,
    hidden_size=72,
    intermediate_size=112,
    num_hidden_layers=4,
    layer_group_size=2,
    first_k_dense_replace=1,
    num_attention_heads=4,
    head_dim=16,
    q_lora_rank=24,
    kv_lora_rank=40,
    qk_nope_head_dim=20,
    qk_rope_head_dim=8,
    v_head_dim=12,
    rope_theta=10000.0,
    max_position_embeddings=1024,
    num_experts=16,
    num_experts_per_tok=3,
    moe_intermediate_size=32,
    moe_shared_expert_intermediate_size=32,
    n_group=4,
    topk_group=2,
    eos_token_id=(306,),
    pad_token_id=305,
)
"""Ling-3.0-tiny's layout at a few hundred thousand parameters; no two sizes that could be confused are equal.

Four layers, because tests compile a program per length: KDA and MLA in turn, a dense layer and then MoE.
"""

FLASH_LIKE = dataclasses.replace(TINY_LIKE, q_lora_rank=None, first_k_dense_replace=2, rope_theta=6000000.0)
"""Ling-3.0-flash's layout: a plain `q_proj`, two dense layers (one KDA, one MLA), the long rotary base."""

CLAMPED = dataclasses.replace(
    FLASH_LIKE,
    expert_swiglu_limit_list=(0.0, 0.0, 0.3, 0.2),
    share_expert_swiglu_limit_list=(0.0, 0.0, 0.0, 0.4),
)
"""FLASH_LIKE with SwiGLU clamps that bite; routed and shared experts differ in where and how hard."""

REAL_HEADS = dataclasses.replace(
    TINY_LIKE,
    hidden_size=96,
    layer_group_size=4,
    num_attention_heads=2,
    head_dim=128,
    q_lora_rank=256,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rope_theta=6000000.0,
)
"""The published head and latent sizes, and a group of three KDA layers and one MLA, in a narrow model."""


def draw(config: Ling3Config, seed: int) -> dict[str, np.ndarray]:
    """fp32 weights under their published names, large enough that logits have a standard deviation near 1.

    Decays lie between almost none and almost all; expert biases are mostly negative, and so are many biased scores.
    """
    rng = np.random.default_rng(seed)
    heads, key, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
    nope, rope, value, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank
    taps = config.short_conv_kernel_size
    weights = {}

    def linear(name: str, size_out: int, size_in: int, gain: float = 1.0) -> None:
        weights[f"{name}.weight"] = gain / np.sqrt(size_in) * rng.standard_normal((size_out, size_in))

    def norm(name: str, size: int) -> None:
        weights[f"{name}.weight"] = rng.uniform(0.5, 1.5, size)

    def mlp(name: str, intermediate: int) -> None:
        linear(f"{name}.gate_proj", intermediate, hidden)
        linear(f"{name}.up_proj", intermediate, hidden)
        linear(f"{name}.down_proj", hidden, intermediate)

    weights["model.word_embeddings.weight"] = rng.standard_normal((config.vocab_size, hidden))
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        at = f"{layer}.attention"
        norm(f"{layer}.input_layernorm", hidden)
        norm(f"{layer}.post_attention_layernorm", hidden)
        if config.attention_kind(i) == "kda":
            for n in "qkv":
                linear(f"{at}.{n}_proj", heads * key, hidden)
                weights[f"{at}.{n}_conv1d.weight"] = 0.5 * rng.standard_normal((heads * key, 1, taps))
            linear(f"{at}.f_proj", heads * key, hidden)
            linear(f"{at}.g_proj", heads * key, hidden)
            linear(f"{at}.b_proj", heads, hidden)
            weights[f"{at}.A_log"] = rng.uniform(-1.0, 1.0, heads)
            weights[f"{at}.dt_bias"] = rng.uniform(-5.0, 1.0, heads * key)
            norm(f"{at}.o_norm", key)
            linear(f"{at}.o_proj", hidden, heads * key)
        else:
            if config.q_lora_rank is None:
                linear(f"{at}.q_proj", heads * (nope + rope), hidden, gain=1.5)
            else:
                linear(f"{at}.q_a_proj", config.q_lora_rank, hidden)
                norm(f"{at}.q_a_layernorm", config.q_lora_rank)
                linear(f"{at}.q_b_proj", heads * (nope + rope), config.q_lora_rank, gain=1.5)
            linear(f"{at}.kv_a_proj_with_mqa", rank + rope, hidden)
            norm(f"{at}.kv_a_layernorm", rank)
            linear(f"{at}.kv_b_proj", heads * (nope + value), rank)
            linear(f"{at}.g_proj", heads, hidden)
            linear(f"{at}.dense", hidden, heads * value)
        if config.mlp_kind(i) == "dense":
            mlp(f"{layer}.mlp", config.intermediate_size)
        else:
            linear(f"{layer}.mlp.gate", config.num_experts, hidden, gain=1.5)
            weights[f"{layer}.mlp.gate.expert_bias"] = rng.uniform(-0.9, 0.1, config.num_experts)
            for e in range(config.num_experts):
                mlp(f"{layer}.mlp.experts.{e}", config.moe_intermediate_size)
            mlp(f"{layer}.mlp.shared_experts", config.moe_shared_expert_intermediate_size * config.num_shared_experts)
    norm("model.norm", hidden)
    linear("lm_head", config.vocab_size, hidden)
    return {name: w.astype(np.float32) for name, w in weights.items()}


def to_bfloat16(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The published dtypes: bf16 but for `expert_bias`, `A_log` and `dt_bias`."""
    wide = ("expert_bias", "A_log", "dt_bias")
    return {name: w if name.endswith(wide) else w.astype(ml_dtypes.bfloat16) for name, w in weights.items()}


def write(path: Path, config: Ling3Config, weights: dict[str, np.ndarray]) -> None:
    """`config.json` with the published fields, and `model.safetensors`, into the directory `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(published_config(config), indent=2))
    safetensors.numpy.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def published_config(config: Ling3Config) -> dict:
    """`config.json` as published: an int for the bound, one end-of-text id, constants spelled out."""
    bound = config.kda_lower_bound
    return dataclasses.asdict(config) | {
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "eos_token_id": config.eos_token_id[0],
        "num_key_value_heads": config.num_attention_heads,
        "kda_safe_gate": bound is not None,
        "kda_lower_bound": bound if bound is None or bound % 1 else int(bound),
        "no_kda_lora": True,
        "hidden_act": "silu",
        "gated_attention_proj_granularity_type": "head_wise",
        "score_function": "sigmoid",
        "topk_method": "noaux_tc",
        "router_dtype": "fp32",
        "moe_router_enable_expert_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_interleave": True,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "use_mla_nope": not config.mla_rope,
        "torch_dtype": "bfloat16",
    }


def draw_well_posed(
    config: Ling3Config, length: int, bfloat16: bool = False
) -> tuple[dict[str, np.ndarray], list[int], np.ndarray, dict[str, np.ndarray]]:
    """Weights, tokens, and their logits and stages in float64, from the first seed that asks fp32 a fair question.

    Where two experts are nearly as good, rounding decides which is taken, and two correct programs differ by 1 or more.
    So no token's choice of experts may hang on less than 2e-5: ten times the rounding of a score.
    """
    for seed in itertools.count(1):
        weights = to_bfloat16(draw(config, seed)) if bfloat16 else draw(config, seed)
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, length).tolist()
        logits, stages = reference.forward({name: w.astype(np.float64) for name, w in weights.items()}, config, tokens)
        if min(stage.min() for name, stage in stages.items() if name.endswith(".margin")) > 2e-5:
            return weights, tokens, logits, stages
    raise AssertionError("unreachable: seeds do not end")
