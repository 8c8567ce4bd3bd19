"""Healing: its stored runs and their picture, and a run as small as can be."""

import json

import pytest
from matplotlib.figure import Figure

from experiments import nano_healing
from experiments.__main__ import RESULTS, stored
from experiments.nano_healing import CUTS, SKILLS, draw
from experiments.nano_tables import MECHANISMS


def test_cuts_have_the_names_of_the_other_tables():
    assert set(CUTS) - {"whole"} <= {mechanism.name for mechanism in MECHANISMS}


def test_the_stored_runs_are_of_every_cut_and_begin_with_the_cut_itself():
    runs = stored(RESULTS / "nano_healing.jsonl")
    assert [run["cut"] for run in runs] == list(CUTS)
    for run in runs:
        assert [point["step"] for point in run["curve"]] == [0, *nano_healing.POINTS, run["steps"]]
        assert all(set(point["right"]) == set(SKILLS) for point in run["curve"])


def test_the_picture_has_a_line_for_each_run_in_each_skill():
    runs = stored(RESULTS / "nano_healing.jsonl")
    axes = Figure().subplots(1, len(SKILLS))
    draw(runs, axes)
    assert [len(ax.lines) for ax in axes] == [len(runs)] * len(SKILLS)


def test_an_unknown_cut_is_refused_and_a_stored_run_is_not_made_again(tmp_path):
    with pytest.raises(SystemExit, match="found no cut gate; expected some of whole, KDA output gate"):
        nano_healing.main(("gate",), out=tmp_path / "runs.jsonl")
    done = {"cut": "RoPE", "steps": 5, "learning_rate": 0.003}
    (file := tmp_path / "runs.jsonl").write_text(json.dumps(done) + "\n")
    nano_healing.main(("RoPE",), steps=5, out=file)
    assert len(stored(file)) == 1


@pytest.mark.slow
def test_a_run_asks_before_and_after(monkeypatch):
    monkeypatch.setattr(nano_healing, "SKILLS", ("facts",))
    run = nano_healing.heal("MLA output gate", steps=5, rate=0.003, questions=16)
    before, after = run["curve"]
    assert (before["step"], after["step"]) == (0, 5) and after["loss"] > 0
    assert before["right"]["facts"] <= 0.5
