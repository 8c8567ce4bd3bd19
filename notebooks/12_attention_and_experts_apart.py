# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 12. Attention and experts apart
#
# A decoder layer has two halves that want different machines. Attention holds the memory of every sequence and spends
# its time reading it; more sequences do not make a sequence's share cheaper. The experts hold no memory at all, and
# read the same weights for one token as for a hundred; they want as many tokens at once as there are. *Attention-FFN
# disaggregation* (AFD) puts the two on two groups of devices that are sized apart, as
# [MegaScale-Infer](https://arxiv.org/abs/2504.02263) and [Step-3](https://arxiv.org/abs/2507.19427) do. In each layer
# an attention worker (a *session*) sends its tokens to the FFN workers (the *cards*) and waits for them to come back.
# With two or more micro-batches a session, neither group waits for the other.
#
# That is the promise. This notebook shows how the two groups take turns, what is in a message, and what it buys: a
# model of the time of a step, checked against a simulation, for Ling-3.0-flash and DeepSeek-V4-Flash. The answer is
# less than the promise: at times half as many tokens again, often none, and on equal devices never more than the best
# undivided system gives.
#
# **You need**: mixtures of experts (notebook 4) and what a sequence's memory costs (notebooks 7 and 11).
#
# **Afterwards you can** read a schedule of micro-batches, predict a step's time from bytes and rates, and say for a
# model, a context and a network whether the two halves are better apart.
#
# **It takes** a minute on two cores, and 0.9 GB of memory.

# %%
import dataclasses
import itertools

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import Markdown
from matplotlib.patches import Patch

import ling3
from ling3 import afd
from ling3.afd.cost import (
    H200,
    DecodeStep,
    Deployment,
    ModelCost,
    Stage,
    best,
    distinct,
    fullest,
    simulate,
    stages,
    step_time,
)
from ling3.families.deepseek_v4_config import DeepseekV4Config
from ling3.runtime import plots

plots.use()
DIVIDED, SYNCHRONOUS, OVERLAPPED = "divided", "undivided, synchronous", "undivided, overlapped"
LOOKS = {
    DIVIDED: {"color": plots.GREEN, "linestyle": "-", "marker": "o"},
    SYNCHRONOUS: {"color": plots.ORANGE, "linestyle": "--", "marker": "s"},
    OVERLAPPED: {"color": plots.BLACK, "linestyle": ":", "marker": "^"},
}


def table(titles, rows):
    lines = [titles, ["---"] * len(titles), *rows]
    return Markdown("\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines))


# %% [markdown]
# ## Taking turns
#
# Two sessions, one card, and a layer in which the attention of a micro-batch takes 1 ms, the experts for both sessions
# take 1 ms, and the rows 0.2 ms either way. Below is one step of three layers, simulated. What decides who may run next
# are the schedulers of `ling3.afd`: a card takes micro-batch $m$ when the flags of *all* sessions are up for it, then
# $m + 1$; a session goes on with the next micro-batch when all its slots are back.

# %%
PAINT = ((plots.SKY, ""), (plots.ORANGE, "///"), (plots.GREEN, "..."))


def gantt(ax, outcome, end):
    workers = sorted({interval.worker for interval in outcome.timeline}, reverse=True)
    for interval in outcome.timeline:
        if interval.start < end:
            colour, hatch = PAINT[interval.micro_batch]
            row, length = workers.index(interval.worker), min(interval.end, end) - interval.start
            ax.barh(row, length, 0.72, interval.start, color=colour, hatch=hatch, edgecolor="white", linewidth=0.6)
            if length > 0.5:
                ax.text(interval.start + length / 2, row, interval.layer, ha="center",
                        va="center", fontsize=8, bbox={"boxstyle": "circle,pad=0.15",
                                                       "color": "white"})  # fmt: skip
    ax.set(yticks=range(len(workers)), yticklabels=workers, xlim=(0, end))
    ax.grid(axis="y", visible=False)


layer = Stage(attention=1.0, experts=(0.8, 1.0), out=0.15, back=0.15, latency=0.05)
turns = {m: simulate([layer] * 3, attention_workers=2, micro_batches=m) for m in (1, 2, 3)}
fig, axes = plt.subplots(3, 1, figsize=(9, 5.6), sharex=True)
for ax, (m, outcome) in zip(axes, turns.items()):
    gantt(ax, outcome, 12)
    sessions, cards = outcome.attention_utilisation, outcome.ffn_utilisation
    step, busy = outcome.step_time / m, f"sessions {sessions:.0%} busy, cards {cards:.0%}"
    ax.set_title(f"{m} micro-batch{'es' * (m > 1)}: a step every {step:.1f} ms; {busy}", fontsize=10)
axes[2].set(xlabel="time, ms (numbers are layers)")
names = [Patch(facecolor=c, hatch=h, edgecolor="white", label=f"micro-batch {m}") for m, (c, h) in enumerate(PAINT)]
fig.legend(handles=names, loc="outside lower center", ncols=3, fontsize=9)
fig.suptitle("Taking turns, simulated: two sessions, one card, three made-up layers", fontsize=11)
plt.show()

# %% [markdown]
# A single micro-batch leaves each group idle while the other works. Two fill the gaps but for the time on the way, and
# with three nobody waits. In a steady state a layer takes
#
# $$\max(M t_\text{attention},\; M t_\text{experts},\; M t_\text{link},\; t_\text{attention} + t_\text{experts} +
# 2\,t_\text{way}),$$
#
# the busiest resource, or the round trip of one micro-batch if that is longer. So $M - 1$ others have to last for the
# time that one is away: for groups of equal speed, $M \ge 2\,(1 + t_\text{way} / t)$.

# %%
round_trip = 1.0 + 1.0 + 2 * (0.15 + 0.05)
for m, outcome in turns.items():
    assert np.isclose(outcome.step_time, 3 * max(m * 1.0, round_trip)) and np.isclose(
        layer.period(m), outcome.step_time / 3
    )
    assert np.isclose(outcome.ffn_utilisation, m / max(m, round_trip))
assert 2 * (1 + 0.2 / 1.0) == 2.4  # so two are too few, and three are enough

# %% [markdown]
# ## What is in a message
#
# Two sessions with two tokens each, top-2 of four experts. A message has a row for each (token, slot), and the numbers
# of the experts; its flag goes up last.

# %%
HIDDEN, EXPERTS, TOP_K, TOKENS = 4, 4, 2, 2
HS = afd.slot_bytes(HIDDEN, 1)
x = jnp.asarray(np.random.default_rng(0).normal(size=(2, TOKENS, HIDDEN)), jnp.bfloat16)
chosen = jnp.asarray([[[2, 0], [1, 2]], [[2, 3], [0, 2]]], jnp.int32)  # [session, token, slot]
scales = jnp.asarray([[[0.75, 0.25], [0.5, 0.5]], [[0.6, 0.4], [0.9, 0.1]]], jnp.float32)
on_card_0 = jnp.asarray([[1, 0, expert] for expert in range(EXPERTS)], jnp.int32)  # one replica each, under its number

card = afd.FfnArea.empty(2, 1, TOKENS, TOP_K, HS)  # sessions, micro-batches, tokens, slots, bytes of a slot
for session in range(2):
    card, sent = afd.attention_to_ffn(
        card, x[session], session_id=session, micro_batch_id=0, layer_id=7,
        expert_ids=chosen[session], expert_rank_table=on_card_0, rank=0,
        moe_expert_num=EXPERTS, token_dtype=1,
    )  # fmt: skip
    ready = int(afd.ffn_worker_scheduler(card).out_num)
    print(f"after session {session}: flags {card.token_info[:, 0, 0].tolist()}", end=", ")
    print(f"the scheduler takes {ready} messages")
    assert sent and ready == (0, 2)[session]

# %% [markdown]
# The card then sorts the rows by expert. `group_list` says how many rows each expert has, which is what a grouped
# matrix product takes; the rest of each row says where its result goes.

# %%
rows, card = afd.ffn_worker_batching(
    card, expert_num=EXPERTS, max_out_shape=(2, TOKENS, TOP_K, HIDDEN), token_dtype=1, need_schedule=1
)
n = int(rows.actual_token_num)
groups = [(expert, count) for expert, count in rows.group_list.tolist() if count]
expert_of_row = np.repeat(*np.array(groups).T)
assert n == 8 and groups == [(0, 2), (1, 1), (2, 4), (3, 1)] and np.all(np.diff(expert_of_row) >= 0)
columns = (expert_of_row, rows.session_ids, rows.token_ids, rows.topk_slots, rows.expert_offsets)
print("group_list:", groups)
table(
    ["row", "expert", "session", "token", "slot", "place in the group"], [[i, *r] for i, r in enumerate(zip(*columns))]
)

# %% [markdown]
# The experts compute (here expert $e$ multiplies by $e + 1$), each row goes back to its slot, and the session weights
# and sums. Nothing was lost or mixed up:

# %%
y = rows.y * jnp.asarray(expert_of_row + 1, jnp.bfloat16)[:, None]
for session in range(2):
    window = afd.AttentionArea.empty(1, TOKENS, TOP_K, HS)
    window = afd.ffn_to_attention(window, y, rows, session_id=session)
    combined, next_layer, _ = afd.attention_worker_combine(
        window, scales[session], 7, hidden_size=HIDDEN, dtype=jnp.bfloat16, need_schedule=1
    )
    products = np.float32(x[session][:, None] * (chosen[session][:, :, None] + 1).astype(jnp.bfloat16))
    expected = np.sum(np.float32(scales[session])[:, :, None] * products, axis=1)
    np.testing.assert_array_equal(combined, jnp.asarray(expected, jnp.bfloat16))
    assert int(next_layer) == 8

# %% [markdown]
# ## What a stage costs
#
# `ling3.afd.cost` counts bytes and operations from the shapes of a model's own arrays, and takes for a time the larger
# of bytes / bandwidth and operations / peak. For a micro-batch of $B$ sequences, attention reads its weights once, and
# $B$ times the memory of a sequence at its context. Of $T$ tokens with $k$ of $E$ experts each, the experts that are
# touched are read, $E\,(1 - (1 - k/E)^T)$ if the choice is random. Shared experts and dense layers stay with the
# attention.
#
# The two models, as they would be served: Ling-3.0-flash in bfloat16; DeepSeek-V4-Flash as published, with experts of
# 4 bits (and a scale for each 32), FP8 elsewhere, and packed caches (notebook 11). Rows go out as int8 and come back
# as bfloat16. The devices are H200s: 4.8 TB/s, 989 Tflop/s and nine tenths of 141 GB, by NVIDIA's data sheet. Peaks
# count as reached, and operations as those of bfloat16, for all systems alike.

# %%
LING_FLASH = {
    "num_hidden_layers": 42, "layer_group_size": 6, "first_k_dense_replace": 2,
    "hidden_size": 2560, "intermediate_size": 6144, "moe_intermediate_size": 768,
    "moe_shared_expert_intermediate_size": 768, "num_attention_heads": 32,
    "num_experts": 512, "q_lora_rank": None, "max_position_embeddings": 262144,
}  # fmt: skip
V4_FLASH = {
    "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"],
    "vocab_size": 129280, "hidden_size": 4096, "num_hidden_layers": 43,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "num_attention_heads": 64,
    "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8,
    "o_lora_rank": 1024, "sliding_window": 128, "index_n_heads": 64,
    "index_head_dim": 128, "index_topk": 512, "n_routed_experts": 256,
    "num_experts_per_tok": 6, "moe_intermediate_size": 2048, "num_hash_layers": 3,
    "max_position_embeddings": 1048576, "compress_rope_theta": 160000,
    "rope_scaling": {"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1,
                     "original_max_position_embeddings": 65536},
}  # fmt: skip
MODELS = {
    "Ling-3.0-flash": ModelCost.of(ling3.Ling3Config(**LING_FLASH)),
    "DeepSeek-V4-Flash": ModelCost.of(
        DeepseekV4Config.from_dict(V4_FLASH), weight_bytes=1.0, expert_bytes=0.5 + 1 / 32, packed=True
    ),
}
ling, v4 = MODELS.values()


def moved(model, context):
    """Bytes that a step moves for one sequence, in all layers."""
    return sum(b.moved + sum(read.bytes * min(context, read.most) for read in b.reads) for b in model.blocks)


facts = {
    "all weights but routed experts, GB": [m.weights / 1e9 for m in MODELS.values()],
    "routed experts, GB": [len(m.blocks) * m.experts * m.expert_bytes / 1e9 for m in MODELS.values()],
    "experts of a token": [f"{m.top_k} of {m.experts}" for m in MODELS.values()],
    "memory of a sequence of 16k, MB": [m.sequence(16_384) / 1e6 for m in MODELS.values()],
    "moved for it in a step, MB": [moved(m, 16_384) / 1e6 for m in MODELS.values()],
    "the same at 256k, MB": [moved(m, 262_144) / 1e6 for m in MODELS.values()],
}
assert 35 * 2 * 4 * 32 * 128 * 128 < moved(ling, 0) < 1.04 * 35 * 2 * 4 * 32 * 128 * 128  # KDA's states, read, written
assert moved(ling, 16_384) - moved(ling, 0) == 7 * 2 * 576 * 16_384  # and 7 layers of MLA
assert moved(v4, 262_144) < 0.12 * moved(ling, 262_144)
table(["", *MODELS], [[name, *(v if isinstance(v, str) else f"{v:.1f}" for v in two)] for name, two in facts.items()])

# %% [markdown]
# V4 moves a tenth of what Ling moves for a long sequence, and both hold far more bytes in experts than elsewhere. The
# next figure has what decides the ratio of the two groups: device time for each token in one layer. The attention of
# more sequences soon stops getting cheaper, as each brings its own memory. Experts get cheaper up to a thousand or more
# tokens, and then are limited by operations.

# %%
batches = 2 ** np.arange(0, 15)
fig, axes = plt.subplots(1, 2, figsize=(9, 3.3), sharey=True)
for ax, (name, model) in zip(axes, MODELS.items()):
    one = Deployment(1, 1, H200, H200)
    per_token = {"experts": sum(s.experts[-1] for s in stages(model, DecodeStep(0, batches, 1), one))}
    per_token |= {
        f"attention at {label}": sum(s.attention for s in stages(model, DecodeStep(context, batches, 1), one))
        for context, label in ((1024, "1k"), (16_384, "16k"), (131_072, "128k"))
    }
    for (label, seconds), colour in zip(per_token.items(), (plots.BLACK, plots.SKY, plots.BLUE, plots.PINK)):
        ax.loglog(batches, seconds / batches * 1e6, color=colour, label=label)
    ax.set(xlabel="tokens at once on one device")
    ax.set_title(name, fontsize=10)
    assert per_token["experts"][-1] / batches[-1] < 0.02 * per_token["experts"][0]
    longest = per_token["attention at 128k"] / batches
    assert longest[-1] > 0.9 * longest[9]  # from 512 sequences on, more of them gain a tenth at most
axes[0].set(ylabel="device time a token, all layers, µs")
axes[0].legend(fontsize=8)
fig.suptitle("Time of attention and of experts on one H200, computed", fontsize=11)
plt.show()
assert np.isclose(distinct(256, 6, 1), 6) and distinct(512, 8, 256) > 0.98 * 512
touched, at_peak = 256 * v4.expert_bytes / 4.8e12, 6 * v4.expert_flops / 989e12
ling_from = 512 * ling.expert_bytes / 4.8e12 / (8 * ling.expert_flops / 989e12)
print(f"V4's experts are limited by operations from {touched / at_peak:.0f} tokens on,", f"Ling's from {ling_from:.0f}")

# %% [markdown]
# ## The model against the simulation
#
# The formula adds up layers as if each were alone. In a model, a layer of MLA follows five of KDA, and different
# micro-batches are in different layers at a time. So the simulation runs the same stages in their order. A single
# micro-batch takes what the formula says. With more, it is off by at most 5 % here: a long layer of one micro-batch may
# hide behind the others, or hold them up.

# %%
checked = []
CASES = {  # context, batch and micro-batches
    "Ling-3.0-flash": ((6, 2), ((1024, 600, 2), (16_384, 256, 3))),
    "DeepSeek-V4-Flash": ((2, 2), ((1024, 800, 1), (1024, 800, 2))),
}
for name, ((sessions, cards), cases) in CASES.items():
    deployment = Deployment(sessions, cards, H200, H200)
    for context, batch, m in cases:
        work = DecodeStep(context, batch, m, token_dtype=2)
        steps = {"attention_workers": sessions, "ffn_workers": cards, "micro_batches": m, "steps": 1, "warm": 1}
        found, closed = (
            simulate(stages(MODELS[name], work, deployment), **steps),
            step_time(MODELS[name], work, deployment),
        )
        times = [f"{closed * 1e3:.2f}", f"{found.step_time * 1e3:.2f}"]
        busy = [f"{found.attention_utilisation:.0%}", f"{found.ffn_utilisation:.0%}"]
        checked.append([f"{name}, {sessions}:{cards}", f"{context:,}", batch, m, *times, *busy])
        assert abs(found.step_time / closed - 1) < (1e-9 if m == 1 else 0.05)
table(["", "context", "batch", "M", "formula, ms", "simulated, ms", "sessions busy", "cards busy"], checked)

# %% [markdown]
# What the formula leaves out is chance. If each stage's time varies, by a standard deviation of $\sigma$ of its mean,
# a card that waits for all sessions waits for the slowest. More micro-batches absorb that. Or the card takes groups of
# sessions as they come (`sync_group_size`) and waits for fewer; but then it reads the same experts for fewer tokens.
# The simulation says what comes of it, here with four sessions and a card that takes half the time of attention for all
# of them, and a third of it for one.

# %%
stage = Stage(1.0, (0.35, 0.4, 0.45, 0.5), 0.1, 0.1, 0.0)
sigmas, cases = (0.0, 0.2, 0.4), ((2, None), (3, None), (2, 2))
fig, ax = plt.subplots(figsize=(6.5, 3.2))
kept = {}
for m, group in cases:
    options = {"attention_workers": 4, "micro_batches": m, "sync_group_size": group, "steps": 24}
    kept[m, group] = [simulate([stage] * 2, **options, jitter=sigma).attention_utilisation for sigma in sigmas]
    who = "all sessions together" if group is None else "groups of two"
    ax.plot(sigmas, 100 * np.asarray(kept[m, group]), label=f"{m} micro-batches, {who}")
ax.set(xlabel="σ of a stage's time, as a share of its mean", ylabel="sessions busy, %", ylim=(78, 101))
ax.set_title("Chance, and who waits for whom: four sessions, simulated", fontsize=11)
ax.legend(fontsize=8)
plt.show()
assert all(np.isclose(shares[0], 1) for shares in kept.values()) and kept[2, None][-1] < 0.85
for better in ((3, None), (2, 2)):
    assert all(a > b for a, b in zip(kept[better][1:], kept[2, None][1:]))

# %% [markdown]
# A third micro-batch wins back half of what chance costs two, and groups of two help a little.
#
# ## The peer
#
# What is it better than? Take the same $N$ devices undivided: each has all attention weights, $1/N$ of the experts, and
# its own sequences, and rows go round by all-to-all. Two ways to run it:
#
# - *synchronous*: attention, rows out, experts, rows back, and everybody waits for the rows;
# - *overlapped*: with two or more micro-batches, one computes while another's rows are under way. A layer takes
#   $\max(M (t_\text{attention} + t_\text{experts}),\; M (t_\text{out} + t_\text{back}),\; \text{round trip})$, as
#   a device's link carries its own sequences' rows and its experts' answers. Computation and communication are taken
#   not to disturb each other, which is the best that it can be.
#
# Each system takes the largest batch for which its caches fit and a step takes at most 50 ms, and of the ratios A:W and
# of 1 to 4 micro-batches those of most output tokens per second and device.
#
# Before the curves, what they can show. Both systems read the same sequences' memories, and both compute the same rows.
# So a divided one can only win what the peer wastes: time that it waits for rows; and reading (and holding) attention
# weights on $N$ devices instead of $A$. And it has two losses of its own: device time wherever the groups are not
# balanced, and *memory*, as what the experts leave free on a card holds no caches:

# %%
N = 32
for name, model in MODELS.items():
    for cards in (4, 8, 16):
        divided = (N - cards) * Deployment(N - cards, cards, H200, H200).room(model)
        whole = N * Deployment.undivided(N, H200).room(model)
        experts = len(model.blocks) * model.experts * model.expert_bytes
        assert np.isclose(divided - whole, experts - cards * (H200.memory - model.weights), atol=1e9)
        print(f"{name}, {N - cards} sessions and {cards} cards: {divided / whole:.0%}", "of the peer's room for caches")
        assert divided < whole


# %% [markdown]
# The difference of the rooms is experts − W·(memory − other weights): the divided system has more room only where the
# experts fill their cards to the brim.
#
# ## Turning the ratios
#
# **This cell is yours.** Change the numbers, and see how the picture changes: more cards or fewer, other contexts, a
# slower link (50e9 is a network card of 400 Gb/s, 450e9 NVLink, in bytes per second a direction), a tighter limit.
# `once_per_card` sends a token's row once to each card that has an expert of it, and sums there, instead of once for
# each (token, slot) as in the windows above.

# %%
DEVICES, CONTEXT, LINK, LIMIT, ONCE_PER_CARD = 32, 4096, 100e9, 0.050, False
MICRO_BATCHES = (1, 2, 3, 4)


def work_of(context, once_per_card=False):
    return DecodeStep(context, batch=1, micro_batches=1, token_dtype=2, once_per_card=once_per_card)


def peers(model, work, devices, hardware, limit=0.050):
    whole = [Deployment.undivided(devices, hardware)]
    return {SYNCHRONOUS: best(model, work, whole, limit, 1), OVERLAPPED: best(model, work, whole, limit, 4)}


def throughput(plan):
    return 0.0 if plan is None else plan.throughput


hardware = dataclasses.replace(H200, link_bandwidth=LINK)
fig, axes = plt.subplots(1, 2, figsize=(10, 3.8))
for ax, (name, model) in zip(axes, MODELS.items()):
    cards = range(2, DEVICES - 1, 2)
    for m, shade in zip(MICRO_BATCHES, (plots.SKY, plots.BLUE, plots.GREEN, plots.PINK)):
        work = dataclasses.replace(work_of(CONTEXT, ONCE_PER_CARD), micro_batches=m)
        curve = [throughput(fullest(model, work, Deployment(DEVICES - w, w, hardware, hardware), LIMIT)) for w in cards]
        ax.plot(cards, curve, color=shade, label=f"divided, M = {m}")
    for kind, plan in peers(model, work_of(CONTEXT, ONCE_PER_CARD), DEVICES, hardware, LIMIT).items():
        ax.axhline(throughput(plan), color=LOOKS[kind]["color"], linestyle=LOOKS[kind]["linestyle"], label=kind)
    ticks = [w for w in cards if w % 6 == 2]
    ax.set(
        xlabel="sessions : cards",
        xticks=ticks,
        xticklabels=[f"{DEVICES - w}:{w}" for w in ticks],
        ylim=(0, None),
    )
    ax.set_title(name, fontsize=10)
axes[0].set(ylabel="tokens / s / device")
fig.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
limits = f"{LINK / 1e9:.0f} GB/s, at most {LIMIT * 1e3:.0f} ms a token"
fig.suptitle(f"Throughput of {DEVICES} H200s, computed\ncontext {CONTEXT:,}, {limits}", fontsize=11)
plt.show()

# %% [markdown]
# With the numbers as they stand: a divided system of one micro-batch is far below everything else, and three do better
# than two. The ratio matters as much: with twice as many cards as it needs, Ling gives little more than half the
# tokens. At the best ratio AFD beats the synchronous peer, and stays below the one that overlaps. (The assertions
# compute it anew, so that you may change the cell above.)

# %%
usual = dataclasses.replace(H200, link_bandwidth=100e9)
apart = [Deployment(N - w, w, usual, usual) for w in range(2, N, 2)]
for name, model in MODELS.items():
    works = {m: dataclasses.replace(work_of(4096), micro_batches=m) for m in (1, 2, 3)}
    by_m = {m: max(throughput(fullest(model, work, one, 0.050)) for one in apart) for m, work in works.items()}
    plan, peer = best(model, work_of(4096), apart, 0.050), peers(model, work_of(4096), N, usual)
    assert by_m[1] < 0.6 * by_m[2] and by_m[2] < by_m[3]
    assert (
        1.1 < plan.throughput / peer[SYNCHRONOUS].throughput < 1.5
        and plan.throughput < 0.8 * peer[OVERLAPPED].throughput
    )
    workers = f"{plan.deployment.attention_workers}:{plan.deployment.ffn_workers}"
    shape = f"{workers}, {plan.work.micro_batches} micro-batches"
    compared = [f"{plan.throughput / other.throughput:.2f} of {kind}" for kind, other in peer.items()]
    print(f"{name}, {shape}:", "; ".join(compared))
three, ten = dataclasses.replace(work_of(4096), micro_batches=3), Deployment(22, 10, usual, usual)
twenty = Deployment(12, 20, usual, usual)
assert fullest(ling, three, twenty, 0.050).throughput < 0.6 * fullest(ling, three, ten, 0.050).throughput

# %% [markdown]
# ## When does it win?
#
# The same over contexts and links, on 32 equal devices, each system at its best ratio and number of micro-batches.
# Numbers above one are green: there the divided system gives more tokens per second and device than the peer.

# %%
CONTEXTS, LINKS = (512, 2048, 8192, 32_768, 131_072), (25e9, 50e9, 100e9, 200e9, 450e9)
RATIOS = (4, 6, 8, 11, 16)
ratio = {(name, kind): np.zeros((5, 5)) for name in MODELS for kind in (SYNCHRONOUS, OVERLAPPED)}
for (name, model), (i, context), (j, link) in itertools.product(MODELS.items(), enumerate(CONTEXTS), enumerate(LINKS)):
    hardware = dataclasses.replace(H200, link_bandwidth=link)
    divided = throughput(
        best(model, work_of(context), [Deployment(N - w, w, hardware, hardware) for w in RATIOS], 0.050)
    )
    for kind, plan in peers(model, work_of(context), N, hardware).items():
        ratio[name, kind][i, j] = divided / throughput(plan)

fig, axes = plt.subplots(2, 2, figsize=(8.5, 6), sharex=True, sharey=True)
for ax, ((name, kind), values) in zip(axes.T.flat, ratio.items()):
    picture = ax.pcolormesh(np.log2(values), cmap="PiYG", vmin=-0.8, vmax=0.8, edgecolors="white", linewidth=0.5)
    for i, j in np.ndindex(values.shape):
        ink = "white" if abs(np.log2(values[i, j])) > 0.5 else plots.BLACK
        ax.text(j + 0.5, i + 0.5, f"{values[i, j]:.2f}", ha="center", va="center", fontsize=9, color=ink)
    ax.set(xticks=np.arange(5) + 0.5, yticks=np.arange(5) + 0.5)
    ax.set_title(f"{name}, {kind.split(', ')[1]} peer", fontsize=10)
    ax.set(xticklabels=[f"{link / 1e9:.0f}" for link in LINKS], yticklabels=["512", "2k", "8k", "32k", "128k"])
    ax.grid(visible=False)
    ax.tick_params(length=0)
for ax in axes[1]:
    ax.set(xlabel="link, GB/s a direction")
for ax in axes[:, 0]:
    ax.set(ylabel="context, tokens")
bar = fig.colorbar(picture, ax=axes, ticks=[-0.8, 0, 0.8], shrink=0.6, label="divided / peer")
bar.ax.set_yticklabels(["0.57", "1", "1.74"])
fig.suptitle(f"Throughput of {N} H200s, divided and as an undivided peer, computed", fontsize=11)
plt.show()

# %%
sync = {name: ratio[name, SYNCHRONOUS] for name in MODELS}
assert all(ratio[name, OVERLAPPED].max() < 0.95 for name in MODELS)
assert np.all(sync["Ling-3.0-flash"][3:] < 1) and 1.1 < sync["Ling-3.0-flash"].max() < 1.2
assert np.all(sync["DeepSeek-V4-Flash"][:4, 1:] > 1) and 1.35 < sync["DeepSeek-V4-Flash"].max() < 1.55
assert np.all(sync["DeepSeek-V4-Flash"][:4, 0] < 1) and np.all(sync["DeepSeek-V4-Flash"][4, 3:] < 0.9)
assert (
    np.all(sync["Ling-3.0-flash"][4] < 0.76)
    and 0.75 < sync["Ling-3.0-flash"][3].min() < sync["Ling-3.0-flash"][3].max() < 0.9
)

# %% [markdown]
# On equal devices:
#
# - **Against a synchronous peer** AFD wins where the rows' way is a large part of a step but not all of it: V4 up to
#   32k tokens from 50 GB/s on, by up to a half around 100 to 200 GB/s, as it moves little state for a sequence, so that
#   the way weighs more; Ling up to 8k tokens, by a tenth or so, and not on NVLink.
# - **Slow links** are everybody's bottleneck. At 25 GB/s V4 is better left whole: undivided, all links share the rows
#   of both ways; divided, the way back, in bfloat16, holds up the way out, in int8.
# - **Long contexts** fill the memory, and a card has no caches. Ling loses a tenth to a quarter at 32k, and
#   a quarter to a third at 128k; V4, whose caches are smaller, a seventh at 128k on fast links.
# - **Against a peer that overlaps perfectly** it wins nowhere, as the counting above said. An overlap is never perfect:
#   the kernels of all-to-all take a part of the device from the computation (20 of 132 multiprocessors in DeepSeek-V3's
#   [training](https://arxiv.org/abs/2412.19437)). Where the map says 0.93, AFD wins if the overlap costs its peer more
#   than a fourteenth of its speed, and sending the rows costs AFD less.
#
# A [study by Baidu](https://arxiv.org/abs/2602.09721) comes to a like conclusion, with another model of costs: a "dead
# zone" on usual networks, and a gain on devices that are connected better and for models of coarser experts. Gains of
# several times, as in the papers above, are against peers that batch less, or on unequal devices.
#
# ## Unequal devices
#
# The two groups need not be of one kind. Take H20s (96 GB, 4.0 TB/s, 148 Tflop/s), which read as fast as others compute
# five times more, and H800s (80 GB, 3.35 TB/s, 989 Tflop/s), all linked by 200 GB/s. Attention on the H20s and experts
# on the H800s; the peers are two undivided systems side by side, one of each kind, both overlapped, and what counts is
# the sum of their tokens.

# %%
H20 = dataclasses.replace(H200, memory=0.9 * 96e9, memory_bandwidth=4.0e12, flops=148e12, link_bandwidth=200e9)
H800 = dataclasses.replace(H200, memory=0.9 * 80e9, memory_bandwidth=3.35e12, flops=989e12, link_bandwidth=200e9)


def tokens(plan):
    """Per second, of all devices, whose price is 1."""
    return 0.0 if plan is None else plan.throughput * plan.deployment.price


mixed = {}
for (name, model), (few, context) in itertools.product(MODELS.items(), itertools.product((4, 6), (1024, 4096, 65_536))):
    work, many = work_of(context), 32 - few
    divided = tokens(best(model, work, [Deployment(many, few, H20, H800)], 0.050))
    beside = [
        tokens(best(model, work, [Deployment.undivided(n, kind)], 0.050)) for n, kind in ((many, H20), (few, H800))
    ]
    mixed[name, many, few, context] = (divided, *beside, divided / sum(beside))
assert mixed["Ling-3.0-flash", 26, 6, 1024][-1] > 1.15 and mixed["DeepSeek-V4-Flash", 28, 4, 65_536][-1] > 1.2
assert mixed["Ling-3.0-flash", 26, 6, 65_536][-1] < 0.8 and mixed["DeepSeek-V4-Flash", 26, 6, 1024][-1] < 0.8
table(
    ["", "H20 : H800", "context", "divided, tokens / s", "H20s alone", "H800s alone",
     "divided / sum"],
    [[name, f"{a}:{w}", f"{context:,}",
      *(f"{v:,.0f}" for v in values[:3]), f"{values[3]:.2f}"]
     for (name, a, w, context), values in mixed.items()],
)  # fmt: skip

# %% [markdown]
# Here AFD wins even against peers that overlap. Six H800s have just room for Ling's experts, and little for caches when
# they serve by themselves; four have room for V4's, and at 64k tokens the same holds. With another ratio, or where the
# H800s alone would serve V4 much faster than the H20s can bring them rows, it loses again. So the ratio has to fit the
# model *and* the context.

# %% [markdown]
# ## The real system
#
# All of this is what `ling3.afd.disaggregate` runs: sessions without routed experts, cards with a share of each
# layer's, and the operators above between them. Here it is on *nano*, two of each on this machine's processor. The ids
# are those of the whole model. (Nothing is faster here, of course: both groups share the same cores.)

# %%
whole = ling3.load("nano")
prompts = [[1, 2, 3], [4, 5], [6]]
together = ling3.generate(whole, prompts, max_tokens=8, temperature=0.0, ignore_eos=True)
system = afd.disaggregate(whole, attention_workers=2, ffn_workers=2, micro_batches=2)
answers = system.generate(prompts, max_tokens=8, temperature=0.0, ignore_eos=True)
assert answers == together
assert len(system.attention_workers) == len(system.ffn_workers) == 2
print("rows that each card has computed:", list(system.stats().rows))

# %% [markdown]
# ## Exercises
#
# **1.** A session's link has a latency of 5 µs. In a layer of Ling-3.0-flash attention takes 40 µs a micro-batch, the
# experts 30 µs, and the rows 10 µs each way. How many micro-batches keep the sessions busy? How many do with a latency
# of 50 µs, and how many on a link of 5 µs that is half as fast?
#
# <details><summary>Solution</summary>
#
# The round trip is 40 + 30 + 2·(10 + 5) = 100 µs, so $M \cdot 40 \ge 100$: three. With 50 µs it is 190 µs: five. Each
# of them reads all the weights again. On the slower link it is 40 + 30 + 2·(20 + 5) = 120 µs: still three, which now
# leave no slack at all. (The link itself is busy for 20 of the 40 µs of a micro-batch, so it is not the limit.)
#
# </details>
#
# **2.** In the cell of *Turning the ratios*, halve the link: `LINK = 50e9`. Predict for both models how much each of
# these loses at its best ratio: a divided system with one micro-batch, one with three, the synchronous peer, the
# overlapped one. Who wins? And why does a single micro-batch do so badly at either speed, although the synchronous peer
# waits for the rows as well?
#
# <details><summary>Solution</summary>
#
# At 100 and at 50 GB/s, in tokens per second and device:
#
# | | Ling-3.0-flash | DeepSeek-V4-Flash |
# |---|---|---|
# | divided, one micro-batch | 6,963 → 4,956 (−29 %) | 7,937 → 5,192 (−35 %) |
# | divided, three | 16,263 → 12,617 (−22 %) | 22,556 → 11,724 (−48 %) |
# | undivided, synchronous | 14,239 → 10,357 (−27 %) | 16,141 → 10,613 (−34 %) |
# | undivided, overlapped | 22,216 → 18,888 (−15 %) | 30,384 → 15,586 (−49 %) |
#
# Whoever waits for the rows loses about a third. With other micro-batches to work on, Ling hides more of the wait. V4
# cannot: its rows had filled the link before, so half the link is half the tokens, and a fourth micro-batch adds
# nothing. The divided system at its best is now 22 % ahead of the synchronous peer with Ling, instead of 14, and 10 %
# with V4, instead of 41; the overlapped peer stays ahead of both.
#
# As for one micro-batch, both wait for the rows, but in the undivided system every device works in both halves of a
# layer. Divided, A devices are idle while the cards work, and W while the sessions do.
#
# </details>
#
# **3.** All 512 experts of Ling are touched in every layer anyway. What does a card gain from more sessions then?
#
# <details><summary>Solution</summary>
#
# It reads the same bytes for more tokens: the time stays, and the time per token falls, until the operations take
# longer than the reading, at 13 thousand tokens. Only after that are more sessions of no more use to a card.
#
# </details>

# %%
# 1
for latency, enough in ((5.0, 3), (50.0, 5)):
    asked = Stage(40.0, (30.0,), 10.0, 10.0, latency)
    busy = {
        m: simulate([asked] * 2, attention_workers=1, micro_batches=m).attention_utilisation
        for m in (enough - 1, enough)
    }
    assert busy[enough - 1] < 1 - 1e-6 and np.isclose(busy[enough], 1)

# 2
alone = Stage(1.0, (1.0,), 0.1, 0.1, 0.0)
assert alone.period(1) == alone.period(1, divided=False) == 2.2  # on twice as many devices, if divided

# 3
times = [
    stages(ling, DecodeStep(0, batch, 1), Deployment(1, 1, H200, H200))[1].experts[-1]
    for batch in (1024, 8192, 16_384, 32_768)
]
assert np.isclose(times[0], times[1], rtol=1e-6) and np.isclose(times[3], 2 * times[2])
