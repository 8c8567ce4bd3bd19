"""Mechanisms against skills: what is counted, and how it is shown."""

import json
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import rich.console

import ling3
from ling3 import cli
from ling3.evals.ablations import ablations
from ling3.evals.run import Score
from ling3.evals.skill_table import SkillRow, SkillTable, compare_skills
from ling3.train.nano.skills import exam as skills_exam

TABLE = SkillTable(
    (
        SkillRow("whole", "", {"recall": Score(9, 10), "facts": Score(8, 10)}),
        SkillRow("MLA: no RoPE", "rope(x) → x", {"recall": Score(3, 10), "facts": Score(8, 10)}),
    ),
    {"model": "any"},
)


def test_a_loss_is_what_the_whole_model_has_more():
    assert TABLE.loss(TABLE.rows[1], "recall") == pytest.approx(0.6)
    assert TABLE.loss(TABLE.rows[1], "facts") == 0.0


def test_it_is_shown_as_table_json_and_picture(tmp_path):
    console = rich.console.Console(width=120, record=True)
    console.print(TABLE)
    text = console.export_text()
    assert "MLA: no RoPE" in text and "recall" in text and "0.300" in text
    numbers = json.loads(json.dumps(TABLE.to_dict()))
    assert numbers["model"] == "any" and numbers["rows"][1]["scores"]["recall"]["right"] == 3
    TABLE.plot(tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="expected one of"):
        TABLE.plot(tmp_path / "table.gif")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_nano_solves_problems_with_its_convolutions_alone():
    model, tokenizer = ling3.load("nano", dtype=jnp.float32), ling3.load_tokenizer("nano")
    chosen = [a for a in ablations(model) if a.name in ("KDA: no short convolution", "KDA: gate at its mean")]
    seen = []
    exams = skills_exam._right  # what an ablation compiles: dropped when the next one begins

    def report(row):
        seen.append((row, exams._cached._cache_size()))

    jax.clear_caches()
    table = compare_skills(model, tokenizer, chosen, ["problems", "chat"], questions=32, report=report)
    assert tuple(row for row, _ in seen) == table.rows and len(seen) == 3
    assert {count for _, count in seen} == {seen[0][1]} and seen[0][1] > 0 == exams._cached._cache_size()
    without = next(row for row in table.rows if "convolution" in row.name)
    for skill in ("problems", "chat"):
        assert table.rows[0].scores[skill].right >= 29 and without.scores[skill].right <= 3
        assert table.loss(without, skill) > 0.8


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("ablate", ["--skills", "juggling"], "found no skill 'juggling'; the skills are problems, chat"),
        ("ablate", ["--skills", "recall", "--text", "x.txt"], "--text is for the perplexity"),
        ("eval skills", ["--only", "recall,juggling"], "found no skill 'juggling'"),
        ("eval skills", ["--questions", "0"], "--questions is 0, expected a whole number >= 1"),
    ],
)
def test_what_cannot_be_measured_is_said_first(command, options, message, capsys):
    assert cli.main([*command.split(), "nano", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_examines_nano_in_the_skills_it_has(capsys):
    assert cli.main(["eval", "skills", "nano", "--only", "problems", "--questions", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["problems"]
    assert found["total"] == 32 and found["right"] >= 29
    assert found["wilson_95"][0] < found["accuracy"] <= found["wilson_95"][1]


@pytest.mark.slow
def test_scoring_needs_no_extra():
    program = "import sys; sys.modules['optax'] = None; import ling3.evals.skills, ling3.evals.skill_table"
    subprocess.run([sys.executable, "-c", program], cwd=pathlib.Path(ling3.__file__).parents[1], check=True)
