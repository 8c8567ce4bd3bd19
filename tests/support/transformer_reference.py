"""Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE in numpy float64, from the equations alone, as `reference.py` has Ling-3.

One sequence, without a batch, a cache or pages. Weights come under their published names; of `ling3` only the fields of
a config are read. In shapes T is tokens, D hidden, H heads, d channels of a head.
"""

import math

import numpy as np
from reference import Array, Reader, Weights, rms_norm, silu


def forward(weights: Weights, config, tokens: list[int]) -> Array:
    """The logits `[T, vocab]` of one sequence."""
    at = Reader({name: np.asarray(array, np.float64) for name, array in weights.items()}, "model")
    x = at("embed_tokens").weight[np.asarray(tokens)]
    for i in range(config.num_hidden_layers):
        layer = at(f"layers.{i}")
        x = x + attention(
            layer("self_attn"), config, i, rms_norm(x, layer("input_layernorm").weight, config.rms_norm_eps)
        )
        h = rms_norm(x, layer("post_attention_layernorm").weight, config.rms_norm_eps)
        x = x + (moe if f"{layer.prefix}.mlp.gate.weight" in weights else swiglu)(layer("mlp"), config, h)
    head = at("embed_tokens") if config.tie_word_embeddings else Reader(at.weights, "lm_head")
    return rms_norm(x, at("norm").weight, config.rms_norm_eps) @ head.weight.T


def linear(at: Reader, name: str, x: Array) -> Array:
    """`W x`, and `+ b` if there is one."""
    return at.linear(name, x) + at.weights.get(f"{at.prefix}.{name}.bias", 0.0)


def attention(at: Reader, config, layer: int, x: Array) -> Array:
    """Grouped-query attention, `[T, D] -> [T, D]`."""
    length, size, group = len(x), config.head_dim, config.num_attention_heads // config.num_key_value_heads
    q, k, v = (linear(at, f"{n}_proj", x).reshape(length, -1, size) for n in "qkv")
    if f"{at.prefix}.q_norm.weight" in at.weights:
        q, k = (rms_norm(h, at(f"{n}_norm").weight, config.rms_norm_eps) for n, h in (("q", q), ("k", k)))
    frequencies, magnitude = rope(config)
    q, k = (magnitude * rotate(h, frequencies) for h in (q, k))
    k, v = (np.repeat(h, group, axis=1) for h in (k, v))
    seen = np.tri(length, dtype=bool)
    if (window := window_of(config, layer)) is not None:
        seen &= ~np.tri(length, k=-window, dtype=bool)
    scores = np.where(seen, np.einsum("qhd,khd->hqk", q, k) / math.sqrt(size), -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    o = np.einsum("hqk,khd->qhd", p / p.sum(axis=-1, keepdims=True), v)
    return linear(at, "o_proj", o.reshape(length, -1))


def window_of(config, layer: int) -> int | None:
    """Tokens that a query of 0-based `layer` sees, its own among them."""
    if hasattr(config, "use_sliding_window"):
        return config.sliding_window if config.use_sliding_window and layer >= config.max_window_layers else None
    return getattr(config, "sliding_window", None)


def rotate(x: Array, frequencies: Array) -> Array:
    """Pairs `(x_i, x_{i + d/2})` of `[T, H, d]`: token t turns pair i by t · frequencies[i]."""
    first, second = np.split(x, 2, axis=-1)
    y = (first + 1j * second) * np.exp(1j * np.outer(np.arange(len(x)), frequencies))[:, None, :]
    return np.concatenate([y.real, y.imag], axis=-1)


def rope(config) -> tuple[Array, float]:
    """The angle of each pair per token, in radians, and the factor on cos and sin."""
    pairs = config.head_dim // 2
    plain = np.array([config.rope_theta ** (-i / pairs) for i in range(pairs)])
    scaling = config.rope_scaling
    match scaling and scaling.rope_type:
        case "linear":
            return plain / scaling.factor, 1.0
        case "llama3":
            waves = 2 * np.pi / plain
            longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
            shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
            share = (longest / waves - 1) / (longest / shortest - 1)
            between = (1 - share) * plain / scaling.factor + share * plain
            return np.where(waves < shortest, plain, np.where(waves > longest, plain / scaling.factor, between)), 1.0
        case "yarn":
            return yarn(plain, config, scaling)
    return plain, 1.0  # "dynamic" scales nothing within the context


def yarn(plain: Array, config, scaling) -> tuple[Array, float]:
    """YaRN (arXiv 2309.00071, §3.2 and §3.4), with DeepSeek's two mscales."""
    context, pairs = scaling.original_max_position_embeddings or config.max_position_embeddings, len(plain)
    ends = [
        pairs * math.log(context / (2 * math.pi * turns)) / math.log(config.rope_theta)
        for turns in (scaling.beta_fast or 32, scaling.beta_slow or 1)
    ]
    low, high = ends if scaling.truncate is False else (math.floor(ends[0]), math.ceil(ends[1]))
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    kept = 1 - np.clip((np.arange(pairs) - low) / (high - low), 0, 1)
    frequencies = plain * kept + plain / scaling.factor * (1 - kept)
    if scaling.mscale and scaling.mscale_all_dim:
        top, bottom = (1 + 0.1 * m * math.log(scaling.factor) for m in (scaling.mscale, scaling.mscale_all_dim))
        return frequencies, top / bottom
    return frequencies, scaling.attention_factor or 1 + 0.1 * math.log(scaling.factor)


def swiglu(at: Reader, config, x: Array) -> Array:
    """`down(silu(gate x) · up x)`."""
    return linear(at, "down_proj", silu(linear(at, "gate_proj", x)) * linear(at, "up_proj", x))


def moe(at: Reader, config, x: Array) -> Array:
    """`Σ_e w_e expert_e(x)` over the best experts of each token."""
    y = np.zeros_like(x)
    s = np.exp(at.linear("gate", x))
    s = s / s.sum(axis=-1, keepdims=True)
    for t, row in enumerate(s):
        best = np.argsort(-row, kind="stable")[: config.num_experts_per_tok]
        w = row[best] / (row[best].sum() if config.norm_topk_prob else 1.0)
        y[t] = sum(w_e * swiglu(at(f"experts.{e}"), config, x[t]) for e, w_e in zip(best, w, strict=True))
    return y
