"""DeepSeek-V4 in plain numpy float64, from the equations alone: slow, and the truth that fast code is held to.

One sequence, token by token and compressed entry by compressed entry: no batch, no cache, no masks, and not a line
shared with `ling3`. The sections are those of the DeepSeek-V4 report: hash routing §2.1, manifold-constrained
hyper-connections (mHC) §2.2, compressed sparse (CSA) and heavily compressed attention (HCA) §2.3.

In shapes T is tokens, d hidden, n residual streams, H heads, D channels of a head, R those of them that are rotated,
m tokens of a compressed entry, E experts. Weights come under their release names, `[out, in]`.
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from reference import Array, Reader, rms_norm, sigmoid, silu
from safetensors import safe_open


@dataclasses.dataclass(frozen=True)
class Config:
    """`config.json`, in the release's spelling or in transformers'."""

    raw: Mapping[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.raw[name]

    @property
    def kinds(self) -> list[str]:
        """Each layer's attention: "sliding", "csa" or "hca"."""
        if "layer_types" in self.raw:
            short = {"sliding": "sliding", "compressed": "csa", "heavily": "hca"}
            return [short[kind.partition("_")[0]] for kind in self.raw["layer_types"]]
        return [{0: "sliding", 4: "csa"}.get(ratio, "hca") for ratio in self.ratios]

    @property
    def ratios(self) -> list[int]:
        """The m of each layer, 0 where nothing is compressed; ratios past the last layer are those of MTP."""
        if "layer_types" in self.raw:
            rates = {"sliding_attention": 0} | self.raw["compress_rates"]
            return [rates[kind] for kind in self.raw["layer_types"]]
        return self.raw["compress_ratios"][: self.num_hidden_layers]

    @property
    def hashed(self) -> list[bool]:
        """Whether each layer's experts are looked up by the token's id."""
        if "mlp_layer_types" in self.raw:
            return [kind == "hash_moe" for kind in self.raw["mlp_layer_types"]]
        return [i < self.num_hash_layers for i in range(self.num_hidden_layers)]

    @property
    def rope(self) -> int:
        """R."""
        if "qk_rope_head_dim" in self.raw:
            return self.raw["qk_rope_head_dim"]
        return int(self.head_dim * self.partial_rotary_factor)

    def frequencies(self, kind: str) -> Array:
        """The radians per token of each of the R/2 pairs: θ^(-2i/R), which YaRN lowers in layers that compress."""
        if "rope_parameters" in self.raw:
            parameters = self.raw["rope_parameters"]["main" if kind == "sliding" else "compress"]
        elif kind == "sliding":
            parameters = {"rope_theta": self.rope_theta}
        else:
            parameters = {"rope_theta": self.compress_rope_theta} | (self.rope_scaling or {})
        i, size, theta = np.arange(self.rope // 2), self.rope, float(parameters["rope_theta"])
        f = theta ** (-2 * i / size)
        if parameters.get("rope_type", parameters.get("type", "default")) == "default":
            return f

        def turning(rotations: float) -> float:
            """The pair, as a real number, that turns this often within the original context."""
            context = parameters["original_max_position_embeddings"]
            return size * np.log(context / (2 * np.pi * rotations)) / (2 * np.log(theta))

        low = max(np.floor(turning(parameters.get("beta_fast", 32))), 0)
        high = min(np.ceil(turning(parameters.get("beta_slow", 1))), size - 1)
        if low == high:
            high += 0.001
        u = np.clip((i - low) / (high - low), 0, 1)
        return u * f / parameters["factor"] + (1 - u) * f


def read(directory: pathlib.Path) -> tuple[Config, dict[str, Array]]:
    """The config and the float64 weights (ids stay integers), under release names, of an unquantised checkpoint.

    The tensors may have the release's names, those of transformers' modules, or the ones that `save_pretrained` writes.
    """
    weights = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="np") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    return Config(json.loads((directory / "config.json").read_text())), wide(release_names(weights))


def wide(weights: Mapping[str, Array]) -> dict[str, Array]:
    """The weights in float64; ids stay integers."""
    return {name: w if w.dtype.kind == "i" else w.astype(np.float64) for name, w in weights.items()}


RENAMED = (
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.compressor\.indexer\.(scorer|q_b_proj)\b", r".indexer.\1"),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"\.scorer\.", "."),
    (r"\.compressor\.kv_norm\.", ".compressor.norm."),
    (r"\.attn\.norm\.", ".attn.kv_norm."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.([qo])_([ab])_proj\.", r".w\1_\2."),
    (r"\.kv_proj\.", ".wkv."),
    (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
    (r"\.position_bias$", ".ape"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.e_score_correction_bias$", ".bias"),
    (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."),
)
"""Both of transformers' namings to the release's, in this order; release names stay as they are."""


def release_names(weights: Mapping[str, Array]) -> dict[str, Array]:
    """The same tensors under release names, experts one by one, without those of multi-token prediction."""
    named = {}
    for own, array in weights.items():
        name = own
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        if name.startswith("mtp."):
            continue
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            prefix, _, part = name.rpartition(".")
            for e, expert in enumerate(array):
                if part == "down_proj":
                    named[f"{prefix}.{e}.w2.weight"] = expert
                else:
                    named[f"{prefix}.{e}.w1.weight"], named[f"{prefix}.{e}.w3.weight"] = np.split(expert, 2)
        else:
            named[name] = array
    return named


def forward(weights: Mapping[str, Array], config: Config, tokens: list[int]) -> tuple[Array, dict[str, Array]]:
    """The logits `[T, vocab]` of one sequence, and what was computed on the way, by release name and in that order.

    Of layer i: `layers.i` has the streams `[T, n, d]` after it; `layers.i.attn_norm` and `layers.i.attn` attention's
    input and output `[T, d]`, and `layers.i.hc_attn` post and the rows of C, `[T, n + n²]`; `layers.i.ffn_norm`,
    `layers.i.ffn` and `layers.i.hc_ffn` are the same of the experts. `layers.i.attn.compressor` and
    `layers.i.attn.indexer.compressor` have the entries, `layers.i.attn.indexer` those chosen, `[T, entries]` of 0 and
    1; `layers.i.ffn.gate` each expert's weight, `[T, E]`. A name that ends in `.margin` has how near each token's
    choice of entries or experts came to another one, `[T]`.
    """
    stages: dict[str, Array] = {}
    x = stages["embed"] = weights["embed.weight"][np.asarray(tokens)]
    streams = np.repeat(x[:, None, :], config.hc_mult, axis=1)
    for i in range(config.num_hidden_layers):
        layer = Reader(weights, f"layers.{i}")
        for part in ("attn", "ffn"):
            mixed = [mix(layer, f"hc_{part}", config, streams[t]) for t in range(len(tokens))]
            stages[f"{layer.prefix}.hc_{part}"] = np.stack([np.append(post, c) for _, post, c in mixed])
            h = np.stack([pre @ streams[t] for t, (pre, _, _) in enumerate(mixed)])
            h = stages[f"{layer.prefix}.{part}_norm"] = rms_norm(h, layer(f"{part}_norm").weight, config.rms_norm_eps)
            if part == "attn":
                o = attention(layer("attn"), config, i, h, stages)
            else:
                routed = [moe(layer("ffn"), config, i, h[t], tokens[t]) for t in range(len(tokens))]
                o, gate, margin = (np.stack(each) for each in zip(*routed, strict=True))
                stages[f"{layer.prefix}.ffn.gate"], stages[f"{layer.prefix}.ffn.gate.margin"] = gate, margin
            stages[f"{layer.prefix}.{part}"] = o
            # C is read transposed: stream k takes C[j, k] of stream j.
            streams = np.stack([np.outer(post, o[t]) + c.T @ streams[t] for t, (_, post, c) in enumerate(mixed)])
        stages[layer.prefix] = streams
    x = stages["hc_head"] = np.stack([collapse(weights, config, streams[t]) for t in range(len(tokens))])
    x = stages["norm"] = rms_norm(x, weights["norm.weight"], config.rms_norm_eps)
    logits = stages["head"] = x @ weights["head.weight"].T
    return logits, stages


def mix(at: Reader, name: str, config: Config, streams: Array) -> tuple[Array, Array, Array]:
    """mHC's pre `[n]`, post `[n]` and C `[n, n]` of one token, which Sinkhorn's iterations make doubly stochastic."""
    n, eps = config.hc_mult, config.hc_eps
    fn, base, scale = (at.weights[f"{at.prefix}.{name}_{field}"] for field in ("fn", "base", "scale"))
    z = fn @ rms_norm(streams.ravel(), 1.0, config.rms_norm_eps)
    pre = sigmoid(z[:n] * scale[0] + base[:n]) + eps
    post = 2 * sigmoid(z[n : 2 * n] * scale[1] + base[n : 2 * n])
    c = np.stack([softmax(row) for row in (z[2 * n :] * scale[2] + base[2 * n :]).reshape(n, n)]) + eps
    for iteration in range(config.hc_sinkhorn_iters):
        if iteration > 0:
            c = c / (c.sum(axis=1, keepdims=True) + eps)
        c = c / (c.sum(axis=0, keepdims=True) + eps)
    return pre, post, c


def collapse(weights: Mapping[str, Array], config: Config, streams: Array) -> Array:
    """The head's sum of the n streams of one token, `[d]`."""
    fn, base, scale = (weights[f"hc_head_{field}"] for field in ("fn", "base", "scale"))
    z = fn @ rms_norm(streams.ravel(), 1.0, config.rms_norm_eps)
    return (sigmoid(z * scale + base) + config.hc_eps) @ streams


def attention(at: Reader, config: Config, layer: int, x: Array, stages: dict[str, Array]) -> Array:
    """One key, which is the value too, for all heads: of the last tokens and of compressed entries; `[T, d] -> [T, d]`.

    Each head has a sink: one more score in the softmax, whose value is zero. Values are rotated, since they are the
    keys, so the output is rotated back by the query's position.
    """
    length, heads, size, eps = len(x), config.num_attention_heads, config.head_dim, config.rms_norm_eps
    kind, m = config.kinds[layer], config.ratios[layer]
    f = config.frequencies(kind)
    kv = [rotate(rms_norm(at.linear("wkv", x[t]), at("kv_norm").weight, eps), t * f) for t in range(length)]
    qa = [rms_norm(at.linear("wq_a", x[t]), at("q_norm").weight, eps) for t in range(length)]
    entries, keys = [], []
    if kind != "sliding":
        entries = compress(at("compressor"), config, kind == "csa", m, x, f)
        stages[f"{at.prefix}.compressor"] = np.reshape(entries, (-1, size))
    if kind == "csa":
        keys = compress(at("indexer.compressor"), config, True, m, x, f)
        stages[f"{at.prefix}.indexer.compressor"] = np.reshape(keys, (-1, config.index_head_dim))
        chosen = stages[f"{at.prefix}.indexer"] = np.zeros((length, len(keys)))
        margin = stages[f"{at.prefix}.indexer.margin"] = np.full(length, np.inf)
    y = []
    for t in range(length):
        q = at.linear("wq_b", qa[t]).reshape(heads, size)
        q = np.stack([rotate(rms_norm(head, 1.0, eps), t * f) for head in q])
        seen = range((t + 1) // m) if m else range(0)
        if kind == "csa":
            seen, margin[t] = choose(at("indexer"), config, x[t], qa[t], keys[: len(seen)], t * f)
            chosen[t, list(seen)] = 1
        first = max(0, t - config.sliding_window + 1)
        keys_and_values = np.stack([*kv[first : t + 1], *(entries[w] for w in seen)])
        o = []
        for head in range(heads):
            scores = keys_and_values @ q[head] / np.sqrt(size)
            p = softmax(np.append(scores, at.attn_sink[head]))[:-1]
            o.append(rotate(p @ keys_and_values, -t * f))
        groups = np.reshape(o, (config.o_groups, -1))
        wo_a = at("wo_a").weight.reshape(config.o_groups, config.o_lora_rank, -1)
        y.append(at.linear("wo_b", np.concatenate([w @ group for w, group in zip(wo_a, groups, strict=True)])))
    return np.stack(y)


def compress(at: Reader, config: Config, overlaps: bool, m: int, x: Array, f: Array) -> list[Array]:
    """An entry for each full block of m tokens: a mean of its values, weighed per channel; `[T, d] -> T//m of [D]`.

    With overlap each token has two values, each with a score: the first goes into the next block's entry, the second
    into its own block's. An entry is then a mean of 2m values, but the first entry of its block's m only.
    """
    values, scores = at.linear("wkv", x), at.linear("wgate", x)
    size = values.shape[1] // (2 if overlaps else 1)
    entries = []
    for w in range(len(x) // m):
        slots = [(values[t, -size:], scores[t, -size:] + at.ape[t % m, -size:]) for t in range(w * m, w * m + m)]
        if overlaps and w > 0:
            before = range(w * m - m, w * m)
            slots = [(values[t, :size], scores[t, :size] + at.ape[t % m, :size]) for t in before] + slots
        p = softmax(np.stack([score for _, score in slots]))
        entry = np.sum(p * np.stack([value for value, _ in slots]), axis=0)
        entries.append(rotate(rms_norm(entry, at("norm").weight, config.rms_norm_eps), w * m * f))
    return entries


def choose(
    at: Reader, config: Config, x: Array, qa: Array, keys: list[Array], angles: Array
) -> tuple[list[int], float]:
    """The `index_topk` entries of the highest scores, in their order, and by how much the last leads the next one.

    Of equal scores the earlier entry wins.
    """
    heads, size = config.index_n_heads, config.index_head_dim
    q = [rotate(head, angles) for head in at.linear("wq_b", qa).reshape(heads, size)]
    a = at.linear("weights_proj", x) / np.sqrt(heads)
    scores = [sum(a[h] * max(q[h] @ key, 0.0) for h in range(heads)) / np.sqrt(size) for key in keys]
    ranked = sorted(range(len(keys)), key=lambda w: -scores[w])
    count = min(config.index_topk, len(keys))
    margin = scores[ranked[count - 1]] - scores[ranked[count]] if len(keys) > count else np.inf
    return sorted(ranked[:count]), margin


def rotate(x: Array, angles: Array) -> Array:
    """RoPE of the last R channels: pair i of them, `(x_{2i}, x_{2i+1})`, turns by `angles[i]`."""
    rest, rotated = np.split(x, [len(x) - 2 * len(angles)])
    a, b = rotated[0::2], rotated[1::2]
    turned = np.stack([a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)], axis=-1)
    return np.concatenate([rest, turned.ravel()])


def moe(at: Reader, config: Config, layer: int, x: Array, token: int) -> tuple[Array, Array, float]:
    """`Σ_e w_e expert_e(x) + shared(x)` of one token, `[d]`; all w, `[E]`; and how near the choice came to another one.

    The bias, or the token's id, chooses only.
    """
    gate = at("gate")
    score = SCORES[config.raw.get("scoring_func", "sqrtsoftplus")](at.linear("gate", x))
    if config.hashed[layer]:
        experts, margin = gate.tid2eid[token], np.inf
    else:
        biased = score + gate.bias
        ranked = sorted(range(len(score)), key=lambda e: -biased[e])
        experts, others = ranked[: config.num_experts_per_tok], ranked[config.num_experts_per_tok :]
        margin = biased[experts[-1]] - biased[others[0]] if others else np.inf
    w, y = np.zeros_like(score), expert(at("shared_experts"), config, x)
    for e in experts:
        w[e] = score[e] / (sum(score[e] for e in experts) + 1e-20) * config.routed_scaling_factor
        y = y + w[e] * expert(at(f"experts.{e}"), config, x)
    return y, w, margin


def expert(at: Reader, config: Config, x: Array) -> Array:
    """`w2(silu(min(w1 x, L)) · clip(w3 x, -L, L))`: the limit precedes silu and bounds the gate from above only."""
    limit = config.swiglu_limit
    return at.linear("w2", silu(np.minimum(at.linear("w1", x), limit)) * np.clip(at.linear("w3", x), -limit, limit))


def softmax(x: Array) -> Array:
    """Of a vector; of each column of a matrix."""
    p = np.exp(x - x.max(axis=0))
    return p / p.sum(axis=0)


SCORES = {"sqrtsoftplus": lambda z: np.sqrt(np.logaddexp(0.0, z)), "sigmoid": sigmoid, "softmax": softmax}
