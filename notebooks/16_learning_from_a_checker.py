# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 16. Learning from a checker
#
# Where answers can be checked, no one has to write them. The model answers each question several times, a checker
# gives rewards, and what was better than the other answers to the same question becomes likelier. That is GRPO
# (DeepSeekMath, [arXiv 2402.03300](https://arxiv.org/abs/2402.03300)), and `ling3/train/rl.py` has it on a page.
#
# Its gradient is right for answers that the model being trained has drawn itself: *on-policy*. Usually the answers
# come from a serving engine whose kernels and batches round differently from the trainer's. The two then give the same
# token different probabilities, and rounding has to be corrected for. Here engine and trainer have the same bits. This
# notebook shows the difference.
#
# **You need**: the engine (notebook 8) and what a policy gradient is.
#
# **Afterwards you can** write a checker, train with it, read GRPO's curves, and say what a sampler that rounds
# differently does to them.
#
# **It takes** two minutes on two cores, and 1.6 GB of memory.

# %%
import itertools
import json
import pathlib
import sys

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import ling3
from ling3.runtime import plots
from ling3.train import Grpo, advantages, grpo

sys.path.insert(0, "..")  # the experiments are no part of the package
from experiments.nano_rl import WORDINGS, as_shipped, is_right, problems, rounded, task
from ling3.train.nano.problems import ask

plots.use()
model, tok = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")
engine = ling3.Engine(model, tok)

# %% [markdown]
# ## Three wordings that nano misreads
#
# nano solves word problems of up to four steps, in the wordings that it was trained on. Here are three others, of one
# step each. The first it nearly knows, but adds a number twice; the second has a verb that it never read; in the third
# nobody owns anything.

# %%
asked = list(itertools.islice(problems(7, "held_out"), 24))
texts = [ask(problem) for problem in asked]
greedy = ling3.SamplingParams(max_tokens=32)
before = [output.text.strip() for output in engine.generate(texts, greedy)]
for problem, text in zip(asked[:3], before):
    print(problem.question, "→", text)
right = [is_right(*pair) for pair in zip(asked, before)]
print(f"{sum(right)} of {len(right)} right")
assert np.mean(right) < 0.3

# %% [markdown]
# ## Groups, rewards and advantages
#
# Greedy answers are all alike; at temperature 1 a few are different, and some of those are right. Sixteen answers to
# each question form a group. An answer's *advantage* is its reward minus the group's mean, divided by the group's
# standard deviation:
#
# $$\hat A_i = \frac{r_i - \mathrm{mean}(r)}{\mathrm{std}(r)}.$$
#
# The other answers are the baseline, and no second model is needed. In a group whose answers are all right or all wrong
# there is nothing to learn. What the checker sees is the last number of an answer, and nothing else.

# %%
tasks = [task(problem) for problem in asked[:6]]
drawn = ling3.SamplingParams(temperature=1.0, max_tokens=32, n=16, seed=0, logprobs=0)
groups = engine.generate([each.prompt for each in tasks], drawn)
rewards = np.array([[t.check(one) for one in g.outputs] for t, g in zip(tasks, groups)])
gains = advantages(rewards)
for row, gain in zip(rewards, gains):
    print("".join("✓" if reward else "·" for reward in row), f"best {gain.max():5.2f}")
assert np.abs(gains.sum(axis=1)).max() < 1e-6
assert set(rewards.ravel()) <= {0.0, 1.0}

# %% [markdown]
# ## On-policy to the bit
#
# The objective needs $\rho = p(\text{token}) / p_{\mathrm{old}}(\text{token})$, how much likelier each token has become
# since it was sampled. Before the first update it should be 1. `ling3.score` runs the engine's own programs over known
# answers, so it *is* 1. Weights in bfloat16, as a server would have them, or rounded to four bits, give the same tokens
# other probabilities:

# %%
pairs = [(g.prompt_token_ids, one.token_ids) for g in groups for one in g.outputs]
old = [[each.logprob for each in one.logprobs] for g in groups for one in g.outputs]
said = np.concatenate(old).astype(np.float32)


def scored(weights):
    """The log-probabilities of all sampled tokens, one after the other."""
    rows = np.asarray(ling3.score(weights, pairs, engine.settings))
    return np.concatenate([row[: len(each)] for row, each in zip(rows, old)])


samplers = {"bfloat16": as_shipped(model), "four bits": rounded(model)}
ratios = {name: np.exp(said - scored(weights)) for name, weights in samplers.items()}
assert np.array_equal(scored(model), said)

fig, ax = plt.subplots(figsize=(7, 3))
for (name, ratio), colour in zip(ratios.items(), (plots.BLUE, plots.RED)):
    distances = np.sort(np.abs(ratio - 1))[::-1]
    share = np.arange(1, len(ratio) + 1) / len(ratio)
    ax.plot(np.maximum(distances, 1e-7), share, color=colour, marker="", label=name)
    print(f"{name}: at most {distances[0]:.2g}, mean {distances.mean():.2g}")
ax.set(xscale="log", yscale="log", xlabel="|ρ - 1|", ylabel="share of tokens beyond")
ax.set_title(f"{len(said):,} tokens of nano, scored by rounded weights", fontsize=10)
ax.legend()
plt.show()
assert all(np.abs(ratio - 1).max() > 0.01 for ratio in ratios.values())

# %% [markdown]
# ## Two steps, live
#
# The objective takes the smaller of $\rho \hat A$ and $\mathrm{clip}(\rho, 1 \pm \varepsilon)\, \hat A$, so that one
# batch does not carry the policy far, and subtracts a penalty $\beta$ times
# $\frac{p_{\mathrm{start}}}{p} - \log \frac{p_{\mathrm{start}}}{p} - 1$, whose mean is the KL divergence from the model
# at the start. Then `engine.update` puts the new weights into the running engine, which compiles nothing again.

# %%
settings = Grpo(steps=2, questions=3, group=8, max_tokens=32, learning_rate=3e-5)
programs = []


def report(point, policy):
    programs.append(engine.loop.runner.programs)
    print(f"step {point.step}: reward {point.reward:.2f}, |ρ - 1| ≤ {point.deviation}")


stream = map(task, problems(0, "train"))
policy, points = grpo(model, engine, stream, settings, report=report)
assert [point.deviation for point in points] == [0.0, 0.0]
assert programs[0] == programs[1] and points[0].kl == 0 < points[1].kl

# %% [markdown]
# ## The recorded runs
#
# `python -m experiments.nano_rl` makes longer runs. The first samples with the weights that are trained, the other with
# rounded ones, whose log-probabilities take the place of the old policy's.

# %%
lines = pathlib.Path("../experiments/results/nano_rl.jsonl").read_text().splitlines()
runs = {run["sampler"]: run for run in map(json.loads, lines)}
exact = runs["exact"]
LOOKS = {"exact": plots.BLUE, "bfloat16": plots.ORANGE, "int4": plots.RED}


def curve(run, name):
    return np.array([point[name] for point in run["curve"]])


def smooth(values, width=5):
    """The mean of each point and up to four before it."""
    return [np.mean(values[max(0, i - width + 1) : i + 1]) for i in range(len(values))]


fig, axes = plt.subplots(2, 2, figsize=(10, 5.6))
names = {
    "reward": "reward, mean of five batches",
    "kl": "KL to the start, nats a token",
    "entropy": "entropy, nats a token",
    "deviation": "largest |ρ - 1|, first step",
}
for ax, (name, label) in zip(axes.ravel(), names.items()):
    for sampler, run in runs.items():
        values = smooth(curve(run, name)) if name == "reward" else curve(run, name)
        ax.plot(values, color=LOOKS[sampler], label=sampler)
    ax.set(xlabel="batch", ylabel=label)
axes[1, 1].set_yscale("symlog", linthresh=1e-2)
axes[0, 0].legend()
fig.suptitle("nano learns three wordings from a checker; samplers: exact and rounded")
plt.show()
for sampler, run in runs.items():
    last = run["curve"][-1]
    minutes, spent = last["seconds"] / 60, last["processor_seconds"] / 60
    print(f"{sampler}: {last['tokens']:,} tokens, {spent:.1f} minutes of a core", end=" ")
    print(f"({minutes:.0f} minutes beside other work)")
    for when in ("before", "after"):
        exam = run[when]
        print(f"    {when:6}: right {exam['right']}, of its own {exam['own']:.2f}")
for sampler, run in runs.items():
    deviations = curve(run, "deviation")
    assert not deviations.any() if sampler == "exact" else deviations.min() > 0

# %% [markdown]
# Both learn. With the exact sampler the reward rises from the first batches on. With the one in bfloat16 it rises a
# little, falls back, and after fifteen batches is hardly above the start; then it rises as steeply. The ratios of its
# first steps, which should be 1, reach 5.6 early on. One run of each is no proof: it shows what can happen, not how
# often.

# %%
means = {name: curve(run, "reward")[10:20].mean() for name, run in runs.items()}
print({name: round(float(mean), 2) for name, mean in means.items()})
assert means["exact"] > 3 * means["bfloat16"]
assert curve(runs["bfloat16"], "reward")[12:17].mean() < 0.15
assert 5.6 < 1 + curve(runs["bfloat16"], "deviation").max() < 5.7

# %% [markdown]
# The answers to held-out questions, before and after:

# %%
shown = zip(exact["before"]["answers"], exact["after"]["answers"])
for (question, first), (_, last) in shown:
    print(question, "\n   before:", first, "\n   after: ", last)
right = [[exact[when]["right"][w.__name__] for w in WORDINGS] for when in ("before", "after")]
gained = np.mean(right[1]) - np.mean(right[0])
print(f"gained: {100 * gained:.0f} points")
assert gained > 0.2

# %% [markdown]
# ## Exercises
#
# **1.** *A checker of your own.* Reward short answers to nano's own problems: 1 for a right answer, minus a hundredth
# for each token. What do you expect it to leave out?
#
# <details><summary>Solution</summary>
#
# ```python
# from ling3.train import Task
# from ling3.train.nano.problems import problems as own
#
# def short(problem):
#     def check(one):
#         return float(is_right(problem, one.text)) - 0.01 * len(one.token_ids)
#     return Task(ask(problem), check)
#
# shorter, found = grpo(model, engine, map(short, own(1, "train")), Grpo(steps=20))
# print([round(point.length, 1) for point in found])
# ```
#
# At temperature 1 nano's answers to its own problems hardly differ, so most groups have one reward and teach nothing.
# What the model never tries cannot be rewarded: the checker needs answers that vary.
#
# </details>
#
# **2.** *Without the standard deviation.* Dr. GRPO (`advantages="unbiased"`) leaves out the division. Whose gradient
# becomes smaller: that of questions which are nearly always right, or of those right half of the time?
#
# <details><summary>Solution</summary>
#
# ```python
# for right in (1, 8, 15):
#     group = np.array([[1.0] * right + [0.0] * (16 - right)])
#     print(right, advantages(group)[0, [0, -1]], advantages(group, "unbiased")[0, [0, -1]])
# ```
#
# The standard deviation is largest, 1/2, if half of the answers are right. Dividing by it makes up for rare successes
# and rare failures: a single right answer among 16 has an advantage of 3.9 instead of 0.94.
#
# </details>
