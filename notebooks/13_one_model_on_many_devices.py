# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 13. One model on many devices
#
# A model that is too large or too slow for one device is cut: each device has some heads, some channels, some experts,
# some of the vocabulary, and what one lacks for the next product it gets from the others. This notebook puts nano on 1,
# 2, 4 and 8 devices and looks at three things: where each array lies, what the devices send each other in a decode
# step, and why MLA's latents are on all of them while KDA's states are not.
#
# The devices are fake: one CPU that JAX takes for eight. They compile and exchange as real ones do, only not faster.
#
# **You need**: the layers of the model (notebook 1) and what they remember (notebook 7).
#
# **Afterwards you can** say of each weight which part a device has, count the bytes that a step sends from the shapes
# alone, and tell which memory can be cut.
#
# **It takes** a minute and a half on two cores, and 0.8 GB of memory.

# %%
import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import ling3
from ling3.cache import KDAState, Paged
from ling3.interpret.collectives import by_source, collectives
from ling3.leaves import array_leaves
from ling3.mesh import Rules, place, plan
from ling3.runtime import plots

jax.config.update("jax_num_cpu_devices", 8)  # before JAX looks for devices
jax.config.update("jax_disable_most_optimizations", True)  # compiles in half the time
plots.use()
nano, tok, tiny = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano"), ling3.Ling3Config()
COUNTS = (1, 2, 4, 8)
SUMS = Rules(sums=True)


def mesh(count):
    return jax.make_mesh((1, count), ("data", "tensor"), devices=jax.devices()[:count])


models = {count: place(nano, mesh(count)) for count in COUNTS}
models["8, sums"] = place(nano, mesh(8), SUMS)

# %% [markdown]
# ## Where each array lies
#
# Each weight says what its axes count (`heads`, `intermediate`, `experts`, `vocab`, …), and one table,
# `ling3.mesh.Rules`, says along which axis of the mesh such a thing is cut. In the picture a cell is an array on a
# device, and what is filled is the part of it that the device has, from its first number at the bottom to its last at
# the top.

# %%
SHOWN = {
    "word_embeddings": "model.word_embeddings.weight",
    "KDA q_proj": "model.layers.0.attention.q_proj.weight",
    "KDA q_conv1d": "model.layers.0.attention.q_conv1d.weight",
    "KDA A_log": "model.layers.0.attention.A_log",
    "KDA o_proj": "model.layers.0.attention.o_proj.weight",
    "MLA kv_a_proj": "model.layers.3.attention.kv_a_proj_with_mqa.weight",
    "MLA kv_b_proj": "model.layers.3.attention.kv_b_proj.weight",
    "MLA dense": "model.layers.3.attention.dense.weight",
    "router": "model.layers.3.mlp.gate.weight",
    "experts up_proj": "model.layers.3.mlp.experts.up_proj.weight",
    "shared up_proj": "model.layers.3.mlp.shared_experts.up_proj.weight",
    "lm_head": "lm_head.weight",
    "KDA state": None,
    "MLA latents": None,
}


def parts(model, rules=None):
    """The first and last share, from 0 to 1, of each array that each device has."""
    found, layout = {}, plan(nano, model.placement.mesh, rules)
    whole = {leaf.path: (leaf.value, share) for leaf, share in zip(array_leaves(nano), layout.shares, strict=True)}
    count = model.placement.mesh.shape["tensor"]
    for name, path in SHOWN.items():
        if path is not None:
            value, share = whole[path]
            size = 1 if share.axis is None else value.shape[share.axis]
            found[name] = [(a / size, b / size) for a, b in share.spans or [(0, 1)] * count]
    heads = nano.config.num_attention_heads
    groups = [d * heads // count / heads for d in range(count)]
    found["KDA state"] = [(start, start + max(1 / count, 1 / heads)) for start in groups]
    found["MLA latents"] = [(0, 1)] * count
    return found


fig, axes = plt.subplots(1, 4, figsize=(11, 5.2), sharey=True, width_ratios=(2, 4, 8, 8))
pictures = {"2 devices": parts(models[2]), "4 devices": parts(models[4]), "8 devices": parts(models[8])}
pictures["8 devices, Rules(sums=True)"] = parts(models["8, sums"], SUMS)
for ax, (title, found) in zip(axes, pictures.items(), strict=True):
    for row, (name, spans) in enumerate(reversed(found.items())):
        colour = plots.KDA if name.startswith("KDA") else plots.MLA if name.startswith("MLA") else plots.GREEN
        for device, (start, end) in enumerate(spans):
            cell = (device + 0.08, row + 0.1)
            ax.add_patch(Rectangle(cell, 0.84, 0.8, facecolor="0.93"))
            everything = (start, end) == (0, 1)
            look = {"alpha": 0.45, "hatch": "////", "edgecolor": "white"} if everything else {}
            height = 0.8 * (end - start)
            ax.add_patch(
                Rectangle((cell[0], cell[1] + 0.8 * start), 0.84, height, facecolor=colour, linewidth=0, **look)
            )
    ax.set(xlim=(0, len(spans)), ylim=(0, len(found)))
    ax.set_title(title, fontsize=10)
    ax.set(xticks=np.arange(len(spans)) + 0.5, xticklabels=range(len(spans)))
    ax.set(yticks=np.arange(len(found)) + 0.5, yticklabels=reversed(found))
    ax.grid(visible=False)
    ax.tick_params(length=0)
fig.supxlabel("device (hatched: it has the whole)", fontsize=10)
fig.suptitle("Which part of nano's arrays each device has", fontsize=11)
plt.show()

# %% [markdown]
# Experts, vocabulary and KDA's heads are cut. Four heads on eight devices make pairs of neighbours that have the same
# head, and of 1,237 rows of the vocabulary, dealt out by multiples of 64, the last of eight devices has none. What is
# small is whole: routers, the projection to MLA's latent, norms.
#
# On four and eight devices `q_proj` and others are whole as well, though they have heads, and on two already the
# shared expert's `up_proj`, though it has channels. Each device would compute 32 or fewer of their outputs, and XLA
# may sum a product with so few columns in another order; `ling3` then lets every device compute all and keep its own,
# so that each product is the sum that one device makes. (What is left of a difference below is arithmetic between
# products, which XLA rounds otherwise for fewer heads; `Rules(same_bits=True)` does that for all heads everywhere,
# and apart from the products.) With `Rules(sums=True)` everything is cut, and matrices whose inputs are cut give
# partial sums that are added up. In a model of the published sizes this concerns fewer matrices, as they are wider.
#
# Each device's part holds the numbers of the checkpoint, bit for bit, and together they are the model:

# %%
for count in COUNTS:
    layout = plan(nano, mesh(count))
    for leaf, share, placed in zip(array_leaves(nano), layout.shares, jax.tree.leaves(models[count]), strict=True):
        whole = np.asarray(leaf.value)
        for shard in placed.addressable_shards:
            assert np.array_equal(shard.data, share.part(whole, share.number(shard.index))), leaf.path
        assert np.array_equal(share.whole(np.asarray(placed)), whole)

story = "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"
question = tok.encode(f"Question: {story}\nAnswer:")
tokens = jnp.asarray([question, question[::-1]], jnp.int32)
logits = {name: np.asarray(models[name](tokens)) for name in (1, 2, 8, "8, sums")}
for name, found in logits.items():
    apart = np.abs(found - logits[1]).max() / np.abs(logits[1]).max()
    print(f"{name!s:>7} devices: logits within {apart:.1e} of one device's")
    assert apart < 2e-6 and (found.argmax(-1) == logits[1].argmax(-1)).all()

# %% [markdown]
# ## What the devices send each other
#
# A compiled program says it: in its HLO text every exchange is an instruction, and its name the path of the module in
# which it stands. Here are those of a decode step with 16 rows, on four devices:

# %%
ROWS = 16


def exchanged(model):
    step = jax.jit(lambda model, tokens, cache: model.step(tokens, cache))
    cache = eqx.filter_eval_shape(lambda model: model.init_cache(ROWS, 256), model)
    compiled = step.lower(model, jax.ShapeDtypeStruct((ROWS, 1), jnp.int32), cache).compile()
    return collectives(compiled.as_text(), model.placement.mesh.shape)


steps = {name: exchanged(models[name]) for name in (2, 4, 8, "8, sums")}
for each in by_source(steps[4]):
    print(
        f"{each.times} x {each.kind:<10} {each.source:<42}",
        f"{each.result:<16} {each.times * each.sent:>8,.0f} bytes sent",
    )

# %% [markdown]
# An *all-gather* gives every device all parts: of n devices each sends its part n - 1 times around, (n - 1)/n of the
# result. An *all-reduce* gives every device the sum, and costs twice that. All of it follows from shapes. With 16 rows
# of float32:
#
# - a row of the embedding is on one device, and the others add zeros: 16 · 128 numbers, summed;
# - `o_proj` or `dense`, and the shared expert's `down_proj`, need all heads or channels: 16 · 128 and 16 · 64 inputs in
#   each layer, gathered;
# - experts: each of a token's two choices is on one device, and the others add zeros: 16 · 2 · 128 numbers in each
#   layer, summed;
# - logits: 16 rows of the vocabulary, filled up to a multiple of 64 on each device, gathered.
#
# Nothing else, and above all no weights.

# %%
config = nano.config
HEADS, HIDDEN, WIDE = config.num_attention_heads, config.hidden_size, 4 * ROWS  # bytes of a channel in all rows
LAYERS = config.num_hidden_layers  # each with routed experts and a shared one


def by_hand(n):
    gathered, summed = (n - 1) / n, 2 * (n - 1) / n
    heads = HEADS * config.head_dim * max(1, n // HEADS)  # those that two devices have come twice
    inputs = LAYERS * (heads + config.moe_shared_expert_intermediate_size)
    outputs = 2 * LAYERS * HIDDEN if HIDDEN % (64 * n) == 0 else 0  # where rows are cut
    logits = n * -(-config.vocab_size // (64 * n)) * 64
    zeros = HIDDEN + LAYERS * config.num_experts_per_tok * HIDDEN
    return WIDE * (gathered * (inputs + outputs + logits) + summed * zeros)


def sent(found):
    return sum(each.times * each.sent for each in found)


for n in COUNTS[1:]:
    print(f"{n} devices: each sends {sent(steps[n]):,.0f} bytes,", f"by hand {by_hand(n):,.0f}")
    assert sent(steps[n]) == by_hand(n)
ENDS = ("word_embeddings", "lm_head", "o_proj", "dense", "down_proj", "mlp.experts")
assert all(each.source.endswith(ENDS) for found in steps.values() for each in found)

# %% [markdown]
# Which of them weigh most? The experts' rows: one for each *choice* of a token, zeros on all devices but one. The sum
# over a token's choices would be half as much for nano, and an eighth for the published models; but a sum in another
# order has other last bits, and `ling3` sends the rows. Then the logits: a request's next token needs only the largest,
# or a sample, so a vocabulary that is cut could be sampled where it lies.

# %%
KINDS = {
    "logits": ("lm_head",),
    "experts": ("mlp.experts",),
    "o_proj, dense": ("o_proj", "dense"),
    "down_proj": ("down_proj",),
    "embedding": ("word_embeddings",),
}
fig, ax = plt.subplots(figsize=(7, 3))
left = np.zeros(4)
names = [2, 4, 8, "8, sums"]
COLOURS = (plots.BLUE, plots.ORANGE, plots.GREEN, plots.SKY, plots.PINK)
for (label, ends), hatch, colour in zip(KINDS.items(), plots.HATCHES, COLOURS, strict=False):
    bytes_sent = np.asarray([sent(x for x in steps[name] if x.source.endswith(ends)) for name in names]) / ROWS / 1e3
    ax.barh(range(4), bytes_sent, left=left, label=label, color=colour, hatch=hatch, edgecolor="white")
    left += bytes_sent
assert np.allclose(left * ROWS * 1e3, [sent(steps[name]) for name in names])
ax.set(yticks=range(4), yticklabels=[f"{name} devices" if name in COUNTS else "8, Rules(sums=True)" for name in names])
ax.set(xlabel="sent by a device for each token of a decode step, kB")
ax.set_title(f"What a device sends in a decode step of nano, {ROWS} rows", fontsize=11)
ax.grid(axis="y", visible=False)
ax.invert_yaxis()
fig.legend(loc="outside lower center", ncols=5, fontsize=9)
plt.show()

# %% [markdown]
# With `Rules(sums=True)` the compiler joins the sums of the shared expert to those of the others, and they are counted
# there.
#
# ## Which memory can be cut
#
# A KDA head has a matrix of its own, and nothing else of the layer reads it: device and head go together, and on n
# devices each holds an nth of the states. MLA remembers for each token one latent from which the keys and values of
# *all* heads are made. Every device has some heads, and each of those reads the whole latent of every token. So each
# device has them all:


# %%
def mine(model):
    """The states of the last two layers on device 0: KDA's matrices, MLA's latents."""
    *_, kda, mla = eqx.filter_jit(lambda model: model.init_cache(2, 256).layers)(model)
    assert isinstance(kda, KDAState) and isinstance(mla, Paged)
    return kda.recurrent.addressable_shards[0].data, mla.entries.addressable_shards[0].data


key, entry = config.head_dim, config.kv_lora_rank + config.qk_rope_head_dim
for count in COUNTS:
    matrices, latents = mine(models[count])
    assert matrices.shape == (2, max(HEADS // count, 1), key, key)  # two requests
    assert latents.size == 2 * 256 * entry  # on every device
    print(f"{count} devices, on each: {matrices.nbytes:>6,} bytes of KDA states,", f"{latents.nbytes:,} of latents")

# %% [markdown]
# Could the latents be cut by their channels? A query's product with a key is a sum over channels, so the devices would
# have to add up the scores of all heads and all tokens of the context before the softmax, in every MLA layer and for
# every new token. For Ling-3.0-tiny at 8,192 tokens, against what the layer exchanges now:

# %%
context = 8192
scores = tiny.num_attention_heads * context * 4
now = tiny.num_attention_heads * tiny.v_head_dim * 2
print(f"{scores:,} bytes of scores to be summed for each token and layer", end="; ")
print(f"{now:,} bytes of outputs are gathered now")
assert scores == 128 * now

# %% [markdown]
# So the latents stay whole along `tensor`. What divides them is dealing out the *requests*: along the axis `data` each
# group of devices has its own rows, with their states and pages. For Ling-3.0-tiny and 64 requests, on 16 devices:

# %%
mla_layers = sum(tiny.attention_kind(i) == "mla" for i in range(tiny.num_hidden_layers))
a_state = (tiny.num_hidden_layers - mla_layers) * tiny.num_attention_heads * tiny.head_dim**2 * 4
a_token = mla_layers * (tiny.kv_lora_rank + tiny.qk_rope_head_dim) * 2
contexts = np.asarray([2**k for k in range(8, 18)])
fig, axes = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
for ax, (data, tensor) in zip(axes, ((1, 16), (4, 4), (16, 1)), strict=True):
    states, latents = np.full(len(contexts), 64 / data * a_state / tensor), 64 / data * a_token * contexts
    ax.loglog(contexts, (states + latents) / 1e9, color=plots.BLACK, linestyle="-", marker="", label="their sum")
    ax.loglog(contexts, latents / 1e9, color=plots.MLA, linestyle="--", marker="", label="MLA latents")
    ax.loglog(contexts, states / 1e9, color=plots.KDA, linestyle="-.", marker="", label="KDA states")
    ax.set_xlabel("tokens of each request")
    ax.set_title(f"{data} x {tensor} (data x tensor)", fontsize=10)
    ax.axhline(32, color=plots.BLACK, linestyle=":", linewidth=1)
    assert states[0] == 64 * a_state / 16  # however the devices are arranged
axes[0].set(ylabel="memory on each device, GB", ylim=(0.001, 100))
axes[0].text(300, 36, "a TPU v6e has 32 GB", fontsize=8)
axes[2].legend(loc="lower right", fontsize=9)
fig.suptitle("Caches of 64 requests to Ling-3.0-tiny on 16 devices", fontsize=11)
plt.show()
assert 64 * a_token * 131072 > 32e9 > 64 / 4 * a_token * 131072

# %% [markdown]
# KDA's states are a sixteenth on each device in all three; the latents only where requests are dealt out. At the full
# context of 131,072 tokens, 64 requests do not fit on devices of 32 GB with tensor parallelism alone. The price of
# `data` is that each group needs its own copy of what `tensor` would have cut: experts excepted, which may lie along
# both axes (`--ep`). What each choice costs for a model is `ling3 inspect config.json --tp 4 --dp 4 --ep 16 --plan`.
#
# ## Exercises
#
# **1.** In a ring each device sends to its right neighbour only. Show that an all-gather of an array in $n$ parts then
# costs each device $(n - 1)/n$ of the array, and an all-reduce twice that.
#
# <details><summary>Solution</summary>
#
# All-gather: in each of $n - 1$ rounds a device passes on the part that it got last, an $n$-th of the array.
# All-reduce: first each part goes round once and every device adds its own numbers to it, so that after $n - 1$ rounds
# each device has the finished sum of one part (a *reduce-scatter*); then those are gathered, in $n - 1$ rounds more.
#
# </details>
#
# **2.** Which of nano's `q_a_proj` (64 outputs), `q_b_proj` (192), `kv_a_proj_with_mqa` (80) and `kv_b_proj` (256) does
# a device have whole on two devices, and why? Does `Rules(sums=True)` change it? Predict, then ask `plan`:
#
# ```python
# for rules in (Rules(), SUMS):
#     for leaf, share in zip(leaves(nano), plan(nano, mesh(2), rules).shares, strict=True):
#         if "layers.3.attention" in leaf.path and "_proj" in leaf.path:
#             print(leaf.path, leaf.value.shape, share.spans or "whole")
# ```
#
# <details><summary>Solution</summary>
#
# All but `kv_b_proj`. The outputs of `q_a_proj` and `kv_a_proj_with_mqa` are latents, which all heads share. `q_b_proj`
# has heads, but two of them are 96 outputs, not a multiple of 64: every device computes all and keeps its own, so that
# each product is summed as on one device. With `kv_b_proj` two heads are 128. `Rules(sums=True)` gives up the order of
# sums, and cuts `q_b_proj` too; what has no heads it cannot cut either.
#
# </details>
#
# **3.** Suppose each device summed its experts' outputs over a token's choices before it sends them. How many bytes
# would a device then send in a step on four devices? Change one factor in `by_hand`. What would be lost?
#
# <details><summary>Solution</summary>
#
# Without `config.num_experts_per_tok *` in `zeros`, 159,744 bytes instead of 208,896: the experts' rows are half as
# many, and all else is as it was. (With 8 experts to a token they would be an eighth.) Lost would be the order of the
# sum: a token's outputs would be added device by device, so its last bits would depend on where its experts lie, and
# with them on the number of devices.
#
# </details>
