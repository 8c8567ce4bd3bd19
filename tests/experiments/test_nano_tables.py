"""The tables of nano: what is lost, from stored results, and the picture of it."""

import json

import jax
import pytest

from experiments import nano_tables
from experiments.nano_probes import NEEDED
from experiments.nano_tables import MECHANISMS, markdown, needed, relied_on
from ling3.evals.ablations import ablations
from ling3.families import init
from ling3.train.nano.mixture import corpus
from ling3.train.nano.recipe import NANO, WITHOUT
from ling3.train.tokenizer import train_tokenizer

REPORT = {
    "rows": [
        {"name": "whole", "scores": {"recall": {"accuracy": 0.9}, "facts": {"accuracy": 0.8}}},
        {"name": "KDA: no decay", "scores": {"recall": {"accuracy": 0.4}, "facts": {"accuracy": 0.75}}},
        {"name": "not in the table", "scores": {"recall": {"accuracy": 0.0}, "facts": {"accuracy": 0.0}}},
    ]
}


def trained(without, seed, recall, facts, probe="in_context", **changes):
    recipe = {"without": without, "seed": seed, "steps": NEEDED[probe].steps, "weight_decay": NANO.weight_decay}
    recipe |= {"learning_rate": NEEDED[probe].learning_rate, "quiet": NEEDED[probe].quiet}
    return {"probe": probe, "recipe": recipe | changes, "right": {"recall": recall, "facts": facts}}


RUNS = [
    trained("nothing", 0, 1.0, 0.5),
    trained("nothing", 1, 0.8, 0.5),
    trained("decay", 0, 0.7, 0.5),
    trained("decay", 1, 0.4, 0.6),
    trained("RoPE", 2, 0.0, 0.0),  # its whole model is not there yet
]


@pytest.mark.thorough
def test_every_row_is_an_ablation_and_every_model_without_something_is_in_a_row():
    model = init(NANO.config(train_tokenizer(corpus(0, size=20), 700)), key=jax.random.key(0))
    cuts = {each.name for each in ablations(model)}
    assert {m.cut for m in MECHANISMS} - {None} <= cuts
    assert {m.without for m in MECHANISMS} - {None} == set(WITHOUT) - {"nothing"}


def test_what_a_trained_model_relies_on():
    lost = {"recall": [pytest.approx(0.5)], "facts": [pytest.approx(0.05)]}
    assert relied_on(REPORT) == {"decay": lost}
    longer = {
        "rows": [{"name": name, "scores": {"examples": {"accuracy": 0.5}}} for name in ("whole", "KDA: no decay")]
    }
    assert relied_on(REPORT, longer) == {"decay": lost | {"examples": [0]}}


LOST = {"recall": [pytest.approx(0.3), pytest.approx(0.4)], "facts": [0, pytest.approx(-0.1)]}


def test_what_training_needs_is_by_seed_the_loss_against_the_same_seed():
    assert needed(RUNS) == {"decay": LOST}


def test_probes_are_columns_of_one_table():
    other = [{**trained(lacking, 0, 0, 0, "in_states"), "right": {"resets": 0.6}} for lacking in ("nothing", "decay")]
    other[1]["right"]["resets"] = 0.5
    assert needed([*RUNS, *other]) == {"decay": LOST | {"resets": [pytest.approx(0.1)]}}


def test_two_runs_of_one_seed_are_not_mixed():
    with pytest.raises(ValueError, match="two of one probe and seed without the same mechanism"):
        needed([*RUNS, trained("decay", 1, 0.0, 0.0, learning_rate=0.02)])


def test_a_median_of_ten_points_is_bold_and_what_was_not_run_is_empty():
    assert markdown({"decay": {"recall": [0.35], "facts": [-0.05]}, "RoPE": {"facts": [0.5, 0.0, 0.04]}}) == (
        "| | recall | facts |\n|---|---|---|\n| decay | **35** | -5 |\n| RoPE |  | 4 (0 to 50) |"
    )


def test_the_command_draws_both(tmp_path, capsys):
    relied, probes = tmp_path / "relied.json", tmp_path / "probes.jsonl"
    relied.write_text(json.dumps(REPORT))
    changed = ({"steps": 5}, {"learning_rate": 0.02}, {"quiet": not NANO.quiet}, {"weight_decay": 0.0})
    others = [trained("nothing", 0, 0.0, 0.0, **change) for change in changed]
    others.append({**RUNS[0], "probe": "short"})
    probes.write_text("".join(json.dumps(run) + "\n" for run in [*RUNS, *others]))
    nano_tables.main((relied,), probes, tmp_path)
    printed = capsys.readouterr().out
    assert printed.index("Cut from nano") < printed.index("Small models trained without")
    assert "| decay | **50** | 5 |" in printed and "| decay | **35** (30 to 40) | -5 (-10 to 0) |" in printed
    for name in ("relied_on", "needed"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text(encoding="utf-8")


def test_a_skill_that_was_not_learned_is_left_empty():
    rows = [
        {"name": name, "scores": {"long_recall": {"accuracy": share}}}
        for name, share in (("whole", 0.13), ("KDA: no decay", 0.0))
    ]
    assert relied_on({"rows": rows}) == {"decay": {"long_recall": []}}
