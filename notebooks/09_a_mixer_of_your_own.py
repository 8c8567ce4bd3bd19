# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 9. A mixer of your own
#
# Most of a language model is not its sequence mixer: embeddings, norms, feed-forwards, checkpoints, sampling, serving.
# So to try an idea for a mixer you should have to write the mixer, and nothing else. This notebook does that once, from
# the formula to a server: the *gated delta rule* (Gated DeltaNet; Yang, Kautz & Hatamizadeh,
# [arXiv 2412.06464](https://arxiv.org/abs/2412.06464)), which is KDA's direct ancestor. It is written in under 60
# lines, trained for a minute or two, saved, loaded, and served beside Ling-3's *nano*, with the engine's promise: a
# request's answer is the same to the last bit, whatever other requests run beside it.
#
# No file of the package is changed.
#
# **You need**: the delta rule (notebook 2), slots and pages (notebooks 7 and 8), and modules of Equinox.
#
# **Afterwards you can** write a sequence mixer of your own, say what a server has to rely on and test it, and train,
# save and serve a model with it.
#
# **It takes** four minutes on two cores, and 1.5 GB of memory.

# %%
import dataclasses
import itertools
import pathlib
import random
import tempfile

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float

import ling3
from ling3 import train
from ling3.layers.conv import ShortConv
from ling3.layers.linear import Linear
from ling3.layers.mlp import MLP
from ling3.layers.norm import GatedRMSNorm, RMSNorm
from ling3.runtime import plots
from ling3.runtime.recorder import Recorder
from ling3.train.nano.problems import ask, problems

plots.use()

# %% [markdown]
# ## The law
#
# Per head there is a matrix $S$ (key × value channels), an associative memory: written with $k v^\top$, read with
# $S^\top q$. A token brings a key $k$ of unit length, a value $v$, a query $q$, a writing strength
# $\beta\in(0,1)$, and one log decay $g\le 0$ for the whole head:
#
# $$S_t = e^{g_t}\,(I - \beta_t k_t k_t^\top)\,S_{t-1} + \beta_t k_t v_t^\top, \qquad o_t = S_t^\top q_t .$$
#
# The factor $I-\beta kk^\top$ makes room: it removes what was stored under $k$ before the new value is added. KDA has
# the same law with a decay for each key channel instead of one number.
#
# Multiplied out, a step needs no matrix product at all: let everything fade, look up what $k$ says now, and write the
# difference to what it should say.


# %%
def delta_step(S, token):
    """S <- e^g S;  S <- S + k (β (v - Sᵀk))ᵀ;  o = Sᵀq, for every row and head."""
    q, k, v, g, beta = token
    S = jnp.exp(g)[..., None, None] * S
    u = beta[..., None] * (v - jnp.sum(k[..., None] * S, axis=-2))
    S = S + k[..., None] * u[..., None, :]
    return S, jnp.sum(q[..., None] * S, axis=-2)


# %% [markdown]
# Against the law, in float64 and as it is written above:

# %%
rng = np.random.default_rng(0)
q, k, v = rng.standard_normal((3, 12, 8))  # twelve tokens, eight channels
k /= np.linalg.norm(k, axis=-1, keepdims=True)
g, beta = -rng.exponential(0.2, 12), rng.uniform(size=12)
law, S = np.zeros((8, 8)), jnp.zeros((1, 1, 8, 8))
for t in range(12):
    law = np.exp(g[t]) * (np.eye(8) - beta[t] * np.outer(k[t], k[t])) @ law + beta[t] * np.outer(k[t], v[t])
    S, o = delta_step(S, [jnp.asarray(y[t], jnp.float32)[None, None] for y in (q, k, v, g, beta)])
    np.testing.assert_allclose(S[0, 0], law, atol=1e-5)
    np.testing.assert_allclose(o[0, 0], law.T @ q[t], atol=1e-5)

# %% [markdown]
# ## What the engine expects of a mixer
#
# A mixer is any Equinox module with two methods:
#
# | | |
# |---|---|
# | `y, state = mixer(x, state, span)` | an output for each token of `x`, `[batch, seq, hidden]`, and the memory after |
# | `mixer.empty_state(spec)` | the memory before the first token, by a `ling3.CacheSpec`: `slots`, `pages`, `dtype` … |
#
# The memory is a pytree of your own. The engine knows only two kinds of arrays in it: those with **a row per slot**,
# one for each running request, and `ling3.Paged` ones, whose entries lie in pages (a cache that grows, as attention
# has). $S$ never grows, so it has a row per slot. That is enough for the engine to fill a slot, to clear it, and to
# swap a preempted request out and in, whatever the arrays mean.
#
# It relies on four laws; each has a cell further down:
#
# 1. **Many tokens or one.** A prompt comes in chunks, then tokens come one by one. However a sequence is cut, the
#    outputs are the same (up to rounding).
# 2. **Padding changes nothing.** `span.length` says how many tokens of each row are real. The columns after them must
#    leave every bit of the memory as it was: here $g=0$ and $\beta=0$, so $S\leftarrow e^0 S+k\,0^\top$.
# 3. **No look ahead.** The output for a token depends on that token and earlier ones.
# 4. **Rows are independent.** Nothing of one row, not even a NaN, may reach another one.
#
# Without a state (`None`, as in training) a sequence begins with the empty one and nothing is kept.
#
# Around the recurrence the layer is the paper's: $q$, $k$, $v$ pass a short convolution and a SiLU; $q$ and $k$ are
# normalised; $g=-e^{A}\,\mathrm{softplus}(a(x)+\mathrm{bias})$, $\beta=\sigma(b(x))$; the output is normed, gated
# and projected. Linear maps, convolution and norms are taken from `ling3.layers`. The convolution's own memory, its
# last three inputs, is the second half of the state.


# %%
class DeltaState(eqx.Module):
    """A layer's memory: two arrays with a row per slot, nothing in pages."""

    S: Float[Array, "batch heads key value"]
    tail: Float[Array, "batch tail channels"]  # the convolution's last inputs


class GatedDeltaNet(eqx.Module):
    """The gated delta rule with one decay per head (arXiv 2412.06464)."""

    qkv_proj: Linear  # [3·heads·key, hidden]
    qkv_conv1d: ShortConv
    a_proj: Linear  # decay, [heads, hidden]
    b_proj: Linear  # writing strength, [heads, hidden]
    g_proj: Linear  # output gate, [heads·value, hidden]
    A_log: Float[Array, " heads"]
    dt_bias: Float[Array, " heads"]
    o_norm: GatedRMSNorm
    o_proj: Linear  # [hidden, heads·value]

    @staticmethod
    def init(hidden, heads, head_dim, std, *, key, dtype):
        inner, keys = heads * head_dim, jax.random.split(key, 6)
        sizes = ((3 * inner, hidden), (heads, hidden), (heads, hidden), (inner, hidden), (hidden, inner))
        qkv, a, b, g, o = (Linear.init(*size, key=k, dtype=dtype, std=std) for size, k in zip(sizes, keys[1:]))
        conv = ShortConv.init(3 * inner, 4, key=keys[0])
        # softplus(-4) = 0.018: before training a head forgets 2 % with a token.
        A_log, dt_bias = jnp.zeros(heads, jnp.float32), jnp.full(heads, -4.0, jnp.float32)
        return GatedDeltaNet(qkv, conv, a, b, g, A_log, dt_bias, GatedRMSNorm.init(head_dim, 1e-6), o)

    def empty_state(self, spec):
        heads, size, (channels, taps) = len(self.A_log), len(self.o_norm.weight), self.qkv_conv1d.weight.shape
        S = jnp.zeros((spec.slots, heads, size, size), jnp.float32)
        return DeltaState(S, jnp.zeros((spec.slots, taps - 1, channels), spec.dtype))

    def __call__(self, x, state, span):
        state = self.empty_state(ling3.CacheSpec(len(x), 0, 1, x.dtype)) if state is None else state
        run, f32, heads = span.execution, jnp.float32, len(self.A_log)
        qkv, tail = self.qkv_conv1d(self.qkv_proj(x, run), state.tail, span)
        q, k, v = rearrange(qkv, "b s (n h d) -> n b s h d", n=3, h=heads)
        q, k = (y * jax.lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6) for y in (q, k))
        a = self.a_proj(x, run, f32) + self.dt_bias[None, None]
        g = -jnp.exp(self.A_log)[None, None] * jax.nn.softplus(a)
        beta = jax.nn.sigmoid(self.b_proj(x, run, f32))
        token = span.valid(x.shape[1])[:, :, None]
        g, beta = jnp.where(token, g, 0.0), jnp.where(token, beta, 0.0)
        span.recorder(decay=g, beta=beta)
        S, o = jax.lax.scan(delta_step, state.S, [jnp.moveaxis(y, 1, 0) for y in (q, k, v, g, beta)])
        gate = jax.nn.sigmoid(rearrange(self.g_proj(x, run, f32), "b s (h d) -> b s h d", h=heads))
        o = rearrange(self.o_norm(jnp.moveaxis(o, 0, 1), gate), "b s h d -> b s (h d)")
        return self.o_proj(o.astype(x.dtype), run), DeltaState(S, tail)


# %%
cells = pathlib.Path("09_a_mixer_of_your_own.py").read_text(encoding="utf-8").split("# %%")
own = [cell for cell in cells if "\ndef delta_step(" in cell or "\nclass GatedDeltaNet(" in cell]
lines = sum(1 for cell in own for line in cell.splitlines() if line.strip())
print(f"{lines} lines")
assert len(own) == 2 and lines <= 60 and issubclass(GatedDeltaNet, ling3.Mixer)

# %% [markdown]
# ## The four laws
#
# They hold for any weights, so they are tested on random ones: three rows of twelve tokens, in a layer with two heads.


# %%
def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def span(start, length):
    """A span without pages."""
    return ling3.Span(jnp.asarray(start, jnp.int32), jnp.asarray(length, jnp.int32))


layer = GatedDeltaNet.init(16, 2, 8, 0.5, key=jax.random.key(1), dtype=jnp.float32)
layer = eqx.tree_at(lambda m: m.dt_bias, layer, jnp.asarray([-1.0, 1.0]))  # forgets in earnest
x = normal(2, 3, 12, 16)
whole, _ = layer(x, None, ling3.Span.whole(3, 12))


def in_pieces(*widths):
    """The outputs and the last state of the same rows, so many tokens at a time."""
    state, outputs, start = layer.empty_state(ling3.CacheSpec(3, 0, 1, jnp.float32)), [], 0
    for width in widths:
        y, state = layer(x[:, start : start + width], state, span([start] * 3, [width] * 3))
        outputs, start = [*outputs, y], start + width
    return jnp.concatenate(outputs, axis=1), state


# %% [markdown]
# **1. Many tokens or one.** As a whole, in chunks, and token by token:

# %%
for widths in ((12,), (5, 4, 3), (1,) * 12):
    np.testing.assert_allclose(in_pieces(*widths)[0], whole, atol=1e-5)

# %% [markdown]
# **2. Padding changes nothing.** The first row has four tokens and garbage after them, the second no token, the third
# all twelve. Equal here means equal bits:

# %%
(_, before), more = in_pieces(12), normal(3, 3, 12, 16)
_, after = layer(more.at[0, 4:].set(1e3), before, span([12, 12, 12], [4, 0, 12]))
_, four = layer(more[:, :4], before, span([12, 12, 12], [4, 0, 4]))
for old, new, short in zip(jax.tree.leaves(before), jax.tree.leaves(after), jax.tree.leaves(four)):
    assert jnp.array_equal(new[1], old[1]), "a row without tokens keeps its state"
    assert jnp.array_equal(new[0], short[0]), "what stands behind the tokens does not matter"
    assert not jnp.array_equal(new[2], old[2])

# %% [markdown]
# **3. No look ahead.** The outputs for the first seven tokens have no gradient with respect to any later one (and have
# one with respect to each of these seven):

# %%
slope = jax.grad(lambda x: jnp.sum(jnp.square(layer(x, None, ling3.Span.whole(3, 12))[0][:, :7])))(x)
assert not jnp.any(slope[:, 7:]) and jnp.all(jnp.any(slope[:, :7], axis=-1))

# %% [markdown]
# **4. Rows are independent.** NaN in the second row, in its tokens and in its memory:

# %%
poisoned = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), before)
clean, _ = layer(more, before, span([12] * 3, [12] * 3))
dirty, _ = layer(more.at[1].set(jnp.nan), poisoned, span([12] * 3, [12] * 3))
assert jnp.array_equal(dirty[0], clean[0]) and jnp.array_equal(dirty[2], clean[2])
assert jnp.all(jnp.isnan(dirty[1]))

# %% [markdown]
# ## A family
#
# A checkpoint's `config.json` names its architecture. A *family* says what to do with the name: how the config is read,
# and which tree of modules is built from it. The config is a frozen dataclass, and four things are asked of it:
# `vocab_size`, `max_position_embeddings`, `eos_token_id` and `to_dict()`, which gives the `config.json`.


# %%
@dataclasses.dataclass(frozen=True)
class DeltaConfig:
    vocab_size: int
    eos_token_id: tuple[int, ...]
    max_position_embeddings: int = 1024
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_heads: int = 2
    head_dim: int = 32
    initializer_range: float = 0.05

    def to_dict(self):
        fields = dataclasses.asdict(self) | {"eos_token_id": list(self.eos_token_id)}
        return {"architectures": ["DeltaForCausalLM"], "model_type": "gated_delta", **fields}

    @staticmethod
    def from_dict(raw, source):
        names = [field.name for field in dataclasses.fields(DeltaConfig)]
        if missing := [f"{name}: absent" for name in names if name not in raw]:
            raise ling3.ConfigError(source, missing)
        return DeltaConfig(**{name: raw[name] for name in names} | {"eos_token_id": tuple(raw["eos_token_id"])})


def init(config, *, key, dtype):
    """A model of random weights: nothing new but the mixer."""
    hidden, std, eps = config.hidden_size, config.initializer_range, 1e-6
    keys = iter(jax.random.split(key, 2 + 2 * config.num_hidden_layers))

    def layer():
        mixer = GatedDeltaNet.init(hidden, config.num_heads, config.head_dim, std, key=next(keys), dtype=dtype)
        mlp = MLP.init(hidden, config.intermediate_size, key=next(keys), dtype=dtype, std=std)
        return ling3.DecoderLayer(RMSNorm.init(hidden, eps), mixer, RMSNorm.init(hidden, eps), mlp)

    table = Linear.init(config.vocab_size, hidden, key=next(keys), dtype=dtype, std=std)
    head = Linear.init(config.vocab_size, hidden, key=next(keys), dtype=dtype, std=std)
    layers = tuple(layer() for _ in range(config.num_hidden_layers))
    return ling3.CausalLM(ling3.Decoder(table, layers, RMSNorm.init(hidden, eps)), head, config)


family = ling3.Family(
    name="Gated DeltaNet",
    architectures=("DeltaForCausalLM",),
    model_types=("gated_delta",),
    config=DeltaConfig,
    read=DeltaConfig.from_dict,
    init=init,
)
ling3.register_family(family)

# %% [markdown]
# The decoder and the language model are Ling-3's own classes, since nothing in them knows what mixes the tokens.
#
# ## A minute or two of training
#
# The task should be one for the delta rule: keep a tally. People are named with numbers, over and over, and only the
# newest number of each one counts. A colon asks for all ten, in alphabetical order:

# %%
tok = ling3.load_tokenizer("nano")
PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Iris", "Kate", "Leo", "Mia", "Sam")
WIDTH = 96


def tally(rng):
    """A prompt of 10 to 20 entries, everyone at least once, and its answer."""
    named = [*PEOPLE, *(rng.choice(PEOPLE) for _ in range(rng.randrange(11)))]
    rng.shuffle(named)
    entries = [(person, rng.randrange(20)) for person in named]
    newest = dict(entries)
    return "".join(f" {p} {n}" for p, n in entries) + ":", "".join(f" {p} {newest[p]}" for p in PEOPLE) + "."


prompt, answer = tally(random.Random(0))
print(prompt, answer, sep="\n")
model = ling3.init(DeltaConfig(tok.vocab_size, tok.eos_token_ids), key=jax.random.key(0))
print(f"{sum(leaf.size for leaf in jax.tree.leaves(model)):,} weights")


# %% [markdown]
# The training loop is the one that made *nano* (`ling3.train`). It wants batches of tokens, and how much each of them
# counts in the loss: prompts and padding 0, answers 1.


# %%
def batches(seed, rows=16):
    rng = random.Random(seed)
    while True:
        tokens, weights = np.zeros((rows, WIDTH), np.int32), np.zeros((rows, WIDTH), np.float32)
        for row in range(rows):
            given, asked = (tok.encode(text) for text in tally(rng))
            ids = [*given, *asked, tok.eos_token_ids[0]]
            tokens[row, : len(ids)], weights[row, len(given) : len(ids)] = ids, 1.0
        yield train.Batch(jnp.asarray(tokens), jnp.asarray(weights))


curve = []
recipe = train.Optimization(steps=300, learning_rate=1e-2, warmup=30)
trained = train.train(model, batches(1), recipe, every=10, report=lambda point, _: curve.append(point))
print(f"{curve[-1].seconds:.0f} seconds, {curve[-1].tokens:,} tokens,", f"loss {curve[-1].loss:.4f} nats")

# %%
fig, ax = plt.subplots(figsize=(7, 3.2))
ax.semilogy([point.step for point in curve], [point.loss for point in curve], color=plots.BLUE)
# Of an answer's 32 tokens ten are numbers of which any of twenty could be right;
# the rest is the same every time.
guessing = 10 * np.log(20) / 32
ax.axhline(guessing, color=plots.BLACK, linewidth=1)
ax.annotate("knows the form of an answer, guesses the numbers", (300, guessing), (0, 3),
            textcoords="offset points", ha="right", fontsize=9)  # fmt: skip
ax.set(xlabel="step", ylabel="loss, nats per token of an answer")
ax.set_title("Training the Gated DeltaNet of this notebook on tallies", fontsize=11)
plt.show()
assert curve[0].loss > guessing > 20 * curve[-1].loss

# %% [markdown]
# First the form of an answer is learned; then, within a few dozen steps, where the numbers come from. What the first
# layer does with each token can be watched: the mixer files $g$ and $\beta$ with `span.recorder`, and a pass whose span
# has a recorder reads them.

# %%
prompt, answer = tally(random.Random(5))
ids = tok.encode(prompt)
words = [tok.decode([i]).strip() for i in ids]  # a space is a token of its own before a number
seen = Recorder()
trained.watched(jnp.asarray([ids], jnp.int32), ling3.Span.whole(1, len(ids), recorder=seen))
beta, g = (np.asarray(seen.of("layers.0.attention")[name][0]) for name in ("beta", "decay"))
deeper = np.asarray(seen.of("layers.1.attention")["decay"][0])
fig, axes = plt.subplots(2, 1, figsize=(11, 4.6), sharex=True)
for ax, values, label in zip(axes, (beta, g), (r"writing strength $\beta$", "log decay g, nats a token")):
    ax.plot(values, label=("head 0", "head 1"))
    ax.set(ylabel=label, xlim=(-1, len(ids)))
axes[0].legend(fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
axes[1].set_xticks(range(len(ids)), [word or "␣" for word in words], rotation=90, fontsize=7)
axes[1].set_xlabel("token")
fig.suptitle("First layer of the Gated DeltaNet trained here, reading one tally", fontsize=11)
plt.show()
names, numbers = ([i for i, word in enumerate(words) if kind(word)] for kind in (str.isalpha, str.isdigit))
print(f"mean β of each head at names {beta[names].mean(axis=0)},", f"at numbers {beta[numbers].mean(axis=0)}")
assert np.max(np.abs(beta[names].mean(axis=0) - beta[numbers].mean(axis=0))) > 0.2
print(f"mean g of each head {g[:-1].mean(axis=0)},", f"in the second layer {deeper[:-1].mean(axis=0)}")
assert np.mean(g[:-1]) > -0.1 and np.mean(deeper[:-1]) > -0.1

# %% [markdown]
# The model has learned to write names and numbers with different strengths; and while it reads, it hardly forgets: an
# old number is *overwritten*, by $I-\beta kk^\top$, when its owner is named again.

# %% [markdown]
# ## To a file and back
#
# A checkpoint is `config.json`, safetensors whose names are the paths in the tree, and the tokenizer's files. This
# needs no code: a module's fields *are* the names. `load` finds the family by `architectures`.

# %%
with tempfile.TemporaryDirectory() as directory:
    checkpoint = pathlib.Path(directory) / "tally"
    ling3.save(trained, checkpoint, tokenizer_from="nano")
    loaded, own_tok = ling3.load(checkpoint), ling3.load_tokenizer(checkpoint)
assert loaded.config == trained.config and isinstance(loaded.model.layers[0].attention, GatedDeltaNet)
assert jax.tree.structure(loaded) == jax.tree.structure(trained)
for stored, array in zip(jax.tree.leaves(loaded), jax.tree.leaves(trained)):
    assert stored.dtype == array.dtype and jnp.array_equal(stored, array)
print(f"{len(jax.tree.leaves(loaded))} arrays, all of them equal")

# %% [markdown]
# ## Served, beside nano
#
# Two engines in one process take turns: the loaded model with ten requests in four slots, and *nano* with four word
# problems. Some of the ten are tallies; the others sample 60 random tokens. An engine allocates pages even to a model
# without paged arrays, so with 16 pages of 16 tokens requests are preempted here too: $S$ and the convolution's tail
# are swapped out and in.

# %%
shapes = {"max_running_requests": 4, "page_size": 16, "chunked_prefill_size": 32,
          "token_paddings": (16, 32), "decode_rows": 4, "decode_steps": 4,
          "max_model_len": 256}  # fmt: skip
nano = ling3.load("nano", dtype=jnp.float32)
engines = {"tally": ling3.Engine(loaded, own_tok, num_pages=16, **shapes), "nano": ling3.Engine(nano, tok, **shapes)}

rng = random.Random(7)
tallies = [tally(rng) for _ in range(6)]
exact = ling3.SamplingParams(max_tokens=40, logprobs=0)
talk = ling3.SamplingParams(max_tokens=60, ignore_eos=True, temperature=1.0, seed=3, logprobs=0)
solve = ling3.SamplingParams(max_tokens=64, logprobs=0)
stories = [ask(problem) for problem in itertools.islice(problems(5, "held_out"), 4)]
asked = {
    "tally": [(prompt, exact) for prompt, _ in tallies] + [(tally(rng)[0], talk) for _ in range(4)],
    "nano": [(story, solve) for story in stories],
}
asked["tally"] = asked["tally"][::2] + asked["tally"][1::2]  # tallies and talkers mixed

numbers = {name: [engine.submit(*request) for request in asked[name]] for name, engine in engines.items()}
answers = {name: {} for name in engines}
while any(engine.has_work for engine in engines.values()):
    for name, engine in engines.items():
        answers[name] |= {d.request_id: d.output.outputs[0] for d in engine.step() if d.output is not None}

for name, engine in engines.items():
    stats = engine.stats()
    print(f"{name}: {stats.output_tokens} tokens in {stats.steps} turns,", f"{stats.preemptions} preemptions")
    print(f"  …{asked[name][0][0][-40:]!r} -> {answers[name][numbers[name][0]].text!r}")
assert engines["tally"].stats().preemptions > 0

# %% [markdown]
# **The promise.** Each of these requests once more, alone in its engine. Token ids and log-probabilities are equal, bit
# for bit, also of those that had been preempted:

# %%
for name, engine in engines.items():
    for number, (prompt, params) in zip(numbers[name], asked[name]):
        crowded, (alone,) = answers[name][number], engine.generate([prompt], params)
        assert crowded.token_ids == alone.token_ids
        assert [x.logprob for x in crowded.logprobs] == [x.logprob for x in alone.logprobs]
moved = sum(answers["tally"][number].timings.preemptions > 0 for number in numbers["tally"])
print(f"{sum(map(len, answers.values()))} answers equal to the last bit,", f"{moved} of them preempted on the way")
assert moved

# %% [markdown]
# And the answers are right: 64 new tallies, through the same engine.

# %%
fresh = [tally(random.Random(f"held out {i}")) for i in range(64)]
texts = [done.text for done in engines["tally"].generate([prompt for prompt, _ in fresh], exact)]
pairs = [(said, true) for text, (_, answer) in zip(texts, fresh) for said, true in zip(text.split(), answer.split())]
right = np.mean([said.rstrip(".") == true.rstrip(".") for said, true in pairs if true.rstrip(".").isdigit()])
print(f"{right:.1%} of {10 * len(fresh)} numbers are right")
assert right > 0.9

# %% [markdown]
# ## What is not there
#
# - *Speed in prefill.* A scan takes one token at a time. KDA's chunk form (notebook 2) does sixteen with matrix
#   products, and would serve here too: the same decay for every key channel.
# - *A kernel.* It would be a field of `ling3.Execution`, or an argument of your own layer.
# - *Ablations.* `ling3.ablate` can leave out what a module may be without: a field such as `g_proj: Linear | None`.
#   Here that is the attention of a layer. `ling3.trace` and `ling3 inspect` work as they are.
#
# ## Exercises
#
# **1.** KDA's decay is a number for each key channel instead of one for the head. Which line of `delta_step` changes,
# and what in the layer around it? Check your step against `ling3.ops.kda.kda_step`.
#
# <details><summary>Solution</summary>
#
# One `None` less: $g$ has an axis of key channels already, the rows of $S$. In the layer `a_proj` gets an output for
# each channel, `[heads·key, hidden]`, and `dt_bias` likewise. The convolution, the four laws and the engine do not
# notice.
#
# ```python
# from ling3.ops.kda import kda_step
#
#
# def channel_step(S, token):
#     q, k, v, g, beta = token
#     S = jnp.exp(g)[..., None] * S  # was [..., None, None]
#     u = beta[..., None] * (v - jnp.sum(k[..., None] * S, axis=-2))
#     S = S + k[..., None] * u[..., None, :]
#     return S, jnp.sum(q[..., None] * S, axis=-2)
#
#
# q, k, v, g = (normal(i, 3, 2, 8) for i in range(4))
# g, beta, state = -jnp.abs(g), jax.nn.sigmoid(normal(4, 3, 2)), normal(5, 3, 2, 8, 8)
# S, o = channel_step(state, (q, k, v, g, beta))
# o_law, S_law = kda_step(q, k, v, g, beta, state)
# np.testing.assert_allclose(S, S_law, atol=1e-5)
# np.testing.assert_allclose(o, o_law, atol=1e-5)
# ```
#
# </details>
#
# **2.** What breaks if $\beta$ is zero on padding, but $g$ is not? Predict which of the four laws fail, then write
# `beta = jnp.where(token, beta, 0.0)` in the place of the line that sets both, and run their cells.
#
# <details><summary>Solution</summary>
#
# The padding of a prompt makes it fade: $S\leftarrow e^g S$ for each column of padding. Only the cell of the second law
# fails, since in the others every token is real. There twelve columns of padding leave less than a thousandth of one
# head's $S$ in the row without tokens, and nothing tells of it but answers that depend on the width that a chunk was
# padded to.
#
# </details>
#
# **3.** Attention over the last 64 tokens only (a sliding window): rows per slot, or pages? And where does such a mixer
# get the position of each token, for its rotary embedding?
#
# <details><summary>Solution</summary>
#
# Rows per slot: `[slots, 64, …]`, a ring buffer indexed by the position modulo 64. It never grows, and pages are for
# arrays that do. Positions are `span.positions(seq)`: absolute, from 0, also in the middle of a sequence. A state need
# not count.
#
# </details>
