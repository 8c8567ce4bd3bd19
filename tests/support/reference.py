"""Ling-3 in plain numpy float64, from the equations alone: slow, and the truth the fast code is held to.

One sequence, one token after another: no batch, no cache, no chunks, no absorbed weights, and not a line shared with
`ling3` (only the fields of its config are read). Weights come under their published names and in their published
layout: linear weights `[out, in]`, convolutions `[channels, 1, taps]`, experts one by one. In shapes T is tokens,
D hidden, P rope channels, E experts.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]


def forward(weights: Weights, config, tokens: list[int]) -> tuple[Array, dict[str, Array]]:
    """The logits `[T, vocab]` of one sequence, and each module's output by published name, in the order computed.

    Beside these, `….mlp.gate.margin` `[T]` says how near each token's choice of experts came to another one.
    """
    at = Reader(weights, "model")
    stages = {}
    x = stages["model.word_embeddings"] = at("word_embeddings").weight[np.asarray(tokens)]
    for i in range(config.num_hidden_layers):
        layer = at(f"layers.{i}")
        attention = mla if (i + 1) % config.layer_group_size == 0 else kda
        h = attention(layer("attention"), config, rms_norm(x, layer("input_layernorm").weight, config.rms_norm_eps))
        stages[f"{layer.prefix}.attention"] = h
        x = x + h
        h = rms_norm(x, layer("post_attention_layernorm").weight, config.rms_norm_eps)
        h = swiglu(layer("mlp"), h) if i < config.first_k_dense_replace else moe(layer("mlp"), config, i, h, stages)
        stages[f"{layer.prefix}.mlp"] = h
        x = stages[layer.prefix] = x + h
    x = stages["model.norm"] = rms_norm(x, at("norm").weight, config.rms_norm_eps)
    logits = stages["lm_head"] = x @ weights["lm_head.weight"].T
    return logits, stages


def predict(weights: Weights, config, tokens: list[int], stages: dict[str, Array]) -> None:
    """Adds the logits of each multi-token-prediction layer to `stages`, as `mtp.0` `[T - 1, vocab]`, `mtp.1`, ….

    Layer k joins its predecessor's hidden state of token t (the first layer: the decoder's) with token t + 1 + k.
    """
    at, x, eps = Reader(weights, "model"), stages["model.norm"], config.rms_norm_eps
    for k in range(config.num_nextn_predict_layers or 0):
        i = config.num_hidden_layers + k
        layer = at(f"layers.{i}")
        e = rms_norm(at("word_embeddings").weight[np.asarray(tokens[k + 1 :])], layer("enorm").weight, eps)
        x = layer.linear("eh_proj", np.concatenate([e, rms_norm(x[:-1], layer("hnorm").weight, eps)], axis=-1))
        x = x + mla(layer("attention"), config, rms_norm(x, layer("input_layernorm").weight, eps))
        x = x + moe(layer("mlp"), config, i, rms_norm(x, layer("post_attention_layernorm").weight, eps), stages)
        x = rms_norm(x, layer("final_layernorm").weight, eps)
        stages[f"mtp.{k}"] = x @ weights["lm_head.weight"].T


@dataclasses.dataclass(frozen=True)
class Reader:
    """The weights under one name: `at("mlp")` goes deeper, `at.A_log` is an array, `at.linear("q_proj", x)` applies."""

    weights: Weights
    prefix: str

    def __call__(self, name: str) -> "Reader":
        return Reader(self.weights, f"{self.prefix}.{name}")

    def __getattr__(self, name: str) -> Array:
        return self.weights[f"{self.prefix}.{name}"]

    def linear(self, name: str, x: Array) -> Array:
        return x @ self(name).weight.T


def sigmoid(x: Array) -> Array:
    return np.exp(-np.logaddexp(0.0, -x))


def silu(x: Array) -> Array:
    return x * sigmoid(x)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """`w · x / sqrt(mean(x²) + eps)` over the last axis."""
    return weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)


def kda(at: Reader, config, x: Array) -> Array:
    """Kimi Delta Attention, `[T, D] -> [T, D]`: `S ← exp(g) S`, `S ← S + k b (v - Sᵀk)ᵀ`, `o = Sᵀq`, token by token."""
    length, heads, size = len(x), config.num_attention_heads, config.head_dim
    q, k, v = (
        silu(short_conv(at.linear(f"{n}_proj", x), at(f"{n}_conv1d").weight)).reshape(length, heads, size)
        for n in "qkv"
    )
    q = q / np.sqrt(np.sum(q**2, axis=-1, keepdims=True) + 1e-6) / np.sqrt(size)
    k = k / np.sqrt(np.sum(k**2, axis=-1, keepdims=True) + 1e-6)
    f = (at.linear("f_proj", x) + at.dt_bias).reshape(length, heads, size)
    rate = np.exp(at.A_log.reshape(heads, 1))
    bound = config.kda_lower_bound
    g = -rate * np.logaddexp(0.0, f) if bound is None else bound * sigmoid(rate * f)
    b = sigmoid(at.linear("b_proj", x))
    state, o = np.zeros((heads, size, size)), np.zeros((length, heads, size))
    for t in range(length):
        state = np.exp(g[t])[:, :, None] * state
        u = b[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + np.einsum("hk,hv->hkv", k[t], u)
        o[t] = np.einsum("hkv,hk->hv", state, q[t])
    gate = sigmoid(at.linear("g_proj", x)).reshape(length, heads, size)
    o = rms_norm(o, at("o_norm").weight, config.rms_norm_eps) * gate
    return at.linear("o_proj", o.reshape(length, heads * size))


def short_conv(x: Array, weight: Array) -> Array:
    """Causal depthwise convolution, `y_t = Σ_j w_j x_{t - taps + 1 + j}`, with zeros before the first token."""
    taps = weight.shape[-1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return sum(weight[:, 0, j] * padded[j : j + len(x)] for j in range(taps))


def mla(at: Reader, config, x: Array) -> Array:
    """Multi-head latent attention with one output gate per head, `[T, D] -> [T, D]`; keys and values are expanded."""
    length, heads = len(x), config.num_attention_heads
    nope, rope, value, rank = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim, config.kv_lora_rank
    if config.q_lora_rank is None:
        q = at.linear("q_proj", x)
    else:
        q = at.linear("q_b_proj", rms_norm(at.linear("q_a_proj", x), at("q_a_layernorm").weight, config.rms_norm_eps))
    q = q.reshape(length, heads, nope + rope)
    latent, k_rope = np.split(at.linear("kv_a_proj_with_mqa", x), [rank], axis=-1)
    latent = rms_norm(latent, at("kv_a_layernorm").weight, config.rms_norm_eps)
    k_nope, v = np.split(at.linear("kv_b_proj", latent).reshape(length, heads, nope + value), [nope], axis=-1)
    q_rope = rotate(q[:, :, nope:], config.rope_theta)
    k_rope = rotate(k_rope[:, None, :], config.rope_theta)
    scores = np.einsum("qhc,khc->hqk", q[:, :, :nope], k_nope) + np.einsum("qhc,kxc->hqk", q_rope, k_rope)
    scores = np.where(np.tri(length, dtype=bool), scores / np.sqrt(nope + rope), -np.inf)
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    o = np.einsum("hqk,khv->qhv", p / p.sum(axis=-1, keepdims=True), v)
    o = o * sigmoid(at.linear("g_proj", x))[:, :, None]
    return at.linear("dense", o.reshape(length, heads * value))


def rotate(x: Array, theta: float) -> Array:
    """RoPE on the pairs `(x0, x1), (x2, x3), …` of `[T, heads, P]`: token t turns pair j by `t · theta^(-2j/P)`."""
    length, _, size = x.shape
    turn = np.exp(1j * np.outer(np.arange(length), theta ** (-np.arange(0, size, 2) / size)))[:, None, :]
    y = (x[:, :, 0::2] + 1j * x[:, :, 1::2]) * turn
    return np.stack([y.real, y.imag], axis=-1).reshape(x.shape)


def moe(at: Reader, config, layer: int, x: Array, stages: dict[str, Array]) -> Array:
    """`Σ_e w_e expert_e(x) + shared(x)`, `[T, D] -> [T, D]`, with the clamps of 0-based `layer`, if any."""
    routed, shared = (
        limits[layer] if limits is not None and layer < len(limits) else 0.0
        for limits in (config.expert_swiglu_limit_list, config.share_expert_swiglu_limit_list)
    )
    gate = at("gate")
    w, margin = route(x @ gate.weight.T, gate.expert_bias, config)
    stages[gate.prefix], stages[f"{gate.prefix}.margin"] = w, margin
    y = swiglu(at("shared_experts"), x, shared)
    for e in range(config.num_experts):
        chosen = np.flatnonzero(w[:, e])
        y[chosen] += w[chosen, e, None] * swiglu(at(f"experts.{e}"), x[chosen], routed)
    return y


def route(logits: Array, bias: Array, config) -> tuple[Array, Array]:
    """The weight of each expert, `[T, E]`, zero for those not chosen, and how far, `[T]`, the choice was from another.

    The bias chooses and does not weigh: groups by the sum of their two best biased scores, then experts in the kept
    groups. Of equal scores the first wins.
    """
    length, experts = logits.shape
    s = sigmoid(logits)
    c = s + bias
    by_group = c.reshape(length, config.n_group, experts // config.n_group)
    groups, group_margin = best(np.sort(by_group, axis=-1)[:, :, -2:].sum(axis=-1), config.topk_group)
    c = np.where(groups[:, :, None], by_group, -np.inf).reshape(length, experts)
    chosen, expert_margin = best(c, config.num_experts_per_tok)
    w = np.where(chosen, s, 0.0)
    if config.norm_topk_prob:
        w = w / (w.sum(axis=-1, keepdims=True) + 1e-20)
    return w * config.routed_scaling_factor, np.minimum(group_margin, expert_margin)


def best(scores: Array, count: int) -> tuple[Array, Array]:
    """Which entries of each row are its `count` largest, and how much the last of them leads the next entry by."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    chosen = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(chosen, order[:, :count], True, axis=-1)
    ranked = np.take_along_axis(scores, order, axis=-1)
    if count == scores.shape[1]:
        return chosen, np.full(len(scores), np.inf)
    return chosen, ranked[:, count - 1] - ranked[:, count]


def swiglu(at: Reader, x: Array, limit: float = 0.0) -> Array:
    """`down(silu(gate x) · up x)`; with a limit L > 0, `down(min(silu(gate x), L) · clip(up x, -L, L))`."""
    gate, up = silu(at.linear("gate_proj", x)), at.linear("up_proj", x)
    if limit > 0:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return at.linear("down_proj", gate * up)
