# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # 8. Serving: continuous batching, turn by turn
#
# One request alone leaves a processor idle: decoding reads all weights to compute one token. Requests in one batch
# share those reads, so a server wants many at once. But requests come at any time, are short or long, and the length of
# an answer is unknown. `ling3.Engine` lets requests join and leave a running batch between two calls to the device:
# *continuous batching* (Orca; Yu et al., OSDI 2022), on pages (vLLM; Kwon et al., SOSP 2023).
#
# Here it is slowed down until each turn can be seen: four slots and few pages, *nano* as the model, one `step()` at a
# time.
#
# **You need**: the two memories of a hybrid (notebook 7), and that a prompt is read many tokens at a time (*prefill*)
# and an answer written one by one (*decoding*).
#
# **Afterwards you can** read a timeline of slots and pages, say which setting makes requests wait, be preempted or
# leave rows idle, and explain what it takes for an answer to have the same bits in any company.
#
# **It takes** less than a minute on two cores, and 0.5 GB of memory.

# %%
import dataclasses
import inspect
import itertools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import ling3
from ling3.runtime import plots
from ling3.serve import Loop
from ling3.train.nano.problems import ask, last_integer, problems

plots.use()
nano, tok = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")
engine = ling3.Engine(
    nano,
    tok,
    max_running_requests=4,  # slots: a slot holds one request's KDA states
    num_pages=26,  # pages: each holds the MLA latents of 16 tokens
    page_size=16,
    chunked_prefill_size=32,  # prompt tokens that may go in per turn
    token_paddings=(16, 32),  # the widths that prefill is compiled for
    decode_rows=4,  # requests to a decode call
    decode_steps=4,  # tokens to a decode call
    max_model_len=384,
)
engine.warmup()  # compiles every program there is; nothing is compiled after this
print(engine.stats())

# %% [markdown]
# ## The turn
#
# The heart of the engine is one function, called over and over. This is it, as it stands in `ling3/serve.py`, the file
# that this notebook walks through:

# %%
print(inspect.getsource(Loop.turn))

# %% [markdown]
# Five things happen in a turn:
#
# 1. **Make room.** Every decoding request will write up to four more latents. If pages run out, the youngest is
#    preempted.
# 2. **Admit.** The oldest waiting request gets a slot and pages, while there are any: first come, first served.
# 3. **Extend.** Prompts go into the caches by chunks, at most 32 padded tokens a turn, so that a long prompt does not
#    make the others wait. Nothing is sampled, and a prompt's last token stays out.
# 4. **Decode.** One call computes up to four tokens for every request whose prompt is in but for that token, with which
#    decoding begins.
# 5. **Read** what the turn *before* has computed, while the device works on this one.
#
# So Python and the device work at the same time, and Python sees tokens one turn late: a request that has ended keeps
# its slot for one turn more, its row idle.
#
# ## Eleven requests in four slots
#
# Word problems that end when the answer is given, some talkers that go on for 90 tokens whatever they say, and one
# prompt with three worked examples. They come in three waves.

# %%
some = list(itertools.islice(problems(5, "held_out"), 16))
greedy = ling3.SamplingParams(max_tokens=64, logprobs=0)
talk = ling3.SamplingParams(max_tokens=90, ignore_eos=True, temperature=1.0, seed=3, logprobs=0)
few_shot = ask(some[4], some[12:15])
arrivals = {
    0: [(ask(some[0]), greedy), (ask(some[1]), talk), (ask(some[2]), greedy)],
    4: [(ask(some[3]), talk), (few_shot, greedy), (ask(some[5]), greedy), (ask(some[6]), greedy)],
    12: [(ask(some[7]), talk), (ask(some[8]), greedy), (ask(some[9]), greedy), (ask(some[10]), talk)],
}
print(f"the worked examples take {len(tok.encode(few_shot))} tokens,", f"a problem {len(tok.encode(ask(some[0])))}")


def watch(engine, arrivals):
    """Steps until all is done: turns as the host saw them, answers by request id."""
    log, outputs, prefilled, first_id = [], {}, {}, None
    while engine.has_work or len(log) <= max(arrivals):
        for prompt, params in arrivals.get(len(log), ()):
            number = engine.submit(prompt, params)
            first_id = number if first_id is None else first_id
        before = engine.stats()
        deltas = engine.step()
        running, scheduler = {}, engine.loop.scheduler  # a look inside: what `stats` counts, by name
        for sequence in scheduler.running:
            number = sequence.request.request_id - first_id
            waits = "decode" if sequence.decoding else "ready"
            phase = "prefill" if sequence.prefilled > prefilled.get(number, 0) else waits
            running[sequence.memory.slot] = (number, phase, len(sequence.memory.pages))
            prefilled[number] = sequence.prefilled
        waiting = [(each.request.request_id - first_id, each.times.preemptions > 0) for each in scheduler.queued()]
        outputs |= {d.request_id - first_id: d.output for d in deltas if d.output is not None}
        log.append({"running": running, "waiting": waiting, "before": before, "stats": engine.stats()})
    return log, outputs


log, crowded = watch(engine, arrivals)
print("turn  waiting  free slots  free pages  prompt tokens  output tokens read")
for turn, (now, b) in enumerate((entry["stats"], entry["before"]) for entry in log[:12]):
    new = (now.prompt_tokens - b.prompt_tokens, now.output_tokens - b.output_tokens)
    print(f"{turn:4} {now.waiting:8} {now.free_slots:11} {now.free_pages:11}", f"{new[0]:14} {new[1]:19}")
stats = engine.stats()
assert stats.submitted == sum(stats.finished.values()) == 11 and stats.free_slots == 4 and stats.free_pages == 26
assert stats.preemptions >= 1
print(f"\n{stats.steps} turns, {stats.prefill_calls} prefill", f"and {stats.decode_calls} decode calls", end=", ")
print(f"{stats.output_tokens} tokens, {stats.preemptions} preemptions")

# %% [markdown]
# The whole run in one picture. A colour and a number are a request; hatched: its prompt is prefilled; dotted: it has a
# slot, but older prompts go first. Below the slots are the waiting requests (crossed: preempted before), and at the
# bottom the owners of the pages.

# %%
COLOURS = [plots.SKY, plots.ORANGE, plots.GREEN, plots.YELLOW, plots.PINK, plots.BLUE, plots.RED, "#BBBBBB"]
HATCH = {"prefill": "/////", "ready": "....", "decode": ""}
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
fig, (slots, pages) = plt.subplots(2, 1, figsize=(11, 6.4), sharex=True, height_ratios=(3, 1.5))
last = {}
for turn, entry in enumerate(log):
    cells = {slot: (number, HATCH[phase]) for slot, (number, phase, _) in entry["running"].items()}
    cells |= {5 + i: (number, "xx" if preempted else "") for i, (number, preempted) in enumerate(entry["waiting"])}
    for row, (number, hatch) in cells.items():
        faded = 0.45 if row >= 5 else 1.0
        look = {"color": COLOURS[number % 8], "edgecolor": "#444444", "linewidth": 0.3}
        slots.barh(row, 1, left=turn, hatch=hatch, alpha=faded, **look)
        if last.get(row) != number:
            slots.text(turn + 0.1, row, str(number), va="center", fontsize=8, weight="bold", bbox=LABEL)
    last = {row: number for row, (number, _) in cells.items()}
    bottom = 0
    for _, (number, _, held) in sorted(entry["running"].items()):
        look = {"color": COLOURS[number % 8], "edgecolor": "#444444", "linewidth": 0.3}
        pages.bar(turn + 0.5, held, 1, bottom=bottom, **look)
        bottom += held
    if entry["stats"].preemptions > entry["before"].preemptions:
        pages.plot(turn + 0.5, 29.5, marker="v", color=plots.BLACK, markersize=7)
waits = max(len(entry["waiting"]) for entry in log)
slots.set_yticks([0, 1, 2, 3, *range(5, 5 + waits)], [*(f"slot {i}" for i in range(4)), *["waits"] * waits])
slots.invert_yaxis()
slots.grid(visible=False)
pages.axhline(26, color=plots.BLACK, linewidth=1)
pages.annotate("all 26 pages", (len(log), 26), xytext=(-3, 3), textcoords="offset points", ha="right", fontsize=9)
pages.set(xlabel="turn of the loop  (▼ a preemption)", ylabel="pages held", ylim=(0, 32), xlim=(0, len(log)))
pages.grid(visible=False)
fig.suptitle("Eleven requests in four slots of an engine that serves nano", fontsize=11)
plt.show()

# %% [markdown]
# What to look for:
#
# - **Slots do not stay empty** while a request waits and has enough pages. A request that ends (mostly a problem, whose
#   answer is short) is followed by the next in the queue a turn later.
# - **A long prompt shares the turns.** Request 4, the worked examples, is hatched for many turns, and in each of them
#   the others go on decoding. Other requests wait longer for prefill, though: prompts go in one after another.
# - **Pages become scarce** when long answers grow. At a ▼ the *youngest* running request is swapped out: its states and
#   pages are copied to the host, bit for bit. It is swapped in again, at its old place in the order, when older
#   requests have made room. The oldest is never preempted, so there is always progress and no deadlock.

# %%
together = [{number for number, _, _ in entry["running"].values()} for entry in log]
prefilling = [t for t, entry in enumerate(log) if (4, "prefill") in [x[:2] for x in entry["running"].values()]]
assert len(prefilling) >= 5 and all(len(together[t]) > 1 for t in prefilling)
for t in prefilling:
    assert log[t]["stats"].decode_calls == log[t]["before"].decode_calls + 1, "the others decode meanwhile"
for entry in log:
    now = entry["stats"]
    held = sum(n for _, _, n in entry["running"].values())
    assert now.free_pages + held == now.pages and now.running + now.free_slots == now.slots
oldest = [min(numbers) for numbers in together if numbers]
assert oldest == sorted(oldest), "the oldest running request stays until it is done"
solved = [last_integer(crowded[i].text) == some[i].answer for i in (0, 2, 4, 5, 6, 8, 9)]
print(f"{sum(solved)} of {len(solved)} problems among them are right")
assert sum(solved) >= 6

# %% [markdown]
# ## The promise
#
# Whatever other requests run beside a request, whenever it comes, and however often it is preempted: its tokens and
# their log-probabilities are *bit for bit* those of the same request alone. Here is each request once more, alone:

# %%
asked = [request for turn in sorted(arrivals) for request in arrivals[turn]]
for number, (prompt, params) in enumerate(asked):
    (alone,) = engine.generate([prompt], params)
    assert alone.token_ids == crowded[number].token_ids
    assert [x.logprob for x in alone.logprobs] == [x.logprob for x in crowded[number].logprobs]
moved = [number for number, output in crowded.items() if output.outputs[0].timings.preemptions]
print(f"{len(asked)} answers equal to the last bit,", f"among them those of request {moved}, which had been preempted")
assert moved

# %% [markdown]
# This does not come by itself. Floating-point sums depend on their order, and a library picks the order by the *shape*
# of what it is given: the same row, multiplied alone and in a batch, may differ in the last bits. One such bit can
# decide between two tokens, and from there on the two texts differ.

# %%
rows = jnp.asarray(np.random.default_rng(0).standard_normal((64, 128)), jnp.float32)
weight = nano.lm_head.weight
multiply = jax.jit(lambda x: x @ weight.T)
in_a_batch, by_one = multiply(rows), jnp.concatenate([multiply(rows[i : i + 1]) for i in range(64)])
np.testing.assert_allclose(in_a_batch, by_one, rtol=1e-4, atol=1e-4)
differ, most = int(jnp.sum(in_a_batch != by_one)), float(jnp.max(jnp.abs(in_a_batch - by_one)))
print(f"{differ:,} of {by_one.size:,} logits differ on this machine, by up to {most:.0e}")

# %% [markdown]
# So the engine fixes the shapes: a decode call has `decode_rows` rows, empty ones among them if need be; a prompt goes
# in alone, cut at multiples of the chunk; a row's pages are summed in order; and draws are keyed by (seed, position)
# and not by a shared stream. The price is arithmetic on empty rows, which `batch_invariant=False` saves.
#
# ## Prompts that begin alike
#
# Six problems after the same three worked examples: the first request computes the examples, and the others go on from
# there. Pages they can share. KDA's states are overwritten by the next token, so the engine has kept *snapshots* of
# them: after every full step of 32 tokens, the least common multiple of a page and a prefill call. Up to there the
# caches depend on the tokens alone, bit for bit, and so does every answer.

# %%
alike = [ask(problem, some[12:15]) for problem in some[4:10]]
engine.forget_prefixes()
before = engine.stats()
known = [engine.generate(prompt, greedy)[0] for prompt in alike]
after = engine.stats()
without = ling3.Engine(nano, tok, engine.settings, prefix_cache=False)
for prompt, output in zip(alike, known, strict=True):
    (cold,) = without.generate(prompt, greedy)
    assert output.token_ids == cold.token_ids
    assert [x.logprob for x in output.logprobs] == [x.logprob for x in cold.logprobs] and cold.cached_tokens == 0
    print(f"{output.cached_tokens:3} of {len(output.prompt_token_ids)}", "prompt tokens were known")
same = min(
    next(i for i, (a, b) in enumerate(zip(x, y)) if a != b)
    for x, y in itertools.combinations([output.prompt_token_ids for output in known], 2)
)
assert known[0].cached_tokens == 0
assert all(output.cached_tokens >= same // 32 * 32 for output in known[1:])
assert after.cached_tokens - before.cached_tokens == sum(output.cached_tokens for output in known)
print(f"kept: {after.cached_pages} of {after.pages} pages,", f"and {after.snapshot_bytes:,} bytes of snapshots")
assert after.free_pages == after.pages, "pages that no running request uses are as good as free"

# %% [markdown]
# ## What it gains
#
# The older way is *static* batching: take four requests, decode until the last of them is done, take the next four. The
# others' rows then idle. Here are 24 requests whose answers have 4 to 64 tokens (drawn log-uniformly), in both ways on
# the same engine, in decode calls as the engine counts them.

# %%
lengths = np.round(np.exp(np.random.default_rng(1).uniform(np.log(4), np.log(64), 24))).astype(int).tolist()
short = ling3.SamplingParams(ignore_eos=True)
requests = [(tok.encode(f"Question: {p.question}")[:8], n) for p, n in zip(itertools.cycle(some), lengths)]


def decode_calls(groups):
    """The engine's decode calls for groups of requests, one group after the other."""
    before = engine.stats().decode_calls
    for group in groups:
        engine.generate([ids for ids, _ in group], [dataclasses.replace(short, max_tokens=n) for _, n in group])
    return engine.stats().decode_calls - before


def list_schedule(lengths, slots, per_call):
    """Calls if free slots take the next request at once, at `per_call` tokens each."""
    free = [0] * slots
    for n in lengths:
        slot = int(np.argmin(free))
        free[slot] += -(-n // per_call)
    return max(free)


decoded = sum(lengths)
static = decode_calls([requests[i : i + 4] for i in range(0, 24, 4)])
continuous = decode_calls([requests])
counted = {
    "static batches of four": static,
    "continuous": continuous,
    "continuous, ideal": list_schedule(lengths, 4, 4),
    "no row ever idle": -(-decoded // 16),
}
fig, ax = plt.subplots(figsize=(7.5, 2.5))
colours = (plots.ORANGE, plots.BLUE, plots.SKY, "#DDDDDD")
bars = ax.barh(list(counted), list(counted.values()), color=colours, edgecolor=plots.BLACK, linewidth=0.6)
for bar, hatch in zip(bars, plots.HATCHES):
    bar.set_hatch(hatch)
used = [f"{n}: {100 * decoded / (16 * n):.0f} % of 16 tokens a call" for n in counted.values()]
ax.bar_label(bars, used, padding=4)
ax.set(xlabel="decode calls, four rows and up to four steps each", xlim=(0, 1.7 * static))
ax.set_title("Decode calls for 24 requests to nano, by way of batching", fontsize=11)
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
plt.show()
by_hand = sum(-(-max(lengths[i : i + 4]) // 4) for i in range(0, 24, 4))
print(f"static, by hand: {by_hand} calls if all four began at once;", f"{static} counted, as prompts go in one by one")
assert counted["continuous, ideal"] <= continuous < static and by_hand <= static

# %% [markdown]
# The gap between static and continuous is the spread of lengths: with all answers equal it would all but vanish. The
# gap between continuous and its ideal comes from this loop: prompts are prefilled one after the other, a slot is
# refilled a turn after its request has ended, an answer's first token comes in a call of one step so that nobody waits
# for it longer, and the last requests run with idle slots beside them.
#
# ## Exercises
#
# **1.** Which setting makes preemption happen in the run above? Read off the picture how many pages the four slots
# would have needed without it, and predict the smallest `num_pages` with which the same arrivals cause no preemption.
# Would three slots instead of four have done as well? Then try:
#
# ```python
# for changes in ({"num_pages": 64}, {"max_running_requests": 3}):
#     other = ling3.Engine(nano, tok, engine.settings, **changes)
#     seen, _ = watch(other, arrivals)
#     held = max(sum(pages for _, _, pages in entry["running"].values()) for entry in seen)
#     print(changes, f"{other.stats().preemptions} preemptions, {len(seen)} turns, at most {held} pages held")
# ```
#
# <details><summary>Solution</summary>
#
# `num_pages`: pages end before slots do. With 64 of them at most 28 are held at a time, so 28 are enough, and one fewer
# already costs a preemption. Three slots avoid it too (at most 24 pages are held), but nobody has been helped: the
# fourth request waits outside instead, and the same work takes 68 turns instead of 60. With all the pages it needs it
# takes 60 too, so one preemption is cheap. The answers are the same every time.
#
# </details>
#
# **2.** What would `decode_steps=1` change? Which of turns, decode calls and answers stay the same?
#
# <details><summary>Solution</summary>
#
# The host looks after every token: less waste after an end, quicker admission, and more calls. The run takes 184 turns
# instead of 60, and 183 decode calls instead of 67. Somebody is preempted all the same: a turn has to find room for one
# more latent of each request and not for four, but the answers are as long. The answers' bits stay the same, since each
# step computes what it did before.
#
# </details>
#
# **3.** A transformer server may preempt by dropping the pages and reading prompt and answer again later. Why does this
# engine copy to the host instead?
#
# <details><summary>Solution</summary>
#
# To keep the promise. A token that was decoded alone would be read again in a chunk, with sums in another order, and
# the latents and states would differ in their last bits. A copy brings back every bit. For a hybrid it is cheap, too:
# the states have the same size however long the text is.
#
# </details>
