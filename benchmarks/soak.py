"""A long run of the engine: requests of every kind, each answer compared with its solo run, with memory watched.

    python -m benchmarks.soak --requests 2000 --out benchmarks/results

Two engines share their compiled programs. The busy one has few slots and too few pages, so that requests wait, are
preempted, and are aborted in every stage; many prompts begin alike, so that its prefix cache is hit, filled and evicted
all the time. Each finished request is also sent to the lonely one, which serves nothing else and has no prefix cache,
and both answers must have the same bits. The engine's counts are checked after every step.
"""

import dataclasses
import gc
import resource
import sys
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import ling3
from benchmarks import record
from benchmarks.soak_report import LOAD, MEMORY, Soak, table
from ling3.engine.outputs import Completion, Delta, RequestOutput
from ling3.engine.request import Request, TokenSequence
from ling3.engine.runner import Saved
from ling3.runtime.progress import progress
from ling3.text.tokenizer import Tokenizer
from ling3.train.nano import problems

SETTINGS = {
    "max_running_requests": 8,
    "num_pages": 26,
    "page_size": 16,
    "chunked_prefill_size": 64,
    "token_paddings": (16, 64),
    "max_model_len": 512,
    "max_queue": 64,
    "decode_rows": 8,
    "decode_steps": 4,
}
"""Eight slots, and hardly more pages than the longest request takes, which is 25."""

STAGES = ("queued", "prefill", "decode", "preempted")
"""Stages in which a request can be aborted."""
COMPANY = 24
"""The most requests in progress at once."""
BURST = 3
"""The most requests that are submitted before one step."""
PHASE = 40
"""Steps, on average, between changes of the intended number of requests in progress."""
EAGERNESS = 0.2
"""The probability per step of an abort that is due, if a request is in the right stage."""
ALIKE = 0.4
"""The share of prompts that begin like others, up to a random token."""
BEGINNINGS = 3
"""The number of shared beginnings."""
REQUESTS_SAMPLED = 10
"""Finished requests between two measurements of memory."""
STEPS_SAMPLED = 10
"""Steps between two records of the load."""


@dataclasses.dataclass
class _Asked:
    """A request in progress, and the tokens and text of its deltas so far, by completion."""

    prompt: list[int]
    params: ling3.SamplingParams
    token_ids: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    text: dict[int, str] = dataclasses.field(default_factory=dict)

    def take(self, delta: Delta) -> None:
        self.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
        self.text[delta.index] = self.text.get(delta.index, "") + delta.text


def soak(
    requests: int,
    *,
    seed: int = 0,
    aborts: float = 0.1,
    longest_prompt: int = 300,
    longest_output: int = 100,
    settings: Mapping[str, Any] = SETTINGS,
    advance: Callable[[int], None] = lambda done: None,
) -> Soak:
    """Sends `requests` requests through an engine with these `settings` over nano in float32, and checks the results.

    A share `aborts` of them is aborted. Everything except the timing follows from `seed`. Raises AssertionError if the
    engine's counts do not add up after a step.
    """
    model, tokenizer = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")
    busy = ling3.Engine(model, tokenizer, **settings)
    lonely = ling3.Engine(model, tokenizer, busy.settings, prefix_cache=False)
    busy.warmup()
    vocab = model.config.vocab_size
    compiled, before, begin = busy.loop.runner.programs, alive(), time.perf_counter()
    draw = np.random.default_rng([seed, requests])
    asked: dict[int, _Asked] = {}
    submitted = done = compared = company = 0
    aborted, stage = Counter[str](), STAGES[0]
    differences, memory, load = [], table(MEMORY), table(LOAD)
    _note(memory, *_memory(0))
    while submitted < requests or busy.has_work:
        if draw.random() < 1 / PHASE:
            company = int(draw.integers(1, COMPANY + 1))
        for _ in range(draw.integers(BURST + 1)):
            if submitted < requests and len(asked) < max(company, 1):
                request = _request(seed, submitted, tokenizer, vocab, longest_prompt, longest_output)
                asked[busy.submit(request.prompt, request.params)] = request
                submitted += 1
        if sum(aborted.values()) < aborts * submitted and draw.random() < EAGERNESS and _abort_one(busy, stage, draw):
            aborted[stage] += 1
            stage = str(draw.choice(STAGES))
        for delta in busy.step():
            asked[delta.request_id].take(delta)
            if delta.output is not None:
                request = asked.pop(delta.request_id)
                differences += differences_of(delta.output, _alone(lonely, request), request)
                compared += len(delta.output.outputs)
                done += 1
                advance(1)
                if done % REQUESTS_SAMPLED == 0:
                    _note(memory, *_memory(done))
        stats = _checked(busy)
        if stats.steps % STEPS_SAMPLED == 0:
            _note(load, stats.steps, stats.running, stats.waiting, stats.free_pages)
    seconds, stats = time.perf_counter() - begin, busy.stats()
    request = delta = None  # these are no leaks, nor are cached prefixes, which are kept until they are forgotten
    busy.forget_prefixes()
    _note(memory, *_memory(done))
    return Soak(
        requests=requests,
        seed=seed,
        settings=dict(settings),
        seconds=round(seconds, 1),
        completions=stats.finished,
        aborted=dict(aborted),
        preemptions=stats.preemptions,
        steps=stats.steps,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        output_tokens=stats.output_tokens,
        compiled=busy.loop.runner.programs - compiled,
        compared=compared,
        differences=differences,
        leaks=leaks_of(busy, lonely, before),
        memory=memory,
        load=load,
    )


def _request(
    seed: int, index: int, tokenizer: Tokenizer, vocab: int, longest_prompt: int, longest_output: int
) -> _Asked:
    """The `index`-th request: random ids or word problems, some after a common beginning, and any kind of sampling."""
    draw = np.random.default_rng([seed, index])
    length = round(float(np.exp(draw.uniform(0, np.log(longest_prompt)))))
    if draw.random() < 0.7:
        prompt = draw.integers(3, vocab, length).tolist()
    else:
        stream = problems.problems(int(draw.integers(2**31)), "train")
        question, *examples = (next(stream) for _ in range(1 + int(draw.integers(3))))
        prompt = tokenizer.encode(problems.ask(question, examples))[-longest_prompt:]
    if draw.random() < ALIKE:
        beginning = np.random.default_rng([seed, 0, int(draw.integers(BEGINNINGS))])
        known = beginning.integers(3, vocab, int(draw.integers(longest_prompt))).tolist()
        prompt = known + prompt[: longest_prompt - len(known)]

    def sometimes(share: float, value: Any, otherwise: Any) -> Any:
        return value if draw.random() < share else otherwise

    max_tokens = int(draw.integers(1, longest_output + 1))
    params = ling3.SamplingParams(
        max_tokens=max_tokens,
        min_tokens=sometimes(0.1, min(8, max_tokens), 0),
        ignore_eos=sometimes(0.8, True, False),
        temperature=sometimes(0.5, 0.0, float(draw.uniform(0.3, 1.5))),
        top_k=sometimes(0.3, 20, None),
        top_p=sometimes(0.3, 0.9, 1.0),
        min_p=sometimes(0.2, 0.05, 0.0),
        repetition_penalty=sometimes(0.15, 1.2, 1.0),
        presence_penalty=sometimes(0.1, 0.5, 0.0),
        frequency_penalty=sometimes(0.15, 0.3, 0.0),
        logit_bias=sometimes(0.1, {int(draw.integers(3, vocab)): 4.0}, None),
        stop=sometimes(0.2, [str(draw.choice([".", " = ", "The answer", "n"]))], ()),
        stop_token_ids=sometimes(0.1, draw.integers(3, vocab, 4).tolist(), ()),
        logprobs=sometimes(0.25, None, int(draw.choice([0, 0, 3]))),
        seed=index,
        n=sometimes(0.08, 2, 1),
    )
    return _Asked(prompt, params)


def _stage(sequence: TokenSequence) -> str:
    """The stage of an unfinished sequence."""
    if sequence.memory.slot is None:
        return "preempted" if sequence.times.preemptions else "queued"
    return "decode" if sequence.decoding else "prefill"


def _abort_one(engine: ling3.Engine, stage: str, draw: np.random.Generator) -> bool:
    """Aborts a random request that has a sequence in this stage; returns False if there is none."""
    found = sorted(
        number
        for number, request in engine.loop.requests.items()
        if any(each.completion is None and _stage(each) == stage for each in request.sequences)
    )
    if not found:
        return False
    number = int(draw.choice(found))
    assert engine.abort(number), f"request {number} was {stage} and could not be aborted"
    assert not engine.abort(number), f"request {number} was aborted twice"
    return True


def _alone(engine: ling3.Engine, request: _Asked) -> RequestOutput:
    """The answer of an engine that serves nothing else."""
    engine.submit(request.prompt, request.params)
    output = None
    while engine.has_work:
        for delta in engine.step():
            output = delta.output or output
    assert output is not None, "a request that was alone has no answer"
    return output


def differences_of(got: RequestOutput, alone: RequestOutput, request: _Asked) -> list[str]:
    """The completions that differ from their solo run (aborted ones: from its beginning) or from their deltas."""
    found = []
    for completion, expected in zip(got.outputs, alone.outputs, strict=True):
        streamed = tuple(request.token_ids.get(completion.index, ())), request.text.get(completion.index, "")
        wrong = _wrong(completion, expected)
        if streamed != (completion.token_ids, completion.text):
            wrong.append(f"its deltas brought {streamed}")
        if wrong:
            found.append(
                f"{'; '.join(wrong)}; with {request.params}, {len(request.prompt)} prompt tokens and "
                f"{completion.timings.preemptions} preemptions"
            )
    return found


def _wrong(got: Completion, alone: Completion) -> list[str]:
    """How a completion differs from its solo run, in words."""
    count = len(got.token_ids) if got.finish_reason == "abort" else None
    wrong = []
    for name in ("token_ids", "logprobs"):
        ours, theirs = getattr(got, name), getattr(alone, name)
        if ours != (theirs if theirs is None else theirs[:count]):
            pairs = enumerate(zip(ours or (), theirs or (), strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(ours or ()), len(theirs or ())))
            wrong.append(
                f"{name} differ from place {at} on: {(ours or ())[at : at + 2]}, alone {(theirs or ())[at : at + 2]}"
            )
    for name in ("seed",) if count is not None else ("seed", "text", "finish_reason", "stop_reason", "error"):
        if getattr(got, name) != getattr(alone, name):
            wrong.append(f"{name} is {getattr(got, name)!r}, alone {getattr(alone, name)!r}")
    if count is not None:
        # An aborted text includes what was held back: the beginning of a stop string, or of a character as U+FFFD.
        whole = alone.text + (alone.stop_reason if isinstance(alone.stop_reason, str) else "")
        if not whole.startswith(got.text.rstrip("\N{REPLACEMENT CHARACTER}")):
            wrong.append(f"text is {got.text!r}, which does not begin {alone.text!r}")
    return wrong


def _checked(engine: ling3.Engine) -> ling3.Stats:
    """The engine's counts. Raises AssertionError if they do not add up."""
    stats, scheduler = engine.stats(), engine.loop.scheduler
    assert stats.submitted == stats.waiting + stats.running + sum(stats.finished.values()), stats
    assert stats.slots == stats.free_slots + stats.running, stats
    used = {page for sequence in scheduler.running for page in sequence.memory.pages}  # sequences share cached prefixes
    assert stats.pages == stats.free_pages + len(used), stats
    scheduler.check()
    return stats


def _note(columns: Mapping[str, array], *row: int) -> None:
    for column, value in zip(columns.values(), row, strict=True):
        column.append(value)


def _memory(done: int) -> tuple[int, int, int]:
    """A row of `MEMORY`'s columns."""
    gc.collect()
    return done, resident(), len(jax.live_arrays())


def resident() -> int:
    """Resident memory of this process in bytes; its peak on systems that do not report the current value."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * resource.getpagesize()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def alive() -> Counter[str]:
    """Counts the arrays, requests and answers that the process holds, by type."""
    gc.collect()
    kinds = (Request, TokenSequence, Saved, RequestOutput, Completion, Delta)
    counts = Counter(type(x).__name__ for x in gc.get_objects() if type(x) in kinds)
    counts["jax.Array"] = len(jax.live_arrays())
    return counts


def leaks_of(busy: ling3.Engine, lonely: ling3.Engine, before: Counter[str]) -> list[str]:
    """Whatever is left of finished requests, in words."""
    found = []
    for name, engine in (("busy", busy), ("lonely", lonely)):
        stats = _checked(engine)
        free = {"slots": (stats.free_slots, stats.slots), "pages": (stats.free_pages, stats.pages)}
        found += [f"the {name} engine has {a} of {b} {what} free" for what, (a, b) in free.items() if a != b]
        known = {"pages": stats.cached_pages, "bytes of snapshots": stats.snapshot_bytes}
        found += [f"the {name} engine has {a} {what} of forgotten prefixes" for what, a in known.items() if a]
        loop = engine.loop
        held = {
            "requests": loop.requests,
            "calls in flight": loop.in_flight,
            "waiting sequences": loop.scheduler.queued(),
        }
        found += [f"the {name} engine has {len(what)} {kind}" for kind, what in held.items() if what]
        if engine.has_work:
            found.append(f"the {name} engine has work")
    after = alive()
    found += [
        f"{after[kind]} objects of {kind} are alive, {before[kind]} at the beginning"
        for kind in sorted(after)
        if after[kind] > before[kind]
    ]
    return found


def main(requests: int = 2000, seed: int = 0, out: Path = Path("benchmarks/results")) -> None:
    """Soak the engine, and write soak.json and soak.png; the exit status is 1 after a difference, leak or compilation.

    Args:
        requests: number of requests.
        seed: seed of the requests, their arrivals and their aborts.
        out: directory to write into.
    """
    with progress("soaking", requests) as advance:
        result = soak(requests, seed=seed, advance=advance)
    record.write(out, "soak", result.to_dict(), result.figure())
    print(result.summary())
    if result.differences or result.leaks or result.compiled:
        sys.exit(1)


if __name__ == "__main__":
    tyro.cli(main)
