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
# model to a model, which still runs, traces, serves and saves. Here we cut nano's output gates, bend its decay, and
# remove its convolutions, and compare the results with the table of the Kimi Linear report, where models were *trained*
# without the part in question.
#
# The two experiments ask different questions, and it is easy to confuse them. **Cutting** asks what a trained model has
# come to rely on. **Training without** asks whether the mechanism was needed. A part can be vital to a model that has
# it, and useless to one that never had it. Notebook 6 trains from scratch.
#
# **You need**: the mechanisms that are cut: KDA's gates and convolutions (notebook 2), MLA and its gate (notebook 3),
# experts (notebook 4).
#
# **Afterwards you can** cut a mechanism out of a model, choose a cut that changes one thing only, and say what the
# result tells about the model, and what it does not tell about the mechanism.

# %%
import itertools
import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import plots
from IPython.display import Image

import ling3
from ling3.interpret import ablate
from ling3.interpret.ablations import solution_rows
from ling3.train.nano.problems import problems

plots.use()
model = ling3.load("nano", dtype=jnp.float32)
tokenizer = ling3.load_tokenizer("nano")

# %% [markdown]
# ## The measure
#
# 128 held-out word problems with their worked solutions. We take the mean of $-\ln p$ over the solutions' tokens, and
# the share of problems *solved*: all of whose tokens are the likeliest ones, which is what greedy decoding would write.

# %%
rows, valid, learned = solution_rows(tokenizer, itertools.islice(problems(2026, "held_out"), 128))
target, mask = rows[:, 1:], learned[:, 1:]


def measure(model):
    """Nats per solution token, and the share of problems solved."""
    scores = jax.nn.log_softmax(model(rows)[:, :-1], axis=-1)
    nats = -jnp.take_along_axis(scores, target[..., None], axis=-1)[..., 0]
    right = (jnp.argmax(scores, axis=-1) == target) | ~mask
    return float(jnp.sum(nats * mask) / jnp.sum(mask)), float(jnp.mean(jnp.all(right, axis=1)))


whole = measure(model)
print(f"whole model: {whole[0]:.4f} nats per token, {whole[1]:.1%} solved")
assert whole[0] < 0.02 and whole[1] > 0.97

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
# What did nano make of them? `ling3.trace` returns them all. A decay of $g$ nats a token halves the memory of its
# channel every $\ln 2/|g|$ tokens.

# %%
seen = ling3.trace(model, rows, logit_lens=False)
real = np.asarray(valid)  # without the padding
figure, (decays, betas, gates) = plt.subplots(1, 3, figsize=(10.5, 3.1))
bins = {"bins": 40, "range": (0, 1), "histtype": "step", "density": True}
for (layer, kda), style in zip(seen.kda.items(), ("-", "--"), strict=True):
    half_lives = np.sort(np.log(2) / np.maximum(-np.asarray(kda.decay)[real].ravel(), 1e-9))[::50]
    decays.semilogx(half_lives, np.linspace(0, 1, len(half_lives)), style, marker="", label=f"layer {layer}")
    betas.hist(np.asarray(kda.beta)[real].ravel(), **bins, ls=style, label=f"layer {layer}")
    gates.hist(np.asarray(kda.gate)[real].ravel(), **bins, ls=style, color=plots.KDA, label=f"KDA, layer {layer}")
for (layer, mla), style in zip(seen.mla.items(), ("-", "--"), strict=True):
    gates.hist(np.asarray(mla.gate)[real].ravel(), **bins, ls=style, color=plots.MLA, label=f"MLA, layer {layer}")
decays.axvline(np.log(2) / 5, color="black", ls=":", label="the bound, -5")
decays.set(xlim=(0.1, 1e4), xlabel="half-life of a channel, tokens", ylabel="share of (token, channel)", title="decay")
betas.set(xlabel="writing strength", ylabel="density", title="beta")
gates.set(xlabel="gate", title="output gates", yscale="log")
for ax in (decays, betas, gates):
    ax.legend(fontsize=7)
plt.show()

g = np.asarray(seen.kda[0].decay)[real]
print(f"layer 0: median decay {np.median(g):.3f} nats a token, {np.mean(g < -4.5):.2%} within 10 % of the bound")
assert np.mean(g < -4.5) < 0.01  # hardly anything comes near the bound: it cannot act as a clamp

# %% [markdown]
# ## The output gate, on and off
#
# KDA: $y = o_{proj}(\mathrm{RMSNorm}(o)\odot\sigma(g_{proj}(x)))$, a number for each of 128 channels. MLA: $y =
# \mathrm{dense}(\sigma(g_{proj}(x))\cdot o)$, one per head. Off means a factor of 1. That also changes the *size* of
# the output, so there is a fairer cut: hold each gate at its mean over many tokens, and only its dependence on the
# token is gone.

# %%
calibration = solution_rows(tokenizer, itertools.islice(problems(2028, "train"), 64))
where = {
    "KDA, both layers": {"kind": "kda"},
    "KDA, layer 0": {"layers": [0]},
    "KDA, layer 2": {"layers": [2]},
    "MLA, both layers": {"kind": "mla"},
}
tokens, real = calibration.tokens, calibration.valid
gate_results = {
    name: (
        measure(ablate.no_output_gate(model, **part)),
        measure(ablate.mean_output_gate(model, tokens, valid=real, **part)),
    )
    for name, part in where.items()
}
for name, (off, mean) in gate_results.items():
    print(f"{name:<17} off: {off[0]:.3f} nats, {off[1]:4.0%} solved    mean: {mean[0]:.3f} nats, {mean[1]:4.0%} solved")

figure, ax = plt.subplots(figsize=(7, 2.6))
place = np.arange(len(where))
for shift, part, colour, hatch, label in (
    (0.2, 0, plots.SKY, "", "off"),
    (-0.2, 1, plots.ORANGE, "///", "at its mean"),
):
    values = [pair[part][1] for pair in gate_results.values()]
    ax.barh(place + shift, values, 0.38, color=colour, hatch=hatch, label=label)
ax.axvline(whole[1], color="black", ls=":", label="whole model")
ax.set_yticks(place, list(where))
ax.set(xlabel="problems solved", xlim=(0, 1), title="output gates")
ax.invert_yaxis()
ax.legend(fontsize=8, loc="upper center")
plt.show()

off, mean = gate_results["KDA, layer 0"]
assert off[1] < 0.1 and off[1] + 0.1 < mean[1] < 0.5
assert gate_results["KDA, layer 2"][0][1] > 0.95 and gate_results["MLA, both layers"][0][1] > 0.95

# %% [markdown]
# In layer 0 the gate is vital: without it hardly any problem is solved. With the gate held at its mean a quarter is
# solved: part of what the gate does is a fixed weighting of channels, but most of it *depends on the token*. In layer 2
# and in both MLA layers the model does as well without it. That says less about gates than about nano: as notebook 1
# showed, its first layer does nearly all of the work, and the others have little to lose.

# %% [markdown]
# ## The bound is not a clamp
#
# $g = \mathrm{lower\_bound}\cdot\sigma(z)$ with $z = e^{A}(f(x) + dt)$: the bound multiplies *every* decay. Changing -5
# into -1 makes the slowest channel forget five times more slowly, far from any bound. To see what the bound itself
# does, undo that: for small decays $g \approx \mathrm{lower\_bound}\cdot e^{z}$, so shifting $dt$ by
# $\ln(5/|\mathrm{lower\_bound}|)/e^{A}$ keeps them as they were, and only what comes near the bound changes. The
# softplus law $g = -e^{A}\,\mathrm{softplus}(f + dt)$ has no bound at all.

# %%
BOUNDS = (-20.0, -10.0, -5.0, -2.5, -1.0, -0.1)


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
    print(f"bound {bound:>5g}: {a[0]:.4f} nats, {a[1]:4.0%} solved    rates kept: {b[0]:.4f} nats, {b[1]:4.0%} solved")
for name, result in {"softplus law": softplus, "no decay": no_decay}.items():
    print(f"{name}: {result[0]:.4f} nats, {result[1]:4.0%} solved")

figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.3))
size = [-bound for bound in BOUNDS]
for ax, part, label in ((left, 0, "nats per solution token"), (right, 1, "problems solved")):
    ax.plot(size, [r[part] for r in plain], label="bound changed")
    ax.plot(size, [r[part] for r in kept], label="bound changed, small decays kept")
    ax.axhline(softplus[part], color=plots.GREEN, ls="-.", marker="", label="softplus law")
    ax.axhline(no_decay[part], color="black", ls=":", marker="", label="no decay")
    ax.set(xscale="log", xlabel="-lower_bound, nats a token", ylabel=label)
left.set_yscale("log")
figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
plt.show()

at = dict(zip(BOUNDS, zip(plain, kept, strict=True), strict=True))
assert at[-10.0][0][1] < 0.8 and at[-1.0][0][1] < 0.5  # the bound alone: every rate is wrong
assert at[-20.0][1][1] > 0.95 and at[-10.0][1][1] > 0.95 and at[-1.0][1][1] > 0.9  # small decays kept: no harm
assert at[-0.1][1][1] < 0.7 and no_decay[1] < 0.4  # but a memory that cannot forget fast enough fails

# %% [markdown]
# So "we changed the bound and accuracy fell" says little about the bound. With the small decays kept, nano does as well
# at -20 as at -5, and nearly as well at -1; only at -0.1, where no channel can fade by a factor e within ten tokens,
# does it fail. What
# the bound of -5 is for is arithmetic: 16 tokens of it are 80 nats, and $e^{80}$ still fits into float32 (notebook 2).
#
# ## Convolutions, beta, depth, experts: the whole table
#
# `ling3 ablate nano` measures such cuts with the engine, here 22 of them: 200 held-out problems asked alone, and 50 of
# them again at the end of a context of about 1,200 tokens, filled with other worked problems. It takes some minutes;
# this is a stored result.

# %%
stored = json.loads(pathlib.Path("../docs/ablations.json").read_text())
table = {row["name"]: row for row in stored["rows"]}
print(f"{'':<28}{'perplexity':>11}{'alone':>8}{'in ' + format(stored['recall_context_tokens'], ',') + ' tokens':>20}")
for name, row in table.items():
    alone, late = row["problems"]["accuracy"], row["recall"]["accuracy"]
    print(f"{name:<28}{row['perplexity']:>11.4g}{alone:>8.3f}{late:>20.3f}")

print("\nthe convolutions once more, here and now:", measure(ablate.no_short_conv(model)))
assert table["whole"]["problems"]["accuracy"] >= 0.98
assert table["KDA: no short convolution"]["problems"]["accuracy"] < 0.05
assert table["layer 0: no KDA"]["problems"]["accuracy"] < 0.05
assert table["layer 1: no MLA"]["problems"]["accuracy"] > 0.9
assert table["KDA: no decay"]["problems"]["accuracy"] > 0.2  # of one, two or three steps, some are still right ...
assert table["KDA: no decay"]["recall"]["accuracy"] < 0.1  # ... but not in a long context

# %%
Image("../docs/ablations.png", width=760)

# %% [markdown]
# One line deserves a second look: *no decay*. Asked alone, the plain delta rule still answers a quarter of the
# problems; after 1,242 tokens of other problems, one in fifty. Forgetting is what a long context needs.
#
# Beside the table the published one: Kimi Linear (arXiv 2510.26692), Table 1, models with 653 M active parameters, each
# **trained** without the part, perplexity on training / validation text:
#
# | trained from scratch, Kimi Linear | perplexity | cut from trained nano | problems solved |
# |---|---|---|---|
# | 3:1 hybrid | 9.23 / 5.65 | whole (1:1 hybrid) | 1.00 |
# | no output gate | 9.25 / 5.67 | KDA: no output gate | 0.04 |
# | swish output gate | 9.43 / 5.81 | | |
# | no short convolution | 9.29 / 5.70 | KDA: no short convolution | 0.00 |
# | all MLA | 9.45 / 5.77 | layer 0: no KDA | 0.03 |
#
# The two sides of the table do not contradict each other. A model that is trained without its output gate loses 0.02 of
# perplexity; a model that was trained with it and loses it fails. Cutting measures **reliance**,
# training measures **need**. If you want to decide what to build, train; if you want to know how a model works, cut.
#
# What could *not* be shown at this size, and is left out of the claims: that MLA layers matter (nano hardly uses them),
# the value of the routing bias and of the shared expert, RoPE (nano reads order from KDA), and any effect of the bound
# itself.

# %%
assert table["MLA: no output gate"]["problems"]["accuracy"] >= 0.98
assert table["experts: no shared one"]["problems"]["accuracy"] >= 0.98
assert table["experts: no routing bias"]["problems"]["accuracy"] >= 0.98

# %% [markdown]
# ## An ablated model is a model
#
# Its config says what is different, so it can be saved, loaded, served, and above all trained from scratch.

# %%
cut = ablate.no_output_gate(model, "kda", layers=[0])
print(cut.config.layer_overrides, cut.config.to_dict()["architectures"])
fresh = ling3.init(cut.config, key=jax.random.key(0))
assert jax.tree.structure(fresh) == jax.tree.structure(cut)
assert cut.model.layers[2].attention.g_proj.weight is model.model.layers[2].attention.g_proj.weight  # nothing is copied

# %% [markdown]
# ## Exercises
#
# **1.** Of nano's gates, beta has not been cut yet. Its mean in layer 0 is 0.59. Hold it at ¼, ½, ¾ and 1 for all
# tokens, in layer 0 and in layer 2. Predict the share of problems solved: does the model rely on the *level* of beta,
# or on its dependence on the token?
#
# ```python
# for beta in (0.25, 0.5, 0.75, 1.0):
#     print(beta, *(f"{measure(ablate.fixed_beta(model, beta, [layer]))[1]:.0%}" for layer in (0, 2)))
# ```
#
# <details><summary>Solution</summary>
#
# Layer 0: 46, 77, 80 and 72 %, where the whole model solves 98. From ½ to 1 the level matters little, and what depends
# on the token is worth a fifth of the problems; at ¼ a write replaces too little of what its key held. That is far from
# the 2 % that are left without the output gate. Layer 2: 98 % each time, as without its output gate.
#
# </details>
#
# **2.** Which expert does nano miss most? Drop each of the eight in each of the three layers, and look at the loss. Why
# do the numbers come in equal pairs?
#
# ```python
# for layer in (1, 2, 3):
#     losses = [1000 * measure(ablate.drop_experts(model, [e], [layer]))[0] for e in range(8)]
#     print(layer, np.round(losses, 2), "thousandths of a nat")
# ```
#
# <details><summary>Solution</summary>
#
# Expert 2 or 3 of layer 2 (11.4 thousandths, against 3.3 of the whole model), then 0 or 1 of layer 1 (7.1); no other
# makes a difference worth the name, and without 6 or 7 of layer 3 the loss is even a little lower. They come in pairs
# since nano's groups have two experts, and a group is scored by the sum of its two best: without one of them the group
# is never chosen, and the other is gone too. So this cut is twice as large as it looks.
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
