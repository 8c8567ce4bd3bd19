"""The prefix cache: what it saves if prompts begin alike, how its hits compare with an ideal cache's, and what it costs
if nothing is shared.

Tokens are random, since the cache only compares them, and engines have their defaults unless a case says otherwise:
prefixes end at multiples of 512 tokens. An engine without the cache is the oracle of every answer.
"""

import dataclasses
import functools
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import ling3
from benchmarks.cases.engine import seconds, together
from benchmarks.models import FOUR_LAYERS, TOY, checkpoint
from benchmarks.oracles import is_peer
from benchmarks.registry import Setting, Side, Trial, Wrong, case
from ling3.bench.measure import SampleRequest, random_requests
from ling3.engine.request import Request, TokenSequence
from ling3.engine.scheduler import Scheduler
from ling3.engine.shapes import Grid, Shapes
from ling3.evals.run import PROTOCOL
from ling3.text.detokenizer import StopStrings

ROOM = 4096
"""The context given to nano here, with its trained weights; its config has 2,048 tokens."""
INSTRUCTION = 1242
"""Tokens that all prompts begin with: as many as twenty worked examples have in nano's prompts."""
ANSWER = 32
"""Tokens of each answer in a chat."""
UNLIMITED = 1024
"""A number of snapshots that is larger than the number of prefixes in any workload."""
VOCABULARY = 2**16
"""The vocabulary size of workloads without a model."""

Tokens = list[int]


def _nano() -> ling3.CausalLM:
    model = ling3.load("nano", dtype=jnp.float32)
    return dataclasses.replace(model, config=dataclasses.replace(model.config, max_position_embeddings=ROOM))


def _four_layers(setting: Setting) -> ling3.CausalLM:
    config = setting.size(full=FOUR_LAYERS, toy=TOY)
    return setting.keep("four layers", lambda: ling3.load(checkpoint(config, setting.scratch), dtype=jnp.float32))


def _engine(setting: Setting, model: ling3.CausalLM, **settings: Any) -> ling3.Engine:
    """A warmed-up engine; at toy size it has steps of 32 tokens, and fewer programs to compile."""
    small = {"page_size": 16, "chunked_prefill_size": 32, "token_paddings": (32,)}
    engine = ling3.Engine(model, **{"max_model_len": ROOM} | settings | setting.size(full={}, toy=small))
    engine.warmup()
    return engine


# Time to the first token


def _first_token(setting: Setting, model: ling3.CausalLM, on_disk: bool = False) -> Trial:
    """Milliseconds to the first token of a new prompt in each round: with its prefix known, then without.

    The prefix is in memory, or `on_disk`, where an engine finds it after a restart.
    """
    known, rest = setting.size(full=(2048, 64), toy=(64, 16))
    directory = setting.scratch / "prefixes"
    engine = _engine(setting, model, **({"prefix_dir": directory} if on_disk else {}))
    draw, prompt = np.random.default_rng(0), []

    def drawn(count: int) -> Tokens:
        return draw.integers(0, model.config.vocab_size, count).tolist()

    def answer(expected: int, tokens: int = 1) -> tuple[Any, ...]:
        params = ling3.SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0)
        (output,) = engine.generate([prompt], params)
        if output.cached_tokens != expected:
            raise Wrong(f"{output.cached_tokens} tokens of the prompt were known, expected {expected}")
        return output.token_ids, output.logprobs

    def meet() -> None:
        """Draws a prompt, and serves another one with the same prefix, so that it is cached."""
        prompt[:] = drawn(known + rest)
        engine.generate([prompt[:known] + drawn(rest)], ling3.SamplingParams(max_tokens=1))
        if on_disk:
            engine.loop.disk.flush()
            engine.forget_prefixes()

    def forget() -> None:
        engine.forget_prefixes()
        if on_disk:
            engine.loop.disk.flush()
            shutil.rmtree(directory)
            directory.mkdir()

    def told() -> float:
        meet()
        return _milliseconds(lambda: answer(known))

    def cold() -> float:
        forget()
        return _milliseconds(lambda: answer(0))

    def check() -> str:
        meet()
        found = answer(known, 16)
        forget()
        if found != answer(0, 16):
            raise Wrong("a known prefix changes tokens or log-probabilities")
        return "tokens and log-probabilities are those of the prompt cold, bit for bit"

    sides = [
        Side(f"{known:,} of {known + rest:,} tokens {'on disk' if on_disk else 'known'}", told, check),
        Side("the same prompt, cold", cold, is_peer),
    ]
    return Trial(sides, about=_about(engine) | {"prompt": known + rest, "known": known})


@case(
    "prefixes/first-token-nano",
    "Time to the first token of a prompt whose first 2,048 of 2,112 tokens are known, on nano.",
    wanted=1 / 0.12,
    rounds=9,
)
def first_token_nano(setting: Setting) -> Trial:
    """A small model, for which the fixed cost of a call matters."""
    return _first_token(setting, _nano())


@case(
    "prefixes/first-token-four-layers",
    "The same at Ling-3.0-tiny's full width with four layers, float32.",
    wanted=1 / 0.12,
)
def first_token_four_layers(setting: Setting) -> Trial:
    """A large model, for which the tokens matter most."""
    return _first_token(setting, _four_layers(setting))


@case(
    "prefixes/first-token-from-disk-nano",
    "Time to the first token of a prompt whose first 2,048 of 2,112 tokens are on disk, on nano.",
    wanted=1 / 0.15,
    rounds=9,
)
def first_token_from_disk_nano(setting: Setting) -> Trial:
    """A small model, whose prompts are computed nearly as fast as files are read."""
    return _first_token(setting, _nano(), on_disk=True)


@case(
    "prefixes/first-token-from-disk-four-layers",
    "The same at Ling-3.0-tiny's full width with four layers, float32.",
    wanted=1 / 0.15,
)
def first_token_from_disk_four_layers(setting: Setting) -> Trial:
    """A large model, for which reading is much faster than computing."""
    return _first_token(setting, _four_layers(setting), on_disk=True)


# Throughput with and without the cache


@dataclasses.dataclass
class _Both:
    """The same work on an engine with the cache and on one without, in alternating order."""

    known: Callable[[], float]
    cold: Callable[[], float]
    renew: Callable[[], object] = lambda: None
    turn: int = 0
    seen: dict[str, float] = dataclasses.field(default_factory=dict)

    def first(self) -> float:
        """Measures both, and returns the time with the cache."""
        self.renew()
        self.turn += 1
        for name in ("known", "cold")[:: 1 if self.turn % 2 else -1]:
            self.seen[name] = getattr(self, name)()
        return self.seen["known"]

    def second(self) -> float:
        """The time without the cache that `first` has measured."""
        return self.seen["cold"]


def _with_and_without(
    engine: ling3.Engine, model: ling3.CausalLM, draw: Callable[[int], list[SampleRequest]], forget: bool
) -> Trial:
    """Seconds for all requests; `draw` makes new ones for each round, from its number."""
    without = ling3.Engine(model, None, engine.settings, prefix_cache=False)
    requests, rounds = draw(0), iter(range(1, 10**6))

    def renew() -> None:
        requests[:] = draw(next(rounds))
        if forget:
            engine.forget_prefixes()

    both = _Both(seconds(lambda: together(engine, requests)), seconds(lambda: together(without, requests)), renew)

    def check() -> str:
        before = engine.stats()
        if together(engine, requests) != together(without, requests):
            raise Wrong("the cache changes tokens")
        after = engine.stats()
        cached, computed = (getattr(after, n) - getattr(before, n) for n in ("cached_tokens", "prompt_tokens"))
        return f"the same tokens; {cached:,} of {cached + computed:,} prompt tokens were known"

    sides = [Side("with the cache", both.first, check), Side("without", both.second, is_peer)]
    about = _about(engine) | {
        "requests": len(requests),
        "prompt_tokens": sum(len(request.prompt) for request in requests),
        "output_tokens": sum(request.max_tokens for request in requests),
    }
    return Trial(sides, unit="s", tokens=about["prompt_tokens"] + about["output_tokens"], about=about)


STEPS_OF_128 = {"page_size": 128, "chunked_prefill_size": 128, "token_paddings": (16, 32, 64, 96, 128)}
"""Settings with which prefixes may end at more places, and the rest of a prompt is padded less."""


def _few_shot(setting: Setting, model: ling3.CausalLM, questions: int, **changes: Any) -> Trial:
    """Questions of 40 to 120 tokens after the same 1,242, with answers of 16 to 48 and an evaluation's settings.

    Each round begins with an empty cache.
    """
    engine = _engine(setting, model, settings=dataclasses.replace(PROTOCOL, **changes))
    count, instruction = setting.size(full=(questions, INSTRUCTION), toy=(6, 80))
    lengths = setting.size(full=((40, 120), (16, 48)), toy=((8, 20), (2, 4)))
    return _with_and_without(
        engine, model, lambda i: random_requests(count, model.config.vocab_size, *lengths, i, instruction), forget=True
    )


@case(
    "prefixes/few-shot",
    "64 questions of 40 to 120 tokens after the same 1,242, answers of 16 to 48, end to end on nano.",
    wanted=4.0,
    rounds=5,
)
def few_shot(setting: Setting) -> Trial:
    """With the settings of `ling3 eval`: 1,024 of the 1,242 tokens are complete steps, which can be cached."""
    return _few_shot(setting, _nano(), 64)


@case(
    "prefixes/few-shot-128",
    "The same in steps of 128 tokens: page_size and chunked_prefill_size 128.",
    wanted=4.0,
    rounds=5,
)
def few_shot_128(setting: Setting) -> Trial:
    """1,152 of the 1,242 tokens are complete steps, which can be cached."""
    return _few_shot(setting, _nano(), 64, **STEPS_OF_128)


@case(
    "prefixes/few-shot-four-layers",
    "The same in steps of 128 with 32 questions, at Ling-3.0-tiny's full width with four layers, float32.",
    wanted=4.0,
    rounds=1,
)
def few_shot_four_layers(setting: Setting) -> Trial:
    """A large model, for which tokens cost more than calls."""
    return _few_shot(setting, _four_layers(setting), 32, **STEPS_OF_128)


@case(
    "prefixes/nothing-shared",
    "64 random prompts of 100 to 1,500 tokens, answers of 16 to 64, on nano: does the cache cost anything?",
    wanted=0.98,
    rounds=9,
)
def nothing_shared(setting: Setting) -> Trial:
    """Each round has new prompts, so that the cache fills up and evicts."""
    model = _nano()
    count, lengths = setting.size(full=(64, ((100, 1500), (16, 64))), toy=(6, ((10, 100), (2, 4))))
    return _with_and_without(
        _engine(setting, model),
        model,
        lambda i: random_requests(count, model.config.vocab_size, *lengths, i),
        forget=False,
    )


# Hit rates


Waves = Iterator[list[Tokens]]
"""Prompts that are sent at once, and after all their answers the next ones, and so on."""
Answers = list[list[int]]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a workload; `length` is the number of tokens in each part that differs."""

    instruction: int
    length: int
    requests: int
    turns: int
    children: int
    answer: int


Workload = Callable[[np.random.Generator, int, Sizes, Answers], Waves]
"""Draws prompts from a vocabulary of the given size; `answers` has those to the last wave when the next is drawn."""


def shared_prefix(draw: np.random.Generator, vocab: int, sizes: Sizes, answers: Answers) -> Waves:
    """One instruction, followed by another suffix in each prompt."""
    instruction = draw.integers(0, vocab, sizes.instruction).tolist()
    yield [instruction + draw.integers(0, vocab, sizes.length).tolist() for _ in range(sizes.requests)]


def chat(draw: np.random.Generator, vocab: int, sizes: Sizes, answers: Answers) -> Waves:
    """Conversations after one instruction: each prompt is the former one, its answer, and a new message."""
    instruction = draw.integers(0, vocab, sizes.instruction).tolist()
    talks = [list(instruction) for _ in range(sizes.requests)]
    for _ in range(sizes.turns):
        for talk, answer in zip(talks, answers or [[]] * len(talks), strict=True):
            talk += [*answer, *draw.integers(0, vocab, sizes.length).tolist()]
        yield [list(talk) for talk in talks]


def tree(draw: np.random.Generator, vocab: int, sizes: Sizes, answers: Answers) -> Waves:
    """Every path through a tree of texts with the instruction as its root, in random order."""
    paths = [draw.integers(0, vocab, sizes.instruction).tolist()]
    for _ in range(3):
        paths = [path + draw.integers(0, vocab, sizes.length).tolist() for path in paths for _ in range(sizes.children)]
    draw.shuffle(paths)
    yield paths


class Ideal:
    """An ideal cache: it finds the longest prefix, in complete steps, that an earlier prompt had."""

    def __init__(self, step: int):
        self.step, self._known = step, set[bytes]()

    def of(self, prompt: Tokens) -> int:
        """How many tokens of `prompt` are cached, never the last, whose logits are needed; then all of it is cached."""
        prefixes = [np.asarray(prompt[:end]).tobytes() for end in range(self.step, len(prompt) + 1, self.step)]
        usable = prefixes[: (len(prompt) - 1) // self.step]
        found = next((i for i, prefix in enumerate(usable) if prefix not in self._known), len(usable))
        self._known.update(prefixes)
        return found * self.step


def _found(scheduler: Scheduler, step: int, prompt: Tokens) -> int:
    """Serves a prompt as an engine does, but without a model; returns how many of its tokens were cached."""
    request = Request(0, None, prompt, ling3.SamplingParams())
    sequence = TokenSequence(request, 0, 0, 0, (), None, StopStrings(()), prefill_end=len(prompt) - 1)
    scheduler.enqueue(sequence)
    if scheduler.admit(len(prompt)) is not sequence:
        raise Wrong("the scheduler lacks the pages for one prompt")
    if sequence.cached:
        scheduler.prefixes_of(sequence).settled(sequence)
    while not sequence.decoding:
        sequence.prefilled = min(sequence.prefilled + step, sequence.prefill_end)
        scheduler.prefixes_of(sequence).keep(sequence, lambda _: object())
    scheduler.release(sequence)
    scheduler.check()
    return sequence.cached


def hits(snapshots: int, workload: Workload, sizes: Sizes, page_size: int, step: int) -> tuple[int, int, int]:
    """Prompt tokens of a workload that were found with at most `snapshots` snapshots, that could have been, and in all.

    Needs no model: the prefixes that are kept depend only on the tokens, and answers are random. Prompts come one after
    another, and pages are not scarce.
    """
    columns = 2**14  # as many as there are pages
    shapes = Shapes(1, columns, page_size, columns, buckets=(), rows=(), grid=Grid(step, 1, snapshots))
    scheduler = Scheduler(shapes)
    draw, answers, ideal = np.random.default_rng(0), list[list[int]](), Ideal(step)
    found, possible, total = 0, 0, 0
    for prompts in workload(draw, VOCABULARY, sizes, answers):
        found += sum(_found(scheduler, step, prompt) for prompt in prompts)
        possible += sum(map(ideal.of, prompts))
        total += sum(map(len, prompts))
        answers[:] = [draw.integers(0, VOCABULARY, sizes.answer).tolist() for _ in prompts]
    return found, possible, total


def full_sizes(length: int) -> Sizes:
    """The sizes of a workload at full scale, with `length` tokens in each part that differs."""
    return Sizes(INSTRUCTION, length, requests=12, turns=4, children=3, answer=ANSWER)


def _hit_rates(setting: Setting, workload: Workload) -> Trial:
    """Hits in percent of the ideal cache's, against the number of snapshots that there is room for."""
    page_size, step = setting.size(full=(128, 512), toy=(16, 32))
    lengths = setting.size(full=(40, 376, 2000), toy=(8, 40))
    budgets = setting.size(full=(2, 4, 8, 16, 32, UNLIMITED), toy=(2, UNLIMITED))
    words = dict[str, str]()

    def sized(length: int) -> Sizes:
        toy = Sizes(80, length, requests=3, turns=2, children=2, answer=4)
        return setting.size(full=full_sizes(length), toy=toy)

    @functools.cache
    def counted(length: int, snapshots: int) -> tuple[int, int, int]:
        return hits(snapshots, workload, sized(length), page_size, step)

    def check(name: str, length: int, snapshots: int) -> str:
        known, possible, total = counted(length, snapshots)
        if known > possible:
            raise Wrong(f"{known:,} tokens were found, and {possible:,} could have been")
        found = f"{100 * known / total:.1f} % of {total:,} prompt tokens, and ideally {100 * possible / total:.1f} %"
        words[f"{name}, {snapshots} snapshots"] = found
        return found

    def rate(length: int, snapshots: int) -> float:
        known, possible, _ = counted(length, snapshots)
        return 100 * known / possible

    sides = [
        Side(
            name := f"suffixes of {length:,} tokens",
            functools.partial(rate, length, snapshots),
            functools.partial(check, name, length, snapshots),
            x=snapshots,
        )
        for length in lengths
        for snapshots in budgets
    ]
    about = {"page_size": page_size, "step": step, "found": words}
    about |= dataclasses.asdict(sized(0)) | {"length": list(lengths)}
    return Trial(sides, unit="% of the ideal", axis="snapshots", about=about, warm=False, shares=True)


def _register(name: str, question: str, workload: Workload) -> None:
    case(f"prefixes/hits-{name}", question, rounds=1)(lambda setting: _hit_rates(setting, workload))


_register("shared-prefix", "What is found of one instruction before 12 prompts, against the room.", shared_prefix)
_register("chat", "What is found of 12 conversations of four turns, against the room.", chat)
_register("tree", "What is found of 27 paths through a tree of texts, against the room.", tree)


def _milliseconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


def _about(engine: ling3.Engine) -> dict[str, Any]:
    """The settings that decide where prefixes end."""
    names: Sequence[str] = ("page_size", "chunked_prefill_size", "token_paddings", "max_model_len", "num_pages")
    return {name: getattr(engine.settings, name) for name in names} | {"step": engine.settings.prefix_step}
