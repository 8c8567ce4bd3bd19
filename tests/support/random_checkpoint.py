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


class Drawing:
    """fp32 weights of a config's modules, drawn one after the other, under their published names."""

    def __init__(self, config: Ling3Config, seed: int):
        self.config, self.rng = config, np.random.default_rng(seed)
        self.weights = {}

    def linear(self, name: str, size_out: int, size_in: int, gain: float = 1.0) -> None:
        self.weights[f"{name}.weight"] = gain / np.sqrt(size_in) * self.rng.standard_normal((size_out, size_in))

    def norm(self, name: str, size: int) -> None:
        self.weights[f"{name}.weight"] = self.rng.uniform(0.5, 1.5, size)

    def mlp(self, name: str, intermediate: int) -> None:
        hidden = self.config.hidden_size
        self.linear(f"{name}.gate_proj", intermediate, hidden)
        self.linear(f"{name}.up_proj", intermediate, hidden)
        self.linear(f"{name}.down_proj", hidden, intermediate)

    def kda(self, at: str) -> None:
        config, rng = self.config, self.rng
        heads, key, hidden = config.num_attention_heads, config.head_dim, config.hidden_size
        for n in "qkv":
            self.linear(f"{at}.{n}_proj", heads * key, hidden)
            shape = heads * key, 1, config.short_conv_kernel_size
            self.weights[f"{at}.{n}_conv1d.weight"] = 0.5 * rng.standard_normal(shape)
        self.linear(f"{at}.f_proj", heads * key, hidden)
        self.linear(f"{at}.g_proj", heads * key, hidden)
        self.linear(f"{at}.b_proj", heads, hidden)
        self.weights[f"{at}.A_log"] = rng.uniform(-1.0, 1.0, heads)
        self.weights[f"{at}.dt_bias"] = rng.uniform(-5.0, 1.0, heads * key)
        self.norm(f"{at}.o_norm", key)
        self.linear(f"{at}.o_proj", hidden, heads * key)

    def mla(self, at: str) -> None:
        config = self.config
        heads, hidden, rank = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
        nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        if config.q_lora_rank is None:
            self.linear(f"{at}.q_proj", heads * (nope + rope), hidden, gain=1.5)
        else:
            self.linear(f"{at}.q_a_proj", config.q_lora_rank, hidden)
            self.norm(f"{at}.q_a_layernorm", config.q_lora_rank)
            self.linear(f"{at}.q_b_proj", heads * (nope + rope), config.q_lora_rank, gain=1.5)
        self.linear(f"{at}.kv_a_proj_with_mqa", rank + rope, hidden)
        self.norm(f"{at}.kv_a_layernorm", rank)
        self.linear(f"{at}.kv_b_proj", heads * (nope + value), rank)
        self.linear(f"{at}.g_proj", heads, hidden)
        self.linear(f"{at}.dense", hidden, heads * value)

    def moe(self, name: str) -> None:
        config = self.config
        self.linear(f"{name}.gate", config.num_experts, config.hidden_size, gain=1.5)
        self.weights[f"{name}.gate.expert_bias"] = self.rng.uniform(-0.9, 0.1, config.num_experts)
        for e in range(config.num_experts):
            self.mlp(f"{name}.experts.{e}", config.moe_intermediate_size)
        self.mlp(f"{name}.shared_experts", config.moe_shared_expert_intermediate_size * config.num_shared_experts)


def draw(config: Ling3Config, seed: int) -> dict[str, np.ndarray]:
    """fp32 weights under their published names, large enough that logits have a standard deviation near 1.

    Decays lie between almost none and almost all; expert biases are mostly negative, and so are many biased scores.
    """
    own, hidden = Drawing(config, seed), config.hidden_size
    own.weights["model.word_embeddings.weight"] = own.rng.standard_normal((config.vocab_size, hidden))
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        own.norm(f"{layer}.input_layernorm", hidden)
        own.norm(f"{layer}.post_attention_layernorm", hidden)
        attention = own.kda if config.attention_kind(i) == "kda" else own.mla
        attention(f"{layer}.attention")
        if config.mlp_kind(i) == "dense":
            own.mlp(f"{layer}.mlp", config.intermediate_size)
        else:
            own.moe(f"{layer}.mlp")
    own.norm("model.norm", hidden)
    own.linear("lm_head", config.vocab_size, hidden)
    for i in range(config.num_nextn_predict_layers or 0):
        layer = f"model.layers.{config.num_hidden_layers + i}"
        for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "final_layernorm"):
            own.norm(f"{layer}.{name}", hidden)
        own.linear(f"{layer}.eh_proj", hidden, 2 * hidden)
        own.mla(f"{layer}.attention")
        own.moe(f"{layer}.mlp")
    return {name: w.astype(np.float32) for name, w in own.weights.items()}


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
        wide = {name: w.astype(np.float64) for name, w in weights.items()}
        logits, stages = reference.forward(wide, config, tokens)
        reference.predict(wide, config, tokens, stages)
        if min(stage.min() for name, stage in stages.items() if name.endswith(".margin")) > 2e-5:
            return weights, tokens, logits, stages
    raise AssertionError("unreachable: seeds do not end")
