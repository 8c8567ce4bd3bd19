# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 11. How DeepSeek-V4 remembers
#
# A transformer's cache grows by the same number of bytes with every token, in every layer. DeepSeek-V4-Flash has 43
# layers and a context of a million tokens, and keeps of each token a thirteenth of what MLA would. It does so with
# *summaries*: a layer attends to the last 128 tokens one by one, and to what lies behind them in entries that stand for
# 4 or for 128 tokens. This notebook takes that memory apart: what is written when, who may read what, how an entry is
# made and chosen, and what it all costs.
#
# **You need**: softmax attention with a KV cache, and RoPE. MLA and the memory of KDA (notebooks 3 and 7) are what it
# is compared with at the end.
#
# **Afterwards you can** say which bytes a token leaves behind and when, compute a compressed entry by hand, predict
# which earlier tokens can influence an output, and size the cache of a long sequence.
#
# **It takes** two minutes on two cores, and 1.1 GB of memory.

# %%
import dataclasses
import itertools
import operator

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

import ling3
from ling3.cache import CacheSpec, Span, is_paged
from ling3.families.deepseek_v4_config import DeepseekV4Config
from ling3.families.llama import LlamaConfig
from ling3.interpret.inspect import report
from ling3.layers.csa import rotate_last
from ling3.layers.hyper import sinkhorn
from ling3.ops import packed_kv
from ling3.ops.compressed_attention import highest
from ling3.runtime import plots
from ling3.runtime.recorder import Recorder

plots.use()
LOOKS = {
    "SWA": {"color": plots.BLUE, "marker": "o", "linestyle": "-"},
    "CSA": {"color": plots.RED, "marker": "s", "linestyle": "--"},
    "HCA": {"color": plots.GREEN, "marker": "^", "linestyle": "-."},
}


def table(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


# %% [markdown]
# ## Two models
#
# V4-Flash as published, of which only shapes are computed here, and a small one with random weights, which runs. There
# are three kinds of layers:
#
# - **SWA**, sliding-window attention: the last $W$ tokens, and nothing else;
# - **CSA**, compressed sparse attention: the window, and of the entries of $m = 4$ tokens those that an *indexer*
#   chooses;
# - **HCA**, heavily compressed attention: the window, and all entries of $m = 128$ tokens.
#
# The small model has one layer of each, with $W = 16$ instead of 128, 16 tokens to an entry of HCA instead of 128, and
# 4 chosen entries instead of 512. Sinks and biases begin at zero; here they are drawn at random, so that they matter.

# %%
FLASH = {
    "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "num_attention_heads": 64,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8,
    "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 512, "n_routed_experts": 256,
    "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "num_hash_layers": 3,
    "max_position_embeddings": 1048576, "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65536},
}  # fmt: skip
SMALL = {
    **{name: value for name, value in FLASH.items()
       if name not in ("compress_ratios", "rope_scaling")},
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3,
    "num_attention_heads": 4, "head_dim": 16,
    "layer_types": ["sliding_attention", "compressed_sparse_attention",
                    "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4,
                       "heavily_compressed_attention": 16},
    "qk_rope_head_dim": 4, "q_lora_rank": 12, "o_groups": 2, "o_lora_rank": 8,
    "sliding_window": 16, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
    "num_hash_layers": 1, "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
DRAWS = np.random.default_rng(7)


def drawn(path, x):
    """Random numbers for what begins at 0: sinks, biases of positions and mixings."""
    name = path[-1].name
    return x + 0.5 * DRAWS.standard_normal(x.shape).astype(x.dtype) if name in ("attn_sink", "ape", "base") else x


flash = report(DeepseekV4Config.from_dict(FLASH))
config = DeepseekV4Config.from_dict(SMALL)
fresh = eqx.filter_jit(ling3.init)(config, key=jax.random.key(0), dtype=jnp.float32)
model = jax.tree_util.tree_map_with_path(drawn, fresh)
layers = {layer.attention.kind: layer.attention for layer in model.model.layers}
flash_kinds = [layer.attention.kind for layer in flash.model.model.layers]
assert list(layers) == ["SWA", "CSA", "HCA"]
assert 284e9 < flash.parameters < 285e9 and flash_kinds == ["SWA", "SWA", *["CSA", "HCA"] * 20, "CSA"]
print(f"V4-Flash: {flash.parameters / 1e9:.0f} billion parameters;", " ".join(flash_kinds[:7]), "…")

# %% [markdown]
# ## What a token leaves behind
#
# Feed the small model one token at a time and compare its state before and after. A layer has up to five arrays:
#
# - `window`: one vector for each of the last $W - 1$ tokens. It is key *and* value, for all heads: V4 has a single head
#   of keys. (The query's own token is the $W$-th; its vector is computed in the same step.)
# - `compressor.entries`: the finished entries, in pages. This is the only part that grows;
# - `compressor.tail`: what the last tokens contribute to entries that are not finished, in float32;
# - `indexer.entries` and `indexer.tail`: the same for the keys by which CSA chooses entries.

# %%
T = 64
tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (1, T)), jnp.int32)


def arrays(states):
    """The arrays of a cache as numpy's, by (kind, name)."""
    found = jax.tree_util.tree_leaves_with_path(states)
    names = [jax.tree_util.keystr(path, simple=True, separator=".").split(".", 1) for path, _ in found]
    kinds = list(layers)
    return {
        (kinds[int(i)], name.replace("entries.entries", "entries")): np.asarray(x)
        for (i, name), (_, x) in zip(names, found)
    }


cache = model.init_cache(1, T)
snapshots = [arrays(cache.layers)]
for t in range(T):
    _, cache = model.step(tokens[:, t : t + 1], cache)
    snapshots.append(arrays(cache.layers))
changed = {
    name: np.array([np.any(after[name] != before[name]) for before, after in itertools.pairwise(snapshots)])
    for name in snapshots[0]
}

t = np.arange(T)
every = {"CSA": 4, "HCA": 16}
for (kind, name), when in changed.items():
    expected = (t + 1) % every[kind] == 0 if name.endswith("entries") else np.ones(T, bool)
    np.testing.assert_array_equal(when, expected, err_msg=f"{kind} {name}")
for before, after in itertools.pairwise(snapshots):  # all but the newest vector moved up by one place
    np.testing.assert_array_equal(after["SWA", "window"][:, :-1], before["SWA", "window"][:, 1:])

fig, ax = plt.subplots(figsize=(9, 2.9))
for row, ((kind, _), when) in enumerate(changed.items()):
    ax.scatter(t[when], np.full(when.sum(), row), s=16, color=LOOKS[kind]["color"], marker=LOOKS[kind]["marker"])
ax.set_yticks(range(len(changed)), [f"{kind} {name}" for kind, name in changed], fontsize=9)
ax.set(xlabel="token", xticks=range(0, T + 1, 4))
ax.set_title("Which arrays a token changes in a small random DeepSeek-V4", fontsize=11)
ax.invert_yaxis()
plt.show()

# %% [markdown]
# Windows and tails change with every token and never grow. An entry of $m$ tokens is written once, by the token that
# completes it, at $(t + 1) \bmod m = 0$, and is never touched again. In bytes, here and in one layer of V4-Flash
# (bfloat16, but tails in float32):


# %%
def sizes(mixer, dtype):
    """Bytes of each array of a state, per sequence; or per entry, and its tokens."""
    state = eqx.filter_eval_shape(mixer.empty_state, CacheSpec(1, 1, 256, dtype))
    found = {}
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_paged):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        array = node.entries if is_paged(node) else node
        rows = array.shape[1] if is_paged(node) else 1
        found[name] = (array.size * array.dtype.itemsize // rows, node.tokens if is_paged(node) else None)
    return found


here = {kind: sizes(layer, jnp.float32) for kind, layer in layers.items()}
there = {layer.attention.kind: sizes(layer.attention, jnp.bfloat16) for layer in flash.model.model.layers}
assert there["SWA"] == {"window": (127 * 512 * 2, None)}
assert there["CSA"] == {
    "window": (127 * 512 * 2, None),
    "compressor.tail": (7 * 2 * 2 * 512 * 4, None),  # tokens; kv and gate; halves of channels; channels; bytes
    "compressor.entries": (512 * 2, 4),
    "indexer.tail": (7 * 2 * 2 * 128 * 4, None),
    "indexer.entries": (128 * 2, 4),
}
assert there["HCA"]["compressor.tail"] == (127 * 2 * 512 * 4, None) == (520_192, None)
assert there["HCA"]["compressor.entries"] == (512 * 2, 128)


def said(size, tokens):
    return f"{size:,}" + ("" if tokens is None else f" per {tokens} tokens")


table(
    ["layer", "array", "the small model, bytes", "V4-Flash, bytes"],
    [[kind, f"`{name}`", said(*here[kind][name]), said(*there[kind][name])] for kind in here for name in here[kind]],
)

# %% [markdown]
# ## What a query may see
#
# The query of token $t$ sees the vector of token $u$ in the window if $t - W < u \le t$, and entry $w$, which stands
# for the tokens $wm \ldots wm + m - 1$, if it is complete:
#
# $$w < \Bigl\lfloor \frac{t + 1}{m} \Bigr\rfloor .$$
#
# In CSA it attends only to the entries that the indexer has chosen among these. To see that the rule is what the layer
# does, differentiate: which inputs $x_u$ change the output $y_t$? The prediction needs one more fact, from the next
# section: a CSA entry is also made of the $m$ tokens *before* its block.

# %%
x = jnp.asarray(np.random.default_rng(1).standard_normal((1, T, 32)), jnp.float32)  # a layer's input
direction = jnp.asarray(np.random.default_rng(2).standard_normal(32), jnp.float32)
W, TOP = config.sliding_window, config.index_topk


@eqx.filter_jit
def watched(layer, x, start=0):
    """What passes inside a layer over a whole sequence from position `start` on."""
    recorder = Recorder()
    span = Span.whole(1, x.shape[1], recorder=recorder)
    y, _ = layer(x, None, dataclasses.replace(span, start=jnp.full(1, start, jnp.int32)))
    return {"y": y[0], **{name: value[0] for name, value in recorder.values.items()}}


@eqx.filter_jit
def influence(layer, x):
    """[T, T]: the size of the derivative of a random direction of y_t to x_u."""
    output = jax.jacrev(lambda x: layer(x, None, Span.whole(1, T))[0][0] @ direction)
    return jnp.linalg.norm(output(x)[:, 0], axis=-1)


passes = {kind: watched(layer, x) for kind, layer in layers.items()}
query, token = np.arange(T)[:, None], np.arange(T)[None]
window = (query - W < token) & (token <= query)
visible = {kind: np.arange(T // m)[None] < (query + 1) // m for kind, m in every.items()}
scores = np.asarray(passes["CSA"]["index_scores"])  # -inf for entries that are not complete
attended = {
    "CSA": visible["CSA"] & np.asarray(highest(jnp.asarray(scores[None]), TOP))[0],
    "HCA": visible["HCA"],
}
measured = {kind: np.asarray(influence(layer, x)) for kind, layer in layers.items()}
for kind, layer in layers.items():
    reached = window.copy()
    if layer.compressor is not None:
        m, overlaps = layer.compressor.ratio, layer.compressor.copies == 2
        first = np.arange(T // m)[:, None] * m
        made_of = (first - m * overlaps <= token) & (token < first + m)  # [entries, tokens]
        reached |= (attended[kind][:, :, None] & made_of[None]).any(axis=1)
    np.testing.assert_array_equal(measured[kind] > 0, reached, err_msg=kind)

# %%
CELLS = ("not in sight", "complete, not chosen", "entry", "entry and window", "window")
COLOURS = ListedColormap(["white", "#d9d9d9", plots.ORANGE, plots.GREEN, plots.BLUE])
fig, axes = plt.subplots(2, 3, figsize=(10, 7), sharex=True, sharey=True)
for (top, bottom), kind in zip(axes.T, layers):
    cells = np.where(window, 4, 0)
    if kind in every:
        own = np.repeat(attended[kind], every[kind], axis=1)
        complete = np.repeat(visible[kind], every[kind], axis=1)
        cells = np.select([own & window, window, own, complete], [3, 4, 2, 1], 0)
        for edge in range(every[kind], T, every[kind]):
            top.axvline(edge - 0.5, color="white", linewidth=0.4)
    top.imshow(cells, cmap=COLOURS, vmin=0, vmax=4, interpolation="nearest")
    top.set_title(f"{kind}: the rule", fontsize=10)
    with np.errstate(divide="ignore"):
        image = bottom.imshow(np.log10(measured[kind]), vmin=-3, vmax=1, interpolation="nearest")
    bottom.set_xlabel("earlier token u")
    bottom.set_title(f"{kind}: the gradient", fontsize=10)
    for ax in (top, bottom):
        ax.set(xticks=range(0, T, 16), yticks=range(0, T, 16))
        ax.grid(visible=False)
for ax in axes[:, 0]:
    ax.set_ylabel("query t")
fig.colorbar(image, ax=axes[1], label=r"$\log_{10}\ |\partial y_t / \partial x_u|$", shrink=0.8)
handles = [
    Patch(facecolor=COLOURS(i), edgecolor=plots.BLACK, linewidth=0.5, label=name) for i, name in enumerate(CELLS)
]
fig.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=9)
fig.suptitle("What a query may see in a small random DeepSeek-V4", fontsize=11)
plt.show()

# %% [markdown]
# In the pictures of the rule an entry is drawn over its own block of tokens; white in the gradient is an exact zero.
# Two things to notice:
#
# - HCA's staircase leaves no gap to the window. At most $m - 1$ tokens are in no complete entry, the newest ones, and
#   the window has them all as long as $W \ge m - 1$. In V4-Flash both are 128.
# - CSA's choice is made per query. What one query leaves out, the next one may choose: nothing is forgotten.

# %%
for kind in ("CSA", "HCA"):
    in_entry = np.repeat(visible[kind], every[kind], axis=1)
    assert np.array_equal(window | in_entry, token <= query), "every earlier token is in sight, until CSA chooses"
comes_back = [w for w in range(T // 4) if np.any(np.diff(attended["CSA"][visible["CSA"][:, w], w].astype(int)) == 1)]
print(f"{len(comes_back)} of {T // 4} entries", "were left out by some query and chosen by the next one")
assert len(comes_back) >= 8

# %% [markdown]
# ## An entry is attention without a query
#
# The compressor makes of each token a vector $kv$ and, with a second matrix, a vector of logits $s$ with *one logit per
# channel*. Of the slots of an entry each channel takes its own weighted mean:
#
# $$e_w = \mathrm{rope}\Bigl(\mathrm{RMSNorm}\Bigl(\sum_{i} \mathrm{softmax}_i(s_i + b_i)
# \odot kv_i\Bigr),\; w m\Bigr),$$
#
# where $b$ is a bias learned per place in the block and channel. No query is involved, so an entry can be made once and
# for all. In HCA the slots are the block's 128 tokens. In CSA there are $2m = 8$: both matrices are twice as wide, and
# an entry takes the first half of the channels from the *previous* block's tokens and the second half from its own.
# So each token is in two entries, in two different versions. By hand, in numpy and float64:


# %%
def softmax(z, axis):
    z = np.exp(z - z.max(axis=axis, keepdims=True))
    return z / z.sum(axis=axis, keepdims=True)


def turned(x, angles):
    """RoPE on the last channels, whose neighbours are pairs."""
    rest, pairs = x[..., : -2 * len(angles)], x[..., -2 * len(angles) :]
    z = (pairs[..., 0::2] + 1j * pairs[..., 1::2]) * np.exp(1j * angles)
    return np.concatenate([rest, np.stack([z.real, z.imag], axis=-1).reshape(pairs.shape)], axis=-1)


def entry_by_hand(compressor, x, w):
    """Entry w of x [tokens, hidden], and the weights of its slots [slots, channels]."""
    m, width = compressor.ratio, compressor.width
    kv, s = (x @ np.float64(matrix.dense()).T for matrix in (compressor.wkv, compressor.wgate))
    s = s + np.float64(compressor.ape)[np.arange(len(x)) % m]
    block = slice(w * m, w * m + m)
    kv_slots, s_slots = [kv[block, -width:]], [s[block, -width:]]
    if compressor.copies == 2 and w > 0:  # before the first block there is nothing
        before = slice(w * m - m, w * m)
        kv_slots, s_slots = [kv[before, :width], *kv_slots], [s[before, :width], *s_slots]
    weights = softmax(np.concatenate(s_slots), axis=0)
    e = np.sum(weights * np.concatenate(kv_slots), axis=0)
    e = e / np.sqrt(np.mean(e**2) + compressor.norm.eps) * np.float64(compressor.norm.weight)
    return turned(e, w * m * np.array(compressor.rotation.frequencies)), weights


@eqx.filter_jit
def entries_of(compressor, x):
    return compressor(x, None, Span.whole(1, T))[0][0]


compressors = {
    "CSA": layers["CSA"].compressor,
    "indexer": layers["CSA"].indexer.compressor,
    "HCA": layers["HCA"].compressor,
}
entries = {}
for name, compressor in compressors.items():
    by_hand = [entry_by_hand(compressor, np.float64(x[0]), w)[0] for w in range(T // compressor.ratio)]
    entries[name] = np.asarray(entries_of(compressor, x))
    np.testing.assert_allclose(entries[name], by_hand, rtol=1e-4, atol=1e-5)

fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=(8, 16))
for ax, name, w in zip(axes, ("CSA", "HCA"), (3, 1)):
    _, weights = entry_by_hand(compressors[name], np.float64(x[0]), w)
    np.testing.assert_allclose(weights.sum(axis=0), 1)
    m, slots = compressors[name].ratio, len(weights)
    first = (w + 1) * m - slots
    image = ax.imshow(weights.T, vmin=0, vmax=0.7, aspect="auto", interpolation="nearest")
    ax.set_xticks(range(slots), range(first, first + slots), fontsize=8)
    ax.set(
        xlabel="token of the slot",
        ylabel="channel",
        yticks=range(0, 16, 5),
    )
    ax.set_title(f"{name}, entry {w}" + ": previous | own block" * (slots > m), fontsize=10)
    ax.grid(visible=False)
axes[0].axvline(3.5, color="white", linewidth=2)
fig.colorbar(image, ax=axes, label="weight of the slot")
fig.suptitle("What two entries are made of in a small random DeepSeek-V4", fontsize=11)
plt.show()

# %% [markdown]
# Each row of these pictures sums to one, and rows differ: a channel can keep the last token's value, another one a mean
# of all. Scalar weights, one per token, could not do that.
#
# ## Which entries: the indexer
#
# At a million tokens a CSA layer has 262,144 entries. Attending to all of them would cost as much as attention to that
# many tokens, so a smaller attention chooses first. It has keys $k_w$ of its own, made by a compressor of its own (128
# channels instead of 512), and a score without a softmax:
#
# $$\mathrm{score}(t, w) = \sum_h a_{t,h}\,\max(0,\; q_{t,h}\cdot k_w), \qquad a_t \text{ a linear map of } x_t .$$
#
# The 512 complete entries with the highest scores are attended to; the scores themselves play no further part. Keys and
# queries are rotated as in the attention. By hand, from the weights:

# %%
layer, indexer = layers["CSA"], layers["CSA"].indexer
frequencies = np.array(layer.rotation.frequencies)
qa = np.float64(x[0]) @ np.float64(layer.wq_a.dense()).T
qa = qa / np.sqrt(np.mean(qa**2, axis=-1, keepdims=True) + layer.q_norm.eps) * np.float64(layer.q_norm.weight)
q = (qa @ np.float64(indexer.wq_b.dense()).T).reshape(T, indexer.heads, -1)
q = np.stack([turned(q[t], t * frequencies) for t in range(T)])
a = np.float64(x[0]) @ np.float64(indexer.weights_proj.dense()).T * (indexer.heads * q.shape[-1]) ** -0.5
products = np.maximum(np.einsum("thc,wc->thw", q, entries["indexer"]), 0)
by_hand = np.where(visible["CSA"], np.einsum("th,thw->tw", a, products), -np.inf)
np.testing.assert_allclose(scores, by_hand, rtol=1e-3, atol=1e-4)

order = np.argsort(-scores, axis=1, kind="stable")[:, :TOP]  # of equal scores the earlier entry is first
chosen = np.zeros_like(visible["CSA"])
np.put_along_axis(chosen, order, True, axis=1)
np.testing.assert_array_equal(chosen & visible["CSA"], attended["CSA"])
count = attended["CSA"].sum(axis=1)
np.testing.assert_array_equal(count, np.minimum(TOP, (np.arange(T) + 1) // 4))

fig, ax = plt.subplots(figsize=(9, 3.6))
shown = np.ma.masked_invalid(scores.T)
limit = float(np.abs(shown).max())
image = ax.imshow(shown, aspect="auto", cmap="PuOr_r", vmin=-limit, vmax=limit, interpolation="nearest")
ax.scatter(*np.nonzero(attended["CSA"]), s=9, color=plots.BLACK, label="chosen")
ax.set(xlabel="query t", ylabel="entry w", xticks=range(0, T, 8), yticks=range(0, 16, 5))
ax.set_title("The indexer's scores in a small random DeepSeek-V4", fontsize=11)
ax.grid(visible=False)
ax.legend(loc="lower left")
fig.colorbar(image, label="score")
plt.show()

# %% [markdown]
# **Ties.** If no head finds a positive product, the score is exactly zero, and several entries can have it. Of equal
# scores the earlier entry is chosen. With four heads that happens; with V4-Flash's 64 hardly ever. Note also that $a$
# can be negative: then a matching key *lowers* a score, and an entry with score zero may be among the best.

# %%
zeros = (scores == 0) & visible["CSA"]
print(f"{zeros.sum()} of {visible['CSA'].sum()} scores are exactly 0:", f"{zeros.sum() / visible['CSA'].sum():.1%}")
made_up = jnp.asarray([[[0.0, 2.0, 0.0, 0.0, -1.0]]])
assert highest(made_up, 2)[0, 0].tolist() == [True, True, False, False, False]
assert zeros.sum() > 0 and (scores[visible["CSA"]] < 0).any() and (zeros & attended["CSA"]).any()

# %% [markdown]
# ## One softmax over all of it
#
# Window and entries compete in a single softmax, together with a *sink*: a logit per head whose value is zero. A head
# that finds nothing gives its weight to the sink and adds little. For query $t$ and head $h$, with the keys $e$ in
# sight as the values:
#
# $$o = \mathrm{rope}^{-1}_t\Bigl(\sum_e p_e\, e\Bigr), \qquad
# p = \mathrm{softmax}\Bigl(\Bigl[\ldots, \tfrac{q\cdot e}{\sqrt{D}}, \ldots, \mathrm{sink}_h\Bigr]\Bigr) .$$


# %%
def attention_by_hand(kind, t):
    """Query t's weights [heads, window | entries | sink] and its unprojected output."""
    seen = {name: np.float64(value) for name, value in passes[kind].items()}
    near = seen["kv"][max(0, t - W + 1) : t + 1]
    far = entries[kind][attended[kind][t]] if kind in every else near[:0]
    keys = np.concatenate([near, far])
    logits = seen["q"][t] @ keys.T  # q is already divided by sqrt(D)
    p = softmax(np.concatenate([logits, np.float64(layers[kind].attn_sink)[:, None]], axis=1), axis=1)
    o = turned(p[:, :-1] @ keys, -t * np.array(layers[kind].rotation.frequencies))
    return (p[:, : len(near)].sum(1), p[:, len(near) : -1].sum(1), p[:, -1]), o


shares = {}
for kind in layers:
    by_hand = [attention_by_hand(kind, t) for t in range(T)]
    np.testing.assert_allclose(passes[kind]["heads"], [o for _, o in by_hand], rtol=1e-3, atol=1e-4)
    shares[kind] = np.array([share for share, _ in by_hand]).mean(axis=2)  # [tokens, 3], the mean of the heads
    np.testing.assert_allclose(shares[kind].sum(axis=1), 1)

fig, axes = plt.subplots(1, 3, figsize=(10, 2.9), sharey=True)
for ax, (kind, share) in zip(axes, shares.items()):
    parts = ax.stackplot(
        range(T), share.T, colors=(plots.BLUE, plots.ORANGE, "#d9d9d9"),
        edgecolor=plots.BLACK, linewidth=0.4, labels=("window", "entries", "sink"),
    )  # fmt: skip
    for part, hatch in zip(parts, plots.HATCHES):
        part.set_hatch(hatch)
    ax.set(xlabel="query t", xlim=(0, T - 1), ylim=(0, 1), xticks=range(0, T, 16))
    ax.set_title(kind, fontsize=10)
axes[0].set_ylabel("share of the weight,\nmean of the heads")
axes[0].legend(loc="lower right", fontsize=9)
fig.suptitle("Where attention's weight goes in a small random DeepSeek-V4", fontsize=11)
plt.show()

# %% [markdown]
# ### Why the output is turned back
#
# In ordinary attention RoPE touches queries and keys, and a score depends on the distance $t - u$ alone. Here the keys
# are also the values, so the sum contains vectors turned by *absolute* positions. Turning the output by $-t$ leaves
# each value turned by $u - t$: distances alone again. So a layer that sees nothing but its window cannot tell where in
# a text it is. Move all tokens by the same number of positions, and compare the outputs that have a whole window:

# %%
swa, positions = layers["SWA"], jnp.arange(T, dtype=jnp.int32)[None]
shifts = 4 ** np.arange(9)
whole = slice(W - 1, None)


def difference(ours, theirs):
    ours, theirs = np.asarray(ours)[whole], np.asarray(theirs)[whole]
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


def not_turned_back(o, start):
    return rotate_last(swa.rotation, o[None], positions + start)[0]


moved = {int(shift): watched(swa, x, jnp.asarray(shift, jnp.int32)) for shift in shifts}
still = passes["SWA"]
with_it = [difference(moved[s]["y"], still["y"]) for s in moved]
without = [difference(not_turned_back(moved[s]["heads"], s), not_turned_back(still["heads"], 0)) for s in moved]
assert max(with_it) < 1e-4 and min(without) > 0.05

fig, ax = plt.subplots(figsize=(7, 3))
ax.loglog(list(moved), without, label="heads, not turned back")
ax.loglog(list(moved), with_it, label="output, turned back")
ax.set(xlabel="all positions moved by, tokens", ylabel="relative change")
ax.set_title("A sliding-window layer of a small random DeepSeek-V4, moved", fontsize=11)
ax.legend(loc="center right", fontsize=9)
plt.show()

# %% [markdown]
# What is left is rounding. A layer with entries sees where its blocks begin, so it can be moved by multiples of $m$
# only.
#
# ## The other memory: four streams
#
# Between layers a transformer keeps one residual stream. V4 keeps $n = 4$, in which a sublayer reads a mixture, and to
# which it gives its output $o$ back, while the streams themselves are mixed:
#
# $$X'_k = \mathrm{post}_k\, o + \sum_j C_{jk} X_j ,$$
#
# with a matrix $C$ that is computed from the streams anew for each token and sublayer. V4-Flash has 86 sublayers, and
# the product of 86 such matrices decides whether what the first one wrote is still there at the end, or has exploded.
# So $C$ is made (nearly) *doubly stochastic*, with positive entries whose rows and columns sum to one, by
# dividing columns and rows by their sums in turn (Sinkhorn and Knopp, 1967). This is mHC, manifold-constrained
# hyper-connections ([arXiv 2512.24880](https://arxiv.org/abs/2512.24880)).

# %%
hyper, SUBLAYERS = model.model.layers[1].attn_hc, 2 * flash.config.num_hidden_layers
n = config.hc_mult
streams = np.random.default_rng(3).standard_normal((1, SUBLAYERS, n, 32)).astype(np.float32)
flat = np.float64(streams.reshape(SUBLAYERS, -1))
z = flat / np.sqrt(np.mean(flat**2, axis=-1, keepdims=True) + hyper.norm_eps) @ np.float64(hyper.fn).T
logits = (z[:, 2 * n :] * float(hyper.scale[2]) + np.float64(hyper.base[2 * n :])).reshape(SUBLAYERS, n, n)
positive = softmax(logits, axis=-1) + hyper.eps


def after(iterations):
    return np.asarray(sinkhorn(jnp.asarray(positive, jnp.float32), iterations, hyper.eps))


iterations = range(1, hyper.iterations + 1)
balanced = {i: after(i) for i in iterations}
_, mixing = eqx.filter_jit(hyper)(jnp.asarray(streams))
np.testing.assert_allclose(balanced[20], mixing.combination[0], rtol=1e-3, atol=1e-5)
off = {
    "rows": np.array([np.abs(balanced[i].sum(axis=-1) - 1).max(axis=-1) for i in iterations]),
    "columns": np.array([np.abs(balanced[i].sum(axis=-2) - 1).max(axis=-1) for i in iterations]),
}
assert hyper.iterations == 20 and off["columns"].max() < 1e-4 and off["columns"][-1].max() < 1e-5
assert off["rows"][0].max() > 0.5 and off["rows"][-1].max() < 0.03 and np.median(off["rows"][-1]) < 1e-3

fig, axes = plt.subplots(1, 5, figsize=(11, 2.6), width_ratios=(1, 1, 1, 1, 1.9))
for ax, i in zip(axes, (1, 2, 5, 20)):
    matrix = balanced[i][0]
    ax.imshow(matrix, vmin=0, vmax=1)
    for j, k in np.ndindex(n, n):
        colour = plots.BLACK if matrix[j, k] > 0.55 else "white"
        ax.text(k, j, f"{matrix[j, k]:.2f}", ha="center", va="center", fontsize=7, color=colour)
    ax.set(xlabel="to stream k", xticks=range(n), yticks=[0, 1, 2, 3] if i == 1 else [])
    ax.set_title(f"{i} iteration" + "s" * (i > 1), fontsize=10)
    ax.grid(visible=False)
axes[0].set_ylabel("from stream j")
for label, deviation in {
    f"rows, worst of {SUBLAYERS}": off["rows"].max(axis=1),
    "rows, median": np.median(off["rows"], axis=1),
    f"columns, worst of {SUBLAYERS}": off["columns"].max(axis=1),
}.items():
    axes[4].semilogy(iterations, deviation, label=label, markersize=3)
axes[4].set(xlabel="iterations", ylim=(1e-7, 3000), xticks=(1, 5, 10, 15, 20))
axes[4].set_title("Deviation of sums from 1", fontsize=10)
axes[4].set_yticks([1e-6, 1e-4, 1e-2, 1])
axes[4].legend(fontsize=7, loc="upper right")
fig.suptitle("Balancing the mixing matrices of a small random DeepSeek-V4", fontsize=11)
plt.show()
rows, columns = (off[name][-1].max() for name in ("rows", "columns"))
print(f"after 20 iterations: rows off by {rows:.1e} at most, columns by {columns:.1e}")

# %% [markdown]
# The columns are divided last, so their sums are right up to rounding; those of the rows only nearly. Now multiply one
# matrix per sublayer. A doubly stochastic matrix has the largest singular value 1, and so has any product of them.
# Beside it are two others from the very same logits, of random streams: $I + \mathrm{logits}$, as hyper-connections
# without the constraint could have, and the softmax alone, whose rows sum to one and whose columns do not.

# %%
variants = {
    "I + logits": np.eye(n)[None] + logits,
    "softmax alone": positive,
    "mHC: 20 iterations": np.float64(mixing.combination[0]),
}
largest, totals = {}, {}
for name, matrices in variants.items():
    product, largest[name] = np.eye(n), []
    for matrix in matrices:
        product = product @ matrix
        largest[name].append(np.linalg.norm(product, ord=2))
    totals[name] = product.sum(axis=0)  # how much of the first streams the last ones have
fig, axes = plt.subplots(1, 2, figsize=(9, 3))
for ax in axes:
    for name, colour, style in zip(largest, (plots.RED, plots.ORANGE, plots.BLUE), ("--", "-.", "-")):
        ax.plot(range(1, SUBLAYERS + 1), largest[name], color=colour, linestyle=style, marker="", label=name)
    ax.set(xlabel="sublayers", ylabel="largest singular value")
axes[0].set(yscale="log")
axes[0].set_title("All of it", fontsize=10)
axes[1].set(ylim=(0.9, 2.1))
axes[1].set_title("The same, near 1", fontsize=10)
axes[1].legend(fontsize=9)
fig.suptitle("Product of the mixing matrices of a small random DeepSeek-V4", fontsize=11)
plt.show()
for name in variants:
    print(f"{name}: {largest[name][-1]:.3g}; column sums", np.array2string(totals[name], precision=2))
assert max(abs(np.array(largest["mHC: 20 iterations"]) - 1)) < 0.05
assert largest["I + logits"][-1] > 1e20
assert largest["softmax alone"][-1] <= 2
assert 0.32 < totals["softmax alone"].min() < 0.34 and 1.49 < totals["softmax alone"].max() < 1.51
assert np.ptp(totals["mHC: 20 iterations"]) < 1e-3 and 2.3 < logits.std() < 2.5

# %% [markdown]
# How fast the unconstrained product grows depends on the logits, whose standard deviation is 2.4 here. The softmax
# alone does not explode either, but the streams come out with unequal shares of what went in: 0.33 to 1.50, the column
# sums.
#
# ## Bytes against context
#
# Back to the cache, at V4-Flash's own size. From the shapes of the states, in bfloat16:

# %%
csa, hca = flash_kinds.count("CSA"), flash_kinds.count("HCA")
states = flash.memory.state_per_sequence
assert (csa, hca) == (21, 20)
assert flash.memory.cache_per_token == 2 * (csa * (512 + 128) // 4 + hca * 512 // 128) == 6_880
assert states["window"] == 43 * 127 * 512 * 2 == 5_592_064
assert states["compressor.tail"] == csa * 57_344 + hca * 520_192 == 11_608_064
assert states["indexer.tail"] == csa * 14_336 == 301_056
assert sum(states.values()) == 17_501_184

# %% [markdown]
# It is served with FP8: an entry of 512 channels takes 584 bytes (448 of them in FP8, with a scale for each 64, and the
# 64 of RoPE in bfloat16), a key of the indexer 132. `ling3.ops.packed_kv` packs pages in that layout, and the sizes of
# what it returns are the numbers. (A page is filled up to a multiple of 576 bytes, which adds 1 %.) `ling3`'s engine
# keeps its pages so with `cache_dtype="packed"`; for the figure the windows are packed as well, and the tails stay in
# float32.

# %%
ENTRY, KEY = packed_kv.ENTRY + packed_kv.SCALES, packed_kv.INDEX + 4
packed_per_token = csa * (ENTRY + KEY) / 4 + hca * ENTRY / 128
assert (ENTRY, KEY) == (584, 132) and packed_per_token == 3_850.25
pages = {per: packed_kv.pack(jnp.zeros((per, 512))).size for per in (64, 2)}  # 256 tokens of CSA and of HCA
keys = packed_kv.pack_index(jnp.zeros((64, 128))).size
padded = (csa * (pages[64] + keys) + hca * pages[2]) / 256
assert pages == {64: 37_440, 2: 1_728} and keys == 8_448 and padded == 3_899.25
assert (flash.memory.packed.per_token, flash.memory.packed.per_token_in_pages) == (packed_per_token, padded)
packed_state = 43 * 127 * ENTRY + states["compressor.tail"] + states["indexer.tail"]
assert packed_state == 15_098_344

mla43 = report(ling3.Ling3Config(num_hidden_layers=43, layer_group_size=1)).memory
tiny = report(ling3.Ling3Config()).memory
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip
llama = report(LlamaConfig.from_dict(LLAMA)).memory
costs = {  # bytes per sequence, bytes per token
    "GQA (Llama-3.1-8B, 32 layers)": (0, llama.cache_per_token),
    "MLA in 43 layers": (0, mla43.cache_per_token),
    "V4-Flash, bfloat16": (sum(states.values()), flash.memory.cache_per_token),
    "Ling-3.0-tiny (6 MLA, 18 KDA)": (sum(tiny.state_per_sequence.values()), tiny.cache_per_token),
    "V4-Flash, packed": (packed_state, packed_per_token),
}
assert costs["GQA (Llama-3.1-8B, 32 layers)"] == (0, 32 * 2 * 8 * 128 * 2) == (0, 131_072)
assert costs["MLA in 43 layers"] == (0, 43 * 576 * 2) == (0, 49_536)
assert costs["Ling-3.0-tiny (6 MLA, 18 KDA)"] == (19_537_920, 6_912)

contexts = 2 ** np.arange(10, 21)
LINES = ((plots.ORANGE, ":", "D"), (plots.MLA, "--", "s"), (plots.SKY, "-", "v"),
         (plots.BLACK, "-.", "^"), (plots.BLUE, "-", "o"))  # fmt: skip
fig, ax = plt.subplots(figsize=(8, 4.4))
total = {name: fixed + growing * contexts for name, (fixed, growing) in costs.items()}
OFFSETS = (-3, -3, -9, 3, -8)
for (name, size), (colour, style, marker), down in zip(total.items(), LINES, OFFSETS):
    hollow = {"markersize": 8, "fillstyle": "none"} if name == "V4-Flash, bfloat16" else {}  # under Ling's, its equals
    ax.loglog(contexts, size / 1e9, color=colour, linestyle=style, marker=marker, label=name, **hollow)
    ax.annotate(f"{size[-1] / 1e9:,.1f} GB", (contexts[-1], size[-1] / 1e9), (7, down),
                textcoords="offset points", fontsize=9)  # fmt: skip
ax.set_xticks(contexts[::2], ["1k", "4k", "16k", "64k", "256k", "1M"])
ax.minorticks_off()
ax.set(xlabel="context, tokens", ylabel="memory of one sequence, GB", xlim=(900, 2.2e6))
ax.set_title("Cache against context: DeepSeek-V4-Flash and others", fontsize=11)
ax.legend(fontsize=9)
plt.show()

million = {name: size[-1] / 1e9 for name, size in total.items()}
assert [round(gb, 1) for gb in million.values()] == [137.4, 51.9, 7.2, 7.3, 4.1]
assert ling3.Ling3Config().max_position_embeddings == LLAMA["max_position_embeddings"] == 131_072
equal = packed_state / (costs["MLA in 43 layers"][1] - packed_per_token)
ratios = {"MLA": mla43.cache_per_token / packed_per_token, "GQA": llama.cache_per_token / packed_per_token}
print(f"V4-Flash, packed, needs less than MLA in as many layers from {equal:.0f}", "tokens on;")
print("per token the others need", {name: f"{ratio:.1f} times as much" for name, ratio in ratios.items()})
assert 330 < equal < 331 and 12.8 < ratios["MLA"] < 12.9 and 34.0 < ratios["GQA"] < 34.1

# %% [markdown]
# At a million tokens one sequence takes 4.1 GB, where MLA in as many layers would take 51.9 and the GQA of an 8 B model
# 137.4. (Ling-3.0-tiny and Llama end at 131,072 tokens; their lines are drawn on.) The lines of V4-Flash in bfloat16
# and of Ling-3.0-tiny lie on each other, but the former is a model of 43 layers and 284 billion parameters, and the
# latter one of 24 and 7.9. Two ways to the same thing: a fixed part (tails and windows there, KDA states here), and
# little that grows.
#
# The savings are not free: what is older than the window is seen through means of 4 or 128 tokens, and in CSA through
# 512 of these at a time. In Ling-3, 6 layers see every token exactly, and 18 see a fixed-size state.
#
# ## Exercises
#
# **1.** Suppose HCA had $m = 16$ as here, but a window of 8. Which tokens does query 30 not see, neither in the window
# nor in an entry?
#
# <details><summary>Solution</summary>
#
# Entry 0 has tokens 0 to 15, and entry 1 is complete with token 31 only. The window has 23 to 30. So 16 to 22 are out
# of sight, until one token later. Hence $W \ge m - 1$.
#
# </details>
#
# **2.** HCA's tail is the largest constant part: 520,192 bytes a layer. It has $kv$ and $s$ of up to 127 tokens. Can it
# be smaller?
#
# <details><summary>Solution</summary>
#
# Yes. The slots of an HCA entry do not overlap, so a running softmax will do, as in FlashAttention: per channel the
# largest logit $M$, $S = \sum e^{s - M}$ and $P = \sum e^{s - M} kv$. That is $3\cdot512\cdot4 = 6{,}144$ bytes, and
# the entry is $P / S$ before the norm.
#
# </details>
#
# **3.** A server wants to share the cache of a common prompt of $L$ tokens. The entries are shared by pointing to their
# pages. What else must it have kept, and does it help if $L$ is a multiple of 128?
#
# <details><summary>Solution</summary>
#
# The windows and the tails as they were after token $L$, 17.5 MB in bfloat16: the same need as with KDA's states. At a
# multiple of 128 HCA's tail is not needed, since nothing is pending: 10.4 MB less. CSA's tail still is, because the
# next entry also takes the previous block's tokens.
#
# </details>

# %%
# 1
t, small_window, m = 30, 8, 16
out_of_sight = [u for u in range(t + 1) if u <= t - small_window and u // m >= (t + 1) // m]
assert out_of_sight == list(range(16, 23))

# 2
draws = np.random.default_rng(4)
s, kv = draws.normal(size=(2, 128, 512))
M, S, P = np.full(512, -np.inf), np.zeros(512), np.zeros(512)
for logit, value in zip(s, kv):
    new = np.maximum(M, logit)
    S, P = (old * np.exp(M - new) + np.exp(logit - new) * part for old, part in ((S, 1), (P, value)))
    M = new
np.testing.assert_allclose(P / S, np.sum(softmax(s, axis=0) * kv, axis=0), rtol=1e-9)
assert 4 * (M.size + S.size + P.size) == 6_144


# 3
def forgetting(cache, kind, name):
    layer = list(layers).index(kind)
    state = eqx.tree_at(operator.attrgetter(name), cache.layers[layer], replace_fn=jnp.zeros_like)
    return eqx.tree_at(lambda cache: cache.layers[layer], cache, state)


_, at_32 = model.step(tokens[:, :32], model.init_cache(1, T))
truth, _ = model.step(tokens[:, 32:], at_32)
kept_per_sequence = [(kind, name) for kind, name in snapshots[0] if not name.endswith("entries")]
off = {}
for kind, name in kept_per_sequence:
    logits, _ = model.step(tokens[:, 32:], forgetting(at_32, kind, name))
    off[kind, name] = float(jnp.abs(logits - truth).max())
print({f"{kind} {name}": f"{change:.2g}" for (kind, name), change in off.items()})
assert off.pop(("HCA", "compressor.tail")) == 0 and min(off.values()) > 1e-3
assert hca * 520_192 == 10_403_840
