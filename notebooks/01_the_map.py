# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 1. The map
#
# One prompt goes through a whole Ling-3, and we look at every stage: what goes in, what comes out, of which shape.
#
# The model is *nano*: 2.4 million parameters and every mechanism of the 7.9-billion Ling-3.0-tiny. It has learned word
# problems and a few exercises of memory. Everything said about shapes here holds for the large model, with larger
# numbers.
#
# **You need**: arrays in Python, and a rough idea of a transformer (tokens, layers, attention). No earlier notebook.
#
# **Afterwards you can** name the stages of a forward pass and the shape of each, say from a config which layers are KDA
# and which MLA, and count a model's parameters and the bytes of a sequence without allocating either.
#
# **It takes** a minute and a half on two cores, and 1.7 GB of memory.

# %%
import dataclasses

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display

import ling3
from ling3.cache import CacheSpec, Span
from ling3.checkpoint.names import structure
from ling3.leaves import array_leaves
from ling3.runtime import plots
from ling3.train.nano.skills import SKILLS

plots.use()
model = ling3.load("nano", dtype=jnp.float32)
tokenizer = ling3.load_tokenizer("nano")
config = model.config
print(f"{sum(leaf.size for leaf in jax.tree.leaves(model)):,} parameters", f"in {config.num_hidden_layers} layers")

# %% [markdown]
# ## A prompt becomes numbers
#
# The tokenizer cuts text into pieces of a fixed vocabulary, and each piece has a number. The model sees only these
# numbers.

# %%
story = "Kate has 16 eggs. Then she gives away 12. How many eggs does Kate have?"
prompt = f"Question: {story}\nAnswer:"
ids = tokenizer.encode(prompt)
tokens = jnp.asarray([ids])  # [batch, seq]
pieces = [tokenizer.decode([i]) for i in ids]
print(tokens.shape, pieces)
assert "".join(pieces) == prompt

# %% [markdown]
# ## The pattern of layers
#
# A decoder layer is two updates of one stream of vectors, the *residual stream* $x$ of shape `[batch, seq, hidden]`:
#
# $$h = x + \mathrm{attention}(\mathrm{RMSNorm}(x)), \qquad y = h + \mathrm{mlp}(\mathrm{RMSNorm}(h)).$$
#
# Attention mixes tokens, the MLP works on each token by itself. Ling-3 has two kinds of each. Layer $i$ attends with
# **MLA** (softmax over all earlier tokens, from a compressed cache) when $(i+1)$ is a multiple of `layer_group_size`,
# else with **KDA** (a linear recurrence, whose memory has a fixed size). The first `first_k_dense_replace` layers have
# a dense MLP, all later ones a mixture of experts: Ling-3.0-tiny has one dense layer, nano none.

# %%
tiny = ling3.Ling3Config()  # the defaults are those of the published Ling-3.0-tiny
figure, axes = plt.subplots(2, 1, figsize=(8, 2.4), height_ratios=(1, 1))
for ax, (name, c) in zip(axes, {"nano": config, "Ling-3.0-tiny": tiny}.items(), strict=True):
    for i in range(c.num_hidden_layers):
        mla, dense = c.attention_kind(i) == "mla", c.mlp_kind(i) == "dense"
        ax.bar(
            i, 1, width=0.92, bottom=1, color=plots.MLA if mla else plots.KDA, hatch="///" if mla else "", ec="white"
        )
        ax.bar(
            i, 1, width=0.92, color="white" if dense else plots.YELLOW, hatch="" if dense else "...", ec="black", lw=0.5
        )
        ax.text(i, 2.1, "MLA" if mla else "KDA", ha="center", fontsize=6)
    ax.set(xlim=(-0.7, 23.7), ylim=(0, 2.7), yticks=[0.5, 1.5], yticklabels=["MLP", "attention"])
    ax.set_title(f"The layers of {name}", fontsize=11)
    ax.set_xticks(range(c.num_hidden_layers), range(c.num_hidden_layers), fontsize=7)
    ax.grid(False)
axes[1].set_xlabel("layer (dotted: experts, plain: dense MLP)")
plt.show()

kinds = [tiny.attention_kind(i) for i in range(24)]
assert kinds.count("kda") == 18 and kinds.count("mla") == 6  # three to one, as in nano
assert [config.attention_kind(i) for i in range(4)] == kinds[:4]
assert [tiny.mlp_kind(i) for i in range(24)] == ["dense"] + 23 * ["moe"]

# %% [markdown]
# ## Through the model by hand
#
# The module tree has the names of the published checkpoint, and the code below uses them. `Span` says which columns
# are real tokens and at which positions; here all of them are, from position 0 on.

# %%
seq = tokens.shape[1]
span = Span.whole(batch=1, seq=seq)
stages = []


def show(stage, array):
    """Notes a stage's shape for the table below."""
    stages.append((stage, str(tuple(array.shape)), array.dtype.name))
    return array


x = show("word_embeddings", model.model.word_embeddings.embed(tokens))

# %% [markdown]
# **Layer 0 is KDA.** Three projections, each followed by a short causal convolution and a SiLU, give a query, a key and
# a value per head; q and k are scaled to unit length. Two more projections give the gates of its memory: the log decay
# $g$ for every key channel, and the writing strength $\beta$ for every head. The memory itself is one matrix $S$ per
# head. Notebook 2 derives what happens to it.

# %%
layer = model.model.layers[0]
kda, normed = layer.attention, layer.input_layernorm(x)
state = kda.empty_state(CacheSpec(slots=1, pages=0, page_size=1, dtype=jnp.float32))
q, k, v, tail = kda.convolved(normed, state.conv, span)
g, beta = kda.gates(normed, span)
for name, array in {
    "q (unit length / sqrt(key))": q,
    "k (unit length)": k,
    "v": v,
    "log decay g": g,
    "beta": beta,
}.items():
    show(f"layers.0.attention: {name}", array)
attended, state = kda(normed, None, span)
show("layers.0.attention: state S", state.recurrent)
show("layers.0.attention: tail of the convolutions", state.conv)
h = x + show("layers.0.attention: output", attended)
assert jnp.all((g > config.kda_lower_bound) & (g < 0)) and jnp.all((beta > 0) & (beta < 1))
np.testing.assert_allclose(jnp.linalg.norm(k, axis=-1), 1.0, atol=1e-4)

# %% [markdown]
# **Its MLP is a mixture of experts.** A router scores all experts for each token and picks the best two; their
# outputs, weighted, and that of a shared expert are added up (notebook 4).

# %%
moe, normed = layer.mlp, layer.post_attention_layernorm(h)
scores = show("layers.0.mlp: router scores", moe.gate.scores(normed[0]))
chosen, weights = moe.gate(normed[0])
show("layers.0.mlp: chosen experts", chosen)
show("layers.0.mlp: their weights", weights)
x = show("layers.0: after the experts", h + moe(normed, span))

# %% [markdown]
# **Layers 1 and 2** are like it. **Layer 3 is MLA.** What it keeps of a token is not a key and a value per head, but
# one *entry*: a latent that all heads expand their keys and values from, and one small rotated key that all share
# (notebook 3).

# %%
for layer in model.model.layers[1:3]:
    x, _ = layer(x, None, span)
layer = model.model.layers[3]
mla, normed = layer.attention, layer.input_layernorm(x)
positions = span.positions(seq)
q_nope, q_rope = mla.queries(mla.query_input(normed), positions)
entries = mla.entries(normed, positions)
for name, array in {"q_nope": q_nope, "q_rope (rotated)": q_rope, "entries [latent | rotated key]": entries}.items():
    show(f"layers.3.attention: {name}", array)
show("layers.3.attention: output gate per head", mla.output_gate(normed))
attended, _ = mla(normed, None, span)
h = x + show("layers.3.attention: output", attended)

assert entries.shape[-1] == config.latent_entry_dim == 80

# %% [markdown]
# Its experts are chosen like the others'. A last norm and one more matrix turn the stream into a score for each word of
# the vocabulary: the logits. By hand we came to the same numbers as the model does.

# %%
x = show("layers.3: after the experts", h + layer.mlp(layer.post_attention_layernorm(h), span))
logits = show("lm_head: logits", model.lm_head(model.model.norm(x), dtype=jnp.float32))
np.testing.assert_allclose(logits, model(tokens), atol=1e-4)  # the same sums, compiled in other groups

width = max(len(stage) for stage, _, _ in stages)
print("\n".join(f"{stage:<{width}}  {shape:<16} {dtype}" for stage, shape, dtype in stages))

# %% [markdown]
# `ling3.trace` does the same for you and returns every stage by name; the following notebooks plot from it. Two
# examples, over texts that nano has never seen. The **logit lens** reads the stream after every layer as if it were the
# last: where does the model know its next token? We ask it of word problems and of four exercises: `recall` looks a
# word up in a list of pairs, `copying` repeats a string, `positions` continues a string that has a period, and `facts`
# are of people that nano has learned by heart. And the norms show how much each part adds to the stream.

# %%
for name in ("recall", "copying", "positions", "facts"):
    (text,) = SKILLS[name].exam(1)
    print(f"{name}: {text.prompt[:60]} … {text.answer[:20]}")


def rows(name, count, width=256):
    """Texts of a skill, padded: tokens, and which of them follow from those before."""
    tokens, learned = np.zeros((count, width), np.int32), np.zeros((count, width), bool)
    for row, text in enumerate(SKILLS[name].exam(count)):
        encoded = [(tokenizer.encode(piece, add_special_tokens=False), known) for piece, known in text.segments]
        ids = [i for piece, _ in encoded for i in piece]
        tokens[row, : len(ids)], learned[row, : len(ids)] = ids, [known for piece, known in encoded for _ in piece]
    return jnp.asarray(tokens), learned


missed, norms = {}, {}
for name in ("problems", "recall", "copying", "positions", "facts"):
    asked, learned = rows(name, 12)
    seen = ling3.trace(model, asked)
    target = np.asarray(asked)[:, 1:, None]
    likely = [np.asarray(jax.nn.softmax(layer.logits[:, :-1], axis=-1)) for layer in seen.layers]
    right = [np.take_along_axis(p, target, axis=-1)[learned[:, 1:], 0] for p in likely]
    missed[name] = [1 - p.mean() for p in right]
    if name == "problems":
        np.testing.assert_allclose(seen.logits, model(asked), atol=1e-3)  # of logits up to 39, in another program
        text = np.asarray(asked) != 0
        for part in ("attention_norm", "mlp_norm", "residual_norm"):
            norms[part] = [float(np.mean(getattr(layer, part)[text])) for layer in seen.layers]

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.2))
for name, values in missed.items():
    left.semilogy(values, label=name)
left.set(xticks=range(4), xlabel="read after layer", ylabel="1 - p(right token), mean")
left.set_title("Logit lens of nano, on five skills", fontsize=11)
left.legend(fontsize=8)
for values, label in zip(norms.values(), ("attention adds", "MLP adds", "the stream"), strict=True):
    right.semilogy(values, label=label)
right.set(xlabel="layer", ylabel="norm, mean over tokens", xticks=range(4))
right.set_title("Residual stream of nano, on problems", fontsize=11)
right.legend(fontsize=8)
plt.show()
print({name: [round(float(x), 3) for x in values] for name, values in missed.items()})
print({name: [round(float(x), 2) for x in values] for name, values in norms.items()})

assert all(missed[name][1] > 0.8 for name in ("recall", "copying", "positions", "facts"))
assert 0.2 < missed["recall"][2] < 0.4 and abs(missed["recall"][3] - missed["recall"][2]) < 0.05
assert missed["copying"][3] < missed["copying"][2] / 10 and missed["positions"][3] < missed["positions"][2] / 10
assert norms["mlp_norm"][1] < norms["residual_norm"][1] / 50

# %% [markdown]
# No layer knows everything. After the first two layers few answers to the exercises are in sight, but that is the lens,
# which shows what points at a word of the vocabulary already. The lens misses what only later layers use:
# cut off one of the first two, and answers are lost (notebook 5). Layer 2, the last KDA, finds most of what a
# state can keep: the value that stands after a key, to which the last layer adds nothing. The MLA layer brings what
# needs a look at the text itself, as copying does, and the distance between two tokens, which RoPE tells: the
# `positions`.
#
# The norms show a part that training left almost unused: the MLP of layer 1 adds 0.06 to a stream of 5.54, and the
# attention before it 3. Without this MLP nano answers just as many problems and facts.

# %% [markdown]
# ## Look for yourself
#
# `ling3.look` makes a page of a pass: for the token under the pointer it shows what each layer keeps, writes, reads and
# chooses. It is one file (`page.save("look.html")`, or `ling3 look nano -p "…" --out look.html`) without a network.
# Click a token and use the arrow keys: left and right for the tokens, up and down for the layers, H for the heads. Bars
# under the tokens are what the selected one reads; striped ones are later tokens that read it.

# %%
page = ling3.look(model, tokenizer, prompt, new_tokens=16, title="nano: the prompt, and its answer")
display(page)

assert page.data["prompt"] == seq and len(page.data["tokens"]) > seq
expected = page.data["layers"][-1]["lens"]["tokens"]  # after the last layer the lens is the model
new_ids = [token["id"] for token in page.data["tokens"][seq:]]
assert [likeliest[0] for likeliest in expected[seq - 1 : -1]] == new_ids  # each token of the answer was the likeliest

# %% [markdown]
# ## Where the parameters are
#
# Shapes cost nothing to ask for: `structure` builds Ling-3.0-tiny's tree without allocating a byte. Nearly all of its
# 7.9 billion parameters are experts, but a token meets only 8 of 128.

# %%
tree = structure(tiny)
parts = {
    "embedding and head": 0,
    "KDA": 0,
    "MLA": 0,
    "dense MLP": 0,
    "routers": 0,
    "routed experts": 0,
    "shared experts": 0,
}
for leaf in array_leaves(tree):
    names = leaf.path.split(".")
    size = int(np.prod(leaf.value.shape))
    if names[1] != "layers":
        part = "embedding and head"
    elif names[3] != "mlp":
        part = "KDA" if tiny.attention_kind(int(names[2])) == "kda" else "MLA"  # with the layer's norms
    elif tiny.mlp_kind(int(names[2])) == "dense":
        part = "dense MLP"
    else:
        part = {"gate": "routers", "experts": "routed experts", "shared_experts": "shared experts"}[names[4]]
    parts[part] += size
active = parts | {"routed experts": parts["routed experts"] * tiny.num_experts_per_tok // tiny.num_experts}

figure, ax = plt.subplots(figsize=(7, 2.8))
place = np.arange(len(parts))
stored = ax.barh(place + 0.2, [n / 1e6 for n in parts.values()], 0.38, color=plots.SKY, label="stored")
used = ax.barh(
    place - 0.2, [n / 1e6 for n in active.values()], 0.38, color=plots.ORANGE, hatch="///", label="used by a token"
)
ax.bar_label(stored, [f"{n / 1e6:,.1f}" for n in parts.values()], fontsize=7, padding=2)
ax.bar_label(used, [f"{n / 1e6:,.1f}" for n in active.values()], fontsize=7, padding=2)
ax.set_yticks(place, list(parts))
ax.set(xlabel="parameters, millions", xlim=(0, 8000))
ax.set_title("Parameters of Ling-3.0-tiny, stored and used by a token", fontsize=11)
ax.invert_yaxis()
ax.legend()
plt.show()

print(f"stored {sum(parts.values()):,}, used by a token {sum(active.values()):,}")
assert sum(parts.values()) == 7_893_392_800  # the published count
assert parts["routed experts"] / sum(parts.values()) > 0.85

# %% [markdown]
# ## What a sequence costs
#
# A running sequence remembers two things. In each KDA layer a matrix $S$ per head and the last three inputs of the
# convolutions, **however long it is**. In each MLA layer 576 numbers **per token**. The cache's own shapes say how
# much:

# %%
shapes = [jax.eval_shape(lambda m, n=n: m.init_cache(1, n, jnp.bfloat16), tree) for n in (1024, 2048)]
latents = [sum(s.entries.size * 2 for s in c.layers if isinstance(s, ling3.Paged)) for c in shapes]
states = [s for s in shapes[0].layers if isinstance(s, ling3.KDAState)]
recurrent = sum(s.recurrent.size * 4 for s in states)
tails = sum(s.conv.size * 2 for s in states)
per_token = (latents[1] - latents[0]) // 1024
print(f"per sequence {recurrent / 1e6:.1f} MB of states (float32)", f"and {tails / 1e6:.2f} MB of tails")
print(f"per token {per_token:,} bytes")
assert (round(recurrent / 1e6, 1), round(tails / 1e6, 2), per_token) == (18.9, 0.66, 6912)

# %% [markdown]
# ## And out again
#
# The likeliest next token is appended, and the pass is repeated, now with one token and a memory of all others. That
# is all there is to generating text.

# %%
new = ling3.generate(model, [ids], max_tokens=32, stop_token_ids=tokenizer.eos_token_ids)
print(prompt + tokenizer.decode(new[0]))
assert tokenizer.decode(new[0]).strip() == "16 - 12 = 4. The answer is 4."

# %% [markdown]
# **What to read next.** The code of this pass is `ling3/model.py` (the tree and its one forward pass); notebooks 2, 3
# and 4 explain its three kinds of layers. Change the model with `dataclasses.replace(config, ...)` and `ling3.init`:
# you may choose every size.

# %%
small = dataclasses.replace(config, num_hidden_layers=6, layer_group_size=3)
print([small.attention_kind(i) for i in range(6)])
fresh = ling3.init(small, key=jax.random.key(0))
assert fresh.model.layers[2].attention.entry == 80 and fresh(tokens).shape == (1, seq, config.vocab_size)

# %% [markdown]
# ## Exercises
#
# **1.** After how many tokens is the MLA part of Ling-3.0-tiny's cache the larger one, and which share of the whole do
# the fixed states have at its full context of 131,072?
#
# <details><summary>Solution</summary>
#
# 19.54 MB / 6,912 bytes = 2,827 tokens. Below that the fixed states are the larger part; at 131,072 tokens they are 2 %
# of the whole. The cell below computes both.
#
# </details>
#
# **2.** Predict both numbers, bytes per sequence and bytes per token, for a model of 24 such layers of which every
# *second* one is MLA (`layer_group_size=2`). At which context does it need as much memory as Ling-3.0-tiny? Then change
# one line, `tree = structure(dataclasses.replace(tiny, layer_group_size=2))`, and run the cells of *What a sequence
# costs* again (without their last assertion).
#
# <details><summary>Solution</summary>
#
# 12 layers of each kind instead of 18 and 6. So the states are two thirds as large, 13.0 MB, and a token costs twice as
# much, 13,824 bytes. The lines meet where the 6.5 MB that are saved are spent again, at 6.5 MB / 6,912 bytes = 942
# tokens; at 131,072 it is 1,825 MB against 926. The ratio of the two kinds is a choice between a cheap beginning and a
# cheap continuation.
#
# </details>
#
# **3.** Ling-3.0-tiny gets twice as many experts, `ling3.Ling3Config(num_experts=256)`. What happens to the number of
# parameters that are stored, and to the number that a token uses? Which of the seven parts grow?
#
# <details><summary>Solution</summary>
#
# Stored are 14.84 billion instead of 7.89: the routed experts double, and they are nearly everything. A token still
# takes 8 of them, so only the routers add to what it uses: 23 matrices with a row per expert, 1.386 billion instead of
# 1.382. This is what a mixture of experts buys: capacity without arithmetic, for memory.
#
# </details>

# %%
crossing = (recurrent + tails) / per_token
at_the_end = (recurrent + tails) / (recurrent + tails + per_token * tiny.max_position_embeddings)
print(f"{crossing:,.0f} tokens; {at_the_end:.1%} at {tiny.max_position_embeddings:,}")
assert 2800 < crossing < 2850 and at_the_end < 0.025
