# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 3. Gated multi-head latent attention
#
# Every fourth layer of Ling-3.0-tiny is full attention: it can look at any earlier token exactly. The price of that is
# the cache. Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434) keeps one short vector per token, from
# which the keys and values of *all* heads follow by a matrix, and then arranges the arithmetic so that a decoding model
# never forms those keys and values at all.
#
# This notebook rebuilds the layer from its equations and checks each step against `ling3.layers.mla`. Sizes: $H$ heads,
# $N$ channels of a key that carry no position, $P$ that are rotated, $V$ of a value, $R$ of the latent. Ling-3.0-tiny:
# $H = 16$, $N = 128$, $P = 64$, $V = 128$, $R = 512$.
#
# **You need**: multi-head attention with a KV cache, and RoPE; notebook 1 shows where the layer stands.
#
# **Afterwards you can** count the cache of MHA, GQA and MLA in bytes, move a matrix from the cached tokens to the query
# (*absorption*) and say when that pays, and explain why the rotated key stands apart.
#
# **It takes** two minutes on two cores, and 1.1 GB of memory.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import ling3
from ling3.cache import CacheSpec, Span
from ling3.interpret.ablate import no_output_gate, no_rope
from ling3.interpret.inspect import report
from ling3.layers.rope import Rope
from ling3.runtime import plots
from ling3.train.nano.problems import ask, problems
from ling3.train.nano.skills import SKILLS
from ling3.train.nano.skills.exam import right_answers
from ling3.train.nano.skills.facts import ATTRIBUTES

jax.config.update("jax_enable_x64", True)  # so that equal can mean equal
plots.use()
tiny = ling3.Ling3Config()

# %% [markdown]
# ## What a token leaves behind
#
# In numbers per token and layer: multi-head attention (MHA) keeps a key and a value of every head, $2\cdot 128\cdot
# 16$; grouped queries (GQA) let several heads share one, here 8 groups; MLA keeps the latent and one rotated key, $R +
# P$. Two bytes each, six MLA layers:

# %%
H, N, P, V, R = 16, 128, 64, 128, 512
assert (tiny.num_attention_heads, tiny.qk_nope_head_dim, tiny.qk_rope_head_dim, tiny.kv_lora_rank) == (H, N, P, R)
layers = sum(tiny.attention_kind(i) == "mla" for i in range(tiny.num_hidden_layers))
numbers = {"MHA, 16 heads": 2 * 128 * 16, "GQA, 8 groups": 2 * 128 * 8, "MLA": R + P, "one shared head (MQA)": 2 * 128}
per_token = {name: 2 * layers * n for name, n in numbers.items()}
assert per_token["MLA"] == report(tiny).memory.cache_per_token == 6912

fig, ax = plt.subplots(figsize=(7, 2.6))
colours = (plots.SKY, plots.GREEN, plots.MLA, plots.YELLOW)
bars = ax.barh(list(per_token), list(per_token.values()), color=colours, edgecolor=plots.BLACK, linewidth=0.6)
for bar, hatch in zip(bars, plots.HATCHES):
    bar.set_hatch(hatch)
ax.bar_label(bars, [f"{b:,} B ({b / 6912:.1f} ×)" for b in per_token.values()], padding=4)
ax.set(xlabel="cache of six full-attention layers, bytes per token", xlim=(0, 62_000))
ax.set_title("Cache of Ling-3.0-tiny, with MLA and with other attention", fontsize=11)
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
plt.show()

# %% [markdown]
# MLA lies between GQA with two groups and with three, yet its heads need not share a key: each has its own 128 + 128
# rows of `kv_b_proj` through which it sees the latent.
#
# ## The layer, from its equations
#
# For a token's input $x_i$ (all norms are RMSNorms):
#
# $$c_i = \mathrm{norm}(W_{c}\,x_i)\in\mathbb R^R,\qquad k^{\mathrm r}_i = \mathrm{rope}_i(W_{r}\,x_i)\in\mathbb R^P ,
# \qquad q_i = W_{qb}\,\mathrm{norm}(W_{qa}\,x_i)$$
#
# The cache holds $[c_i\,|\,k^{\mathrm r}_i]$ and nothing else. Head $h$ has its own key and value,
# $k_{ih} = W_{uk,h}\,c_i$ and $v_{ih} = W_{uv,h}\,c_i$ (together `kv_b_proj`), and attends with
#
# $$s_{ijh} = \frac{q^{\mathrm n}_{ih}\cdot k_{jh} + \mathrm{rope}_i(q^{\mathrm r}_{ih})\cdot k^{\mathrm r}_j}
# {\sqrt{N+P}},\qquad o_{ih} = \sum_{j\le i} \mathrm{softmax}_j(s_{ijh})\,v_{jh} ,\qquad
# y_i = W_o\,\bigl[\sigma(w_h\cdot x_i)\,o_{ih}\bigr]_h .$$
#
# Below, that is the MLA layer of *nano*, the last of its four ($H = 4$, $N = 32$, $P = 16$, $V = 32$, $R = 64$), in
# float64, on the hidden states of a word problem.

# %%
trained, tok = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")
nano = jax.tree.map(lambda w: w.astype(jnp.float64), trained)
problem = next(problems(3, "held_out"))
text = f"{ask(problem)} {problem.solution}"
tokens = jnp.asarray([tok.encode(text)], jnp.int32)
T = tokens.shape[1]
span = Span.whole(1, T)
print(text)


@jax.jit
def attention_inputs(model, tokens):
    """What each layer's attention is given."""
    x, given = model.model.word_embeddings.embed(tokens), []
    for layer in model.model.layers:
        given.append(layer.input_layernorm(x))
        x, _ = layer(x, None, span)
    return given


def mla_inputs(ids):
    """What the MLA layer gets for at most T tokens; zeros after them change nothing."""
    padded = jnp.asarray([ids + [0] * (T - len(ids))], jnp.int32)
    return attention_inputs(nano, padded)[3][0, : len(ids)]


mla, x = nano.model.layers[3].attention, mla_inputs(tokens[0].tolist())  # [seq, hidden]
H, N, P, V, R = 4, 32, 16, 32, 64
positions = jnp.arange(T, dtype=jnp.int32)[None]
causal = jnp.tril(jnp.ones((T, T), bool))


# %%
def queries_and_entries(mla, x):
    """q_nope [T, H, N], q_rope [T, H, P], and to be cached: c [T, R], k_rope [T, P]."""
    q = mla.q_b_proj(mla.q_a_layernorm(mla.q_a_proj(x))).reshape(T, H, N + P)
    compressed = mla.kv_a_proj_with_mqa(x)
    k_rope = mla.rotation(compressed[None, :, None, R:], positions)[0, :, 0]
    q_rope = mla.rotation(q[None, ..., N:], positions)[0]
    return q[..., :N], q_rope, mla.kv_a_layernorm(compressed[:, :R]), k_rope


def softmax(scores):
    return jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)


def output(mla, o, x):
    gate = jax.nn.sigmoid(mla.g_proj(x))
    return mla.dense((gate[..., None] * o).reshape(T, H * V))


def expanded(mla, x):
    q_nope, q_rope, c, k_rope = queries_and_entries(mla, x)
    kv = mla.kv_b_proj(c).reshape(T, H, N + V)
    k, v = kv[..., :N], kv[..., N:]
    scores = jnp.einsum("ihn,jhn->hij", q_nope, k) + jnp.einsum("ihp,jp->hij", q_rope, k_rope)
    return output(mla, jnp.einsum("hij,jhv->ihv", softmax(scores * (N + P) ** -0.5), v), x)


y = expanded(mla, x)
np.testing.assert_allclose(y, mla(x[None], None, span)[0][0], rtol=1e-9, atol=1e-12)

# %% [markdown]
# ### Low rank, seen
#
# Keys and values of all heads are $H(N+V)$ numbers a token, but a matrix of rank at most $R$ times a latent. The
# singular values of the expanded cache of this text end where the latents' do:

# %%
_, _, c, k_rope = queries_and_entries(mla, x)
rng = np.random.default_rng(0)
latents = jnp.concatenate([c, jnp.asarray(rng.standard_normal((300, R)))])  # the text's, and more than R others
values = jnp.linalg.svd(mla.kv_b_proj(latents), compute_uv=False)
fig, ax = plt.subplots(figsize=(7, 2.8))
ax.semilogy(np.arange(1, len(values) + 1), values / values[0], color=plots.MLA, marker="")
ax.axvline(R, color=plots.BLACK, linewidth=0.8)
ax.annotate(f"R = {R}, the channels of a latent", (R, 1e-8), xytext=(4, 0), textcoords="offset points")
ax.set(xlabel=f"number of the singular value, of H (N + V) = {H * (N + V)}", ylabel="size / that of the largest")
ax.set_title("Singular values of the expanded cache in nano's MLA layer", fontsize=11)
plt.show()
assert values[R] < 1e-12 * values[0] < 1e-3 * values[R - 1]

# %% [markdown]
# ## Absorption
#
# Expanding keys and values for every cached token at every step would cost far more than attention itself. But the
# matrices can change sides. For the scores,
#
# $$q_{ih}\cdot(W_{uk,h}\,c_j) = (W_{uk,h}^\top\,q_{ih})\cdot c_j ,$$
#
# so each head's query is brought into the latent's space *once*, and meets the cached $c_j$ as they are. For the
# values, the sum over tokens commutes with the matrix:
#
# $$\sum_j a_{ijh}\,W_{uv,h}\,c_j = W_{uv,h}\Bigl(\sum_j a_{ijh}\,c_j\Bigr) .$$
#
# What remains is attention in which all heads share one key and one value per token, both of them the cache entry.


# %%
def absorbed(mla, x, scale=(N + P) ** -0.5):
    q_nope, q_rope, c, k_rope = queries_and_entries(mla, x)
    W = mla.kv_b_proj.weight.reshape(H, N + V, R)
    W_uk, W_uv = W[:, :N], W[:, N:]
    q_latent = jnp.einsum("hnr,ihn->ihr", W_uk, q_nope)
    scores = jnp.einsum("ihr,jr->hij", q_latent, c) + jnp.einsum("ihp,jp->hij", q_rope, k_rope)
    o_latent = jnp.einsum("hij,jr->ihr", softmax(scores * scale), c)
    return output(mla, jnp.einsum("hvr,ihr->ihv", W_uv, o_latent), x)


np.testing.assert_allclose(absorbed(mla, x), y, rtol=1e-9, atol=1e-12)

# %% [markdown]
# The layer picks the form by the number of tokens it is given: one token absorbs, several expand. So a sequence fed
# token by token and the same sequence at once go different ways to the same numbers:

# %%
pages = -(-T // 256)  # of 256 tokens each, all of them this sequence's
cache, outputs = mla.empty_state(CacheSpec(slots=1, pages=pages, page_size=256, dtype=jnp.float64)), []
table = jnp.arange(pages, dtype=jnp.int32)[None]
step = jax.jit(lambda x, cache, start: mla(x, cache, Span(start, jnp.ones(1, jnp.int32), table)))
for t in range(T):
    out, cache = step(x[None, t : t + 1], cache, jnp.full(1, t, jnp.int32))
    outputs.append(out[0, 0])
np.testing.assert_allclose(jnp.stack(outputs), y, rtol=1e-9, atol=1e-12)
np.testing.assert_array_equal(cache.entries.reshape(-1, R + P)[T:], 0.0)
np.testing.assert_allclose(cache.entries.reshape(-1, R + P)[:T], jnp.concatenate([c, k_rope], axis=1), atol=1e-12)

# %% [markdown]
# **The scale stays $(N+P)^{-1/2}$.** The absorbed product has $R + P$ terms, and an attention kernel that is handed
# vectors of that length would divide by $\sqrt{R+P}$. But the scores are the same numbers as before, so their scale is
# too. The other one makes every softmax flatter, by a factor of $\sqrt{80/48} = 1.29$ here and $\sqrt{576/192} = 1.73$
# in Ling-3.0-tiny. This goes unnoticed by every check of shapes:

# %%
wrong = absorbed(mla, x, scale=(R + P) ** -0.5)
off = float(jnp.linalg.norm(wrong - y) / jnp.linalg.norm(y))
print(f"relative error of the layer's output with the wrong scale: {off:.2f}")
assert off > 0.05

# %% [markdown]
# ## Which form, when
#
# Count multiplications and additions for one head, $n$ new tokens and $L$ cached ones (Ling-3.0-tiny's sizes; the
# causal mask left aside):
#
# | | once per cached token | once per new token | per pair |
# |---|---|---|---|
# | expanded | $2R(N+V)$ | | $2(N+P) + 2V$ |
# | absorbed | | $2R(N+V)$ | $2(R+P) + 2R$ |
#
# Absorption moves the same product from the cached tokens to the new ones, and makes each pair 3.4 times as expensive.
# With $n = 1$ (decoding) the first column decides, with a long prompt the last. For long contexts they meet at
#
# $$n^* = \frac{2R(N+V)}{2(R+P)+2R - 2(N+P) - 2V} .$$

# %%
N, P, V, R = 128, 64, 128, 512
change_sides, pair_expanded, pair_absorbed = 2 * R * (N + V), 2 * (N + P) + 2 * V, 2 * (R + P) + 2 * R


def operations(n, L):
    """Of one head: expanded, absorbed."""
    return L * change_sides + n * L * pair_expanded, n * change_sides + n * L * pair_absorbed


crossing = change_sides / (pair_absorbed - pair_expanded)
contexts, news = 2 ** np.arange(0, 18), np.unique(np.geomspace(1, 4096, 60).astype(int))
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
styles = (("expanded", plots.ORANGE, "--", "s"), ("absorbed", plots.MLA, "-", "o"))
for (name, colour, style, marker), count in zip(styles, operations(1, contexts)):
    left.loglog(contexts, count, color=colour, linestyle=style, marker=marker, label=name)
left.loglog(contexts, contexts * pair_expanded, color=plots.BLACK, linestyle=":", marker="", label="MHA, keys cached")
left.set(xlabel="context L, tokens", ylabel="operations per head")
left.set_title("Decoding: n = 1", fontsize=10)
left.legend()
for L, colour, style in ((512, plots.SKY, ":"), (131072, plots.BLUE, "-")):
    one, other = operations(news, L)
    right.loglog(news, other / one, color=colour, linestyle=style, marker="", label=f"L = {L:,}")
right.axhline(1, color=plots.BLACK, linewidth=1)
right.annotate("equally many", (1, 1), xytext=(0, -12), textcoords="offset points", fontsize=9)
right.axvline(crossing, color=plots.BLACK, linewidth=0.8)
meet = f"$n^* = {crossing:.0f}$:\nlong contexts\nmeet here"
right.annotate(meet, (crossing, 0.012), xytext=(4, 0), textcoords="offset points", fontsize=9)
right.set(xlabel="new tokens n", ylabel="operations, absorbed / expanded")
right.set_title("Prefilling: which is cheaper?", fontsize=10)
right.legend()
fig.suptitle("Operations of one MLA head of Ling-3.0-tiny, counted", fontsize=11)
plt.show()

assert (change_sides, pair_expanded, pair_absorbed) == (262_144, 640, 2176) and pair_absorbed == 3.4 * pair_expanded
one, other = operations(1, 4096)
print("one new token at L = 4,096:", f"absorbed takes 1/{one / other:.0f} of the operations of expanded")
one, other = operations(512, 131_072)
print("a chunk of 512 at L = 131,072:", f"expanded takes 1/{other / one:.1f} of the operations of absorbed")
one, other = operations(np.asarray([157, 171]), 10**9)
assert one[0] > other[0] and one[1] < other[1] and 157 < crossing < 171

# %% [markdown]
# Against MHA with its keys in the cache, decoding with absorption computes 3.4 times more, and reads 7.1 times less.
# Which counts? A modern accelerator can do hundreds of operations in the time it takes to read one byte, so decoding
# waits for memory, and what counts is how much is done with a byte once it is there:

# %%
H = 16
mha = H * pair_expanded / (2 * H * (N + P + V))
mla_intensity = H * pair_absorbed / (2 * (R + P))
print(f"operations per byte of cache: {mha:.0f} for MHA,", f"{mla_intensity:.0f} for MLA with 16 heads")
assert (round(mha), round(mla_intensity)) == (1, 30)

# %% [markdown]
# (`ling3` lets the sum over values run over the whole entry of 576 and drops the last 64 sums: a little more
# arithmetic, no copy of the cache.)
#
# ## Why the rotated key stands apart
#
# RoPE turns queries and keys by an angle that grows with their position. Turning is orthogonal and angles add, so a
# rotated product depends on the distance alone:
#
# $$(\mathcal R_i\,q)\cdot(\mathcal R_j\,k) = q\cdot \mathcal R_{j-i}\,k .$$

# %%
theta = nano.config.rope_theta
q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 16))) for _ in range(2))


def rotated(x, position):
    return mla.rotation(x, jnp.full((1, 1), position, jnp.int32))[0, 0, 0]


for i, j in ((5, 2), (105, 102), (1005, 1002)):
    np.testing.assert_allclose(rotated(q, i) @ rotated(k, j), rotated(q, 3) @ rotated(k, 0), rtol=1e-9)

# %% [markdown]
# Suppose the key $W_{uk}\,c_j$ itself were rotated. Then
#
# $$(\mathcal R_i\,q_i)\cdot(\mathcal R_j W_{uk}\,c_j) = \bigl(W_{uk}^\top\,\mathcal R_{i-j}\,q_i\bigr)\cdot c_j :$$
#
# the matrix that the query should absorb depends on $j$. A query would have to be brought into the latent's space anew
# for each token it looks at, which is what absorption was to avoid; and the cached latent cannot be turned beforehand,
# since the turn happens in each head's own space, behind $W_{uk,h}$. How far off would one fixed matrix be? Here is the
# change of $W_{uk}^\top\mathcal R_{d}$ from distance 0 to $d$, for nano's own $W_{uk}$ (and its $\theta = 10{,}000$):

# %%
W_uk = np.asarray(mla.kv_b_proj.weight.reshape(4, 64, 64)[:, :32])  # nano's [heads, N, R]
distances = np.unique(np.geomspace(1, 2048, 40).astype(int))
rows = jnp.asarray(np.swapaxes(W_uk, 1, 2))  # each latent channel's vector in the head's key space
turn, change = Rope.plain(theta, 32, interleaved=True), []
for d in distances:
    turned = turn(rows.reshape(1, 1, -1, 32), jnp.full((1, 1), d, jnp.int32))
    turned = turned.reshape(rows.shape)
    change.append(float(jnp.linalg.norm(turned - rows) / jnp.linalg.norm(rows)))
fig, ax = plt.subplots(figsize=(7, 2.8))
ax.semilogx(distances, change, color=plots.MLA)
ax.axhline(np.sqrt(2), color=plots.BLACK, linewidth=0.8)
ax.annotate(r"$\sqrt{2}$: unrelated", (1, 1.44))
ax.set(xlabel="distance d, tokens", ylabel="relative change of the\nmatrix to absorb", ylim=(0, 1.7))
ax.set_title("How the matrix to absorb would turn with distance, nano's MLA layer", fontsize=11)
plt.show()
assert 0.25 < change[0] < 0.35 and max(change) > 1.2

# %% [markdown]
# One token away the matrix is already 30 % off. So MLA splits the work: $N$ channels per head without position,
# which can be absorbed, and one key of $P$ channels with position, shared by all heads, computed from $x$ and rotated
# once, *before* it is cached. A dot product of joined vectors is the sum of the parts' dot products, hence the two
# terms of $s_{ijh}$ and the joint scale $(N+P)^{-1/2}$.
#
# ### A head that looks back by distance
#
# One of nano's skills is to go on with a string that repeats, `Every 12: owl elm owl owl fox …`. Its words are three,
# so a word says little about where in the period it stands; the distance says all. Where do the heads look? The
# weights by distance, averaged over the last period of such strings, with the layer's rotation and without it:

# %%
period = 12
strings = [own for own in SKILLS["positions"].exam(40) if own.prompt.startswith(f"Every {period}:")]
looked = {"as trained": 0, "without RoPE": 0}  # [heads, distance]
for own in strings:
    ids = tok.encode(own.prompt + own.answer)
    last = len(ids) - 1 - np.arange(period)
    given = mla_inputs(ids)
    q, compressed = mla.q_b_proj(mla.q_a_layernorm(mla.q_a_proj(given))), mla.kv_a_proj_with_mqa(given)
    q, k_rope = q.reshape(1, len(ids), 4, 48), compressed[None, :, None, 64:]
    k = mla.kv_b_proj(mla.kv_a_layernorm(compressed[:, :64])).reshape(len(ids), 4, 64)[..., :32]
    for name in looked:
        at = jnp.arange(len(ids), dtype=jnp.int32)[None] * (name == "as trained")  # turned by 0 is not turned
        q_rope, k_turned = mla.rotation(q[..., 32:], at)[0], mla.rotation(k_rope, at)[0, :, 0]
        scores = jnp.einsum("ihn,jhn->hij", q[0, ..., :32], k) + jnp.einsum("ihp,jp->hij", q_rope, k_turned)
        seen = jnp.tril(jnp.ones(scores.shape[1:], bool))
        weights = np.asarray(jax.nn.softmax(jnp.where(seen, scores * 48**-0.5, -jnp.inf), axis=-1))
        back = [weights[:, last, last - d].mean(axis=1) for d in range(2 * period)]
        looked[name] += np.stack(back, axis=1) / len(strings)
fig, axes = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
for ax, (name, back) in zip(axes, looked.items()):
    for h in range(4):
        ax.plot(back[h], label=f"head {h}")
    ax.axvline(period - 1, color=plots.BLACK, linewidth=0.8)
    ax.annotate("the word that comes next", (period - 1, 0.9), xytext=(5, 0), textcoords="offset points", fontsize=8)
    ax.set(ylim=(-0.03, 1), xlabel="distance, tokens", ylabel="attention weight, mean")
    ax.set_title(name, fontsize=10)
    ax.label_outer()
axes[0].legend(loc="upper left")
fig.suptitle(f"Where nano's MLA heads look in strings of period {period}", fontsize=11)
plt.show()
there = {name: back[:, period - 1].max() for name, back in looked.items()}
print({name: f"{weight:.2f}" for name, weight in there.items()}, f"the best head's weight {period - 1} tokens back")
assert there["as trained"] > 0.8 and there["without RoPE"] < 0.1

# %% [markdown]
# One head does it: 92 % of its weight lies on the one token that is right. Without the rotation no head gives that
# token more than 3 %.
#
# ## The gate
#
# The weights of a softmax sum to one. A head that finds nothing must still return a mean of values; models without a
# gate learn to park such heads on a token that says nothing (an *attention sink*). Ling-3 gives each head a number per
# token, $\sigma(w_h\cdot x_i)$, multiplied onto its output: near zero the head is off. The gate depends on the query's
# token alone, and it is a nonlinearity between $W_{uv}$ and $W_o$, which are otherwise two linear maps in a row.

# %%
H, N, P, V, R = 4, 32, 16, 32, 64  # nano again
q_nope, q_rope, c, k_rope = queries_and_entries(mla, x)
kv = mla.kv_b_proj(c).reshape(T, H, N + V)
scores = jnp.einsum("ihn,jhn->hij", q_nope, kv[..., :N]) + jnp.einsum("ihp,jp->hij", q_rope, k_rope)
o = jnp.einsum("hij,jhv->ihv", softmax(scores * (N + P) ** -0.5), kv[..., N:])
gate = jax.nn.sigmoid(mla.g_proj(x))  # [seq, heads]
said = jnp.einsum("ihv,dhv->ihd", o, mla.dense.weight.reshape(-1, H, V))  # what each head would add without it
np.testing.assert_allclose(jnp.sum(gate[..., None] * said, axis=1), y, rtol=1e-9, atol=1e-12)

t, h = np.unravel_index(int(jnp.argmin(gate)), gate.shape)
loud, heard = (float(jnp.linalg.norm(z[t, h]) / jnp.linalg.norm(y[t])) for z in (said, gate[..., None] * said))
print(f"token {t} ({tok.decode([int(tokens[0, t])])!r}), head {h}:", f"the gate is {gate[t, h]:.1e}")
print(f"its part of the layer's output, which has length 1: {loud:.0f} without the gate,", f"{heard:.3f} with it")
assert loud > 10 and heard < 0.1  # without its gate it would drown the others, with it it is not heard among them

# %% [markdown]
# What nano's gates do, token by token: in the problem; in a string that repeats, in which each word has to be found
# again; and in facts that nano knows by heart, for which there is nothing to find.

# %%
written = {name: next(SKILLS[name].texts(3, "train")) for name in ("positions", "facts")}
texts = {"problem": text, **{name: own.prompt + own.answer for name, own in written.items()}}
fig, axes = plt.subplots(3, 1, figsize=(11, 5.4))
opened = {}
for ax, (name, own) in zip(axes, texts.items()):
    row = tok.encode(own)
    opened[name] = np.asarray(jax.nn.sigmoid(mla.g_proj(mla_inputs(row))))  # [seq, heads]
    image = ax.imshow(opened[name].T, aspect="auto", vmin=0, vmax=1)
    ax.set_xticks(range(len(row)), [tok.decode([t]).replace("\n", "⏎") for t in row], rotation=90, fontsize=7)
    ax.set(ylabel=f"{name}\nhead", yticks=range(H), xlim=(-0.5, T - 0.5))
    ax.grid(visible=False)
fig.colorbar(image, ax=axes, label="gate, from 0 (shut) to 1 (open)")
fig.suptitle("Output gates of nano's MLA heads at each token of three texts", fontsize=11)
plt.show()
for name, gates in opened.items():
    print(f"{name}: {gates.min():.3f} to {gates.max():.3f}, on average {gates.mean():.2f}")
attributes = np.isin([tok.decode([t]).strip() for t in tok.encode(texts["facts"])], ATTRIBUTES)
known, found = opened["facts"][attributes].mean(), opened["positions"][-2 * period - 1 : -1].mean()
print(f"where a fact is due: {known:.2f} on average", end="; ")
print(f"in the string, where the next word is to be found: {found:.2f}")
assert known < found / 3

# %% [markdown]
# The gates are open where this layer has something to find, and nearly shut where an answer is known: at `likes`,
# `fears`, `seeks` and `owns`, after each of which comes a word that stands nowhere in the text.
#
# ## What nano needs its MLA layer for
#
# The other three layers, of KDA, remember too. What is left of nano's skills without this one, without its gate, and
# without its rotation?

# %%
cuts = {
    "as trained": trained,
    "no RoPE": no_rope(trained),
    "no gate": no_output_gate(trained, "MLA"),
    "no MLA": eqx.tree_at(lambda m: m.model.layers[3].attention.dense.weight, trained, replace_fn=jnp.zeros_like),
}
exams = {name: SKILLS[name].exam(64) for name in ("problems", "facts", "copying", "positions")}
right = {
    cut: {name: np.mean(right_answers(model, tok, exam)) for name, exam in exams.items()} for cut, model in cuts.items()
}
fig, ax = plt.subplots(figsize=(9, 3))
looks = zip((plots.BLUE, plots.ORANGE, plots.GREEN, plots.RED), plots.HATCHES)
for k, ((cut, of), (colour, hatch)) in enumerate(zip(right.items(), looks)):
    at = np.arange(len(exams)) + 0.2 * k - 0.3
    bars = ax.bar(at, [100 * share for share in of.values()], 0.2, label=cut, color=colour, edgecolor=plots.BLACK)
    for bar in bars:
        bar.set(hatch=hatch, linewidth=0.4)
    ax.bar_label(bars, [f"{100 * share:.0f}" for share in of.values()], fontsize=8, padding=1)
ax.set(xticks=range(len(exams)), xticklabels=list(exams), ylabel="right answers, %", ylim=(0, 112))
ax.set_title("What nano gets right without parts of its MLA layer", fontsize=11)
ax.legend(loc="upper left", bbox_to_anchor=(1, 1))
ax.grid(axis="x", visible=False)
plt.show()
for skill in ("copying", "positions"):
    assert right["as trained"][skill] > 0.8 and right["no MLA"][skill] < 0.1, skill
assert right["no RoPE"]["positions"] < 0.1
for skill in ("facts", "copying"):
    assert abs(right["as trained"][skill] - right["no RoPE"][skill]) < 0.05, skill
for cut in ("no MLA", "no RoPE"):
    assert 0.5 < right[cut]["problems"] < right["as trained"]["problems"] - 0.05, cut
assert right["no MLA"]["facts"] - right["no gate"]["facts"] > 0.5

# %% [markdown]
# Copying and positions are nothing without the layer: what they look for is one exact place, and that is what attention
# can find and a KDA state of fixed size cannot promise. Positions are nothing without the rotation either. Copying
# finds its place by what stands there, since no two words come twice in the same order, and short convolutions show a
# token the words before it. Problems lose some, here a quarter without the layer and a tenth without the rotation (of
# 200 others it is 18 % either way, `docs/ablations.json`). Facts by heart do without both, and not without the gate:
# what nobody looked for would drown them.

# %% [markdown]
# ## Exercises
#
# **1.** A cache holds $L$ tokens and $n$ new ones come. From which $L$ on is the absorbed form the cheaper one, for
# $n = 1$, 128, 160 and 512? Derive a formula with $n^*$ from the table of *Which form, when*, then check it with
# `operations(n, L)`.
#
# <details><summary>Solution</summary>
#
# Absorbed is cheaper if $n\cdot 2R(N+V) + nL\,p_a < L\cdot 2R(N+V) + nL\,p_e$, with the costs of a pair $p_a$ and
# $p_e$. Divided by $2R(N+V)$, and with $n^* = 2R(N+V)/(p_a - p_e)$, that is
#
# $$L > \frac{n}{1 - n/n^*} .$$
#
# So from 2 tokens on for $n = 1$: decoding always absorbs. From 513 for $n = 128$, from 2,561 for $n = 160$, and never
# for $n = 512 > n^* = 171$. (`ling3` expands whenever there is more than one token: its prompts come in chunks of up to
# 512, and one program for all of them is simpler than two.)
#
# ```python
# L = np.arange(1, 10_000)
# for n in (1, 128, 160, 512):
#     one, other = operations(n, L)
#     print(n, L[other < one][:1])
# ```
#
# </details>
#
# **2.** Ling-3.0-flash has 32 heads and 7 MLA layers of the same $R$ and $P$. How many bytes does a token leave in the
# cache, and how many operations per byte does absorbed decoding do?
#
# <details><summary>Solution</summary>
#
# $7\cdot 2\cdot 576 = 8{,}064$ bytes: the heads do not enter. Operations per byte double with the heads, to 60.
#
# </details>
#
# **3.** Shuffle the cached entries of all earlier tokens and let the last token attend to them. What happens to its
# output? What if you shuffle the latents alone, and leave the rotated keys where they are? And what would a KDA layer
# make of earlier tokens in another order? Predict, then run:
#
# ```python
# import dataclasses
#
# order, flat = np.random.default_rng(0).permutation(T - 1), cache.entries.reshape(-1, R + P)
# flat = flat.at[: T - 1, :].set(flat[order, :])  # for the latents alone: `:R` instead of `:`, twice
# shuffled = dataclasses.replace(cache, entries=flat.reshape(cache.entries.shape))
# out, _ = step(x[None, T - 1 :], shuffled, jnp.full(1, T - 1, jnp.int32))
# print(jnp.linalg.norm(out[0, 0] - y[-1]) / jnp.linalg.norm(y[-1]))
# ```
#
# <details><summary>Solution</summary>
#
# Nothing, up to rounding: softmax attention is a sum over a set, and an entry carries its position in its rotated key,
# not in its place. With the latents alone each of them stands beside another token's rotated key, and the output is
# 100 % off: the error is as long as the output itself. A KDA state is no set: each token decays what came before and
# corrects what it finds, so the same tokens in another order leave another state.
#
# </details>
