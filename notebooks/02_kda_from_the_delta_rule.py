# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 2. Kimi Delta Attention, from the delta rule
#
# Softmax attention keeps every key and value it has seen. A KDA head keeps one matrix $S$, as large after a million
# tokens as after one, and per token it does four things:
#
# $$S \leftarrow \mathrm{diag}(e^{g})\,S,\qquad u = \beta\,(v - S^\top k),\qquad S \leftarrow S + k\,u^\top,\qquad
# o = S^\top q.$$
#
# This notebook derives these lines, then the *chunk form*, which computes the same numbers on matrix products, and then
# shows what the bound $-5 \le g$ of Ling-3 is for: it makes those products representable in float32.
# Each claim is followed by the cell that checks it against `ling3.ops.kda` and `ling3.ops.kda_chunks`, which the
# model runs.
#
# **You need**: softmax attention, outer products and gradients; notebook 1 shows where the layer stands.
#
# **Afterwards you can** say how KDA's memory differs from linear attention's and DeltaNet's, derive the chunk form from
# the recurrence, and work out which sub-chunk a given bound on the decay allows in float32.
#
# **It takes** a minute and a half on two cores, and 1.3 GB of memory.

# %%
import itertools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import ling3
from ling3.cache import Span
from ling3.layers.kda import KDA
from ling3.ops.kda import kda_gate, l2_normalize, recurrent_kda
from ling3.ops.kda_chunks import MAX_NATS, SUB_CHUNK, chunk_kda, unit_lower_inverse
from ling3.runtime import plots
from ling3.train.nano.problems import ask, problems

jax.config.update("jax_enable_x64", True)  # equalities are checked in float64; float32 has its turn below
plots.use()


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape))


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


# %% [markdown]
# ## A memory that is a matrix
#
# Let a head write each pair $(k_j, v_j)$ into a matrix by adding the outer product, and read with a query:
#
# $$S = \sum_j k_j v_j^\top,\qquad o = S^\top q = \sum_j (k_j\cdot q)\,v_j .$$
#
# That is attention without the softmax: *linear attention*. Asked for a key it has stored ($|k_i| = 1$), it answers
#
# $$S^\top k_i = v_i + \sum_{j\ne i} (k_j\cdot k_i)\,v_j ,$$
#
# the right value plus crosstalk. Two random unit vectors in $K$ dimensions have $\mathbb E\,(k_j\cdot k_i)^2 = 1/K$, so
# after $n$ writes the squared error is $(n-1)/K$ of the squared length of a value: it grows without bound. And a
# second write to the same key does not replace the first: the answer is the sum of the two.
#
# ## The delta rule: one step of gradient descent
#
# Instead of adding blindly, ask what the memory *should* have answered. The loss of the newest pair and its gradient
# are
#
# $$\mathcal L(S) = \tfrac12\,|S^\top k - v|^2,\qquad \nabla_S\,\mathcal L = k\,(S^\top k - v)^\top ,$$
#
# and one step of size $\beta$ against it is the *delta rule* (Widrow and Hoff, 1960; as attention: Schlag et al. 2021,
# Yang et al. 2024):
#
# $$S \leftarrow S - \beta\,\nabla_S\mathcal L = S + k\,\underbrace{\beta\,(v - S^\top k)}_{u}{}^\top .$$

# %%
S, k, v, beta = normal(0, 8, 6), unit(normal(1, 8)), normal(2, 6), 0.3


def loss(S):
    return 0.5 * jnp.sum((S.T @ k - v) ** 2)


after = S + jnp.outer(k, beta * (v - S.T @ k))
np.testing.assert_allclose(after, S - beta * jax.grad(loss)(S), rtol=1e-12)

# %% [markdown]
# What the memory answers for $k$ afterwards follows from $|k| = 1$:
#
# $$S_{\text{new}}^\top k = S^\top k + |k|^2\,\beta\,(v - S^\top k) = (1-\beta)\,S^\top k + \beta\,v .$$
#
# So $\beta$, a sigmoid of the token, says how much of the old answer is replaced by the new one, from nothing to all.
# Everything orthogonal to $k$ stays untouched. The write is $S \mapsto (I - \beta k k^\top)\,S + \beta k v^\top$, and
# its matrix has the eigenvalues $1$ and $1-\beta|k|^2$. With $|k| = 1$ both lie in $[0, 1]$: what is stored can only
# shrink, whatever tokens come. That is why KDA's keys are normalised (`l2_normalize`, with $10^{-6}$ under the root for
# the sake of zeros; here `unit`).

# %%
np.testing.assert_allclose(after.T @ k, (1 - beta) * (S.T @ k) + beta * v, rtol=1e-12)
orthogonal = normal(3, 8) - (normal(3, 8) @ k) * k
np.testing.assert_allclose(after.T @ orthogonal, S.T @ orthogonal, rtol=1e-12)
np.testing.assert_allclose(jnp.linalg.eigvalsh(jnp.eye(8) - beta * jnp.outer(k, k)), [1 - beta, *[1.0] * 7], rtol=1e-12)

# %% [markdown]
# Now both memories, on random pairs. `recurrent_kda` with $g = 0$ and $\beta = 1$ is the delta rule; a token with
# $\beta = 0$ writes nothing, so one batch holds the memory after each count $n$ of writes. The third line is what no
# memory of this shape can beat: the least-squares solution, which is exact up to $n = K$ pairs.

# %%
K = V = 32
writes, heads = 96, 64
counts = np.unique(np.round(np.geomspace(1, writes, 15)).astype(int))
keys, values = unit(normal(4, 1, writes, heads, K)), normal(5, 1, writes, heads, V)
written = jnp.asarray(np.arange(writes)[None] < counts[:, None], jnp.float64)  # [counts, writes]


def batched(x):
    return jnp.broadcast_to(x, (len(counts), *x.shape[1:]))


zero = jnp.zeros((len(counts), heads, K, V))
strength = jnp.broadcast_to(written[..., None], (len(counts), writes, heads))
inputs = (batched(keys), batched(keys), batched(values), jnp.zeros((len(counts), writes, heads, K)))
_, delta = jax.jit(recurrent_kda)(*inputs, strength, zero)
additive = jnp.einsum("nw,whk,whv->nhkv", written, keys[0], values[0])
by_head, answers = np.asarray(keys[0]).swapaxes(0, 1), np.asarray(values[0]).swapaxes(0, 1)
best = np.stack([np.linalg.pinv(by_head[:, :n]) @ answers[:, :n] for n in counts])


def recall_error(S):
    """Mean of |Sᵀk - v|² / |v|² over what was written."""
    error = jnp.sum((jnp.einsum("nhkv,whk->nwhv", S, keys[0]) - values) ** 2, axis=-1) / V
    return jnp.sum(error * strength, axis=(1, 2)) / jnp.sum(strength, axis=(1, 2))


errors = {"linear attention: add": additive, "delta rule: correct": delta, "least squares": best}
errors = {name: np.asarray(recall_error(S)) for name, S in errors.items()}
fig, ax = plt.subplots()
for name, error in errors.items():
    ax.plot(counts, error, label=name)
ax.plot(
    counts, (counts - 1) / K, color=plots.BLACK, linestyle=":", linewidth=1, label=r"expected: $(n-1)/K$", marker=""
)
ax.axvline(K, color=plots.BLACK, linewidth=0.8)
ax.annotate(f"$n = K = {K}$: a pair for each channel", (K, 2.8), xytext=(4, 0), textcoords="offset points")
ax.set(xlabel="pairs written, n", ylabel="squared error of recall / |value|²")
ax.set_title(f"Errors of recall from a {K} × {V} memory of random pairs", fontsize=11)
ax.legend(loc="upper left")
plt.show()

# 64 heads of up to 96 pairs: their mean stays within a fifth of its expectation.
np.testing.assert_allclose(errors["linear attention: add"][5:], (counts[5:] - 1) / K, rtol=0.2)
assert np.all(errors["delta rule: correct"][1:] < errors["linear attention: add"][1:])
assert np.all(errors["least squares"][counts < K] < 1e-20)
energy = np.asarray(jnp.mean(jnp.sum(delta**2, axis=(2, 3)), axis=1)) / (K * V)
np.testing.assert_allclose(energy, 1 - (1 - 1 / K) ** counts, rtol=0.1)

# %% [markdown]
# The delta rule's error is bounded: a write in a random direction first removes $1/K$ of everything stored, so $|S|^2$
# tends to $KV$ (asserted above), and a key that was forgotten long ago is answered by an unrelated vector of the length
# of a value, an error of $1 + 1$. The oldest pairs are lost; the newest is exact. The difference is plainest when a key
# gets a second value:

# %%
k, first, second = unit(normal(6, 1, 1, 1, 8)), normal(7, 6), normal(8, 6)
twice = jnp.broadcast_to(k, (1, 2, 1, 8))
_, S = recurrent_kda(
    twice,
    twice,
    jnp.stack([first, second])[None, :, None],
    jnp.zeros((1, 2, 1, 8)),
    jnp.ones((1, 2, 1)),
    jnp.zeros((1, 1, 8, 6)),
)
np.testing.assert_allclose(S[0, 0].T @ k[0, 0, 0], second, rtol=1e-9)  # the sum of both, were it linear attention

# %% [markdown]
# ## Forgetting, channel by channel
#
# The delta rule forgets only what is overwritten. But topics end, and then the memory should fade whether or not its
# keys occur again. So the state decays before each write, by $e^{g}$ with $g \le 0$, and the *kind* of $g$ names the
# architecture:
#
# | decay | write | name |
# |---|---|---|
# | none | $k\,v^\top$ | linear attention |
# | one number per head | $k\,v^\top$ | RetNet (fixed), Mamba-2 (from the token) |
# | one per key channel | $k\,v^\top$ | gated linear attention |
# | none | $k\,\beta(v - S^\top k)^\top$ | DeltaNet |
# | one number per head | $k\,\beta(v - S^\top k)^\top$ | Gated DeltaNet |
# | **one per key channel** | $k\,\beta(v - S^\top k)^\top$ | **Kimi Delta Attention** (arXiv 2510.26692) |
#
# A row of $S$ belongs to a key channel, so a head may hold some channels for a whole document and wipe others at each
# comma. The loop below is the law as it stands at the top of this page; `recurrent_kda` is the same, with both of its
# reads in one product: since $k\,u^\top$ is rank one, $o = (e^g S)^\top q + (q\cdot k)\,u$ needs no second look at $S$.


# %%
def kda_by_hand(q, k, v, g, beta, S):
    """One head: q, k, g [seq, key], v [seq, value], beta [seq]."""
    out = []
    for t in range(len(q)):
        S = jnp.exp(g[t])[:, None] * S
        u = beta[t] * (v[t] - S.T @ k[t])
        S = S + jnp.outer(k[t], u)
        out.append(S.T @ q[t])
    return jnp.stack(out), S


def draw(seed, seq, key, value, lower_bound):
    """A random sequence of one head: q, k, v, g, beta and a state to start from."""
    q, k = (l2_normalize(normal(seed + i, 1, seq, 1, key)) for i in range(2))
    g = kda_gate(3 * normal(seed + 2, 1, seq, 1, key), jnp.zeros(1), jnp.zeros((1, key)), lower_bound)
    beta = jax.nn.sigmoid(normal(seed + 3, 1, seq, 1))
    return q * key**-0.5, k, normal(seed + 4, 1, seq, 1, value), g, beta, normal(seed + 5, 1, 1, key, value)


inputs = draw(10, seq=16, key=8, value=6, lower_bound=-5.0)
q, k, v, g, beta = (x[0, :, 0] for x in inputs[:5])
S0 = inputs[5][0, 0]
o, S = recurrent_kda(*inputs)
by_hand, S_by_hand = kda_by_hand(q, k, v, g, beta, S0)
np.testing.assert_allclose(o[0, :, 0], by_hand, rtol=1e-10)
np.testing.assert_allclose(S[0, 0], S_by_hand, rtol=1e-10)

# %% [markdown]
# A decay of $g$ nats per token has a half-life of $\ln 2/|g|$ tokens: 693 tokens at $g = -0.001$, 7 at $-0.1$, and at
# Ling-3's bound of $-5$ a single token leaves $e^{-5} = 0.7\,\%$. What does a trained model choose? Here is $-g$ of
# the three KDA layers of *nano*, the checkpoint in the package, over 24 problems of the kind it was trained on. (Its
# training began with half of the heads at half-lives below a token, and with the others at 8 to 700 tokens.)

# %%
model, tok = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")
rows = (tok.encode(f"{ask(p)} {p.solution}")[:32] for p in problems(1, "held_out"))
tokens = jnp.asarray(list(itertools.islice((row for row in rows if len(row) == 32), 24)), jnp.int32)
span = Span.whole(len(tokens), 32)


@jax.jit
def decay_rates(model, tokens):
    """-g of each KDA layer, [batch, seq, heads, key]."""
    x, rates = model.model.word_embeddings.embed(tokens), {}
    for i, layer in enumerate(model.model.layers[:3]):
        if isinstance(kda := layer.attention, KDA):
            f = kda.f_proj(layer.input_layernorm(x), dtype=jnp.float32).reshape(*tokens.shape, 4, 32)
            rates[i] = -kda_gate(f, kda.A_log, kda.dt_bias.reshape(4, 32), kda.lower_bound)
        x, _ = layer(x, None, span)
    return rates


decays = decay_rates(model, tokens)
fig, ax = plt.subplots(figsize=(7, 3.2))
bins = np.geomspace(1e-4, 5, 60)
for (i, rate), colour, style in zip(
    decays.items(), (plots.BLUE, plots.ORANGE, plots.GREEN), ("-", "--", "-."), strict=True
):
    assert jnp.all((rate > 0) & (rate < 5))
    share = np.ones(rate.size) / rate.size
    shown = np.maximum(rate.reshape(-1), bins[0])
    ax.hist(shown, bins, weights=share, histtype="step", color=colour, linestyle=style, label=f"layer {i}")
ax.axvline(5, color=plots.BLACK, linewidth=1)
ax.annotate("bound", (5, 0.28), xytext=(-36, 0), textcoords="offset points")
ax.set(
    xscale="log",
    ylim=(0, 0.3),
    xlabel="decay $-g$, nats per token (in the first bin: all slower)",
    ylabel="share of all (token, channel)",
)
top = ax.secondary_xaxis("top", functions=(lambda r: np.log(2) / np.maximum(r, 1e-9),) * 2)
top.set_xlabel("half-life, tokens")
ax.legend(loc="upper left")
fig.suptitle("Decays in nano's three KDA layers, over 24 word problems", fontsize=11)
plt.show()
slowest = []
for i, rate in decays.items():
    lasting, local = rate[:, :, :2], rate[:, :, 2:]  # heads 0 and 1, and 2 and 3
    assert np.mean(lasting < 1) > 0.95 and np.mean(local > 1) > 0.95
    spread = [np.percentile(half, (5, 50, 95)) for half in (lasting, local)]
    slow, fast = (", ".join(f"{x:.4f}" for x in percentiles) for percentiles in spread)
    print(f"layer {i}: {slow} nats in heads 0 and 1,", f"{fast} in heads 2 and 3 (5th, 50th and 95th percentile)")
    slowest.append(spread[0][0])
assert slowest[1] < slowest[0] / 3 and slowest[2] < slowest[1] / 30

# %% [markdown]
# The two kinds of heads are still there. In heads 2 and 3 the median is 3 to 4 nats: of what was written with the last
# token 2 to 5 % are left. Heads 0 and 1 keep more, and the longer the deeper they are: their median half-life is 1.7
# tokens in layer 0, 7 in layer 1 and 13 in layer 2, where a twentieth of the decays is so slow, with half-lives above
# 6,000 tokens, that nothing fades before a problem ends.
#
# ## The chunk form
#
# Token by token, the recurrence is a chain of small steps: each reads all of $S$, changes it a little and writes it
# back. The way out is to take $C$ tokens at once, and to find all their updates $u_1,\dots,u_C$ *before* touching $S$.
#
# **Unroll.** Let $G_i = g_1 + \dots + g_i$ inside the chunk and $S_0$ the state at its start. By induction
#
# $$S_i = e^{G_i} S_0 + \sum_{j\le i} \bigl(e^{G_i - G_j}\,k_j\bigr)\,u_j^\top , \tag{1}$$
#
# where $e^{\cdots}$ multiplies key channels: what was written at $j$ has decayed from $j$ to $i$.
#
# **Insert.** Token $i$ reads the memory decayed to $i$ but without its own write, which is (1) with $j < i$:
#
# $$u_i = \beta_i v_i - \beta_i\,(e^{G_i} k_i)^\top S_0
# - \sum_{j<i} \underbrace{\beta_i \sum_c k_{ic}\,k_{jc}\,e^{G_{ic}-G_{jc}}}_{A_{ij}}\;u_j .$$
#
# **Solve.** The $u$ stand on both sides, but each depends on earlier ones alone: a triangular system. With the rows
# $u_i$ in a matrix $v'$, and $A$ strictly lower triangular,
#
# $$\begin{gathered} (I + A)\,v' = \beta v - (\beta\,k\,e^{G})\,S_0\quad\Longrightarrow\\
# v' = \underbrace{M\,(\beta v)}_{U} - \underbrace{M\,(\beta\,k\,e^{G})}_{W}\,S_0,\qquad M = (I+A)^{-1} .
# \end{gathered} \tag{2}$$
#
# This is the WY form of a product of Householder-like factors $I - \beta kk^\top$ (Bischof and Van Loan, 1987; for the
# delta rule: Yang et al., arXiv 2406.06484). $U$ and $W$ do not contain $S_0$: all chunks of a sequence can compute
# them at the same time. What has to wait for the chunk before is one product with $S_0$.
#
# **Read.** With (1), $o_i = S_i^\top q_i$ and the state after the chunk are
#
# $$\begin{gathered} o = (q\,e^{G})\,S_0 + \mathrm{tril}(P)\,v',\quad P_{ij} = \sum_c q_{ic}k_{jc}e^{G_{ic}-G_{jc}},\\
# S_C = e^{G_C} S_0 + (k\,e^{G_C - G})^\top v' .
# \end{gathered} \tag{3}$$


# %%
def decayed_products(left, right, G):
    """Σ_c left_ic right_jc e^{G_ic - G_jc}, i >= j: three indices, no exponent > 0."""
    span = jnp.where(jnp.tril(jnp.ones((len(G), len(G)), bool))[..., None], G[:, None] - G[None], -jnp.inf)
    return jnp.einsum("ic,jc,ijc->ij", left, right, jnp.exp(span))


def chunk_by_hand(q, k, v, g, beta, S):
    G = jnp.cumsum(g, axis=0)
    A = jnp.tril(beta[:, None] * decayed_products(k, k, G), -1)
    M = jnp.linalg.inv(jnp.eye(len(q)) + A)
    U, W = M @ (beta[:, None] * v), M @ (beta[:, None] * k * jnp.exp(G))  # (2)
    new = U - W @ S
    o = (q * jnp.exp(G)) @ S + decayed_products(q, k, G) @ new  # (3)
    return o, jnp.exp(G[-1])[:, None] * S + (k * jnp.exp(G[-1] - G)).T @ new


o_chunk, S_chunk = chunk_by_hand(q, k, v, g, beta, S0)
np.testing.assert_allclose(o_chunk, by_hand, rtol=1e-10)
np.testing.assert_allclose(S_chunk, S_by_hand, rtol=1e-10)

# %% [markdown]
# These ten lines replace the sixteen steps of the loop. `chunk_kda` is the same for batches, heads and many chunks, and
# pads the last chunk with tokens of $g = 0$, $\beta = 0$. Here it is compared with the recurrence for lengths that fill
# their chunks and lengths that do not, from a non-zero state, in outputs, states and gradients:

# %%
for seq, chunk_size in ((1, 16), (37, 16), (64, 32)):
    inputs = draw(20, seq, key=8, value=6, lower_bound=-5.0)

    def chunked(*inputs, chunk_size=chunk_size):
        return chunk_kda(*inputs, lower_bound=-5.0, chunk_size=chunk_size)

    for ours, law in zip(jax.jit(chunked)(*inputs), jax.jit(recurrent_kda)(*inputs), strict=True):
        np.testing.assert_allclose(ours, law, rtol=1e-9, atol=1e-12)


def slopes(form, inputs):
    """The gradients of a scalar of outputs and state, in all six inputs."""
    return jax.jit(jax.grad(lambda *x: sum(jnp.sum(jnp.sin(y)) for y in form(*x)), argnums=range(6)))(*inputs)


inputs = draw(20, 37, key=8, value=6, lower_bound=-5.0)
by_chunks = slopes(lambda *x: chunk_kda(*x, lower_bound=-5.0), inputs)
for ours, law in zip(by_chunks, slopes(recurrent_kda, inputs), strict=True):
    np.testing.assert_allclose(ours, law, rtol=1e-8, atol=1e-11)

# %% [markdown]
# What the two triangles look like for a chunk of 32: $A_{ij}$ says how much of token $j$'s write token $i$ finds under
# its own key; $M$ is the correction that follows, and $M - I$ is $-A$ to first order.

# %%
_, k32, _, g32, beta32, _ = (x[0, :, 0] for x in draw(30, 32, key=8, value=6, lower_bound=-0.2))
A = jnp.tril(beta32[:, None] * decayed_products(k32, k32, jnp.cumsum(g32, axis=0)), -1)
M = jnp.linalg.inv(jnp.eye(32) + A)
fig, axes = plt.subplots(1, 2, figsize=(7, 3.2))
limit = float(jnp.max(jnp.abs(A)))
for ax, matrix, name in zip(axes, (A, M - jnp.eye(32)), ("$A$", r"$M - I = (I + A)^{-1} - I$")):
    image = ax.imshow(matrix, vmin=-limit, vmax=limit, cmap="PuOr")
    ax.set(xlabel="token j, written", ylabel="token i, writing")
    ax.set_title(name, fontsize=10)
    ax.grid(visible=False)
fig.colorbar(image, ax=axes, shrink=0.85, label="coefficient")
fig.suptitle("The two triangles of a chunk of 32 random tokens", fontsize=11)
plt.show()

# %% [markdown]
# ### The inverse
#
# $(I+A)^{-1}$ exists for every strictly triangular $A$, and there is a tempting product for it: since $A^C = 0$,
#
# $$(I+A)^{-1} = (I - A)(I + A^2)(I + A^4)(I + A^8)\cdots$$
#
# Do not use it. Take 64 tokens with the *same* key, $\beta = 1$ and no decay: $A$ is all ones below the diagonal. The
# answer is tame (each write undoes the last: ones on the diagonal and $-1$ below it), but the powers of $A$ hold
# binomial coefficients up to $\binom{62}{31} \approx 5\cdot 10^{17}$, whose differences float32 cannot hold.
# `unit_lower_inverse` goes by halves instead, and each of its intermediates is a block of the answer:
#
# $$\begin{pmatrix} P & 0\\ B & Q\end{pmatrix}^{-1}
# = \begin{pmatrix} P^{-1} & 0\\ -Q^{-1} B\,P^{-1} & Q^{-1}\end{pmatrix}.$$


# %%
def by_powers(A):
    I = jnp.eye(len(A), dtype=A.dtype)  # noqa: E741
    inverse, power = I - A, A @ A
    for _ in range(int(np.log2(len(A))) - 1):
        inverse, power = inverse @ (I + power), power @ power
    return inverse


same_key = jnp.tril(jnp.ones((64, 64), jnp.float32), -1)
truth = jnp.eye(64) - jnp.eye(64, k=-1)
by_both = [float(jnp.max(jnp.abs(form(same_key) - truth))) for form in (by_powers, unit_lower_inverse)]
print("largest error by powers {:.1e}, by halves {:.1e}".format(*by_both))
assert jnp.array_equal(unit_lower_inverse(same_key), truth)
assert jnp.max(jnp.abs(by_powers(same_key) - truth)) > 1e3

# %% [markdown]
# ### Why it pays
#
# Count multiplications and additions per token and head, with $K = V$ channels and chunks of $C$. The recurrence takes
# $7K^2$ (decay, two reads, a write), and for that it moves the float32 state in and out of memory: $8K^2$ bytes. The
# chunk form takes $6K^2$ for what touches $S$ and about $10\,C K + C^2$ for what happens inside the chunk, but it moves
# $S$ once per chunk. So its work per byte of state grows with $C$, and nearly all of it is matrix products, which is
# what processors are fastest at.

# %%
C, K = np.asarray([16, 32, 64, 128, 256]), 128
recurrence = 7 * K**2
chunked = 6 * K**2 + 10 * C * K + C**2
fig, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2))
left.plot(C, chunked / recurrence, color=plots.BLUE, label="chunk form")
left.axhline(1, color=plots.BLACK, linewidth=1)
left.annotate("recurrence", (80, 1.03))
left.set(xlabel="chunk length C, tokens", ylabel="operations, recurrence = 1", xscale="log", ylim=(0, 5))
right.plot(C, chunked / (8 * K**2 / C), color=plots.BLUE)
right.axhline(recurrence / (8 * K**2), color=plots.BLACK, linewidth=1)
right.annotate("recurrence", (80, 1.1))
right.set(xlabel="chunk length C, tokens", ylabel="operations per byte of state", xscale="log", yscale="log")
for ax in (left, right):
    ax.set_xticks(C, C)
    ax.minorticks_off()
fig.suptitle(f"Operations of the chunk form, counted for one head of {K} channels", fontsize=11)
plt.show()
ratio = chunked[0] / recurrence
print(f"C = 16: {ratio:.2f} × the operations of the recurrence,", f"{16 * ratio:.0f} × as many per byte of state")
assert chunked[0] < 1.05 * recurrence and chunked[2] < 2 * recurrence

# %% [markdown]
# ## What the bound buys
#
# One thing above was not a matrix product: $\sum_c k_{ic}k_{jc}e^{G_{ic}-G_{jc}}$ has three indices, and
# `decayed_products` builds all $C\times C\times K$ of them. It *wants* to factor,
#
# $$\sum_c k_{ic}\,k_{jc}\,e^{G_{ic}-G_{jc}} = \sum_c \bigl(k_{ic}\,e^{G_{ic}}\bigr)\bigl(k_{jc}\,e^{-G_{jc}}\bigr)
# = \bigl(k\,e^{G}\bigr)\bigl(k\,e^{-G}\bigr)^{\!\top},$$
#
# and on paper that is a matrix product. But $G$ only falls, so $e^{-G}$ only grows: with $g = -5$ in every token, 64
# tokens make $e^{320}$, and float32 ends at $e^{88.7}$. Every product needed lies in $[-1, 1]$; their factors do not
# exist.


# %%
def wrong_products(k, g):
    """The factored form over the whole chunk."""
    G = jnp.cumsum(g, axis=0)
    return jnp.tril((k * jnp.exp(G)) @ (k * jnp.exp(-G)).T)


k64 = unit(normal(40, 64, 8)).astype(jnp.float32)
g64 = jnp.full((64, 8), -5.0, jnp.float32)
wrong, right = wrong_products(k64, g64), decayed_products(k64, k64, jnp.cumsum(g64, axis=0))
assert jnp.isinf(jnp.exp(-jnp.cumsum(g64, axis=0))[-1, 0]), "e^320 is no float32"
assert jnp.any(jnp.isnan(wrong)), "0 · inf"
assert jnp.all(jnp.isfinite(right)) and jnp.max(jnp.abs(right)) <= 1.0 + 1e-6
first_nan = int(jnp.argmax(jnp.any(jnp.isnan(wrong), axis=1)))
limit = np.log(np.finfo(np.float32).max)
print(f"float32 ends at e^{limit:.1f}", end="; ")
print(f"the first NaN is at token {first_nan + 1}: 5 · {first_nan + 1} > {limit:.1f}")
assert 5 * first_nan < limit < 5 * (first_nan + 1)

# %% [markdown]
# The repair has two parts, and the first needs the bound.
#
# **Inside 16 tokens**, shift the exponents to the midpoint $m$: $e^{G_i - G_j} = e^{G_i - G_m}\cdot e^{G_m - G_j}$. At
# most eight tokens lie on either side, so with $g \ge -5$ both factors stay below $e^{8\cdot 5} = e^{40}$, and even the
# product of two such factors ($e^{80}$, above the diagonal, where it is thrown away) is finite. That is why the bound
# is $-5$: it is a number of this arithmetic, $16\cdot 5 = 80 < 88.7$, and not of language.
#
# **Across sub-chunks** the right factor $e^{G_m - G_j}$ of an earlier token can only shrink. So a chunk of 64 is four
# blocks of rows, each one plain matrix product. The picture has the largest exponent of any factor; the softplus law of
# Kimi Linear, $g = -e^{A_{\log}}\,\mathrm{softplus}(\cdot)$ with $e^{A_{\log}}$ up to 16 at its start, has no bound at
# all (drawn as an example: $16\,\mathrm{softplus}(0) = 11.1$ nats).

# %%
C = np.asarray([1, 2, 4, 8, 16, 32, 64, 128])
rates = {"bound −5": (5.0, plots.BLUE, "-", "o"), "bound −1": (1.0, plots.GREEN, "-.", "^")}
rates["softplus law, 16·softplus(0)"] = (16 * np.log(2), plots.RED, "--", "s")
fig, ax = plt.subplots(figsize=(7.5, 4))
for name, (rate, colour, style, marker) in rates.items():
    ax.plot(C, rate * C, color=colour, linestyle=style, marker=marker, label=name)
ax.plot(C, 5 * np.minimum(C, 16) / 2, color=plots.BLACK, marker="D", linestyle=":", label="bound −5, midpoints of 16")
ax.axhspan(limit, 3000, color=plots.PINK, alpha=0.25, linewidth=0)
ax.annotate("overflow of float32: above 88.7 nats", (1, 1200))
ax.annotate("320 nats", (64, 320), (5, -13), textcoords="offset points")
ax.set(xscale="log", yscale="log", ylim=(0.7, 3000), xlabel="chunk length, tokens")
ax.set(ylabel="largest exponent of a factor, nats")
ax.set_xticks(C, C)
ax.minorticks_off()
ax.legend(loc="lower right", fontsize=9)
ax.set_title("Exponents in the factored products of a chunk, by law of decay", fontsize=11)
plt.show()
assert SUB_CHUNK // 2 * 5 == MAX_NATS == 40 and 2 * MAX_NATS < limit < 5 * 18

# %% [markdown]
# The repair, for the sub-chunk of 16 that the plot's black line stands for, in three lines; then the whole of it, in
# `chunk_kda` with chunks of 64 at the bound itself, where the wrong way gave NaN.


# %%
def midpoint_products(left, right, g):
    G = jnp.cumsum(g, axis=0)
    middle = G[len(g) // 2]
    return jnp.tril((left * jnp.exp(G - middle)) @ (right * jnp.exp(middle - G)).T)


ours, law = midpoint_products(k64[:16], k64[:16], g64[:16]), right[:16, :16]
np.testing.assert_allclose(ours, law, rtol=1e-5, atol=1e-7)

q64, _, v64, _, beta64, state64 = (x.astype(jnp.float32) for x in draw(41, 64, key=8, value=6, lower_bound=-5.0))
at_the_bound = (q64, k64[None, :, None], v64, g64[None, :, None], beta64, state64)
o, S = jax.jit(lambda *x: chunk_kda(*x, lower_bound=-5.0, chunk_size=64))(*at_the_bound)
o_law, S_law = recurrent_kda(*at_the_bound)
np.testing.assert_allclose(o, o_law, atol=1e-6)
np.testing.assert_allclose(S, S_law, atol=1e-6)

# %% [markdown]
# Without a bound (`lower_bound=None`) the same function stays right: inside a sub-chunk it falls back to the three
# indices of `decayed_products`. It is a matter of cost: $16\cdot16\cdot K$ exponentials per sub-chunk and no matrix
# product, instead of $2\cdot16\cdot K$ and one. Here at decays up to hundreds of nats a token:

# %%
inputs = draw(50, 48, key=8, value=6, lower_bound=None)
inputs = (*inputs[:3], 40 * inputs[3], *inputs[4:])
print(f"the fastest decay here: {-jnp.min(inputs[3]):.0f} nats a token")
assert jnp.min(inputs[3]) < -200
unbounded = jax.jit(lambda *x: chunk_kda(*x, lower_bound=None))
for ours, law in zip(unbounded(*inputs), recurrent_kda(*inputs), strict=True):
    np.testing.assert_allclose(ours, law, rtol=1e-9, atol=1e-12)

# %% [markdown]
# ## What float32 costs
#
# Equality in float64 is a statement about algebra. The model runs in float32; so here are both forms in float32 against
# the recurrence in float64, for gates from almost none to the bound, over 512 tokens and 8 heads of 64 channels. The
# error is the largest of all outputs, relative to their root mean square.


# %%
def sequence(rate, seq=512, heads=8, key=64):
    """Float32 inputs, the same for both precisions; decays lie around `rate` nats."""
    q, k = (l2_normalize(normal(60 + i, 1, seq, heads, key)) for i in range(2))
    g = -jnp.minimum(rate * jnp.exp(0.3 * normal(62, 1, seq, heads, key)), 5.0)
    beta = jax.nn.sigmoid(normal(63, 1, seq, heads))
    inputs = (q * key**-0.5, k, normal(64, 1, seq, heads, key), g, beta, jnp.zeros((1, heads, key, key)))
    return tuple(x.astype(jnp.float32) for x in inputs)


forms = {
    "recurrence": jax.jit(recurrent_kda),
    "chunks of 16": jax.jit(lambda *x: chunk_kda(*x, lower_bound=-5.0, chunk_size=16)),
    "chunks of 64": jax.jit(lambda *x: chunk_kda(*x, lower_bound=-5.0, chunk_size=64)),
}
rates, found = (0.001, 0.01, 0.1, 1.0, 5.0), {name: [] for name in forms}
exact = jax.jit(recurrent_kda)
for rate in rates:
    inputs = sequence(rate)
    truth, _ = exact(*(x.astype(jnp.float64) for x in inputs))
    for name, form in forms.items():
        error = jnp.max(jnp.abs(form(*inputs)[0].astype(jnp.float64) - truth))
        found[name].append(float(error / jnp.sqrt(jnp.mean(truth**2))))

fig, ax = plt.subplots()
for name, error in found.items():
    ax.plot(rates, error, label=name)
ax.axhline(2.0**-24, color=plots.BLACK, linewidth=1)
ax.annotate("half a unit in the last place of 1", (0.0011, 2.0**-24 * 1.15), fontsize=9)
ax.set(xscale="log", yscale="log", xlabel="typical decay, nats per token", ylabel="largest error / rms output")
ax.set_title("Errors of KDA in float32 against float64, random inputs", fontsize=11)
ax.legend()
plt.show()
# The largest of 262,144 outputs, each a sum of 64 products over a chain of
# contractions: tens of roundings of 6e-8.
assert max(max(error) for error in found.values()) < 1e-5
for name in ("chunks of 16", "chunks of 64"):
    assert np.all(np.asarray(found[name]) < 2 * np.asarray(found["recurrence"]))

# %% [markdown]
# The chunk form is no approximation in float32 either: at every decay up to the bound its error is that of the
# recurrence.
#
# ## Exercises
#
# **1.** A kernel writer wants sub-chunks of 32 with the same limit of 40 nats for a factor. Which bound do they need?
# And without any bound: what do `midpoint_products` and `chunk_kda` make of a decay of 12 nats a token? Predict in
# which of the 16 rows the first fails, and what `lower_bound` has to do with the second:
#
# ```python
# fast = jnp.full((64, 8), -12.0, jnp.float32)
# print(jnp.isnan(midpoint_products(k64[:16], k64[:16], fast[:16])).any(axis=1))
# for bound in (-5.0, None):
#     o, _ = chunk_kda(q64, k64[None, :, None], v64, fast[None, :, None], beta64, state64, lower_bound=bound)
#     print(bound, jnp.all(jnp.isfinite(o)))
# ```
#
# <details><summary>Solution</summary>
#
# $32/2\cdot|g| \le 40$ gives $g \ge -2.5$; a channel keeps at least $e^{-2.5} = 8\,\%$ per token, against $0.7\,\%$.
# (For a bound below −5, `ling3` halves its sub-chunks instead.)
#
# The first row is NaN. Its token is eight tokens from the midpoint, so its factors are $e^{8\cdot 12} = e^{96}$, which
# is infinite in float32, and $e^{-96}$, which is rounded to zero; the other seven tokens before the midpoint stay below
# $e^{88.7}$. `lower_bound` is a promise about $g$, which `chunk_kda` does not check: with $-5$ it takes the same
# factors and returns NaN, with `None` the three indices of `decayed_products`, and is right.
#
# </details>
#
# **2.** Some models let $\beta$ go up to 2. What do tokens of $\beta = 2$, $v = 0$, $g = 0$ and one and the same key do
# to what is stored under that key? Does the chunk form need a change?
#
# <details><summary>Solution</summary>
#
# They flip its sign: $S^\top k \mapsto (1-\beta)\,S^\top k = -S^\top k$, so after $n$ of them it is $(-1)^n$ times what
# it was. A state can then count modulo two (parity, notebook 6), which eigenvalues in $[0, 1]$ cannot. The algebra of
# the chunk form stays as it is: $\beta$ only scales rows of $A$, $U$ and $W$.
#
# ```python
# start, key = normal(8, 1, 1, 8, 6), unit(normal(6, 1, 1, 1, 8))
# for n in (1, 2, 3, 4):
#     same = jnp.broadcast_to(key, (1, n, 1, 8))
#     nothing, none = jnp.zeros((1, n, 1, 6)), jnp.zeros((1, n, 1, 8))
#     _, S = recurrent_kda(same, same, nothing, none, 2 * jnp.ones((1, n, 1)), start)
#     np.testing.assert_allclose(S[0, 0].T @ key[0, 0, 0], (-1) ** n * start[0, 0].T @ key[0, 0, 0], rtol=1e-9)
# ```
#
# </details>
#
# **3.** A batch has prompts of different lengths. Which $g$ and $\beta$ must its padding have, so that no state notices
# it? Which of the two is harder to miss when it is forgotten?
#
# <details><summary>Solution</summary>
#
# $g = 0$ and $\beta = 0$: the state is multiplied by one and nothing is written. Without $\beta = 0$ garbage is written
# at once, and answers tell. Without $g = 0$ the memory fades by a little more than it should, which a test of answers
# may not notice. The cell below pads with garbage in $q$, $k$ and $v$ and finds the state bit for bit as it was.
#
# </details>

# %%
state = draw(70, 4, key=8, value=6, lower_bound=-5.0)[5]
garbage = tuple(1e3 * x for x in draw(71, 4, key=8, value=6, lower_bound=-5.0)[:3])
_, after = recurrent_kda(*garbage, jnp.zeros((1, 4, 1, 8)), jnp.zeros((1, 4, 1)), state)
assert jnp.array_equal(after, state)
