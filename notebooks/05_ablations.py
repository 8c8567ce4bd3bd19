# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 5. Ablations: what each mechanism is worth to a trained model
#
# Take a mechanism out of a trained model and see what breaks. `ling3.ablate` does the surgery: pure functions from a
# model to a model, which still runs, traces, serves and saves. *What* breaks depends on what the model is asked to do,
# so one score is not enough: nano has ten skills (`ling3.train.nano.skills`), and the result is a table, mechanisms
# against skills. Here we cut its output gates and bend its decay, read the table, and compare it with that of the Kimi
# Linear report, where models were *trained* without the part in question.
#
# The two experiments ask different questions, and it is easy to confuse them. **Cutting** asks what a trained model has
# come to rely on. **Training without** asks whether the mechanism was needed. A part can be vital to a model that has
# it, and useless to one that never had it. Notebook 6 trains from scratch.
#
# **You need**: the mechanisms that are cut: KDA's gates and convolutions (notebook 2), MLA and its gate (notebook 3),
# experts (notebook 4).
#
# **Afterwards you can** cut a mechanism out of a model, choose a cut that changes one thing only, read a table of cuts
# against skills, and say what it tells about the model, and what it does not tell about the mechanism.
#
# **It takes** three minutes on two cores, and 1.1 GB of memory.

# %%
import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown

import ling3
from ling3.cache import Span
from ling3.evals.skill_table import draw_losses
from ling3.interpret import ablate
from ling3.runtime import plots
from ling3.train.nano.skills import SKILLS

plots.use()
model = ling3.load("nano", dtype=jnp.float32)
tokenizer = ling3.load_tokenizer("nano")

# %% [markdown]
# ## The measure
#
# Two of the skills are measured live, with 32 held-out texts each. `problems` are word problems, and the answer is the
# whole worked solution. `resets` asks for the value of a key, and after the word *new* no earlier value counts:

# %%
MEASURED, COUNT = ("problems", "resets"), 32


def padded(texts):
    """The texts as rows of tokens; which are real, and which of these the answer's."""
    pairs = [(tokenizer.encode(t.prompt), tokenizer.encode(t.answer, add_special_tokens=False)) for t in texts]
    tokens = np.zeros((len(pairs), max(len(prompt) + len(answer) for prompt, answer in pairs)), np.int32)
    real, answers = np.zeros_like(tokens, bool), np.zeros_like(tokens, bool)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        tokens[row, :end], real[row, :end], answers[row, len(prompt) : end] = prompt + answer, True, True
    return jnp.asarray(tokens), jnp.asarray(real), jnp.asarray(answers)


exam = [text for name in MEASURED for text in SKILLS[name].exam(COUNT)]
rows, real, answers = padded(exam)
for text in exam[::COUNT]:
    print(f"…{text.prompt[-230:]!r} -> {text.answer!r}\n")

# %% [markdown]
# The measures are the mean of $-\ln p$ over the tokens of the answers, and the share of answers that are *right*: all
# of their tokens are the likeliest ones, which is what greedy decoding would write. The layers run one by one, so that
# after a cut only the kind of layer that it changed has to be compiled again.


# %%
span, one_layer = Span.whole(*rows.shape), eqx.filter_jit(lambda layer, x: layer(x, None, span)[0])


def scored(model):
    x = model.model.word_embeddings.embed(rows)
    for layer in model.model.layers:
        x = one_layer(layer, x)
    logits, target, asked = model.logits(model.model.norm(x)), rows[:, 1:], answers[:, 1:]
    scores = jax.nn.log_softmax(logits[:, :-1], axis=-1)
    nats = -jnp.take_along_axis(scores, target[..., None], axis=-1)[..., 0]
    right = jnp.all((jnp.argmax(scores, axis=-1) == target) | ~asked, axis=1)
    return jnp.sum(nats * asked, axis=1), jnp.sum(asked, axis=1), right


def measure(model):
    """For each skill, nats per token of the answers, and the share that is right."""
    nats, count, right = (np.asarray(x).reshape(len(MEASURED), COUNT) for x in scored(model))
    return dict(zip(MEASURED, zip(nats.sum(axis=1) / count.sum(axis=1), right.mean(axis=1)), strict=True))


def words(result):
    return "   ".join(f"{skill}: {nats:.4f} nats, {right:4.0%} right" for skill, (nats, right) in result.items())


whole = measure(model)
print("whole model  ", words(whole))
assert all(nats < 0.05 and right > 0.95 for nats, right in whole.values())

# %% [markdown]
# ## Three kinds of gates
#
# "The gate" is ambiguous in this architecture. There are three:
#
# | gate | formula | says |
# |---|---|---|
# | decay (forget gate) | $g = \mathrm{bound}\cdot\sigma(e^{A}(f(x)+dt))$, per key channel | how fast memory fades |
# | beta (write gate) | $\beta = \sigma(b(x))$, per head | how strongly a token is written |
# | output gate | $\sigma(g_{proj}(x))$: KDA per element, MLA per head | what is let out |
#
# What did nano make of them? `ling3.trace` returns them all; here over 32 texts of training. A decay of $g$ nats a
# token halves the memory of its channel every $\ln 2/|g|$ tokens.

# %%
texts = [SKILLS[name].texts(2028, "train") for name in MEASURED]
tokens, valid, _ = padded([next(stream) for stream in texts for _ in range(16)])
seen, there = ling3.trace(model, tokens, logit_lens=False), np.asarray(valid)  # without the padding
figure, (decays, betas, gates) = plt.subplots(1, 3, figsize=(10.5, 3.3))
bins = {"bins": 40, "range": (0, 1), "histtype": "step", "density": True}
for (layer, kda), style in zip(seen.kda.items(), ("-", "--", "-."), strict=True):
    half_lives = np.sort(np.log(2) / np.maximum(-np.asarray(kda.decay)[there].ravel(), 1e-9))[::50]
    decays.semilogx(half_lives, np.linspace(0, 1, len(half_lives)), style, marker="", label=f"layer {layer}")
    betas.hist(np.asarray(kda.beta)[there].ravel(), **bins, ls=style, label=f"layer {layer}")
    gates.hist(np.asarray(kda.gate)[there].ravel(), **bins, ls=style, color=plots.KDA, label=f"KDA, layer {layer}")
for layer, mla in seen.mla.items():
    gates.hist(np.asarray(mla.gate)[there].ravel(), **bins, color=plots.MLA, label=f"MLA, layer {layer}")
decays.axvline(np.log(2) / 5, color="black", ls=":", label="the bound, -5 nats")
decays.set(xlim=(0.1, 1e4), xlabel="half-life of a channel, tokens", ylabel="share of (token, channel)")
betas.set(xlabel="writing strength", ylabel="density")
gates.set(xlabel="gate", ylabel="density", yscale="log")
for ax, title in ((decays, "Decay"), (betas, "Beta"), (gates, "Output gates")):
    ax.set_title(title, fontsize=10)
    ax.legend(fontsize=7)
figure.suptitle("Three kinds of gates in nano, over 32 texts", fontsize=11)
plt.show()

half_life = {}
for layer, kda in seen.kda.items():
    g, beta = np.asarray(kda.decay)[there], np.asarray(kda.beta)[there]
    half_life[layer] = np.log(2) / -np.median(g, axis=(0, 2))
    heads, near = ", ".join(f"{tokens:.2g}" for tokens in half_life[layer]), np.mean(g < -4.5)
    print(f"layer {layer}: median half-lives of the heads {heads} tokens, {near:.1%}", "of g within 10 % of the bound,")
    print(f"         mean beta {beta.mean():.2f},", f"mean output gate {np.asarray(kda.gate)[there].mean():.2f}")
for layer, mla in seen.mla.items():
    print(f"layer {layer}: MLA's heads let out", f"{np.round(np.asarray(mla.gate)[there].mean(axis=0), 2)} on average")
assert all(heads.min() < np.log(2) / 2.5 and heads.max() > 5 * heads.min() for heads in half_life.values())

# %% [markdown]
# In each KDA layer two heads forget nearly everything with the next token: they look at the last few tokens, as a
# convolution does. The other two remember for longer: for about two tokens in layer 0, about seven in layer 1, and one
# head of layer 2 for more than a hundred. The first kind uses more than half of what the bound allows, so the bound may
# matter to it; one head of layer 2 has 7 in 10 of its decays within 10 % of it.

# %% [markdown]
# ## The output gate, on and off
#
# KDA: $y = o_{proj}(\mathrm{RMSNorm}(o)\odot\sigma(g_{proj}(x)))$, a number for each of 128 channels. MLA: $y =
# \mathrm{dense}(\sigma(g_{proj}(x))\cdot o)$, one per head. Off means a factor of 1. That also changes the *size* of
# the output, so there is a fairer cut: hold each gate at its mean over many tokens, and only its dependence on the
# token is gone.

# %%
held = ablate.mean_output_gate(model, tokens, valid=valid).model.layers  # the means of one pass of the whole model
gate_results = {}
for layer, module in ablate.having(model, "output gate").items():
    off = ablate.no_output_gate(model, layers=[layer])
    mean = eqx.tree_at(lambda m, i=layer: m.model.layers[i], model, held[layer])
    gate_results[f"{type(module).__name__}, layer {layer}"] = measure(off), measure(mean)
for name, (off, mean) in gate_results.items():
    print(f"{name}, off      {words(off)}\n{name}, at mean  {words(mean)}")

figure, panels = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True)
place = np.arange(len(gate_results))
for ax, skill in zip(panels, MEASURED, strict=True):
    for shift, part, colour, hatch, label in (
        (-0.2, 0, plots.SKY, "", "off"),
        (0.2, 1, plots.ORANGE, "///", "at its mean"),
    ):
        values = [100 * pair[part][skill][1] for pair in gate_results.values()]
        ax.barh(place + shift, values, 0.38, color=colour, hatch=hatch, label=label)
    ax.axvline(100 * whole[skill][1], color="black", ls=":", label="whole model")
    ax.set(xlabel=f"{skill}: right answers, %", xlim=(0, 102))
panels[0].set_yticks(place, list(gate_results))
panels[0].invert_yaxis()
figure.suptitle("What nano gets right with one output gate off, or at its mean", fontsize=11)
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
plt.show()

# %% [markdown]
# The two bars ask two questions. *Off* asks whether the layers above can do with an output of another size and another
# weighting of channels; *at its mean* asks whether the gate has to know the token. A layer whose gate can be held at
# its mean has made a constant of it. `resets` needs no gate to know the token: with any of them at its mean all 32
# texts are right. Nor does it need their size, but for layer 0's. The `problems` need the size of all four gates, and
# the token in those of layers 0 and 2.
#
# MLA's gate looks idle in both panels: at its mean it costs one text of 64. But two panels are not all skills. The
# table below has eight more, and there the same cut leaves 12 of 100 answers to `positions`. What one skill does
# without may be vital to another one.

# %%
for skill in MEASURED:
    assert gate_results["MLA, layer 3"][1][skill][1] > whole[skill][1] - 0.1
assert all(mean["resets"][1] > 0.9 for _, mean in gate_results.values())
assert all(gate_results[f"KDA, layer {layer}"][1]["problems"][1] < 0.7 for layer in (0, 2))

# %% [markdown]
# ## The bound is not a clamp
#
# $g = \mathrm{lower\_bound}\cdot\sigma(z)$ with $z = e^{A}(f(x) + dt)$: the bound multiplies *every* decay. Changing -5
# into -1 makes the slowest channel forget five times more slowly, far from any bound. To see what the bound itself
# does, undo that: for small decays $g \approx \mathrm{lower\_bound}\cdot e^{z}$, so shifting $dt$ by
# $\ln(5/|\mathrm{lower\_bound}|)/e^{A}$ keeps them as they were, and only what comes near the bound changes. The
# softplus law $g = -e^{A}\,\mathrm{softplus}(f + dt)$ has no bound at all.

# %%
BOUNDS = (-20.0, -10.0, -5.0, -1.0, -0.1)


def kda_layers(model):
    """The KDA modules."""
    return [layer.attention for layer in model.model.layers if hasattr(layer.attention, "dt_bias")]


def rates_kept(model, bound):
    """The bound changed, and dt_bias shifted so that small decays stay as they were."""
    ratio = model.config.kda_lower_bound / bound
    shifted = [
        kda.dt_bias + jnp.log(ratio) / jnp.repeat(jnp.exp(kda.A_log), kda.dt_bias.size // kda.heads)
        for kda in kda_layers(model)
    ]
    shifted_model = eqx.tree_at(lambda m: [kda.dt_bias for kda in kda_layers(m)], model, shifted)
    return ablate.lower_bound(shifted_model, bound)


plain = [measure(ablate.lower_bound(model, bound)) for bound in BOUNDS]
kept = [measure(rates_kept(model, bound)) for bound in BOUNDS]
softplus, no_decay = measure(ablate.lower_bound(model, None)), measure(ablate.no_decay(model))
for bound, a, b in zip(BOUNDS, plain, kept, strict=True):
    print(f"bound {bound:>5g}        {words(a)}\n  rates kept       {words(b)}")
print(f"softplus law       {words(softplus)}\nno decay           {words(no_decay)}")

figure, panels = plt.subplots(1, 2, figsize=(9.5, 3.3), sharey=True)
size = [-bound for bound in BOUNDS]
for ax, skill in zip(panels, MEASURED, strict=True):
    ax.plot(size, [100 * r[skill][1] for r in plain], label="bound changed")
    ax.plot(size, [100 * r[skill][1] for r in kept], label="bound changed, small decays kept")
    ax.axhline(100 * softplus[skill][1], color=plots.GREEN, ls="-.", marker="", label="softplus law")
    ax.axhline(100 * no_decay[skill][1], color="black", ls=":", marker="", label="no decay")
    ax.set(xscale="log", xlabel="-lower_bound, nats a token")
    ax.set_title(skill, fontsize=10)
panels[0].set_ylabel("right answers, %")
figure.suptitle("What nano gets right with another bound or law of its decay", fontsize=11)
figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
plt.show()

at = {bound: pair for bound, *pair in zip(BOUNDS, plain, kept, strict=True)}
worst = {bound: [max(whole[s][1] - result[s][1] for s in MEASURED) for result in pair] for bound, pair in at.items()}
assert worst[-20.0][0] > 0.2  # the bound alone: every decay is wrong
assert worst[-20.0][1] < 0.1 and worst[-10.0][1] < 0.1  # the small decays kept, and room for larger ones: no harm
assert worst[-1.0][1] > 0.3 and worst[-0.1][1] > 0.3  # but a memory that cannot forget fast enough fails
assert max(whole[s][1] - no_decay[s][1] for s in MEASURED) > 0.3

hit = np.asarray(scored(ablate.no_decay(model))[2])[COUNT:]
none = np.array([text.answer == " none" for text in exam[COUNT:]])
print(f"resets without decay: right are {hit[none].sum()} of {none.sum()}", "answers 'none'", end=", ")
print(f"{hit[~none].sum()} of {(~none).sum()} values")
assert hit[none].mean() > 0.8 and hit[~none].mean() < 0.2

# %% [markdown]
# So "we changed the bound and accuracy fell" says little about the bound. With the small decays kept, nano does as well
# at -20 and at -10 as at -5. Even the head that lives at the bound gains and loses nothing: five nats leave 0.7 % of a
# memory, and less makes no difference. In the other direction the bound is a limit that can be felt. At -1 the heads
# that look at the last few tokens look at more of them, and nano solves next to no problem; at -0.1 no channel can fade
# by a factor e within ten tokens.
#
# And look at *what* is lost before you tell a story. One would think that a memory that cannot forget gives stale
# values after *new*. It is the other way round: without decay nano says *none* to nearly everything, so every *none* is
# right and no value is. It seems that the layers above get something they have never seen, and give the commonest
# answer.
#
# What the bound of -5 is for is arithmetic: 16 tokens of it are 80 nats, and $e^{80}$ still fits into float32 (notebook
# 2).
#
# ## Mechanisms against skills: the whole table
#
# `ling3 ablate nano --skills problems,chat,… --json table.json` measures every cut on every skill: here 100 held-out
# texts of each short skill, and 60 of the two long ones. It takes many minutes; this is a stored result. A cell is the
# share of right answers that is lost, in points of a hundred; beside a skill's name stands what the whole model has.

# %%
right = {}
for name in ("nano_relied_on", "nano_relied_on_long"):
    for row in json.loads(pathlib.Path(f"../experiments/results/{name}.json").read_text(encoding="utf-8"))["rows"]:
        right.setdefault(row["name"], {}).update({skill: s["accuracy"] for skill, s in row["scores"].items()})
cuts, skills = [name for name in right if name != "whole"], [name for name in SKILLS if name in right["whole"]]
lost = {cut: {skill: right["whole"][skill] - right[cut][skill] for skill in skills} for cut in cuts}

columns = [f"{skill} ({100 * right['whole'][skill]:.0f} %)" for skill in skills]
figure, ax = plt.subplots(figsize=(8.6, 7.6))
image = draw_losses(ax, cuts, columns, np.array([[lost[cut][skill] for skill in skills] for cut in cuts]))
ax.grid(False)
ax.set_title("What nano loses when a mechanism is cut (beside a skill: what it has)", fontsize=11)
figure.colorbar(image, label="right answers lost, of 100")
plt.show()

# %% [markdown]
# Read it by columns: what does a skill rely on? And by rows: what is a mechanism used for? The strongest evidence is a
# **double dissociation**: one cut breaks a skill and leaves another, and a second cut does it the other way round. Then
# neither is just the harder skill or the deeper wound. Here RoPE and the routed experts are such a pair. `positions`
# asks for the word so many places back: nothing is left of it without rotation, while the experts can go. `facts`, a
# world of people learned by heart, stands in the weights of the experts, and needs no rotation. Decay and RoPE are no
# such pair: `resets` needs decay alone, but `positions` needs both.

# %%
rope, experts, decay = (lost[cut] for cut in ("MLA: no RoPE", "experts: none but the shared", "KDA: no decay"))
for skill in ("positions", "facts", "resets"):
    points = [
        f"{100 * row[skill]:3.0f} without {name}"
        for row, name in ((rope, "RoPE"), (experts, "experts"), (decay, "decay"))
    ]
    print(f"{skill:>9} loses {', '.join(points)}")
assert rope["positions"] > 0.9 and rope["facts"] < 0.1
assert experts["facts"] > 0.5 and experts["positions"] < 0.1
assert decay["resets"] > 0.3 and rope["resets"] < 0.1 and decay["positions"] > 0.5
assert right["MLA: gate at its mean"]["positions"] < 0.3  # the gate that looked idle above

# %% [markdown]
# A table with many numbers invites stories. Two kinds of rows bear none: those that cost no skill a tenth of its
# answers, and those that leave no skill half of what it had. (Of 100 texts, a few points more or less are chance.)

# %%
idle = [cut for cut in cuts if max(lost[cut].values()) < 0.1]
fatal = [cut for cut in cuts if all(right[cut][s] <= right["whole"][s] / 2 for s in skills)]
print("no skill loses a tenth:", "; ".join(idle), "\nno skill keeps a half:", "; ".join(fatal))
assert {"experts: no routing bias", "experts: top 1", "KDA: lower_bound -10"} <= set(idle)
assert "KDA: no short convolution" in fatal

# %% [markdown]
# - **No loss** is not no use. The routing bias is there to feed all experts *while they are trained* (notebook 4); once
#   they are, the scores alone choose well enough; `facts` alone may miss it, by 5 points. Cutting comes too late to see
#   what it did.
# - **Total loss** is not need in every skill. All that KDA writes and reads has passed the short convolutions, and the
#   layers above have never seen anything like what comes out without them. So all falls at once, and the row cannot
#   tell the skills that use them from the others.
# - **A column can lose no more than it has.** What the whole model gets right stands beside each skill's name. Of
#   `long_recall` that is 13 %, 8 of 60 texts, so its column says nothing about any mechanism.
# - **One at a time.** Two parts that can stand in for each other both look idle when each is cut alone.
#
# And the table is one of *this* model. Nano's first edition had the same mechanisms, but had learned the word problems
# alone, and its first layer did nearly everything: without the attention of any one of the other three it still solved
# at least 93 % of them, and without its routed experts 98 %. What a model relies on is as much a matter of what it was
# asked to learn.
#
# ## Relied on is not needed
#
# Beside it the published table: Kimi Linear (arXiv 2510.26692), Table 1, models with 653 M active parameters, each
# **trained** without the part, perplexity on training / validation text. To the right what nano, **cut**, still gets
# right of the word problems.

# %%
published = {
    "3:1 hybrid": ("9.23 / 5.65", "whole"),
    "no output gate": ("9.25 / 5.67", "KDA: no output gate"),
    "no short convolution": ("9.29 / 5.70", "KDA: no short convolution"),
    "all MLA": ("9.45 / 5.77", "layer 0: no KDA"),
}
titles = ("trained from scratch, Kimi Linear", "perplexity", "cut from nano", "problems right")
lines = ["| " + " | ".join(titles) + " |", "|---" * 4 + "|"]
lines += [f"| {name} | {cost} | {cut} | {right[cut]['problems']:.2f} |" for name, (cost, cut) in published.items()]
assert right["whole"]["problems"] > 0.95
assert all(right[cut]["problems"] < 0.6 for _, cut in published.values() if cut != "whole")
Markdown("\n".join(lines))

# %% [markdown]
# The two sides of the table do not contradict each other. A model that is trained without its output gate loses 0.02 of
# perplexity; a model that was trained with it and loses it fails. Cutting measures **reliance**,
# training measures **need**. If you want to decide what to build, train; if you want to know how a model works, cut.

# %% [markdown]
# ## An ablated model is a model
#
# Its config says what is different, so it can be saved, loaded, served, and above all trained from scratch.

# %%
cut = ablate.no_output_gate(model, "kda", layers=[0])
print(cut.config.layer_overrides, cut.config.to_dict()["architectures"])
fresh = jax.eval_shape(lambda key: ling3.init(cut.config, key=key), jax.random.key(0))  # its shapes alone
assert jax.tree.structure(fresh) == jax.tree.structure(cut)
assert cut.model.layers[1].attention.g_proj.weight is model.model.layers[1].attention.g_proj.weight  # nothing is copied

# %% [markdown]
# ## Exercises
#
# **1.** Of nano's gates, beta has been cut in the table alone. Its mean in each layer is printed under *Three kinds of
# gates*. Hold it at ¼, ½, ¾ and 1 for all tokens, in one layer at a time. Predict which of the two skills loses more:
# does the model rely on the *level* of beta, or on its dependence on the token?
#
# ```python
# for layer in (0, 1, 2):
#     for beta in (0.25, 0.5, 0.75, 1.0):
#         print(layer, beta, words(measure(ablate.fixed_beta(model, beta, [layer]))))
# ```
#
# <details><summary>Solution</summary>
#
# Layers 0 and 1 hardly care: at most one text of the 64 is lost, with ¼ in layer 0. In layer 2 the level matters, and
# to `resets` most: at ¼, near the mean of 0.30, 31 of 32 texts are right, at ½ and above 20. And it is the other way
# round than without decay: at 1 all 12 answers *none* are wrong, and all 20 values right. `problems` fall more slowly,
# 29, 29, 26 and 24 of 32. The three texts that they lose near the mean are what depends on the token, or on the head:
# the means of the heads of layer 2 are 0.14, 0.23, 0.28 and 0.53, and one level fits none of them well.
#
# </details>
#
# **2.** In which layer do the `facts` stand? Predict, then silence the routed experts of one layer at a time. Why do
# the losses of the four layers not add up to that of all layers in the table?
#
# ```python
# from ling3.train.nano.skills.exam import right_answers
#
# texts = SKILLS["facts"].exam(200)
# for layer in ablate.having(model, "experts per token"):
#     cut = ablate.no_routed_experts(model, [layer])
#     print(layer, np.mean(right_answers(cut, tokenizer, texts)))
# ```
#
# <details><summary>Solution</summary>
#
# In layers 0 and 2: of 200 texts 99.5 % are right, and without the experts of layer 0, 1, 2 or 3 77.5, 99.5, 87.5 and
# 95.5 %. Those losses add up to 38 points, but all four layers together cost 70: an answer is right as long as its
# token is the likeliest, so a part of its evidence may go without a loss, and two parts may not. Layers 0 and 2
# together leave 51 %, where their two losses would add up to leave 65. The nats per token, which have no threshold,
# tell more: 0.83, 0.03, 0.48 and 0.16 for the single layers, 1.83 for 0 and 2, 2.90 for all (0.03 for the whole model).
#
# </details>
#
# **3.** Bound, law and initialisation are three ablations. Which of them did *The bound is not a clamp* change for the
# softplus law?
#
# <details><summary>Solution</summary>
#
# Two at once: the law, and with it the rates (the same $f$, $dt$ and $A$ mean other decays under another law). A
# trained model cannot tell them apart; train it from scratch with `kda_lower_bound=None`, and each law has rates of its
# own.
#
# </details>
