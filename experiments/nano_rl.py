"""GRPO on nano: three wordings that it does not understand, learned from a checker alone.

    python -m experiments.nano_rl                 # all runs that are not stored yet (extra: train)
    python -m experiments.nano_rl --samplers exact

The checker sees only whether the last number of an answer is right. `exact` samples with the weights that are trained;
`bfloat16` and `int4` sample with rounded ones, and their log-probabilities take the place of the old policy's. Each run
appends a line with its curve, its exams before and after, and some answers to `results/nano_rl.jsonl`; a stored run is
not repeated.
"""

import dataclasses
import functools
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import ling3
from experiments.__main__ import RESULTS, append, stored
from ling3.bench.report import machine
from ling3.engine.outputs import Completion
from ling3.train import Grpo, Point, Task, grpo
from ling3.train.nano.problems import CONTAINERS, OBJECTS, PEOPLE, Problem, Split, Step, ask, exam, last_integer

SETTINGS = Grpo(steps=40, questions=9, group=12, max_tokens=32, learning_rate=3e-5, kl=0.02)
QUESTIONS = 150
"""Held-out questions of an exam: a third with each wording."""


def together(rng: random.Random) -> Problem:
    """A sum: nano adds the first number once more, as in its own problems that ask for `together`."""
    (one, _), (other, _) = rng.sample(PEOPLE, 2)
    things, step = rng.choice(OBJECTS), Step(rng.randint(2, 40), "+", rng.randint(2, 20))
    stated = f"{one} has {step.left} {things}. {other} has {step.right} {things}."
    return Problem(f"{stated} How many {things} do they have together?", (step,))


def eaten(rng: random.Random) -> Problem:
    """A difference, by a verb that nano does not know."""
    (one, _), things = rng.choice(PEOPLE), rng.choice(OBJECTS)
    step = Step(left := rng.randint(4, 60), "-", rng.randint(2, min(left, 20)))
    stated = f"{one} has {step.left} {things}. {one} eats {step.right} {things}."
    return Problem(f"{stated} How many {things} are left?", (step,))


def there_are(rng: random.Random) -> Problem:
    """A product, of a story without a person."""
    (plural, one), things = rng.choice(CONTAINERS), rng.choice(OBJECTS)
    step = Step(groups := rng.randint(2, 9), "×", rng.randint(2, min(12, 60 // groups)))
    stated = f"There are {step.left} {plural} with {step.right} {things} in each {one}."
    return Problem(f"{stated} How many {things} are there?", (step,))


WORDINGS = (together, eaten, there_are)


def problems(seed: int, split: Split) -> Iterator[Problem]:
    """Problems of a split with each wording in turn; a seed gives the same stream on every machine."""
    rng = random.Random(seed)
    for wording in itertools.cycle(WORDINGS):
        problem = wording(rng)
        while problem.split != split:
            problem = wording(rng)
        yield problem


def is_right(problem: Problem, text: str) -> bool:
    """Whether the last number of an answer is the problem's."""
    return last_integer(text) == problem.answer


def task(problem: Problem) -> Task:
    """The problem as a prompt, and its checker, whose reward is 1 or 0."""

    def check(completion: Completion) -> float:
        return float(is_right(problem, completion.text))

    return Task(ask(problem), check)


def rounded(model: Any, bits: int = 4) -> Any:
    """The model with the numbers of a quantized one: in each row of a matrix, multiples of 1/7 of the largest."""
    most = 2 ** (bits - 1) - 1

    def of_rows(x: jax.Array) -> jax.Array:
        scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-12) / most
        return jnp.round(x / scale) * scale

    return jax.tree.map(lambda x: of_rows(x) if x.ndim > 1 else x, model)


def as_shipped(model: ling3.CausalLM) -> ling3.CausalLM:
    """The model in the dtypes of nano's checkpoint: bfloat16."""
    return jax.tree.map(lambda x, like: x.astype(like.dtype), model, shipped())


@functools.cache
def shipped() -> ling3.CausalLM:
    """The model as it is in the package."""
    return ling3.load("nano")


SAMPLERS: dict[str, Callable[[ling3.CausalLM], ling3.CausalLM] | None] = {
    "exact": None,
    "bfloat16": as_shipped,
    "int4": rounded,
}


def answers(engine: ling3.Engine, asked: Sequence[Problem]) -> list[str]:
    """The greedy answers to problems."""
    outputs = engine.generate([ask(problem) for problem in asked], ling3.SamplingParams(max_tokens=64))
    return [output.text.strip() for output in outputs]


def examined(engine: ling3.Engine) -> dict[str, Any]:
    """The shares of right greedy answers to held-out problems: of each wording, and of nano's own; some of them."""
    asked, own = list(itertools.islice(problems(2026, "held_out"), QUESTIONS)), exam(QUESTIONS)
    texts = answers(engine, asked)
    right = [is_right(*pair) for pair in zip(asked, texts, strict=True)]
    shares = {wording.__name__: float(np.mean(right[i :: len(WORDINGS)])) for i, wording in enumerate(WORDINGS)}
    kept = [is_right(*pair) for pair in zip(own, answers(engine, own), strict=True)]
    shown = [[problem.question, text] for problem, text in zip(asked[:6], texts, strict=False)]
    return {"right": shares, "own": float(np.mean(kept)), "answers": shown}


def run(sampler: str, settings: Grpo = SETTINGS, seed: int = 0) -> dict[str, Any]:
    """Trains nano with a sampler; returns the run's record. The exams are of the trained weights in float32."""
    model, tokenizer, change = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano"), SAMPLERS[sampler]
    exact = ling3.Engine(model, tokenizer)
    engine = exact if change is None else ling3.Engine(change(model), tokenizer)
    before = examined(exact)

    def report(point: Point, _: ling3.CausalLM) -> None:
        print(f"{sampler}, step {point.step}: {dataclasses.asdict(point)}", file=sys.stderr, flush=True)

    policy, points = grpo(model, engine, map(task, problems(seed, "train")), settings, sampler=change, report=report)
    exact.update(policy)
    record = {"sampler": sampler, "seed": seed, "settings": dataclasses.asdict(settings)}
    return record | {"before": before, "after": examined(exact), "curve": [dataclasses.asdict(each) for each in points]}


def main(samplers: tuple[str, ...] = tuple(SAMPLERS), steps: int = SETTINGS.steps, out: Path = RESULTS) -> None:
    """Make the runs that are not stored yet.

    Args:
        samplers: the runs to make.
        steps: batches of answers of each run.
        out: directory of the results.
    """
    file, settings = out / "nano_rl.jsonl", dataclasses.replace(SETTINGS, steps=steps)
    for sampler in samplers:
        if not any(line["sampler"] == sampler and line["settings"]["steps"] == steps for line in stored(file)):
            append(file, run(sampler, settings) | {"machine": machine()})


if __name__ == "__main__":
    tyro.cli(main)
