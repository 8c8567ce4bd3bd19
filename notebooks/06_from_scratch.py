# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 6. Trained from scratch in minutes
#
# Ablating a trained model shows what it relies on. To see what a mechanism is *for*, models have to learn without it.
# Here are four tasks, each of which tests one mechanism, and Ling-3s of 76,000 to 160,000 parameters trained on them:
# 134 runs in an hour of one shared core.
#
# **You need**: KDA, its decay and its $\beta$ (notebook 2), MLA (notebook 3), and the difference between cutting a part
# and training without it (notebook 5).
#
# **Afterwards you can** name a task that a mechanism makes possible, read a picture of runs with its sweep and its
# seeds, and say which of your conclusions such a picture bears.
#
# **It takes** a minute and a half on two cores, and 0.9 GB of memory.
#
# Small experiments mislead easily, so there are rules, kept by `experiments/` (see its README):
#
# 1. Predictions are written, and committed, before the first run. They are quoted below; wrong ones are called wrong.
# 2. Variants have the same number of parameters within 1 %, and the same stream of batches.
# 3. The learning rate is swept for each variant, with a seed of its own (0).
# 4. The best rate is run with fresh seeds (1, 2, 3), and each of these runs is a point in the picture.
# 5. Errors are drawn on a logarithmic axis: 99.0 % and 99.99 % right are a hundred times apart.

# %%
import dataclasses
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown

from ling3.runtime.plots import BLACK, BLUE, GREEN, ORANGE, PINK, RED, SKY, use

sys.path.insert(0, "..")  # the experiments are no part of the package
from experiments import sweep
from experiments.design import EXPERIMENTS
from experiments.reported import Reported
from experiments.tasks import segment_reset as segment_reset_of
from ling3.ops.kda import recurrent_kda

use()
RESULTS = pathlib.Path("../experiments/results")
PREDICTIONS = pathlib.Path("../experiments/predictions.md").read_text(encoding="utf-8")
LOOKS = list(zip((BLUE, RED, GREEN, ORANGE, PINK, BLACK), "os^DvX", ("-", "--", "-.", ":", "-", "--"), strict=True))


# %% [markdown]
# ## Reading the results
#
# Each finished run is a line of JSON. `swept` are the runs of the sweep, `reported` those with fresh seeds. The error
# is the share of wrong answers on held-out rows: 256 of them during a run, 2,048 others at the end of a reported one.
# A run without wrong answers is drawn, and counted in means, as if half an answer were wrong.


# %%
def results(name):
    """The stored runs of one task."""
    return Reported(EXPERIMENTS[name], RESULTS / f"{name}.jsonl")


def predicted(name):
    """What predictions.md says of a task."""
    section = re.search(rf"^## {name}\n(.*?)(?=^## |\Z)", PREDICTIONS, re.DOTALL | re.MULTILINE)[1]
    return Markdown("**Predicted:** " + section.strip())


def table(results):
    """Per variant: parameters, the sweep's best rate, final errors, steps to 90 %."""
    titles = ("variant", "parameters", "best rate", "error, seeds 1, 2, 3", "mean", "loss, mean", "steps to 90 %")
    lines = ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
    for v in results.variants:
        runs = results.reported[v]
        errors = ", ".join(f"{100 * run.final.error:.3g} %" for run in runs)
        steps = ", ".join(str(run.steps_to_90 or "–") for run in runs)
        cells = (v, f"{runs[0].parameters:,}", f"{runs[0].learning_rate:g}", errors, f"{100 * results.error(v):.2g} %")
        lines.append("| " + " | ".join((*cells, f"{results.loss(v):.2g}", steps)) + " |")
    return Markdown("\n".join(lines))


def picture(results, task, by):
    """Final errors, a point per seed; errors on the way; sweep of learning rates."""
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.6), width_ratios=(1.1, 1.2, 1))
    for i, (variant, (colour, marker, dashes)) in enumerate(zip(results.variants, LOOKS)):
        errors, runs = results.errors(variant), results.reported[variant]
        left.plot(i + np.linspace(-0.18, 0.18, len(errors)), 100 * errors, marker, color=colour, markersize=6)
        left.hlines(100 * results.error(variant), i - 0.3, i + 0.3, color=colour, linewidth=1)
        for run in runs:
            wrong = [100 * max(point.error, 0.5 / results.asked) for point in run.curve]
            label = variant if run is runs[0] else None
            middle.plot(
                [p.step for p in run.curve],
                wrong,
                color=colour,
                marker=marker,
                linestyle=dashes,
                label=label,
                markersize=3,
                linewidth=0.9,
            )
        sweeps = sorted(results.swept[variant], key=lambda run: run.learning_rate)
        right.plot(
            [r.learning_rate for r in sweeps],
            [r.curve[-1].loss for r in sweeps],
            color=colour,
            marker=marker,
            linestyle=dashes,
        )
        best = min(sweeps, key=lambda run: run.curve[-1].loss)
        right.plot(best.learning_rate, best.curve[-1].loss, "o", color=colour, markersize=11, fillstyle="none")
    for ax, asked in ((left, results.asked_finally), (middle, results.asked)):
        ax.axhline(100 / asked, color=BLACK, linewidth=0.8, linestyle=(0, (1, 2)), zorder=0)
        end, side = (0.98, "right") if ax is left else (0.02, "left")
        where = ((end, 100 / asked), (0, 2), ("axes fraction", "data"), "offset points")
        ax.annotate("one wrong answer", *where, ha=side, fontsize=7)
    left.set(xticks=range(len(results.variants)), ylabel="wrong answers at the end, %", yscale="log")
    left.set_xticklabels(results.variants, rotation=35, ha="right")
    middle.set(xlabel="step", ylabel="wrong answers, %", yscale="log")
    right.set(xlabel="learning rate", ylabel="final loss, nats per answer", yscale="log", xscale="log")
    rates = sorted({run.learning_rate for runs in results.swept.values() for run in runs})
    right.set_xticks(rates, [f"{rate:g}" for rate in rates], fontsize=8)
    right.minorticks_off()
    left.set_title("Each seed, and their geometric mean", fontsize=9)
    middle.set_title("On the way, each seed", fontsize=9)
    right.set_title("The sweep, seed 0; circled: chosen", fontsize=9)
    fig.suptitle(f"{task}: small Ling-3s trained from scratch, by {by}", fontsize=11)
    fig.legend(
        *middle.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(results.variants),
        fontsize=8,
        frameon=False,
    )
    plt.show()


def tokens(rows, title):
    """Rows of (symbol, colour, answer): boxes, with the answer after each beneath."""
    width = max(len(row) for row in rows)
    _, ax = plt.subplots(figsize=(0.27 * width + 0.3, 0.62 * len(rows) + 0.35))
    for y, row in enumerate(rows):
        for x, (symbol, colour, answer) in enumerate(row):
            box = plt.Rectangle((x - 0.42, -1.25 * y - 0.3), 0.84, 0.6, fc=colour, ec=BLACK, lw=0.5, alpha=0.45)
            ax.add_patch(box)
            ax.text(x, -1.25 * y, symbol, ha="center", va="center_baseline", fontsize=8)
            ax.text(x, -1.25 * y - 0.62, answer, ha="center", va="center", fontsize=8, fontweight="bold")
    ax.set(xlim=(-0.7, width - 0.3), ylim=(-1.25 * len(rows) + 0.3, 0.55))
    ax.set_title(title, fontsize=9, loc="left")
    ax.axis("off")
    plt.show()


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEF"

# %%
TASKS = ("segment_reset", "mqar", "parity", "palindrome")  # notebook 10 has the fifth
everything = [run for name in TASKS for run in results(name).runs]
minutes = sum(run.seconds for run in everything) / 60
print(f"{len(everything)} runs, {minutes:.0f} minutes", end=", ")
print(f"{min(r.parameters for r in everything):,} parameters and more")
assert len(everything) == 134 and 59 < minutes < 61

# %% [markdown]
# ## 1. Segment reset: what is the bound for?
#
# Ling-3 bounds its decay: $g = -5\,\sigma(e^{A}(f + b))$ nats a token, where Kimi Linear has
# $g = -e^{A}\,\mathrm{softplus}(f + b)$. The $-5$ is a kernel's number: sixteen tokens span at most 80 nats, and
# $e^{80}$ still fits a float32. Does it cost anything? And how small may a bound be before it does?
#
# The task has to make forgetting matter. A row is five segments. Each begins with a reset, binds five keys to values,
# and asks for six keys: three of its own, and three *stale* ones, bound in earlier segments, to which the answer is
# NULL. A line of the picture is a segment; the answers stand beneath.


# %%
def recall_rows(task):
    """A held-out row, segment by segment."""
    batch, rows = task.batch(sweep.HELD_OUT, 0, 1), []
    for token, target, asked in zip(batch.tokens[0], batch.targets[0], batch.mask[0]):
        if token == 0:
            rows.append([("R", ORANGE, "")])
        elif token >= 18:
            rows[-1].append((str(token - 18), "white", ""))
        else:
            rows[-1].append((LETTERS[token - 2], SKY, "" if not asked else "∅" if target == 1 else str(target - 18)))
    return rows


segment_reset = results("segment_reset")
tokens(
    recall_rows(segment_reset.experiment.task),
    "A row of segment reset\nR: reset; letters: keys; numbers: values; ∅: NULL",
)

# %%
predicted("segment_reset")

# %%
picture(segment_reset, "Segment reset", by="law of decay")

# %%
table(segment_reset)

# %% [markdown]
# **Found.** All four predictions hold. Without decay 0.6 to 1.2 % of the answers are wrong, 200 times as many as with
# the bound of $-5$ (S1), which is little for a model that can only overwrite (S4). Between the bounds $-5$, $-1$,
# $-0.1$ and the softplus law there is nothing to choose: each run makes between 0 and 8 errors in 61,440, and seeds
# differ more than variants (S2). So for a task of 85 tokens the bound of $-5$ is free, and one fifty times smaller
# would do: over the 17 tokens of a segment, $-0.1$ nats a token still forget $1 - e^{-1.7} = 82\,\%$.
#
# The bound of $-0.01$ has 40 times the error on average (S3), and its three points tell more than their mean: two seeds
# are near the model without decay, one is as good as any. At most 16 % of a segment can be forgotten there, so that
# model must have found a way that needs no forgetting, and a longer training might have shown it to the others.
#
# Two variants, $-0.1$ and $-0.01$, chose the highest rate of the sweep; a higher one might have served them better.

# %%
error = {variant: segment_reset.error(variant) for variant in segment_reset.variants}
assert error["bound -5"] < error["decay off"] / 3, "S1"
alike = [error[variant] for variant in ("bound -5", "bound -1", "bound -0.1", "softplus")]
assert max(alike) < 3 * min(alike), "S2"
assert error["bound -0.01"] > 2 * error["bound -5"], "S3"
assert max(segment_reset.errors("decay off")) < 0.05, "S4"

assert error["decay off"] > 200 * error["bound -5"] and error["bound -0.01"] > 40 * error["bound -5"]
assert segment_reset.asked_finally == 61440
for variant in ("bound -5", "bound -1", "bound -0.1", "softplus"):
    assert max(segment_reset.errors(variant)) * 61440 < 8.5
best, *others = sorted(segment_reset.errors("bound -0.01"))
assert best < 1e-4 and min(others) > 4e-3

# %% [markdown]
# ### One run, live, and what it learned
#
# Three segments, 240 steps, the very loop that made the results.

# %%
short = dataclasses.replace(
    segment_reset.experiment, task=segment_reset_of(segments=3), steps=240, points=6, held_out=128
)
for measured in sweep.training(short, "bound -5", learning_rate=1.6e-2, seed=1):
    model, point = measured
    print(f"step {point.step:3}: loss {point.loss:.4f} nats, error {point.error:7.2%}")


# %% [markdown]
# The decay $g$ of every channel of the first layer, on a row that the model has never seen:

# %%
row = short.task.batch(sweep.HELD_OUT, 0, 64)
x = model.model.layers[0].input_layernorm(model.model.word_embeddings.embed(jnp.asarray(row.tokens)))
layer = model.model.layers[0].attention
f = (layer.f_proj(x) + layer.dt_bias).reshape(*x.shape[:2], 2, -1)
g = layer.lower_bound * jax.nn.sigmoid(jnp.exp(layer.A_log)[:, None] * f)  # [batch, seq, heads, key], nats a token
g = np.asarray(g).reshape(*x.shape[:2], -1)

order = np.argsort(g[:, ::17].mean((0, 1)))
fig, ax = plt.subplots(figsize=(10, 3.4))
image = ax.imshow(g[0][:, order].T, aspect="auto", vmin=-5, vmax=0)
ax.set_xticks(range(51), [symbol for line in recall_rows(short.task) for symbol, _, _ in line], fontsize=7)
ax.set(xlabel="token", ylabel="key channel of either head, sorted")
ax.grid(visible=False)
fig.colorbar(image, ax=ax, label="log decay g, nats a token")
ax.set_title("Decays in the first layer of the small Ling-3 trained above", fontsize=11)
plt.show()

# %%
at_resets, elsewhere = g[:, ::17], np.delete(g, [0, 17, 34], axis=1)
sharp = at_resets.mean((0, 1)) < -2.0  # channels that keep less than 14 % over a reset
print(f"all channels: {at_resets.mean():.2f} nats at a reset,", f"{elsewhere.mean():.2f} elsewhere")
print(f"{sharp.sum()} channels: {at_resets[..., sharp].mean():.2f}", f"and {elsewhere[..., sharp].mean():.2f}")
assert point.error < 0.02
assert at_resets.mean() < 3 * elsewhere.mean()
assert sharp.mean() > 0.2 and elsewhere[..., sharp].mean() > -0.15

# %% [markdown]
# The model was never told what a reset is. About a third of its channels empty there and keep what they hold elsewhere;
# others decay at keys of their own. Channels that decay apart from each other are what KDA adds to the gated delta
# rule, which has one decay per head.

# %% [markdown]
# ## 2. MQAR: which mixture recalls?
#
# Multi-query associative recall [(Arora et al., 2023)](https://arxiv.org/abs/2312.04927): six keys with their values,
# then each key once, at a random place among blanks. To bind a value to the key before it, a layer has to look one
# token back. KDA's short convolution does that; attention must first copy the key onto the value's place in one
# layer and look for it in a later one (an induction head).


# %%
def mqar_row(task):
    """A held-out row."""
    batch, line = task.batch(sweep.HELD_OUT, 0, 1), []
    for token, target, asked in zip(batch.tokens[0], batch.targets[0], batch.mask[0]):
        symbol = "·" if token == 0 else LETTERS[token - 1] if token <= 32 else str(token - 33)
        line.append((symbol, SKY if 0 < token <= 32 else "white", str(target - 33) if asked else ""))
    return [line]


mqar = results("mqar")
tokens(mqar_row(mqar.experiment.task), "A row of MQAR; letters: keys; numbers: values; ·: blank")

# %%
predicted("mqar")

# %%
picture(mqar, "MQAR", by="ratio of KDA to MLA layers")

# %%
table(mqar)

# %% [markdown]
# **Found.** M2 and M3 hold: MLA alone, and KDA without its convolution, end at 77 to 80 % of errors, where a guess
# among the six values of the row is wrong 83 % of the time. They know which values there are, and little of which key
# they belong to. M4 holds: with one MLA layer in four or with none the model takes 180 to 270 steps to 90 %.
#
# **M1 is wrong.** No mixture reaches 99 % in every seed; the errors lie between 0.5 and 6 %, and seeds differ more than
# mixtures do. (The budget was cut from 480 to 360 steps to keep all within an hour, after the prediction and before the
# first run of this task.) So nothing can be said here of which ratio is best. Kimi Linear's
# [Table 1](https://arxiv.org/abs/2510.26692) took 653 million active parameters to see 3:1 ahead of 1:1 by 0.01 of
# validation perplexity, and of all MLA by 0.12.
#
# What the picture does show is how much hangs on a convolution of four taps. These are failures of 360 steps and not of
# principle: stacked layers of either kind could build the look one token back. (MLA's best rate of the four was the
# lowest, so two lower ones were added to its sweep. Their losses were higher.)

# %%
mixtures = ("1:0", "3:1", "1:1")
final = {variant: mqar.errors(variant) for variant in mqar.variants}
assert not all(max(final[variant]) <= 0.01 for variant in mixtures), "M1 does not hold"
assert mqar.steps_to_90("0:1") == [None] * 3, "M2"
assert mqar.steps_to_90("1:0, no conv") == [None] * 3, "M3"
steps = {variant: np.mean(mqar.steps_to_90(variant)) for variant in ("1:0", "3:1")}
assert 1 / 1.5 < steps["1:0"] / steps["3:1"] < 1.5, "M4"

for variant in mixtures:
    assert min(final[variant]) > 0.004 and max(final[variant]) < 0.06
    assert all(180 <= step <= 270 for step in mqar.steps_to_90(variant))
    assert mqar.error(variant) < min(final["1:0"].max(), final["3:1"].max())  # means within the spread of seeds
for variant in ("0:1", "1:0, no conv"):
    assert min(final[variant]) > 0.77 and max(final[variant]) < 0.80

# %% [markdown]
# ## 3. Parity: what can an eigenvalue below zero do?
#
# Is the number of ones so far odd? A state has to *flip* at every one. KDA's transition
# $\left(I - \beta k k^\top\right) e^{g}$ has the eigenvalue $1 - \beta$ along the unit vector $k$: with
# $\beta = \sigma(\cdot) \in (0, 1)$ it can shrink but never change its sign. With $\beta = 2\,\sigma(\cdot)$ it reaches
# down to $-1$ [(Grazzi et al., 2024)](https://arxiv.org/abs/2411.12537), and $1 - 2kk^\top$ is a reflection.

# %%
parity = results("parity")
batch = parity.experiment.task.batch(sweep.HELD_OUT, 0, 1)
line = [
    (str(token), SKY if token else "white", str(target)) for token, target in zip(batch.tokens[0], batch.targets[0])
]
tokens([line], "A row of parity: bits, and whether the ones so far are odd")

# %% [markdown]
# One channel is enough, by hand: $k = q = 1$, $v = \tfrac12$, no decay, and $\beta = 2$ at each 1, $\beta = 0$ at each
# 0. A one then takes $S$ to $S + 2(\tfrac12 - S) = 1 - S$.

# %%
bits = jnp.asarray(batch.tokens, jnp.float32)
one = jnp.ones((*bits.shape, 1, 1))
o, _ = recurrent_kda(q=one, k=one, v=0.5 * one, g=0 * one, beta=2 * bits[..., None], state=jnp.zeros((1, 1, 1, 1)))
assert np.array_equal(o[..., 0, 0], batch.targets)

# %%
predicted("parity")

# %%
picture(parity, "Parity", by="mixer and range of β")

# %%
table(parity)

# %% [markdown]
# **Found.** All three predictions hold. With $\beta$ in $[0, 1]$ 27 to 35 % of the bits are wrong (P1). With $\beta$ in
# $[0, 2]$ the three seeds make 1, 1 and 6 errors in 81,920 (P2). MLA alone does little better than a coin (P3). One
# factor of 2 and not a parameter more: this is expressivity, as sharp as it comes.
#
# The sweep has a lesson of its own: at the rates 0.004 and 0.032 the wider $\beta$ fails too. With one learning rate,
# and the wrong one, this mechanism would have looked like little or nothing. (For the other two, lower rates were added
# to the sweep; with none of the six did either get below 36 % there.)

# %%
assert min(parity.errors("beta in [0, 1]")) > 0.2, "P1"
assert min(parity.errors("beta in [0, 2]")) < 0.01, "P2"
assert parity.error("beta in [0, 2]") < parity.error("beta in [0, 1]"), "P2"
assert min(parity.errors("MLA")) > 0.4, "P3"

assert sorted(round(error * parity.asked_finally) for error in parity.errors("beta in [0, 2]")) == [1, 1, 6]
assert parity.asked_finally == 81920
assert min(parity.errors("beta in [0, 1]")) > 0.265 and max(parity.errors("beta in [0, 1]")) < 0.35
assert all(run.curve[-1].error > 0.36 for variant in ("beta in [0, 1]", "MLA") for run in parity.swept[variant])
at = {run.learning_rate: run.curve[-1].error for run in parity.swept["beta in [0, 2]"]}
assert at[4e-3] > 0.2 and at[3.2e-2] > 0.3 and max(at[8e-3], at[1.6e-2]) < 0.001

# %% [markdown]
# ## 4. Palindrome: can a gate hurt?
#
# Twenty letters, a separator, and the letters backwards. Nothing may be forgotten before it is asked for, so a gate
# that forgets has no work here. Each place of the second half shows the letter that the one before it asked for.

# %%
palindrome = results("palindrome")
batch = palindrome.experiment.task.batch(sweep.HELD_OUT, 0, 1)
line = [
    (LETTERS[token - 1] if token else "|", SKY if token else ORANGE, LETTERS[target - 1] if asked else "")
    for token, target, asked in zip(batch.tokens[0], batch.targets[0], batch.mask[0])
]
tokens([line], "A row of palindrome: a string, the separator, the string backwards")

# %% [markdown]
# There is a short cut: look for the letter shown last in the string, and answer the one before it. With letters that
# occur more than once this is ambiguous; the last two or three letters are less so. What such a rule gets wrong, when
# it chooses among all places that fit:


# %%
def lookup_error(strings, n):
    """Expected error of going by the last n letters shown (the separator is one)."""
    length = strings.shape[1]
    padded = np.pad(strings, ((0, 0), (0, n)))
    shown = np.stack([padded[:, 1 + i : 1 + i + length] for i in range(n)], axis=-1)
    fits = (shown[:, :, None] == shown[:, None]).all(-1)
    right = (fits & (strings[:, :, None] == strings[:, None])).sum(-1) / fits.sum(-1)
    return 1 - right.mean()


strings = palindrome.experiment.task.batch(sweep.HELD_OUT, 0, 1024).tokens[:, :20]
lookup = {n: lookup_error(strings, n) for n in (1, 2, 3)}
for n, wrong in lookup.items():
    print(f"by the last {n}: {wrong:.2%} wrong")

# %%
predicted("palindrome")

# %%
picture(palindrome, "Palindrome", by="mixer")

# %%
table(palindrome)

# %% [markdown]
# **Found.** In the geometric means that the predictions speak of, D1 and D2 hold: 1:1 before no decay before KDA. The
# points say how little that is worth. KDA's three seeds lie between 3 and 24 %, and the best of them beats every run
# without decay. A gate may hurt here, but three seeds do not show it. With one attention layer two seeds end below 1 %
# and one at 41 %: in the arithmetic mean 1:1 comes out last of the three. What can be said is that the mixture *can* do
# what neither kind did alone in this budget.
#
# **D3 is wrong.** MLA alone finishes anywhere from 12 to 61 % of errors: one seed was well on the way.
#
# KDA with or without decay ends between the rule that goes by one letter and the rule that goes by two, which its short
# convolution can read off; its best run equals the latter. The good runs of the mixture are better than that.

# %%
mean = {variant: palindrome.error(variant) for variant in palindrome.variants}
final = {variant: sorted(palindrome.errors(variant)) for variant in palindrome.variants}
assert mean["decay off"] < mean["KDA"], "D1"
assert mean["1:1"] < min(mean["KDA"], mean["decay off"]), "D2"
assert not min(final["MLA"]) > 0.5, "D3 does not hold"

assert min(final["KDA"]) < min(final["decay off"]) and max(final["KDA"]) > max(final["decay off"])
assert np.mean(final["1:1"]) > np.mean(final["KDA"]) > np.mean(final["decay off"])
assert final["1:1"][1] < 0.01 and final["1:1"][2] > 0.4
assert min(final["MLA"]) > 0.12 and max(final["MLA"]) < 0.62
kda_alone = final["KDA"] + final["decay off"]
assert min(kda_alone) > 0.95 * lookup[2] and max(kda_alone) < lookup[1]
assert final["1:1"][1] < lookup[2]

# %% [markdown]
# ## What to take home
#
# | mechanism | what small models from scratch say of it |
# |---|---|
# | decay per channel | needed where old things must go, and learned without being told what a reset is |
# | the bound of $-5$ | free here; it could be fifty times smaller |
# | short convolution | four taps that bind a value to its key; without them 360 steps were not enough |
# | hybrid ratio | any mixture learns recall; which is best does not show at this size |
# | $\beta$ up to 2 | the difference between counting and not |
# | a gate where nothing is to be forgotten | no harm that three seeds could show |
# | an MLA layer after a KDA layer | the two best reversals of all, and one of the worst: it can, and may not |
#
# Of 14 predictions 12 hold, two of those (D1, D2) by less than the seeds scatter, and M1 and D3 are wrong. Small
# experiments are good at *whether* a mechanism can do a thing, and poor at *how much* of it a large model wants: for
# that see the published ablations, or change one field of a config and train again:
#
# ```python
# config = ling3.Ling3Config(..., kda_allow_neg_eigval=True)
# ```
#
# ## Exercises
#
# **1.** In the parity by hand, one channel with $v = \tfrac12$, put `1 * bits` in the place of `2 * bits`. Predict the
# outputs before you run the cell. Which question about the bits do they still answer?
#
# <details><summary>Solution</summary>
#
# 0 until the first one, and $\tfrac12$ from then on: with $\beta = 1$ a one takes $S$ to $S + (\tfrac12 - S) =
# \tfrac12$, whatever it was. So the channel knows *whether* there was a one, and not how many. It has stored, where
# $\beta = 2$ has counted. (The cell's assertion fails, as it should.)
#
# </details>
#
# **2.** With $\beta = 2$ and no decay, what do two equal keys in a row do to the state along them?
#
# <details><summary>Solution</summary>
#
# The first takes $s = S^\top k$ to $2v - s$, the second takes that to $2v' - (2v - s)$: with equal values back to $s$,
# since a reflection undoes itself. So a model cannot use $\beta = 2$ to *store*: what it writes is always relative to
# what was there. It has to choose $\beta \approx 1$ where it stores and $\beta \approx 2$ where it counts.
#
# </details>
#
# **3.** Why is the sweep's own seed not among the reported ones?
#
# <details><summary>Solution</summary>
#
# The best of four runs is partly the luckiest of four. The mixture's 0.35 % of errors on palindromes chose its learning
# rate; one fresh seed at that rate then ended at 41 %. Reported with the sweep's seed, variants whose runs scatter more
# would look better than they are.
#
# </details>
