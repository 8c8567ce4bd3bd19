# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 15. Guessing ahead
#
# A decode step reads every weight it needs, and makes one token of it. If we could guess the next three tokens, one
# pass over the model could check all three: it computes what follows each of them, and a guess is right if it is the
# token that the model itself gives there. That is speculative decoding (Leviathan et al., arXiv 2211.17192). Right
# guesses save steps, wrong ones cost a little, and neither may change the answer.
#
# On a hybrid model there is a catch. Attention's cache is a list, from which the entries of wrong guesses can be
# dropped. KDA's memory is a matrix into which every token is mixed, and out of which none can be taken.
#
# **You need**: KDA's recurrence (notebook 2), the hybrid cache (notebook 7) and the engine (notebook 8).
#
# **Afterwards you can** say where guesses come from and how often they are right; show what a wrong guess would do to
# a state that cannot go back, and two ways out; and compute when guessing pays.
#
# **It takes** two minutes on two cores, and 1.5 GB of memory.

# %%
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import ling3
from ling3.cache import Cache, KDAState
from ling3.engine.speculation import lookup
from ling3.runtime import plots
from ling3.train.nano.skills import SKILLS

plots.use()
model, tok = ling3.load("nano", dtype=jnp.float32, mtp=True), ling3.load_tokenizer("nano")
size = sum(leaf.size for leaf in jax.tree.leaves(model.mtp))
print(f"the model: {model.parameters - size:,} parameters; the layer after it: {size:,}")

# %% [markdown]
# ## Where guesses come from
#
# **Lookup** needs no model: if the last four tokens occurred before, guess that the text goes on as it did there.
#
# **Multi-token prediction** (MTP) is a layer behind the last, trained to see one token further. From the hidden state
# $h_t$ and the *next* token it predicts the token after that:
#
# $$y_t = \mathrm{layer}\big(W\,[\,\mathrm{norm}(e_{t+1}),\ \mathrm{norm}(h_t)\,]\big), \qquad
# p(\text{token}_{t+2}) = \mathrm{softmax}(\mathrm{head}(y_t)).$$
#
# Fed with its own $y_t$ it predicts further still, less and less well. nano's layer was trained after the model, which
# stayed as it was.
#
# How often is each right? nano answers questions of each skill. Then we ask both, at every token of the answers, what
# the next would be: the layer always has a guess, lookup only sometimes.

# %%
COUNT, NEW = 24, 48
greedy = ling3.SamplingParams(max_tokens=NEW, temperature=0.0)
sizes = {"max_model_len": 1536, "page_size": 64, "chunked_prefill_size": 256, "token_paddings": (256,)}
engine = ling3.Engine(model, tok, **sizes, decode_rows=16)
names = [name for name in SKILLS if name != "long_recall"]
asked = {name: [tok.encode(text.prompt) for text in SKILLS[name].exam(COUNT)] for name in names}
flat = [ids for name in names for ids in asked[name]]
outputs = engine.generate(flat, greedy)
answers = {name: outputs[i * COUNT : (i + 1) * COUNT] for i, name in enumerate(names)}


def ahead(ids):
    """The layer's guesses from the third token on; padded, for few compiled lengths."""
    padded = ids + [0] * (-len(ids) % 256)
    return np.argmax(ling3.mtp_logits(model, jnp.asarray([padded]))[0], axis=-1)[: len(ids) - 2]


rows = []
for name in names:
    right = {"mtp": [], "lookup": []}
    for output in answers[name]:
        ids, start = [*output.prompt_token_ids, *output.outputs[0].token_ids], len(output.prompt_token_ids)
        guesses = ahead(ids)
        for t in range(start, len(ids)):
            right["mtp"].append(guesses[t - 2] == ids[t])
            found = lookup(ids[:t])
            right["lookup"].append(bool(found) and found[0] == ids[t])
    rows.append([np.mean(right["mtp"]), np.mean(right["lookup"])])
    own, found = rows[-1]
    print(f"{name:10} MTP {own:4.0%}, lookup {found:4.0%} of {len(right['mtp']):,} tokens")

# %%
figure, axes = plt.subplots()
places = np.arange(len(names))
for i, (label, colour) in enumerate((("MTP", plots.BLUE), ("lookup", plots.ORANGE))):
    axes.bar(places + 0.4 * i - 0.2, [row[i] for row in rows], 0.38, color=colour, hatch=plots.HATCHES[i], label=label)
axes.set(xticks=places, ylabel="tokens guessed right", ylim=(0, 1.25), title="The next token, guessed before the step")
axes.set_xticklabels(names, rotation=30, ha="right")
axes.legend(loc="upper right")
plt.show()

# %% [markdown]
# The layer has attention of its own, and copies nearly as well as the model does. What it lacks are the facts: they are
# in the weights of the layers before it, which have not seen the newest token yet when the layer guesses. Of a fact it
# knows the end, and no more. Lookup is right where a text repeats itself, as in `copying` and `positions`, and has
# nothing to say elsewhere.
#
# ## A memory that cannot go back
#
# Take a prompt, and let the model read three wrong guesses. Then we go back: for attention it is enough to set the
# length back, since entries behind a sequence's end are never read and will be overwritten. KDA's states have the wrong
# tokens in them. How much does that change?

# %%
prompt = asked["problems"][0]
cache = model.init_cache(1, 512)
before, cache = model.step(jnp.asarray([prompt]), cache, last=True)
wrong = tok.encode(" Lena Lena Lena")[:3]
_, misled = model.step(jnp.asarray([wrong]), cache)


def goes_on(cache, tokens=40):
    """The greedy continuation, from the token that follows the prompt."""
    found, token = [], int(jnp.argmax(before[0, -1]))
    for _ in range(tokens):
        found.append(token)
        if token in model.config.eos_token_id:
            break
        logits, cache = model.step(jnp.asarray([[token]]), cache)
        token = int(jnp.argmax(logits[0, -1]))
    return tok.decode(found)


def only(kind):
    """The states after the guesses for one kind of layer, before them for the other."""
    both = zip(misled.layers, cache.layers, strict=True)
    return Cache(
        tuple(late if isinstance(late, KDAState) == (kind == "KDA") else early for late, early in both),
        cache.length,
        cache.table,
    )


print("states before the guesses:", goes_on(cache))
print("MLA's pages after them:   ", goes_on(only("MLA")))
print("KDA's states after them:  ", goes_on(only("KDA")))
assert goes_on(only("MLA")) == goes_on(cache) != goes_on(only("KDA"))

# %% [markdown]
# MLA does not notice, and three words in KDA's states are enough to lose the thread. There are two ways out:
#
# - **a state for each guess**: keep the state after each token of the pass and take the right one. At Ling-3.0-tiny's
#   sizes that is 19.5 MB for each guess of each sequence.
# - **look first, write later**: compute what each guess reads from the state without writing; when it is known how
#   many are right, take exactly their steps from the state before. Their inputs ($q, k, v, g, \beta$) are small.
#
# The engine does the second. It takes the same steps in the same order that decoding without guesses takes, so that
# even the last bits are the same: an engine that guesses gives the tokens and log-probabilities of one that does not.

# %%
params = ling3.SamplingParams(max_tokens=64, temperature=0.7, seed=3, logprobs=0)
questions = [ids for name in ("problems", "copying", "positions", "tracking") for ids in asked[name][:4]]
plain = ling3.Engine(model, tok, **sizes, decode_rows=16)
expected = [(a.outputs[0].token_ids, a.outputs[0].logprobs) for a in plain.generate(questions, params)]
for way in ("lookup", "mtp"):
    guessing = ling3.Engine(model, tok, **sizes, decode_rows=16, speculation=way, draft_tokens=3)
    got = guessing.generate(questions, params)
    assert [(a.outputs[0].token_ids, a.outputs[0].logprobs) for a in got] == expected
    stats = guessing.stats()
    told = f"{stats.accepted_tokens} of {stats.drafted_tokens} guesses right"
    print(f"{way}: {told}; every bit as without")

# %% [markdown]
# ## When it pays
#
# Let a guess be right with probability $p$ if those before it are. A pass over $k$ guesses gives one token and as many
# more as are right in a row: $1 + p + \dots + p^k$. It takes longer than a plain step, since it has $k + 1$ rows where
# a step has one; say $c$ times as long. Guessing pays where
#
# $$\frac{1 + p + p^2 + \dots + p^k}{c} > 1.$$
#
# $c$ is a property of the machine and the model, so we measure it: a step with one, two, four and eight rows.


# %%
def seconds(count):
    """The time of a decode step of `count` rows, at a context of 64 tokens."""
    own, ids = model.init_cache(count, 128), jnp.ones((count, 64), jnp.int32)
    _, own = model.step(ids, own)
    one = ids[:, :1]
    jax.block_until_ready(model.step(one, own))
    taken = []
    for _ in range(30):
        start = time.perf_counter()
        jax.block_until_ready(model.step(one, own))
        taken.append(time.perf_counter() - start)
    return min(taken)


counts = [1, 2, 4, 8]
times = [seconds(count) for count in counts]
print({count: f"{1000 * t:.2f} ms" for count, t in zip(counts, times, strict=True)})

# %%
p = np.linspace(0, 1, 101)
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6))
left.plot(counts, np.array(times) / times[0])
left.set(xlabel="rows of a step", ylabel="time / time of one row", ylim=(0, None), title="nano, here")
for c, label in ((times[2] / times[0], "nano, here"), (2.4, "Ling-3.0-tiny's layers in INT4, two cores")):
    gain = sum(p**k for k in range(4)) / c
    right.plot(p, gain, markevery=20, label=f"{label}: c = {c:.1f}")
right.axhline(1, color=plots.BLACK, linewidth=0.8)
right.set(xlabel="p, a guess is right", ylabel="tokens per time, against none", title="Three guesses in a pass")
right.legend(fontsize=8)
plt.show()

# %% [markdown]
# Where a step of four rows takes as long as one of one row, even poor guesses pay. In a mixture of experts on two cores
# each row reads its own experts: there a pass takes 2.4 times as long, and guesses must nearly all be right. With more
# sequences at once, their rows fill the step already, and guessing ends. So the engine measures its passes and steps,
# counts each sequence's right guesses, and checks as many guesses as pay, or none. Here is what that brings if one
# question is asked after the other:

# %%
for way in (None, "lookup", "mtp"):
    one = ling3.Engine(model, tok, **sizes, decode_rows=16, prefix_cache=False, speculation=way)
    one.warmup()
    told = []
    for name in ("problems", "copying", "positions"):
        start, before, made = time.perf_counter(), one.stats(), 0
        for ids in asked[name]:
            made += len(one.generate([ids], greedy)[0].outputs[0].token_ids)
        rate, after = made / (time.perf_counter() - start), one.stats()
        right = after.accepted_tokens - before.accepted_tokens
        drafted = after.drafted_tokens - before.drafted_tokens
        told.append(f"{name} {rate:4.0f} tokens/s, {right} of {drafted} right")
    print(f"{way or 'no guesses':10}", "; ".join(told))

# %% [markdown]
# ## Exercises
#
# **1.** *A third way to guess.* `speculation=` also takes a function from the tokens so far to the tokens that may
# follow. Write one for nano's equations: after ` = `, guess the sum. How often is it right?
#
# <details><summary>Solution</summary>
#
# ```python
# import re
#
# def sums(tokens):
#     found = re.search(r"(\d+) ([+×-]) (\d+) = $", tok.decode(list(tokens[-12:])))
#     if found is None:
#         return []
#     left, operator, right = int(found[1]), found[2], int(found[3])
#     result = {"+": left + right, "-": left - right, "×": left * right}[operator]
#     return tok.encode(f"{result}. ")[:1]
#
# right = []
# for output in answers["problems"]:
#     ids = [*output.prompt_token_ids, *output.outputs[0].token_ids]
#     for t in range(len(output.prompt_token_ids), len(ids)):
#         right += [guess == ids[t] for guess in sums(ids[:t])]
# print(sum(right), len(right))
# ```
#
# Always: 56 of 56, for nano sums well, and so does Python. But it is one token in nine of the answers (528). An engine
# with `speculation=sums` and 24 questions at once finds that it does not pay, and checks none.
#
# </details>
#
# **2.** *The layer's second guess.* `lookup` and the layer fail in different places. Count the tokens that at least one
# of them guesses right. Would an engine with both be faster?
#
# <details><summary>Solution</summary>
#
# Collect both lists of a skill in the loop above, `a` and `b`, and take `np.mean(np.array(a) | np.array(b))`. In
# `copying` and `positions` it is higher than either; elsewhere it is the layer's alone. But a pass has to decide which
# of two guesses it checks, or check a tree of them, which costs more rows.
#
# </details>
