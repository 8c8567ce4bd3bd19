"""The published weights, for who has them: LING3_CHECKPOINT names their directory, LING3_GSM8K and LING3_MMLU_PRO the
prompt files of the published table. LING3_PREDICTIONS may name a directory for the predictions, so that a run that was
broken off goes on. What is not named is reported as not run."""

import json
import os
from pathlib import Path

import pytest

import ling3
from ling3 import cli
from ling3.evals.run import Score


def named(variable, what):
    """What an environment variable names; skips the test where it is not set."""
    value = os.environ.get(variable)
    if not value:
        pytest.skip(f"not run: set {variable} to {what}")
    return value


@pytest.fixture
def checkpoint():
    return named("LING3_CHECKPOINT", "the directory of a Ling-3.0-tiny checkpoint")


def test_the_capital_of_france(checkpoint):
    """The one continuation that is published: " Paris", "."."""
    tokenizer = ling3.load_tokenizer(checkpoint)
    prompt = tokenizer.encode("The capital of France is")
    (new,) = ling3.generate(ling3.load(checkpoint), [prompt], max_tokens=2)
    assert new == [13997, 13]
    assert tokenizer.decode(new) == " Paris."


@pytest.mark.parametrize(
    ("task", "variable", "wanted"), [("gsm8k", "LING3_GSM8K", 0.85), ("mmlu-pro", "LING3_MMLU_PRO", 0.44)]
)
def test_the_published_table(checkpoint, tmp_path, capsys, task, variable, wanted):
    """Right as often as published, or more often: the share wanted is not above the 95 % interval of that found."""
    prompts = named(variable, f"a prompt file for `ling3 eval {task}`, with its answers")
    out = Path(os.environ.get("LING3_PREDICTIONS", tmp_path)) / f"{task}.jsonl"
    assert cli.main(["eval", task, checkpoint, "--prompts", prompts, "--out", str(out)]) == 0
    lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    score = Score(sum(line["right"] for line in lines), len(lines))
    last = capsys.readouterr().out.splitlines()[-1]
    with capsys.disabled():
        print(f"\n{task}: {last}")
    assert last == str(score)
    assert score.interval[1] >= wanted
