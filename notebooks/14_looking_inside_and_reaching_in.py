# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 14. Looking inside and reaching in
#
# Before *nano* writes `60 - 5`, something in it has settled on the minus. Where, and in what form? And if we change it
# there, does the model do another sum? Three experiments answer that: a linear **probe** reads the operator from the
# residual stream, a **steering** vector turns it into the other one, and **patching** from one run into another shows
# by which way a number comes from the question, and by which a learned fact comes out of the weights. All three need
# two things: `ling3.Capture` brings arrays out of a running model, `ling3.Intervention` puts others in.
#
# **You need**: the residual stream and the two kinds of layers (notebook 1), and least squares.
#
# **Afterwards you can** capture activations from a batch of requests; fit a probe and say what it does and does
# not show; steer a request; and find by patching through which layers, heads and experts an answer travels.
#
# **It takes** two minutes on two cores, and 1.4 GB of memory.

# %%
import itertools
import random
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import ling3
from ling3.runtime import plots
from ling3.train.nano.problems import OBJECTS, PEOPLE, ask, problems
from ling3.train.nano.skills.facts import ATTRIBUTES, fact, never_first, subjects

plots.use()
model, tok = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")
kinds = [model.config.attention_kind(i).upper() for i in range(model.config.num_hidden_layers)]
print(kinds)

# %% [markdown]
# ## Capture
#
# The prompts are 512 held-out word problems whose solution begins with a sum or a difference. Each prompt goes as far
# as the first number of the solution: what comes next is the operator. One call to the engine answers them all and
# brings along what each attention layer added to the residual stream, and the stream after each layer. Capturing
# changes no answer: an engine without it gives the same.

# %%
FIT, ALL = 384, 512
asked = list(itertools.islice((p for p in problems(14, "held_out") if p.steps[0].operator in "+-"), ALL))
prompts = [tok.encode(f"{ask(p)} {p.steps[0].left}") for p in asked]
print(f"{tok.decode(prompts[0])!r} … {asked[0].solution!r}")
engine = ling3.Engine(
    model, tok, max_model_len=128, page_size=16, chunked_prefill_size=64, token_paddings=(64,), decode_rows=64
)
inside = ling3.Capture(residual=True, attended=True, added=True, heads=True)
greedy = {"max_tokens": 6, "temperature": 0.0}
answers = engine.generate(prompts, ling3.SamplingParams(**greedy, capture=inside))
without = engine.generate(prompts, ling3.SamplingParams(**greedy))
assert [a.text for a in answers] == [a.text for a in without]

plus = np.array([p.steps[0].operator == "+" for p in asked])
wrote = np.array([a.text.split()[0] for a in answers])
right = np.mean(wrote == np.where(plus, "+", "-"))
first = answers[0].captured.residual[0]
print(f"operators right: {right:.1%};", f"a residual stream: {first.shape}, [prompt and answer, hidden]")
assert right > 0.99

# %% [markdown]
# ## A probe
#
# A linear probe (Alain & Bengio, arXiv 1610.01644) is a linear classifier on activations. Ours is a ridge regression of
# $y = \pm1$ (plus or minus) on the stream $x$ at one token, in closed form:
#
# $$w = (X^\top X + \lambda I)^{-1}X^\top y, \qquad X, y \text{ centred}.$$
#
# It is fitted on 384 problems, and judged on the other 128. Two baselines belong to it. The *majority* says what
# guessing gets. The *embeddings* say what the token alone gives away: whatever a probe finds beyond that, the model has
# brought to this token from others.

# %%
token_vectors = np.asarray(model.model.word_embeddings.weight)
sign = np.where(plus, 1.0, -1.0)


def stages(back):
    """The stream at the prompt's last token but `back`: [problems, hidden] by stage."""
    at = [len(ids) - 1 - back for ids in prompts]
    found = {"token": np.stack([token_vectors[ids[t]] for ids, t in zip(prompts, at, strict=True)])}
    for i in range(len(kinds)):
        before = list(found.values())[-1]
        attended = np.stack([a.captured.attended[i][t] for a, t in zip(answers, at, strict=True)])
        found[f"{i} attn"] = before + attended
        found[f"{i}"] = np.stack([a.captured.residual[i][t] for a, t in zip(answers, at, strict=True)])
    return {name: x.astype(np.float64) for name, x in found.items()}


def probe(x, y, ridge=10.0):
    """A ridge regression's weights and means; `ridge` in mean channel variances."""
    centre, level = x.mean(0), y.mean()
    x = x - centre
    penalty = ridge * max(np.mean(x**2), 1e-9) * np.eye(x.shape[1])  # 1e-9: a stream may be the same in all problems
    return np.linalg.solve(x.T @ x + penalty, x.T @ (y - level)), centre, level


def accuracy(x):
    """On the held-out problems, of a probe fitted on the others."""
    w, centre, level = probe(x[:FIT], sign[:FIT])
    return np.mean(np.sign((x[FIT:] - centre) @ w + level) == sign[FIT:])


places = {"the number": 0, "the space before it": 1, "Answer:": 2}
streams = {name: stages(back) for name, back in places.items()}
read = {name: {stage: accuracy(x) for stage, x in found.items()} for name, found in streams.items()}
majority = max(np.mean(plus[FIT:]), 1 - np.mean(plus[FIT:]))

figure, ax = plt.subplots(figsize=(7.5, 3.6))
for name, found in read.items():
    shares = [100 * share for share in found.values()]
    ax.plot(range(len(found)), shares, label=f"at “{name}”" if name.endswith(":") else f"at {name}")
ax.axhline(100 * majority, color=plots.BLACK, ls=":", marker="", label="guessing the majority")
labels = ["token"] + [f"{kind}\n{i}" if part else f"MoE\n{i}" for i, kind in enumerate(kinds) for part in (1, 0)]
ax.set_xticks(range(len(labels)), labels)
ax.set(xlabel="the residual stream after …", ylabel="right answers of the probe, %", ylim=(45, 103))
ax.set_title("Where a probe reads the operator in nano's residual stream", fontsize=11)
ax.legend(fontsize=8, loc="lower right")
plt.show()
number = read["the number"]
print(f"majority {majority:.3f}", {stage: round(float(share), 3) for stage, share in number.items()})

# %% [markdown]
# The number itself does not tell: the probe on the embeddings is no better than the majority, and neither are those
# after the first two layers. Then layer 2's attention brings the operator, and it can be read in every problem that the
# probe was not fitted on. At the two tokens before the number a probe is right in seven or eight problems of ten, more
# than the majority: something that goes with the operator is there already, and the operator itself where it is needed.

# %%
assert number["token"] < majority + 0.05 and max(number["1 attn"], number["1"]) < majority + 0.1
assert number["2 attn"] > 0.97 and number["3"] > 0.97
assert all(max(read[name].values()) < 0.87 for name in places if name != "the number")

# %% [markdown]
# ### Does the model use what a probe reads?
#
# A probe shows what *can* be read, not what *is*. So take away what a layer's attention adds, at this one token, and
# see which operator follows. Everything else stays as it is.
#
# Interventions are pytrees whose arrays have a row for each sequence. Concatenated, those of many prompts are one, and
# each row of a batch undergoes its own, as in the engine. And at a position that a sequence does not have an
# intervention does nothing: so those of several sites run in one compiled program, of which we switch on one at a time.

# %%
NOWHERE = 10_000
PLUS, MINUS = (tok.encode(f"3 {sign} 4")[1] for sign in "+-")
held = prompts[FIT:]
last = [len(ids) - 1 for ids in held]
rows = np.zeros((len(held), 64), np.int32)
for row, ids in zip(rows, held, strict=True):
    row[: len(ids)] = ids


def together(interventions):
    """One intervention for a batch, of one for each row."""
    return jax.tree.map(lambda *each: np.concatenate(each), *interventions)


def operators(*changes):
    """What nano writes after the held-out prompts; each change is for the batch."""
    logits = model(jnp.asarray(rows), interventions=changes)
    return np.asarray(jnp.argmax(logits[np.arange(len(held)), np.array(last)], axis=-1))


own = np.where(plus[FIT:], PLUS, MINUS)
cut = {}
for chosen in range(len(kinds)):
    off = [
        together([ling3.Intervention.set(i, "attended", 0.0, positions=[t if i == chosen else NOWHERE]) for t in last])
        for i in range(len(kinds))
    ]
    cut[chosen] = np.mean(operators(*off) == own)
    print(f"without layer {chosen}'s {kinds[chosen]} at this token:", f"{cut[chosen]:.1%} right")
DECIDES = min(cut, key=cut.get)
assert DECIDES == 2 and cut[DECIDES] < 0.1 and sorted(cut.values())[1] > 0.95

# %% [markdown]
# The cuts say what the probes said: the operator comes from layer 2, and at this token from no other.
#
# ## Steering
#
# Now the other way: we write the decision into the stream. The obvious vector is the probe's $w$. The other candidate
# is the difference $d$ of the mean streams before a plus and before a minus. They are not the same, though each follows
# from the other: $X^\top y$ is $d$ times a number, so
#
# $$w \propto (X^\top X + \lambda I)^{-1} d .$$
#
# $w$ is the direction that *reads* best: it avoids the channels in which streams vary for other reasons. $d$ is the
# direction in which the streams *differ*, the probe's *pattern* (Haufe et al., NeuroImage 87, 2014).

# %%
RIDGE = 10.0
x = streams["the number"][f"{DECIDES}"]
w, centre, _ = probe(x[:FIT], sign[:FIT], RIDGE)
d = x[:FIT][plus[:FIT]].mean(0) - x[:FIT][~plus[:FIT]].mean(0)
spread = x[:FIT] - centre
pattern = (spread.T @ spread + RIDGE * np.mean(spread**2) * np.eye(len(w))) @ w


def cosine(a, b):
    return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


print(f"cosine of w and d: {cosine(w, d):.2f}; length of d: {np.linalg.norm(d):.0f}, "
      f"of a stream: {np.mean(np.linalg.norm(x, axis=1)):.0f}")  # fmt: skip
assert np.isclose(cosine(pattern, d), 1) and 0.6 < cosine(w, d) < 0.7

# %% [markdown]
# We add multiples of $d$ after layer 2 at the prompt's last token, towards plus where the answer is a minus and the
# other way round, then $w$ and a random vector, scaled to the same length.

# %%
DOSES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
noise = np.random.default_rng(0).standard_normal(len(d))
directions = {
    name: v * np.linalg.norm(d) / np.linalg.norm(v)
    for name, v in {"difference d": d, "probe's w": w, "random": noise}.items()
}
other = np.where(plus[FIT:], MINUS, PLUS)
towards = -sign[FIT:]


def pushed(vector):
    """Per held-out prompt: `vector` at its last token, towards the other operator."""
    return [
        ling3.Intervention.add(DECIDES, (s * vector).astype(np.float32), positions=[t])
        for s, t in zip(towards, last, strict=True)
    ]


steered = {name: np.stack([operators(together(pushed(dose * v))) for dose in DOSES]) for name, v in directions.items()}
figure, (turned, lost) = plt.subplots(1, 2, figsize=(9.5, 3.3), sharey=True)
for name, found in steered.items():
    turned.plot(DOSES, 100 * np.mean(found == other, axis=1), label=name)
    lost.plot(DOSES, 100 * np.mean((found != other) & (found != own), axis=1), label=name)
turned.set(ylabel="problems, %", xlabel="length of the vector, in lengths of d")
turned.set_title("Writes the other operator", fontsize=10)
lost.set(xlabel="length of the vector, in lengths of d")
lost.set_title("Writes no operator", fontsize=10)
turned.legend(fontsize=8)
figure.suptitle(f"What nano writes in {len(held)} held-out problems when steered", fontsize=11)
plt.show()
flipped = {name: dict(zip(DOSES, np.mean(found == other, axis=1), strict=True)) for name, found in steered.items()}
broken = {name: np.mean((found[-1] != other) & (found[-1] != own)) for name, found in steered.items()}
for name, share in flipped.items():
    print(f"{name}: {share[0.5]:.0%} turned at 0.5, {share[1.0]:.0%} at 1", end="; ")
    print(f"{broken[name]:.0%} without an operator at 3")
assert flipped["difference d"][1.0] > 0.98 and broken["difference d"] < 0.02
assert flipped["probe's w"][0.5] < 0.1 and 0.35 < flipped["difference d"][0.5] < 0.6
assert 0.9 < flipped["probe's w"][1.0] < 0.96
assert max(flipped["random"].values()) < 0.02 and broken["random"] > 0.3

# %% [markdown]
# Once $d$ turns every operator, and three times $d$ breaks nothing. The vector $w$, two thirds of it along $d$, is a
# weaker tool: at half the length of $d$ it turns 2 % where $d$ turns 48, and at the full length 93 %, while 7 % of the
# prompts lose their operator. So **the direction that reads best is not the best to write with**. (Marks & Tegmark,
# arXiv 2310.06824, found the same of truth and falsehood in large models.) A random vector turns none, but a long one
# costs more than a third of the prompts their operator.
#
# Half of $d$ turns half, and so it should: it takes the mean stream of one class midway to that of the other. Are they
# those whose story has a step of the other kind too, so that there is something to choose from?

# %%
choice = np.array(
    [any(step.operator == ("-" if p.steps[0].operator == "+" else "+") for step in p.steps[1:]) for p in asked[FIT:]]
)
half = steered["difference d"][DOSES.index(0.5)] == other
print(f"flipped by d/2: {np.mean(half[choice]):.0%} of the {sum(choice)} stories "
      "with a later step of the other kind, "
      f"{np.mean(half[~choice]):.0%} of the others")  # fmt: skip
assert 0.4 < np.mean(half[choice]) < 0.7 and 0.25 < np.mean(half[~choice]) < 0.55

# %% [markdown]
# Hardly: 55 % of them against 41 % of the others is little more than 64 problems of either kind differ by chance.
#
# ### The sum that follows
#
# Does the rest of the solution go along? `SamplingParams(interventions=…)` steers a request of the engine, each with a
# vector and positions of its own. Ours hold at a position of the prompt alone: what is generated afterwards is
# generated by the model as it is, with what the steered token has left in its caches.

# %%
params = [ling3.SamplingParams(**greedy, interventions=[change]) for change in pushed(2 * d)]
texts = [out.text for out in engine.generate(held, params)]
equations = [re.match(r" ([+-]) (\d+) = (\d+)\.", text) for text in texts]
for p, text in list(zip(asked[FIT:], texts, strict=True))[:4]:
    print(p.question)
    print(f"   own: {p.steps[0]}   steered: {p.steps[0].left}{text.split('.')[0]}.")

assert all(equations)
LIMIT = 60  # of every number that nano has been trained on
left_operand = np.array([p.steps[0].left for p in asked[FIT:]])
operand, result = (np.array([int(e[group]) for e in equations]) for group in (2, 3))
truth = left_operand + operand * np.array([1 if e[1] == "+" else -1 for e in equations])
fits, holds = (truth >= 0) & (truth <= LIMIT), truth == result
print(f"the equation holds in {np.mean(holds[fits]):.0%} of the {sum(fits)} problems "
      f"whose result is in 0..{LIMIT}, "
      f"and in {np.mean(holds[~fits]):.0%} of the {sum(~fits)} others")  # fmt: skip
kept = operand == np.array([p.steps[0].right for p in asked[FIT:]])
print(f"the second number is that of the unsteered equation in {np.mean(kept):.0%}")
assert np.mean(holds[fits]) > 0.97 and np.mean(holds[~fits]) < 0.1
assert np.mean(kept) > 0.97

# %% [markdown]
# One vector at one token, and the model does another sum, correctly, as long as the result is a number that it knows; a
# difference below 0 or a sum beyond 60 it has never seen, and gets all of these wrong. And nothing but the sign has
# changed. The second number is in every problem that of the story's first step: David's 6 yellow coins are taken away,
# though what he gives away in the story is 11. Sign and number are fetched apart.
#
# Is that still the vector, or the sign that follows from it? We write the other sign ourselves, and add no vector:

# %%
forced = [[*ids, int(sign)] for ids, sign in zip(held, other, strict=True)]
after = [out.text for out in engine.generate(forced, ling3.SamplingParams(max_tokens=4, temperature=0.0))]
same = [text.startswith(tok.decode([int(sign)]) + rest) for text, sign, rest in zip(texts, other, after, strict=True)]
print(f"the same equation in {np.mean(same):.0%}")
assert np.mean(same) > 0.97

# %% [markdown]
# The sign does all of it. The vector has turned one decision, and everything else follows from the token that was
# written: the pass at the next token reads the sign, not what was done to the stream before it.
#
# What steering does not show: that the model itself uses this direction and no other. A push of twice the difference
# takes the stream far beyond the mean of the other class.
#
# ## Patching: by which way does an answer come?
#
# Steering shows that a place matters; *causal tracing* (Meng et al., arXiv 2202.05262) shows which places matter. Take
# two prompts, a clean and a corrupted one. Run the corrupted prompt, but put in the clean run's array at one site and
# one position. If the clean answer comes back, it has gone through there. The measure is the difference of the two
# answers' logits: 0 is the corrupted run, 1 the clean one.
#
# We do it for two answers. One is in the prompt: the first number of a solution. The other is in the weights: nano has
# learned 2,048 people by heart, of whom each likes, fears, owns and seeks something. That is what Meng et al. asked.

# %%
rng = random.Random(14)


def number():
    """A clean and a corrupted prompt that differ in one number, and its two tokens."""
    (hero, _), (friend, _), things = *rng.sample(PEOPLE, 2), rng.choice(OBJECTS)
    numbers, taken = rng.sample(range(21, 61), 2), rng.randint(2, 20)
    story = "Question: {} has {} {}. {} takes {} of them. How many {} does {} have?"
    both = [tok.encode(story.format(hero, n, things, friend, taken, things, hero) + "\nAnswer: ") for n in numbers]
    return *both, *(tok.encode(f"{n}")[0] for n in numbers)


def memory():
    """The same for two people and an attribute that training texts have first."""
    attribute = rng.choice(ATTRIBUTES)
    two = rng.sample([name for name in subjects() if never_first(name) != attribute], 2)
    both = [tok.encode(f"About {name}: {attribute}") for name in two]
    return *both, *(tok.encode(f" {fact(name, attribute)}")[0] for name in two)


def known(draw, count):
    """Pairs of which nano answers both, not alike: clean, corrupted, answer tokens."""
    pairs = [draw() for _ in range(2 * count)]
    best = [np.argmax(model(jnp.asarray(ids))[:, -1], axis=-1) for ids in list(zip(*pairs, strict=True))[:2]]
    right = [p for p, a, b in zip(pairs, *best, strict=True) if (a, b) == p[2:] and a != b]
    print(f"{len(right)} of {len(pairs)} pairs right")
    return list(zip(*right[:count], strict=True))


numbers, memories = known(number, 12), known(memory, 24)
assert len(numbers[0]) == 12 and len(memories[0]) == 24

# %%
SITES = {"embeddings": (None, "embeddings", None)}
SITES |= {f"{site} {i}": (i, site, None) for site in ("residual", "attended", "added") for i in range(len(kinds))}
SITES |= {f"head {i}.{h}": (i, "heads", h) for i in range(len(kinds)) for h in range(model.config.num_attention_heads)}
STREAM = ["embeddings", *(f"residual {i}" for i in range(len(kinds)))]
PARTS = [name for name in SITES if name not in STREAM]


def values(ids, seen, name):
    """What a clean run has at a site, [positions, …]."""
    layer, site, head = SITES[name]
    if site == "embeddings":
        return token_vectors[ids]
    array = getattr(seen, site)[layer]
    return array if head is None else array[:, head]


def patched(ids, donor, seen, cells):
    """Last logits of `ids` per cell: sites and positions that get `donor`'s arrays."""
    changes = []
    for name, (layer, site, head) in SITES.items():
        patch = ling3.Intervention.patch(layer, values(donor, seen, name), site=site, head=head)
        seq = range(len(ids))
        where = np.array([[t if (name, t) in cell else NOWHERE + t for t in seq] for cell in cells], np.int32)
        patch = jax.tree.map(lambda x: np.repeat(x, len(cells), axis=0), patch)
        changes.append(eqx.tree_at(lambda p: p.positions, patch, where))
    return np.asarray(model(jnp.asarray([ids] * len(cells)), interventions=changes)[:, -1])


def traced(clean, corrupted, good, bad):
    """The clean answer's share by stage and position of the stream, and by layer part.

    All cells are one program: nothing; the laws (below); each stage and position alone;
    each part alone, at the last position.
    """
    (seq,) = {len(ids) for ids in (*clean, *corrupted)}
    differs = [t for t in range(seq) if any(a[t] != b[t] for a, b in zip(clean, corrupted, strict=True))]
    runs = engine.generate(list(clean), ling3.SamplingParams(max_tokens=0, capture=inside))
    cells = [frozenset(), frozenset(("embeddings", t) for t in differs)]
    cells += [frozenset((name, t) for t in range(seq)) for name in STREAM[1:]]
    cells += [frozenset({(name, t)}) for name in STREAM for t in range(seq)]
    cells += [frozenset({(name, seq - 1)}) for name in PARTS]
    logits = [patched(*each[:2], each[2].captured, cells) for each in zip(corrupted, clean, runs, strict=True)]
    truth = patched(clean[0], clean[0], runs[0].captured, cells[:1] * len(cells))[0]
    laws = np.max(np.abs(logits[0][: 1 + len(STREAM)] - truth), axis=1)

    difference = np.stack([own[:, g] - own[:, b] for own, g, b in zip(logits, good, bad, strict=True)])
    none, whole, each = difference[:, :1], difference[:, 1:2], difference[:, 1 + len(STREAM) :]
    share = np.mean((each - none) / (whole - none), axis=0)
    grid, parts = share[: len(STREAM) * seq].reshape(len(STREAM), seq), share[len(STREAM) * seq :]
    return differs, laws, grid, dict(zip(PARTS, parts.tolist(), strict=True))


def draw(ids, grid, parts, title):
    """The map of the stream, and the parts of layers at the last position."""
    words = [tok.decode([i]).replace("\n", "\\n").replace(" ", "␣") for i in ids]
    figure, (stream, last_token) = plt.subplots(1, 2, figsize=(11, 3.6), width_ratios=(3, 1.4))
    image = stream.imshow(grid, aspect="auto", vmin=0, vmax=1)
    stream.set_xticks(range(len(words)), words, rotation=70 if len(words) > 8 else 0, fontsize=8)
    stream.set_yticks(range(len(STREAM)), ["embeddings", *(f"after layer {i}, {kind}" for i, kind in enumerate(kinds))])
    stream.set_xlabel("token")
    stream.set_title("The stream from the clean run, at one position", fontsize=10)
    stream.grid(visible=False)
    figure.colorbar(image, ax=stream, label="share of the clean answer")
    carrier = max(range(len(kinds)), key=lambda i: parts[f"attended {i}"])
    colours = {"MLA": plots.MLA, "KDA": plots.KDA}
    bars = {f"{kind} {i}": (parts[f"attended {i}"], colours[kind]) for i, kind in enumerate(kinds)}
    bars |= {f"experts {i}": (parts[f"added {i}"], plots.YELLOW) for i in range(len(kinds))}
    of_heads = [name for name in parts if name.startswith(f"head {carrier}.")]
    bars |= {f"{kinds[carrier]} {carrier}, head {name[-1]}": (parts[name], plots.SKY) for name in of_heads}
    last_token.barh(list(bars), [x for x, _ in bars.values()], color=[colour for _, colour in bars.values()])
    last_token.tick_params(axis="y", labelsize=8)
    last_token.set(xlabel="share of the clean answer", xlim=(-0.1, 1.05))
    last_token.set_title("Parts, at the last position", fontsize=10)
    figure.suptitle(title, fontsize=11)
    last_token.invert_yaxis()
    plt.show()
    print({name: round(x, 2) for name, x in parts.items() if abs(x) > 0.01})


differs, laws, grid, parts = traced(*numbers)

# %% [markdown]
# First the laws. The clean embedding at the position where the prompts differ makes the corrupted run the clean one,
# bit for bit. And a layer's whole output taken from the clean run leaves nothing of the corrupted one: the logits are
# the clean ones, but for rounding, since the engine has captured in another program.

# %%
print("largest difference of a logit:", dict(zip(["nothing", *STREAM], laws.tolist(), strict=True)))
assert laws[0] > 1 and laws[1] == 0 and np.max(laws[1:]) < 1e-3

# %% [markdown]
# Now the map of the number, the mean over twelve pairs.

# %%
draw(numbers[0][0], grid, parts, "Patching nano: what brings a number of the prompt back")
(source,) = differs
assert np.all(grid[:3, source] > 0.95) and np.all(grid[3:, -1] > 0.95)
assert np.max(np.abs(grid[3:, :-1])) < 0.05 and np.max(np.abs(grid[:3, -1])) < 0.05
assert parts["attended 2"] > 0.95 and parts["head 2.0"] > 0.95

# %% [markdown]
# One jump. Until layer 1 the number is where it was written. After layer 2 the stream at that position matters no more,
# and the one at the last position has all of it. What carries it is KDA, the recurrent layer, and of its four heads
# number 0: the state that this head has built up over the prompt gives the number back twenty tokens later.
#
# And the fact?

# %%
differs, laws, grid, parts = traced(*memories)
draw(memories[0][0], grid, parts, "Patching nano: what brings a learned fact back")

assert laws[0] > 1 and laws[1] == 0 and np.max(laws[1:]) < 1e-3
assert np.all(grid[1:3, -1] > 0.6) and np.all(grid[1:3, -1] < 0.9) and np.all(grid[3:, -1] > 0.95)
assert 0.6 < parts["attended 0"] == max(parts.values()) < 0.9 and 0.15 < parts["attended 2"] < 0.45
assert all(0.15 < parts[f"added {i}"] < 0.55 for i in (0, 2, 3)) and abs(parts["added 1"]) < 0.1

# %% [markdown]
# No one jump, and no one carrier. The name is two tokens, and the attribute a third. Layer 0 brings most of the name to
# the last position, three quarters of the answer; the rest waits at the name's second word, and layer 2's attention
# brings it. And here the experts matter: what a person likes stands nowhere in the prompt, and what those of layer 0,
# 2 or 3 add at the last token is worth a quarter to two fifths of the answer. Layer 1's add nothing. (With attention's,
# the shares sum to more than one: what layer 0 brings, the experts above it go on with.)
#
# In a large model expect maps that are less clean, and read them with care: a patch shows that a site is *enough* to
# bring the answer back, not that there is no other way.
#
# ## Exercises
#
# **1.** *Do not stop pushing.* We added $2d$ at one token. Add it at every token from there on (`from_position=` in
# place of `positions=`). What becomes of the equations, and why?
#
# <details><summary>Solution</summary>
#
# ```python
# for scale in (0.25, 0.5, 1):
#     changes = [
#         ling3.Intervention.add(DECIDES, (scale * s * d).astype(np.float32), from_position=t)
#         for s, t in zip(towards, last, strict=True)
#     ]
#     params = [ling3.SamplingParams(**greedy, interventions=[change]) for change in changes]
#     texts = [out.text for out in engine.generate(held, params)]
#     print(scale, np.mean([re.match(r" [+-] \d+ = \d+\.", text) is not None for text in texts]), texts[0])
# ```
#
# All still write an equation at $d/4$, which turns nothing, 30 % at $d/2$, and none at $d$: the push is there at every
# later token too, and each of them gets an operator, as in ` + 4 +  +  +  + `. Steer where the decision is made, not
# everywhere.
#
# </details>
#
# **2.** *Which number does the result follow?* In `… Answer: 38 - 11 = ` the 38 is there twice, in the question and in
# the equation. Change one of them at a time. Does nano compute from the story or from what it has written?
#
# <details><summary>Solution</summary>
#
# ```python
# def result(question, equation):
#     story = f"Question: Anna has {question} eggs. Ben takes 11 of them. How many eggs does Anna have?\n"
#     ids = tok.encode(f"{story}Answer: {equation} - 11 = 0")[:-1]  # ` = ` is one token where a number follows
#     return tok.decode([int(jnp.argmax(model(jnp.asarray([ids]))[0, -1]))])
#
# print(result(38, 38), result(45, 38), result(38, 45))
# ```
#
# 27, 27 and 34: from what it has written. So it is with every two of 25, 33, 41, 49 and 57 in the place of 38 and 45.
# Once the equation is there the question's number is not asked for any more.
#
# </details>
#
# **3.** *A direction from the gradient.* `model(…)` can be differentiated by a vector that an intervention adds. Take
# the gradient of the mean difference of the two operators' logits, at the vector 0. Is it nearer to $d$ or to $w$?
#
# <details><summary>Solution</summary>
#
# ```python
# def margin(vector):
#     logits = model(jnp.asarray(rows), interventions=[ling3.Intervention.add(DECIDES, vector)])
#     logits = logits[np.arange(len(held)), np.array(last)]
#     return jnp.mean(logits[:, PLUS] - logits[:, MINUS])
#
# gradient = np.asarray(jax.grad(margin)(jnp.zeros(len(d))))
# print(cosine(gradient, d), cosine(gradient, w))
# ```
#
# To $d$: 0.83 against 0.61. What the later layers listen to is where the streams do differ. (This vector is added at
# all tokens of the prompt; at the last token alone each row needs positions of its own, by `together`.)
#
# </details>
