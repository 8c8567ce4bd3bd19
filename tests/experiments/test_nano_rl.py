"""GRPO on nano: the questions and their checker, the rounded weights, and what was recorded."""

import itertools
import json

import jax
import numpy as np
from tiny import open_model

from experiments import nano_rl
from experiments.__main__ import RESULTS
from ling3.train import Grpo
from ling3.train.nano.problems import LIMIT

RUNS = [json.loads(line) for line in (RESULTS / "nano_rl.jsonl").read_text().splitlines()]


def test_questions_have_each_wording_in_turn():
    """In both splits, without a common solution, and with numbers that nano has seen."""
    train, held_out = (list(itertools.islice(nano_rl.problems(1, split), 60)) for split in ("train", "held_out"))
    for problems, split in ((train, "train"), (held_out, "held_out")):
        assert [p.steps[0].operator for p in problems] == ["+", "-", "×"] * 20
        assert all(p.split == split and 0 <= p.answer <= LIMIT for p in problems)
    assert not {p.solution for p in train} & {p.solution for p in held_out}


def test_the_checker_sees_the_last_number_alone():
    problem = next(nano_rl.problems(0, "train"))
    assert nano_rl.is_right(problem, problem.solution) and nano_rl.is_right(problem, f"It is {problem.answer}.")
    assert not nano_rl.is_right(problem, f"{problem.solution} 7 + 7 = 61.") and not nano_rl.is_right(problem, "")


def test_rounded_weights():
    """Fifteen numbers a row at most, each within half a step of the weight."""
    layer = open_model().model.layers[0].mlp
    for x, y in zip(*(map(np.asarray, jax.tree.leaves(each)) for each in (layer, nano_rl.rounded(layer))), strict=True):
        step = np.max(np.abs(x), axis=-1, keepdims=True) / 7
        assert (np.abs(x - y) <= 0.501 * step).all()  # half a step, and float32's rounding
        assert max(len(np.unique(row)) for row in y) <= 15


def test_the_recorded_runs():
    """The exact sampler's ratio is 1 in each batch, and the others' is not; the first KL is that of rounding alone."""
    assert {run["sampler"] for run in RUNS} >= {"exact", "bfloat16"}
    for run in RUNS:
        deviations = [point["deviation"] for point in run["curve"]]
        assert not any(deviations) if run["sampler"] == "exact" else all(deviations)
        assert Grpo(**run["settings"]) == nano_rl.SETTINGS and len(run["curve"]) == nano_rl.SETTINGS.steps
        assert run["curve"][0]["kl"] == 0
