# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 7. The hybrid cache
#
# A running Ling-3 remembers in two ways. Its MLA layers keep an entry per token, as transformers do: a list that grows.
# Its KDA layers keep a state, as recurrent networks do: a few matrices that never grow, and are overwritten at every
# token. Most of what is known about serving transformers is known about lists. This notebook measures both memories,
# and then breaks the second one in the ways in which a list cannot be broken.
#
# **You need**: KDA's state (notebook 2) and MLA's entries (notebook 3).
#
# **Afterwards you can** say what a sequence costs in bytes and in time at any context, what has to be copied to return
# to an earlier point, and how a slot that is not cleared leaks one request into another.
#
# **It takes** a minute and a half on two cores, and 1.0 GB of memory.

# %%
import functools
import itertools
import json
import pathlib
import re
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import ling3
from ling3.bench.report import machine
from ling3.cache import Cache, CacheSpec, KDAState, Span
from ling3.interpret.inspect import report
from ling3.ops.kda import kda_step
from ling3.runtime import plots
from ling3.train.nano.problems import ask, last_integer, problems

plots.use()
nano, tok, tiny = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano"), ling3.Ling3Config()

# %% [markdown]
# ## Bytes
#
# A KDA layer holds a matrix of key by value channels per head, in float32, and the last three inputs of its short
# convolutions. An MLA layer holds 576 numbers per token. For Ling-3.0-tiny in bfloat16, by hand and from `ling3
# inspect`:

# %%
memory = report(tiny).memory
kda_layers = sum(tiny.attention_kind(i) == "kda" for i in range(tiny.num_hidden_layers))
mla_layers = tiny.num_hidden_layers - kda_layers
states = kda_layers * 16 * 128 * 128 * 4  # heads, key, value, bytes
tails = kda_layers * 3 * (3 * 16 * 128) * 2  # taps - 1; channels of q, k and v; bytes
per_token = mla_layers * (512 + 64) * 2
assert (kda_layers, mla_layers) == (18, 6)
assert states == memory.state_per_sequence["recurrent"] == 18_874_368
assert tails == memory.state_per_sequence["conv"] == 663_552
assert per_token == memory.cache_per_token == 6_912
print(f"{(states + tails) / 1e6:.1f} MB once per sequence,", f"and {per_token:,} bytes per token")

# %% [markdown]
# The same model with MLA in all 24 layers would need no states and $24\cdot1152 = 27{,}648$ bytes a token; with plain
# multi-head attention (16 keys and values of 128) 196,608. Below about a thousand tokens the states take *more*
# memory. Where the lines cross, and what they say at the model's full context:

# %%
fixed = {"hybrid (Ling-3.0-tiny)": states + tails, "all MLA": 0, "all MHA": 0}
fixed["all KDA"] = (states + tails) * 24 // 18
growing = {"hybrid (Ling-3.0-tiny)": per_token, "all MLA": 24 * 1152, "all MHA": 24 * 2 * 16 * 128 * 2, "all KDA": 0}
contexts = 2 ** np.arange(4, 18)
fig, ax = plt.subplots(figsize=(7.5, 4))
looks = ((plots.BLACK, "-", "o"), (plots.MLA, "--", "s"), (plots.ORANGE, ":", "D"), (plots.KDA, "-.", "^"))
for name, (colour, style, marker) in zip(fixed, looks):
    mb = (fixed[name] + growing[name] * contexts) / 1e6
    ax.loglog(contexts, mb, color=colour, linestyle=style, marker=marker, label=name)
    ax.annotate(f"{mb[-1]:,.0f} MB", (contexts[-1], mb[-1]), xytext=(6, -3), textcoords="offset points", fontsize=9)
crossing = {name: (states + tails) / (growing[name] - per_token) for name in ("all MLA", "all MHA")}
for name, at in crossing.items():
    ax.plot(at, growing[name] * at / 1e6, marker="o", markersize=11, fillstyle="none", color=plots.BLACK)
    ax.annotate(f"{at:,.0f}", (at, growing[name] * at / 1e6), xytext=(-6, 10), textcoords="offset points", fontsize=9)
ax.set(xlabel="context, tokens", ylabel="memory of one sequence, MB", xlim=(14, 600_000), ylim=(0.3, 60_000))
ax.set_title("Memory of Ling-3.0-tiny, and if all its layers were of one kind", fontsize=11)
ax.legend(fontsize=9)
plt.show()
assert {name: round(at) for name, at in crossing.items()} == {"all MLA": 942, "all MHA": 103}
full = {name: fixed[name] + growing[name] * 131_072 for name in fixed}
print({name: f"{full[name] / full['hybrid (Ling-3.0-tiny)']:.2f} × the hybrid" for name in full}, "at 131,072 tokens")

# %% [markdown]
# ## Time
#
# A decode step reads what it remembers. So a KDA layer takes the same time at any context, and an MLA layer's time
# grows with the tokens in use. Here are one layer of each kind, nano's own, eight steps to a call, on this machine;
# beside it a whole model of nano's widths with room for 65,536 tokens, as `benchmarks/decode_latency.py` has recorded
# it.

# %%
STEPS, contexts = 8, (256, 1024, 4096, 16384)
PAGES = contexts[-1] // 256 + 1
TABLE = jnp.arange(PAGES, dtype=jnp.int32)[None]


@functools.partial(jax.jit, donate_argnums=3)
def decode(layer, x, start, state):
    def step(i, carry):
        x, state = carry
        span = Span(start + jnp.asarray(i, jnp.int32), jnp.ones_like(start), TABLE, ling3.Execution.default())
        y, state = layer(x, state, span)
        return x + 0.01 * y, state

    return jax.lax.fori_loop(0, STEPS, step, (x, state))


def milliseconds(layer, state):
    """Per step, at each context: the fastest of ten calls."""
    times, x = [], jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 128)), jnp.float32)
    for context in contexts:
        seconds = []
        for _ in range(10):
            begin = time.perf_counter()
            y, state = decode(layer, x, jnp.full(1, context, jnp.int32), state)
            jax.block_until_ready(y)
            seconds.append(time.perf_counter() - begin)
        times.append(1e3 * min(seconds) / STEPS)
    return times


kda, mla = nano.model.layers[0].attention, nano.model.layers[3].attention
measured = {
    "one KDA layer": milliseconds(kda, kda.empty_state(CacheSpec(1, PAGES, 256, jnp.float32))),
    "one MLA layer": milliseconds(mla, mla.empty_state(CacheSpec(1, PAGES, 256, jnp.float32))),
}
record = json.loads(pathlib.Path("../benchmarks/results/decode_latency.json").read_text())
stored = record["running_requests"]["16"]
here, there = (f"{where['cpu']}, {where['cores']} cores" for where in (machine(), record["machine"]))
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
for (name, ms), colour, style, marker in zip(measured.items(), (plots.KDA, plots.MLA), ("-.", "--"), "^s"):
    left.loglog(contexts, ms, color=colour, linestyle=style, marker=marker, label=name)
left.set(xlabel="context, tokens", ylabel="time per decode step, ms")
left.set_title(f"Layers of nano, one request\n{here}", fontsize=10)
looks = {
    "whole step": (plots.BLACK, "-", "o"),
    "MLA layers": (plots.MLA, "--", "s"),
    "KDA layers": (plots.KDA, "-.", "^"),
}
for name, (colour, style, marker) in looks.items():
    ms = {int(c): t["median"] for c, t in stored[name]["ms_per_step"].items()}
    right.loglog(list(ms), list(ms.values()), color=colour, linestyle=style, marker=marker, label=name)
right.set(xlabel="context, tokens per request", ylabel="time per decode step, ms")
right.set_title(f"A model of nano's widths, 16 requests\n{there}", fontsize=10)
for ax in (left, right):
    ax.legend(fontsize=9)
fig.suptitle("Time of a decode step against context, measured here and recorded", fontsize=11)
plt.show()
growth = {name: ms[-1] / ms[0] for name, ms in measured.items()}
print({name: f"{times:.1f} times as long at 16,384 tokens as at 256" for name, times in growth.items()})
# 64 times the reads, beside a fixed part, on a machine that may be doing other things.
assert growth["one MLA layer"] > 3 * growth["one KDA layer"]

# %% [markdown]
# ## A list can be cut, a state cannot
#
# An MLA cache has a length, and what lies beyond it is not read. To take back eight tokens, subtract eight. `Cache` has
# its length in one place, so let us try that on the whole model: read a prompt, go on by eight tokens, set the length
# back, and go on differently. The truth is a model that never saw those eight.

# %%
BATCH, WIDTH = 32, 96
some = list(itertools.islice(problems(7, "held_out"), BATCH))
prompts = [tok.encode(ask(problem)) for problem in some]
assert max(map(len, prompts)) <= WIDTH


def padded(rows, width=WIDTH):
    tokens = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(tokens, rows):
        row[: len(ids)] = ids
    return jnp.asarray(tokens), jnp.asarray([len(ids) for ids in rows], jnp.int32)


def with_length(cache, length):
    return Cache(cache.layers, length, cache.table)


def states_of(cache):
    return [layer for layer in cache.layers if isinstance(layer, KDAState)]


def with_states(cache, states):
    given = iter(states)
    return Cache(tuple(next(given) if isinstance(x, KDAState) else x for x in cache.layers), cache.length, cache.table)


tokens, lengths = padded(prompts)
logits, cache = nano.step(tokens, nano.init_cache(BATCH, 256), lengths, last=True)
best = jnp.argmax(logits[:, 0], axis=-1)[:, None]
at_prompt = states_of(cache)  # arrays are values: this is the copy that an engine would have to make

truth, _ = nano.step(best, cache)
later = cache
for token in range(20, 28):  # eight tokens that will be taken back
    _, later = nano.step(jnp.full((BATCH, 1), token, jnp.int32), later)
cut = with_length(later, cache.length)
naive, _ = nano.step(best, cut)
restored, _ = nano.step(best, with_states(cut, at_prompt))
off = float(jnp.sqrt(jnp.mean((naive - truth) ** 2) / jnp.mean((truth - truth.mean(-1, keepdims=True)) ** 2)))
print(f"length set back alone: logits off by {off:.2f} of their standard deviation")
assert jnp.array_equal(restored, truth) and off > 0.5

# %% [markdown]
# With the KDA states of that moment put back, the logits agree bit for bit; the MLA entries could stay where they were.
# So whatever wants to return to an earlier point must have *copied the state* when it was there:
#
# | wish | with a list | with a state |
# |---|---|---|
# | drop rejected draft tokens (speculative decoding) | subtract from the length | a copy per draft token, or a replay |
# | share a common prefix between requests | point to the same pages | a copy, and only at points chosen beforehand |
# | preempt a request | free its pages, read the prompt again later | the same, or move the state to the host and back |
#
# In Ling-3.0-tiny a copy has 19.5 MB, as much as the latents of 2,827 tokens. `ling3`'s engine takes one every 512
# tokens of a prompt by default, as long as there is room, so that later prompts can go on from there; and it preempts
# by moving states and pages to the host. Both bring back every bit.
# With `SamplingParams(keep=True)` a request leaves such a copy for you: a `ling3.Snapshot`, from which others go on.
#
# ### Can the recurrence be run backwards?
#
# On paper it can. From $S_t = (I - \beta kk^\top)\,e^{g} S_{t-1} + \beta k v^\top$ and $|k| = 1$ follows
# for $\beta < 1$
#
# $$S_{t-1} = e^{-g}\Bigl(I + \tfrac{\beta}{1-\beta}\,kk^\top\Bigr)\bigl(S_t - \beta k v^\top\bigr) .$$
#
# But forgetting is what the layer is good at: each step back multiplies the rounding errors by the factor that the step
# forward had divided by. With the $k$, $v$, $g$ and $\beta$ of nano's first layer on a real prompt, in float32 (a line
# ends where its range does). Two of its heads forget nearly all from one token to the next, the other two far less:

# %%
longest = max(prompts, key=len)
x = nano.model.layers[0].input_layernorm(nano.model.word_embeddings.embed(jnp.asarray([longest], jnp.int32)))
span = Span.whole(1, len(longest))
q, k, v, _ = kda.convolved(x, kda.empty_state(CacheSpec(1, 0, 1, jnp.float32)).conv, span)
g, beta = kda.gates(x, span)

forwards = [kda.empty_state(CacheSpec(1, 0, 1, jnp.float32)).recurrent]
step = jax.jit(kda_step)
for t in range(len(longest)):
    forwards.append(step(*(z[:, t] for z in (q, k, v, g, beta)), forwards[-1])[1])


@jax.jit
def undo(k, v, g, beta, S):
    S = S - (beta[..., None] * k)[..., None] * v[..., None, :]
    S = S + (beta / (1 - beta))[..., None, None] * k[..., None] * jnp.einsum("bhk,bhkv->bhv", k, S)[..., None, :]
    return jnp.exp(-g)[..., None] * S


S, errors = forwards[-1], []
for t in reversed(range(len(longest))):
    S = undo(*(z[:, t] for z in (k, v, g, beta)), S)
    norm = jnp.linalg.norm(forwards[t], axis=(2, 3)) + 1e-30
    errors.append(np.asarray(jnp.linalg.norm(S - forwards[t], axis=(2, 3)) / norm)[0])
errors = np.asarray(errors)[:-1]  # the last one is the zero state, which nothing is relative to
fig, ax = plt.subplots(figsize=(7, 3.2))
for head, error in enumerate(errors.T):
    ax.semilogy(np.arange(1, len(errors) + 1), error, marker="", label=f"head {head}")
ax.axhline(1, color=plots.BLACK, linewidth=1)
ax.annotate("nothing is right", (49, 2.0), ha="right", fontsize=9)
ax.set(xlabel="tokens undone", ylabel="relative error of the state", ylim=(1e-8, None))
ax.set_title("Undoing tokens in float32, state of nano's first KDA layer", fontsize=11)
ax.legend(fontsize=9, loc="upper left")
plt.show()
lost = [int(np.argmax(error > 1)) + 1 if np.any(error > 1) else len(longest) for error in errors.T]
forgets = np.asarray(jnp.median(-g[0].reshape(-1, *k.shape[2:]), axis=(0, 2)))  # nats per token, of half the channels
for head, (nats, tokens_undone) in enumerate(zip(forgets, lost, strict=True)):
    print(f"head {head} forgets {nats:.2f} nats a token", end=", ")
    print(f"and is lost after {tokens_undone} of {len(longest)} tokens")
lasting, local = np.split(np.asarray(lost)[np.argsort(forgets)], 2)
assert local.max() < 10 and local.max() < lasting.min()

# %% [markdown]
# ## A slot that is not cleared
#
# A server gives a finished request's slot to the next one. For a list it is enough to set the length to zero: stale
# entries lie beyond it and are never read. A state has no length. What happens if it is not cleared?
#
# Take 32 pairs of users. The first of each pair tells the model a fact and is done: "Sam has 55 dollars." The second,
# who gets the same slot, asks a question that *cannot* be answered, since it lacks the fact. The cache's length is set
# to zero in between, and then parts of the memory are cleared, or not.


# %%
def greedy(cache, rows, new=56):
    """Answers by plain prefill and decoding from a cache of length 0."""
    tokens, lengths = padded(rows)
    logits, cache = nano.step(tokens, cache, lengths, last=True)
    out = [jnp.argmax(logits[:, 0], axis=-1)[:, None]]
    for _ in range(new - 1):
        logits, cache = nano.step(out[-1], cache)
        out.append(jnp.argmax(logits, axis=-1))
    ids = np.concatenate(out, axis=1).tolist()
    ends = [next((i for i, t in enumerate(row) if t in tok.eos_token_ids), len(row)) for row in ids]
    return [tok.decode(row[:end]) for row, end in zip(ids, ends)]


def cleared(cache, *parts):
    """Length 0, and zeros in `parts`: KDA's `recurrent` or `conv`, MLA's `entries`."""

    def zero(layer, part):
        return eqx.tree_at(lambda x: getattr(x, part), layer, replace_fn=jnp.zeros_like)

    layers = [
        functools.reduce(lambda x, part: zero(x, part) if hasattr(x, part) else x, parts, layer)
        for layer in cache.layers
    ]
    return Cache(tuple(layers), jnp.zeros_like(cache.length), cache.table)


stories = (p for p in problems(11, "held_out") if re.match(r"\w+ has \d+ \w+\. ", p.question))
stories = list(itertools.islice(stories, BATCH))
facts, rests = zip(*(p.question.split(". ", 1) for p in stories))
questions = [tok.encode(f"Question: {rest}\nAnswer:") for rest in rests]
tokens, lengths = padded([tok.encode(f"Question: {fact}.") for fact in facts])
_, used = nano.step(tokens, nano.init_cache(BATCH, 256), lengths)

memories = {
    "fresh cache": nano.init_cache(BATCH, 256),
    "stale latents": cleared(used, "recurrent", "conv"),
    "stale conv tails": cleared(used, "recurrent", "entries"),
    "stale states S": cleared(used, "conv", "entries"),
    "all stale": cleared(used),
}
found = {name: greedy(memory, questions) for name, memory in memories.items()}
right = {name: sum(last_integer(text) == p.answer for text, p in zip(texts, stories)) for name, texts in found.items()}
shown = next(i for i, p in enumerate(stories) if last_integer(found["all stale"][i]) == p.answer and len(p.steps) > 1)
print("user 1:", f"{facts[shown]}.\nuser 2: {rests[shown]}")
for name in ("fresh cache", "all stale"):
    print(f"  {name + ':':13}{found[name][shown]}")
assert found["stale latents"] == found["fresh cache"], "what lies beyond the length is not read"
assert right["stale states S"] > 3 * max(right["fresh cache"], 3)

# %%
fig, ax = plt.subplots(figsize=(7, 2.6))
colours = (plots.SKY, plots.MLA, plots.YELLOW, plots.KDA, plots.ORANGE)
shares = [100 * count / BATCH for count in right.values()]
bars = ax.barh(list(right), shares, color=colours, edgecolor=plots.BLACK, linewidth=0.6)
for bar, hatch in zip(bars, plots.HATCHES):
    bar.set_hatch(hatch)
ax.bar_label(bars, [f"{count} of {BATCH}" for count in right.values()], padding=4)
ax.set(xlabel="right answers to unanswerable questions, %", xlim=(0, 100))
ax.set_title("What nano tells the second user of a slot, by what is stale", fontsize=11)
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
plt.show()

# %% [markdown]
# The second user's answers are computed with the first user's numbers, and half of them are right. All of it comes
# through $S$: stale latents change no bit, and the three tokens of a conv state hold no story. This is a leak of one
# request's content into another's answer, and a test is likely to miss it: *complete* questions are answered as well as
# ever. (nano was trained on rows of several stories, each of which has to be read by itself.)

# %%
whole = [tok.encode(ask(p)) for p in stories]
fresh, stale = greedy(memories["fresh cache"], whole), greedy(memories["all stale"], whole)
scores = [sum(last_integer(text) == p.answer for text, p in zip(texts, stories)) for texts in (fresh, stale)]
print(f"complete questions right: {scores[0]} of {BATCH} in a fresh cache,", f"{scores[1]} in a stale one")
assert min(scores) > 0.9 * BATCH

# %% [markdown]
# The remedy is one line, and it must run *every* time a slot is filled: in `ling3` that is `swap_in`
# (`ling3/engine/pool.py`), which puts whole `SlotContents` in the row, zeros for a new sequence and its own saved
# states for one that was swapped out. Nothing of what was there before stays, so a slot need not be cleaned up when its
# sequence ends:

# %%
engine = ling3.Engine(nano, tok, max_running_requests=1, num_pages=2, decode_rows=1,
                      token_paddings=(64,), chunked_prefill_size=64,
                      max_model_len=256)  # fmt: skip
for i in (shown, shown + 1):  # the one slot is used by both users, in turn
    told, answer = engine.generate([f"Question: {facts[i]}.", questions[i]], ling3.SamplingParams(max_tokens=40))
    assert told.finish_reason in ("stop", "length") and answer.text == found["fresh cache"][i]

# %% [markdown]
# ## Padding
#
# Rows of a batch have different lengths. Softmax attention masks padding; a recurrence would write it. So
# KDA sets $g = 0$ and $\beta = 0$ there: $S \leftarrow e^0 S + k\,(0\cdot u)^\top = S$, and the convolution's tail is
# cut after the last *valid* token. `lengths` says how many are valid, and 0 leaves a row exactly as it was:

# %%
tokens, lengths = padded(prompts)
_, cache = nano.step(tokens, nano.init_cache(BATCH, 256), lengths)
idle = jnp.asarray([0] * 8 + [WIDTH] * (BATCH - 8), jnp.int32)  # the first eight rows bring nothing but padding
_, after = nano.step(tokens, cache, idle)
for old, new in zip(states_of(cache), states_of(after)):
    assert jnp.array_equal(old.recurrent[:8], new.recurrent[:8]) and jnp.array_equal(old.conv[:8], new.conv[:8])
    assert not jnp.any(jnp.all(old.recurrent[8:] == new.recurrent[8:], axis=(1, 2, 3)))

# %% [markdown]
# And a padded row continues like one without padding. Float32 sums inside a chunk may be ordered differently for
# another width, hence a tolerance, in terms of the logits' standard deviation:

# %%
alone, _ = nano.step(jnp.asarray([prompts[0]], jnp.int32), nano.init_cache(1, 256))
together, _ = nano.step(tokens, nano.init_cache(BATCH, 256), lengths)
np.testing.assert_allclose(together[0, : len(prompts[0])], alone[0], atol=1e-4 * jnp.std(alone))

# %% [markdown]
# ## Exercises
#
# **1.** 80 GB of memory hold Ling-3.0-tiny's 15.8 GB of weights and its sequences. How many bytes does a sequence of
# 131,072 tokens have, and how many such sequences fit beside the weights, in the hybrid and in an all-MLA model? And of
# 8,192 tokens? Why is the hybrid's advantage not the same?
#
# <details><summary>Solution</summary>
#
# 131,072 tokens: $19.5 + 131072\cdot 0.006912 = 925.5$ MB, so 64.2 GB hold 69. All MLA: $131072\cdot0.027648 = 3{,}624$
# MB, so 17. With 8,192 tokens they are 76.2 and 226.5 MB: 842 and 283. The entries alone are in the ratio of the layers
# that have them, 24 to 6. The states take from that what they are of the whole: a quarter of a sequence of 8,192
# tokens, and 2 % of one of 131,072.
#
# </details>
#
# **2.** Why are the states float32 when the weights are bfloat16? Let the first layer of nano round its state after
# every token, and compare with rounding once at the end. What if it forgot ten or a hundred times more slowly?
#
# ```python
# def rounded(S):
#     return S.astype(jnp.bfloat16).astype(jnp.float32)
#
#
# for slower in (1, 10, 100):
#     S = exact = forwards[0]
#     for t in range(len(longest)):
#         token = [z[:, t] for z in (q, k, v, g / slower, beta)]
#         S, exact = rounded(step(*token, S)[1]), step(*token, exact)[1]
#     for state in (rounded(exact), S):
#         print(slower, jnp.linalg.norm(state - exact, axis=(2, 3)) / jnp.linalg.norm(exact, axis=(2, 3)))
# ```
#
# <details><summary>Solution</summary>
#
# Rounded once, a state is off by 0.14 to 0.19 %. Rounded after each of the 49 tokens it is hardly worse as it is, 0.16
# to 0.21 %: errors decay like everything else in $S$, and this layer forgets quickly. Ten times more slowly it is off
# by 0.17 to 0.49 %, a hundred times by 0.35 to 0.65 %. A channel that keeps thousands of tokens collects as many
# roundings, and with 8 bits of significand a write of less than 1/512 of what is there changes nothing at all. An MLA
# entry is written once.
#
# </details>
#
# **3.** A chat server wants to reuse the common system prompt of all its users. What must it store?
#
# <details><summary>Solution</summary>
#
# The MLA pages of the prompt, to be shared by reference, and *one* copy of the KDA states (and convolution tails) after
# its last token: 19.5 MB, copied into each new request's slot. A request that differs from the prompt before its end
# gains nothing, unless states were stored at more places, as notebook 8 shows.
#
# </details>
