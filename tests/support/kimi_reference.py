"""Kimi-Linear in numpy float64, of `reference.py`'s parts, and random checkpoints of it in the published layout."""

import itertools
import json
import re
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import reference
import safetensors.numpy
from published_configs import KIMI_LINEAR
from reference import Array, rms_norm

from ling3.checkpoint import weight_names
from ling3.families.kimi_linear import KimiLinearConfig

SMALL = KIMI_LINEAR | {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "linear_attn_config": {
        "kda_layers": [1, 3],
        "full_attn_layers": [2],
        "num_heads": 3,
        "head_dim": 8,
        "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "model_max_length": 128,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_expert_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 10,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}
"""The published fields of a model of 30 thousand parameters, with every kind of layer."""

_NAMES = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def forward(weights: reference.Weights, config: KimiLinearConfig, tokens: list[int]) -> tuple[Array, Array]:
    """The logits `[T, vocab]` of one sequence, and `[T]`, how near each token's choice of experts came to another."""
    at = reference.Reader(_as_ling_3s(weights), "model")
    kda, moe = _kda_config(config), _moe_config(config)
    x, stages = at("embed_tokens").weight[np.asarray(tokens)], {}
    for i in range(config.num_hidden_layers):
        layer = at(f"layers.{i}")
        h, own = rms_norm(x, layer("input_layernorm").weight, config.rms_norm_eps), layer("self_attn")
        x = x + (reference.kda(own, kda, h) if i + 1 in config.linear_attn_config.kda_layers else mla(own, config, h))
        h = rms_norm(x, layer("post_attention_layernorm").weight, config.rms_norm_eps)
        if i < config.first_k_dense_replace:
            x = x + reference.swiglu(layer("mlp"), h)
        else:
            x = x + reference.moe(layer("block_sparse_moe"), moe, i, h, stages)
    margins = [stage for name, stage in stages.items() if name.endswith(".margin")]
    return rms_norm(x, at("norm").weight, config.rms_norm_eps) @ weights["lm_head.weight"].T, np.min(margins, axis=0)


def mla(at: reference.Reader, config: KimiLinearConfig, x: Array) -> Array:
    """Multi-head latent attention without positions and output gate; the latent's norm has an eps of its own."""
    length, heads, nope = len(x), config.num_attention_heads, config.qk_nope_head_dim
    size = nope + config.qk_rope_head_dim
    q = at.linear("q_proj", x).reshape(length, heads, size)
    latent, shared = np.split(at.linear("kv_a_proj_with_mqa", x), [config.kv_lora_rank], axis=-1)
    latent = rms_norm(latent, at("kv_a_layernorm").weight, 1e-6)
    k, v = np.split(at.linear("kv_b_proj", latent).reshape(length, heads, -1), [nope], axis=-1)
    k = np.concatenate([k, np.repeat(shared[:, None], heads, axis=1)], axis=-1)
    scores = np.einsum("qhc,khc->hqk", q, k) / np.sqrt(size)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    o = np.einsum("hqk,khv->qhv", p / p.sum(axis=-1, keepdims=True), v)
    return at.linear("o_proj", o.reshape(length, -1))


def _as_ling_3s(weights: reference.Weights) -> dict[str, Array]:
    """KDA's gates multiplied out, and experts and the routing bias under Ling-3's names."""
    named = {}
    for name, array in weights.items():
        if match := re.fullmatch(r"(.*\.[fg])_b_proj\.weight", name):
            named[f"{match[1]}_proj.weight"] = array @ weights[f"{match[1]}_a_proj.weight"]
        own = re.sub(r"(\.experts\.\d+)\.(w\d)", lambda found: f"{found[1]}.{_NAMES[found[2]]}", name)
        named[own.replace("e_score_correction_bias", "expert_bias")] = array
    return named


def _kda_config(config: KimiLinearConfig) -> types.SimpleNamespace:
    linear = config.linear_attn_config
    return types.SimpleNamespace(
        num_attention_heads=linear.num_heads,
        head_dim=linear.head_dim,
        kda_lower_bound=None,
        rms_norm_eps=config.rms_norm_eps,
    )


def _moe_config(config: KimiLinearConfig) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        expert_swiglu_limit_list=None,
        share_expert_swiglu_limit_list=None,
        num_experts=config.num_experts,
        n_group=config.num_expert_group,
        topk_group=config.topk_group,
        num_experts_per_tok=config.num_experts_per_token,
        norm_topk_prob=config.moe_renormalize,
        routed_scaling_factor=config.routed_scaling_factor,
    )


def draw(config: KimiLinearConfig, seed: int, bfloat16: bool = False) -> dict[str, Array]:
    """Weights under their published names, drawn as `random_checkpoint.draw` does."""
    rng = np.random.default_rng(seed)
    weights = {}
    for weight in weight_names(config):
        name, shape = weight.name, weight.shape
        if name.endswith("norm.weight"):
            array = rng.uniform(0.5, 1.5, shape)
        elif name.endswith("A_log"):
            array = rng.uniform(-1.0, 1.0, shape)
        elif name.endswith("dt_bias"):
            array = rng.uniform(-5.0, 1.0, shape)
        elif name.endswith("e_score_correction_bias"):
            array = rng.uniform(-0.9, 0.1, shape)
        elif "conv1d" in name:
            array = 0.5 * rng.standard_normal(shape)
        else:
            gain = np.sqrt(shape[-1]) if "embed" in name else 1.5 if ".gate.weight" in name else 1.0
            array = gain / np.sqrt(shape[-1]) * rng.standard_normal(shape)
        wide = not bfloat16 or name.endswith(("A_log", "dt_bias", "e_score_correction_bias"))
        weights[name] = array.astype(np.float32 if wide else ml_dtypes.bfloat16)
    return weights


def draw_well_posed(
    config: KimiLinearConfig, length: int, bfloat16: bool = False, first: int = 1
) -> tuple[dict[str, Array], list[int], Array]:
    """Weights, tokens and their logits in float64, of the first seed from `first` on without a near tie of experts.

    The margin is `random_checkpoint.draw_well_posed`'s.
    """
    for seed in itertools.count(first):
        weights = draw(config, seed, bfloat16)
        tokens = np.random.default_rng(seed).integers(2, config.vocab_size, length).tolist()
        logits, margins = forward({name: w.astype(np.float64) for name, w in weights.items()}, config, tokens)
        if margins.min() > 2e-5:
            return weights, tokens, logits
    raise AssertionError("unreachable: seeds do not end")


def write(path: Path, config: KimiLinearConfig, weights: dict[str, Array]) -> None:
    """`config.json` with the published fields, and `model.safetensors`, into the directory `path`."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config.to_dict(), indent=2))
    safetensors.numpy.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
