"""Families of transformers and hybrids in numpy float64, from the equations alone, as `reference.py` has Ling-3.

One sequence, without a batch, a cache or pages. Weights come under their published names; of `ling3` only the fields of
a config are read. In shapes T is tokens, D hidden, H heads, d channels of a head.
"""

import math
import types
from collections.abc import Callable

import numpy as np
import reference
from reference import Array, Reader, Weights, rms_norm, short_conv, sigmoid, silu


def forward(weights: Weights, config, tokens: list[int]) -> Array:
    """The logits `[T, vocab]` of one sequence."""
    at = reader(weights)
    head = at("embed_tokens") if config.tie_word_embeddings else Reader(at.weights, "lm_head")
    return hidden(at, config, tokens) @ head.weight.T


def reader(weights: Weights) -> Reader:
    """The weights of the decoder in float64."""
    nested = "model.language_model" if "model.language_model.norm.weight" in weights else "model"
    return Reader({name: np.asarray(array, np.float64) for name, array in weights.items()}, nested)


def hidden(at: Reader, config, tokens: list[int]) -> Array:
    """The normed hidden states `[T, D]`."""
    x, streams = at("embed_tokens").weight[np.asarray(tokens)], getattr(config, "hc_mult", None)
    x = x if streams is None else np.repeat(x[:, None], streams, axis=1)
    for i in range(config.num_hidden_layers):
        x = decoded(at(f"layers.{i}"), config, i, x)
    return norm(at, "norm", config, x if streams is None else x.mean(axis=1))


def decoded(layer: Reader, config, i: int, x: Array) -> Array:
    """The residual stream after a layer, `[T, D]`, or all of them, `[T, N, D]`."""
    feed_forward = moe if f"{layer.prefix}.mlp.gate.weight" in layer.weights else swiglu

    def attend(h: Array) -> Array:
        return mixed(layer, config, i, norm(layer, "input_layernorm", config, h))

    def feed(h: Array) -> Array:
        return feed_forward(layer("mlp"), config, norm(layer, "post_attention_layernorm", config, h))

    return connected(layer, "hc_ffn", config, connected(layer, "hc_attn", config, x, attend), feed)


def connected(layer: Reader, name: str, config, x: Array, block: Callable[[Array], Array]) -> Array:
    """`x + block(x)`; N streams are mixed by manifold-constrained hyper-connections (arXiv 2512.24880)."""
    if x.ndim == 2:
        return x + block(x)
    fn, base, scale = (layer.weights[f"{layer.prefix}.{name}_{part}"] for part in ("fn", "base", "scale"))
    n, eps = config.hc_mult, config.hc_eps
    w = rms_norm(x.reshape(len(x), -1), 1.0, config.rms_norm_eps) @ fn.T
    pre = sigmoid(w[:, :n] * scale[0] + base[:n]) + eps
    post = 2 * sigmoid(w[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    c = np.exp(w[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
    c = c / c.sum(axis=2, keepdims=True) + eps
    for iteration in range(config.hc_sinkhorn_iters):
        c = c / (c.sum(axis=2, keepdims=True) + eps) if iteration else c
        c = c / (c.sum(axis=1, keepdims=True) + eps)
    return post[:, :, None] * block(np.einsum("tn,tnd->td", pre, x))[:, None] + np.einsum("tij,tid->tjd", c, x)


def norm(at: Reader, name: str, config, x: Array) -> Array:
    """RMSNorm, in Qwen's hybrids with 1 + w in place of w."""
    zero_centered = hasattr(config, "linear_num_value_heads")
    return rms_norm(x, at(name).weight + zero_centered, config.rms_norm_eps)


def mixed(layer: Reader, config, i: int, x: Array) -> Array:
    """The attention of a layer, of the kind whose weights it has."""
    if f"{layer.prefix}.linear_attn.A_log" in layer.weights:
        return gated_deltanet(layer("linear_attn"), config, x)
    if f"{layer.prefix}.self_attn.A_log" in layer.weights:
        return kda(layer("self_attn"), config, x)
    if f"{layer.prefix}.self_attn.indexer.wk.weight" in layer.weights:
        return indexed_attention(layer("self_attn"), config, x)
    if f"{layer.prefix}.self_attn.kv_b_proj.weight" in layer.weights:
        return latent_attention(layer("self_attn"), config, x)
    return attention(layer("self_attn"), config, i, x)


def linear(at: Reader, name: str, x: Array) -> Array:
    """`W x`, and `+ b` if there is one."""
    return at.linear(name, x) + at.weights.get(f"{at.prefix}.{name}.bias", 0.0)


def attention(at: Reader, config, layer: int, x: Array) -> Array:
    """Grouped-query attention, `[T, D] -> [T, D]`."""
    length, size, group = len(x), config.head_dim, config.num_attention_heads // config.num_key_value_heads
    q, k, v = (linear(at, f"{n}_proj", x) for n in "qkv")
    gated = q.shape[1] == 2 * config.num_attention_heads * size
    q, gate = np.split(q.reshape(length, -1, (1 + gated) * size), [size], axis=-1)
    k, v = (h.reshape(length, -1, size) for h in (k, v))
    if f"{at.prefix}.q_norm.weight" in at.weights:
        q, k = norm(at, "q_norm", config, q), norm(at, "k_norm", config, k)
    frequencies, magnitude = rope(config)
    turned = 2 * len(frequencies)
    q, k = (
        np.concatenate([magnitude * rotate(h[..., :turned], frequencies), h[..., turned:]], axis=-1) for h in (q, k)
    )
    k, v = (np.repeat(h, group, axis=1) for h in (k, v))
    seen = np.tri(length, dtype=bool)
    if (window := window_of(config, layer)) is not None:
        seen &= ~np.tri(length, k=-window, dtype=bool)
    scores = np.where(seen, np.einsum("qhd,khd->hqk", q, k) / math.sqrt(size), -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    o = np.einsum("hqk,khd->qhd", p / p.sum(axis=-1, keepdims=True), v)
    o = o * sigmoid(gate) if gated else o
    return linear(at, "o_proj", o.reshape(length, -1))


def latent_attention(at: Reader, config, x: Array) -> Array:
    """DeepSeek-V3's multi-head latent attention (arXiv 2405.04434, §2.1), `[T, D] -> [T, D]`, with expanded keys."""
    length, nope, scaling = len(x), config.qk_nope_head_dim, config.rope_scaling
    q = at.linear("q_proj", x) if config.q_lora_rank is None else at.linear("q_a_proj", x)
    if config.q_lora_rank is not None:
        q = at.linear("q_b_proj", rms_norm(q, at("q_a_layernorm").weight, 1e-6))
    q = q.reshape(length, config.num_attention_heads, -1)
    latent, shared = np.split(at.linear("kv_a_proj_with_mqa", x), [config.kv_lora_rank], axis=-1)
    kv = at.linear("kv_b_proj", rms_norm(latent, at("kv_a_layernorm").weight, 1e-6))
    k, v = np.split(kv.reshape(length, config.num_attention_heads, -1), [nope], axis=-1)
    frequencies, magnitude = rope(config)
    halves = np.argsort(np.arange(2 * len(frequencies)) % 2, kind="stable")  # pairs of neighbours as halves
    q_rope, k_rope = (magnitude * rotate(h[..., halves], frequencies) for h in (q[..., nope:], shared[:, None]))
    scores = np.einsum("qhc,khc->hqk", q[..., :nope], k) + np.einsum("qhc,kxc->hqk", q_rope, k_rope)
    scale = q.shape[-1] ** -0.5
    if scaling is not None and scaling.mscale_all_dim:
        scale *= (1 + 0.1 * scaling.mscale_all_dim * math.log(scaling.factor)) ** 2
    scores = np.where(np.tri(length, dtype=bool), scale * scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    o = np.einsum("hqk,khv->qhv", p / p.sum(axis=-1, keepdims=True), v)
    return at.linear("o_proj", o.reshape(length, -1))


def kda(at: Reader, config, x: Array) -> Array:
    """Kimi Delta Attention with low-rank gates, which are multiplied out, and a bounded decay, `[T, D] -> [T, D]`."""
    own = config.linear_attn_config
    gates = {f"{at.prefix}.{g}_proj.weight": at(f"{g}_b_proj").weight @ at(f"{g}_a_proj").weight for g in "fg"}
    sizes = {"num_attention_heads": own.num_heads, "head_dim": own.head_dim, "kda_lower_bound": own.gate_lower_bound}
    settings = types.SimpleNamespace(**sizes, rms_norm_eps=config.rms_norm_eps)
    return reference.kda(Reader({**at.weights, **gates}, at.prefix), settings, x)


def indexed_attention(at: Reader, config, x: Array) -> Array:
    """Latent attention without positions to the tokens that an indexer selects (GLM-5.3-Flash), `[T, D] -> [T, D]`."""
    length, nope, eps = len(x), config.qk_nope_head_dim, config.rms_norm_eps
    qa = rms_norm(at.linear("q_a_proj", x), at("q_a_layernorm").weight, eps)
    q = at.linear("q_b_proj", qa).reshape(length, config.num_attention_heads, nope)
    latent = rms_norm(at.linear("kv_a_proj_with_mqa", x), at("kv_a_layernorm").weight, eps)
    kv = at.linear("kv_b_proj", latent).reshape(length, config.num_attention_heads, -1)
    k, v = np.split(kv, [nope], axis=-1)
    scores = np.einsum("qhc,khc->hqk", q, k) / math.sqrt(nope)
    scores = np.where(selected(at("indexer"), config, x, qa), scores, -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    o = np.einsum("hqk,khv->qhv", p / p.sum(axis=-1, keepdims=True), v)
    return at.linear("o_proj", o.reshape(length, -1))


def selected(at: Reader, config, x: Array, qa: Array) -> Array:
    """The tokens that each query sees, `[T, T]`: those of its best complete pools, and of the incomplete one."""
    length, size, top = len(x), config.index_kpool, config.index_topk // config.index_kpool
    k = at.linear("wk", x)
    k = (k - k.mean(axis=-1, keepdims=True)) / np.sqrt(k.var(axis=-1, keepdims=True) + 1e-6)
    k, s = k * at("k_norm").weight + at("k_norm").bias, x @ at.index_kpool_compress_gate.T
    keys = []
    for first in range(0, length - size + 1, size):
        p = np.exp(s[first : first + size] + at.index_kpool_compress_ape)
        keys.append(np.sum(p / p.sum(axis=0) * k[first : first + size], axis=0))
    q = at.linear("wq_b", qa).reshape(length, config.index_n_heads, -1)
    a, seen = at.linear("weights_proj", x), np.zeros((length, length), bool)
    for t in range(length):
        complete = (t + 1) // size
        scores = [a[t] @ np.maximum(q[t] @ key, 0.0) for key in keys[:complete]]
        for pool in np.argsort([-score for score in scores], kind="stable")[:top]:
            seen[t, size * pool : size * (pool + 1)] = True
        seen[t, size * complete : t + 1] = True
    return seen


def gated_deltanet(at: Reader, config, x: Array) -> Array:
    """Gated DeltaNet (arXiv 2412.06464, §3), `[T, D] -> [T, D]`, token by token; each key head serves R value heads."""
    length, heads, size = len(x), config.linear_num_key_heads, config.linear_key_head_dim
    repeats, value = config.linear_num_value_heads // heads, config.linear_value_head_dim
    if f"{at.prefix}.in_proj_qkvz.weight" in at.weights:
        qkvz = at.linear("in_proj_qkvz", x).reshape(length, heads, -1)
        *qkv, z = np.split(qkvz, np.cumsum([size, size, repeats * value]), axis=-1)
        qkv = np.concatenate([part.reshape(length, -1) for part in qkv], axis=-1)
        b, a = np.split(at.linear("in_proj_ba", x).reshape(length, heads, -1), [repeats], axis=-1)
    else:
        qkv, z, b, a = (at.linear(f"in_proj_{name}", x) for name in ("qkv", "z", "b", "a"))
    z, b, a = z.reshape(length, -1, value), b.reshape(length, -1), a.reshape(length, -1)
    qkv = silu(short_conv(qkv, at("conv1d").weight))
    q, k, v = np.split(qkv, [heads * size, 2 * heads * size], axis=-1)
    q, k = (h.reshape(length, heads, size) for h in (q, k))
    q, k = (np.repeat(h / np.sqrt(np.sum(h**2, -1, keepdims=True) + 1e-6), repeats, axis=1) for h in (q, k))
    v, beta = v.reshape(length, -1, value), sigmoid(b)
    decay = np.exp(-np.exp(at.A_log) * np.logaddexp(0.0, a + at.dt_bias))
    state, o = np.zeros((heads * repeats, size, value)), np.zeros_like(v)
    for t in range(length):
        state = decay[t][:, None, None] * state
        u = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + np.einsum("hk,hv->hkv", k[t], u)
        o[t] = np.einsum("hkv,hk->hv", state, q[t]) / math.sqrt(size)
    o = rms_norm(o, at("norm").weight, config.rms_norm_eps) * silu(z)
    return at.linear("out_proj", o.reshape(length, -1))


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
    pairs = int(config.head_dim * getattr(config, "partial_rotary_factor", 1.0)) // 2
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
    """`down(silu(gate x) · up x)`, with a limit L `down(silu(min(gate x, L)) · clip(up x, -L, L))`."""
    limit = getattr(config, "swiglu_limit", np.inf)
    up = np.clip(linear(at, "up_proj", x), -limit, limit)
    return linear(at, "down_proj", silu(np.minimum(linear(at, "gate_proj", x), limit)) * up)


def moe(at: Reader, config, x: Array) -> Array:
    """`Σ_e w_e expert_e(x)` over the best experts of each token, and the shared expert."""
    y, bias = np.zeros_like(x), at.weights.get(f"{at.prefix}.gate.e_score_correction_bias")
    if bias is None:
        s = np.exp(at.linear("gate", x))
        s = s / s.sum(axis=-1, keepdims=True)
    else:
        s = sigmoid(at.linear("gate", x))
    for t, row in enumerate(s):
        best = chosen(row if bias is None else row + bias, config)
        w = row[best] / (row[best].sum() if getattr(config, "norm_topk_prob", True) else 1.0)
        w = w * getattr(config, "routed_scaling_factor", 1.0)
        y[t] = sum(w_e * swiglu(at(f"experts.{e}"), config, x[t]) for e, w_e in zip(best, w, strict=True))
    if f"{at.prefix}.shared_experts.up_proj.weight" in at.weights:
        y += swiglu(at("shared_experts"), config, x)
    if f"{at.prefix}.shared_expert.up_proj.weight" in at.weights:
        y += sigmoid(at.linear("shared_expert_gate", x)) * swiglu(at("shared_expert"), config, x)
    return y


def chosen(scores: Array, config) -> Array:
    """The best experts of a token, out of the groups with the largest sums of their two best experts."""
    groups = np.array_split(scores, getattr(config, "n_group", 1))
    if len(groups) > 1:
        sums = np.array([np.sort(group)[-2:].sum() for group in groups])
        kept = np.argsort(-sums, kind="stable")[: config.topk_group]
        scores = np.concatenate([own if g in kept else np.full_like(own, -np.inf) for g, own in enumerate(groups)])
    return np.argsort(-scores, kind="stable")[: config.num_experts_per_tok]
