"""Runs the experiments of a task and stores each finished run as a line of `results/TASK.jsonl`.

    python -m experiments --task mqar

Runs every variant at every learning rate with one seed, then the best rate of each with fresh seeds. A stored run is
not repeated, so an interrupted experiment continues where it stopped.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal

import tyro

from experiments.design import EXPERIMENTS, Experiment
from experiments.sweep import Run, best_rate, read, run
from ling3.bench.report import machine

RESULTS = Path(__file__).parent / "results"
DOCS = Path(__file__).parent.parent / "docs"


def conduct(experiment: Experiment, file: Path) -> list[Run]:
    """Makes the runs of an experiment that `file` lacks, appending each to it when finished; returns all runs."""
    runs = read(file)

    def once(variant: str, rate: float, seed: int) -> None:
        budget = {"variant": variant, "learning_rate": rate, "seed": seed, "steps": experiment.steps}
        if any(all(getattr(done, name) == value for name, value in budget.items()) for done in runs):
            return
        runs.append(run(experiment, variant, rate, seed))
        append(file, dataclasses.asdict(runs[-1]) | {"machine": machine()})
        last = runs[-1].final or runs[-1].curve[-1]
        print(f"{experiment.task.name}, {variant}, rate {rate:g}, seed {seed}: error {last.error:.2%}", file=sys.stderr)

    for variant in experiment.variants:
        for rate in experiment.rates(variant):
            once(variant, rate, experiment.sweep_seed)
    for seed in experiment.seeds:
        for variant in experiment.variants:
            once(variant, best_rate(runs, experiment, variant), seed)
    return runs


def stored(file: Path) -> list[dict[str, Any]]:
    """The lines of JSON of a file, in order; empty if there is no such file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def append(file: Path, line: dict[str, Any]) -> None:
    """Appends a line of JSON to a file, creating the file and its directory if necessary."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def main(
    task: Literal["segment_reset", "mqar", "parity", "palindrome", "text_and_recall", "all"] = "all",
    small: bool = False,
    out: Path = RESULTS,
) -> None:
    """Make the runs that are not stored yet.

    Args:
        task: which experiment; all of them take about an hour and a half of one core.
        small: make a quick check with a tenth of the steps, two learning rates and one seed, written to OUT/small.
        out: directory of the results.
    """
    for name in EXPERIMENTS if task == "all" else (task,):
        experiment = EXPERIMENTS[name]
        if small:
            experiment = dataclasses.replace(
                experiment,
                steps=experiment.steps // 10,
                warmup=4,
                points=2,
                learning_rates=(4e-3, 8e-3),
                more_rates={},
                seeds=(1,),
            )
        conduct(experiment, (out / "small" if small else out) / f"{name}.jsonl")


if __name__ == "__main__":
    tyro.cli(main)
