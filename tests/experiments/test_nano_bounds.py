"""The sweep of the bound: shares of decays, and its table and picture from stored runs."""

import json

import numpy as np
import pytest

from experiments import nano_bounds
from experiments.nano_bounds import BOUNDS, at_least, by_bound, histogram, markdown
from experiments.nano_probes import EDGES, PROBES
from ling3.train.nano.recipe import NANO, WITHOUT


def run(without, seed, right, rates):
    counts, _ = np.histogram(rates, EDGES)
    recipe = {"without": without, "seed": seed, "weight_decay": NANO.weight_decay, "quiet": PROBES["in_states"].quiet}
    recipe |= {"steps": PROBES["in_states"].steps, "learning_rate": PROBES["in_states"].learning_rate}
    return {"probe": "in_states", "recipe": recipe, "right": {"resets": right}, "decays": {"0": counts.tolist()}}


RUNS = [
    run("nothing", 0, 0.9, [0.01] * 6 + [4.0] * 2),
    run("nothing", 1, 0.7, [0.01] * 2),
    run("bound", 0, 0.5, [0.01, 12.0]),
]


def test_bounds_are_what_a_recipe_can_leave_out():
    assert set(BOUNDS) <= set(WITHOUT)
    for name, bound in BOUNDS.items():
        if name != "nothing":
            assert WITHOUT[name] == {"kda_lower_bound": None if bound is None else -bound}


def test_shares_of_decays():
    assert histogram(RUNS[:2], "0").sum() == pytest.approx(1)
    assert at_least(RUNS[:2], 1.0) == pytest.approx(0.2) and at_least(RUNS[:2], 5.0) == 0
    assert at_least(RUNS[2:], 5.0) == pytest.approx(0.5)


def test_the_table_has_a_row_for_each_bound_and_the_picture_all(tmp_path, capsys):
    assert list(by_bound(RUNS)) == [5.0, None]
    assert markdown({"in_states": RUNS, "in_weights": RUNS[2:]}).splitlines() == [
        "| bound | resets | ≥ 1 / ≥ 5 nats | resets | ≥ 1 / ≥ 5 nats |",
        "| --- | --- | --- | --- | --- |",
        "| -5 | 0.70 to 0.90 | 20.0% / 0.0% |  |  |",
        "| softplus | 0.50 | 50.0% / 50.0% | 0.50 | 50.0% / 50.0% |",
    ]
    file = tmp_path / "runs.jsonl"
    file.write_text("".join(json.dumps(own) + "\n" for own in RUNS))
    nano_bounds.main(file, out=tmp_path / "bounds.png")
    assert "| softplus |" in capsys.readouterr().out and (tmp_path / "bounds.png").stat().st_size > 10000


def test_without_runs_it_says_what_to_run(tmp_path):
    (file := tmp_path / "runs.jsonl").write_text(json.dumps(run("RoPE", 0, 1.0, [0.01])) + "\n")
    with pytest.raises(
        ValueError, match="no runs of the probes in_context, in_states, in_weights with a bound: run experiments"
    ):
        nano_bounds.main(file)
