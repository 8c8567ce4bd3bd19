"""Mechanisms against skills: what nano relies on, beside what training needs.

    SHORT=problems,chat,recall,resets,copying,facts,tracking,positions
    ling3 ablate nano --skills $SHORT --questions 100 --json experiments/results/nano_relied_on.json
    ling3 ablate nano --skills examples,long_recall --questions 60 --json experiments/results/nano_relied_on_long.json
    python -m experiments.nano_probes --probe needed --seeds 0 1 2
    python -m experiments.nano_tables

A cell is the share of right answers that is lost: on the left where the mechanism is cut from nano, on the right in
small models trained without it, the median of seeds with the least and the most. The pictures go to `docs/relied_on`
and `docs/needed`, as PNG and SVG, the tables in Markdown to standard output.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import tyro

from experiments.__main__ import DOCS, RESULTS
from experiments.nano_probes import NEEDED, finished
from ling3.evals.skill_table import draw_losses
from ling3.train.nano.mixture import TEXTS


class Mechanism(NamedTuple):
    """A row of both tables: the ablation that cuts it, and the key of `WITHOUT` that trains without it, if there is."""

    name: str
    cut: str | None
    without: str | None


MECHANISMS = (
    Mechanism("KDA output gate", "KDA: no output gate", "KDA output gate"),
    Mechanism("MLA output gate", "MLA: no output gate", "MLA output gate"),
    Mechanism("decay", "KDA: no decay", "decay"),
    Mechanism("lower_bound -20", None, "bound -20"),
    Mechanism("lower_bound -10", "KDA: lower_bound -10", "bound -10"),
    Mechanism("lower_bound -1", "KDA: lower_bound -1", "bound -1"),
    Mechanism("lower_bound -0.1", "KDA: lower_bound -0.1", "bound -0.1"),
    Mechanism("no bound: softplus", "KDA: softplus law", "bound"),
    Mechanism("beta = 1", "KDA: beta 1", "beta"),
    Mechanism("short convolution", "KDA: no short convolution", "short convolution"),
    Mechanism("RoPE", "MLA: no RoPE", "RoPE"),
    Mechanism("KDA of layer 0", "layer 0: no KDA", None),
    Mechanism("KDA of layer 1", "layer 1: no KDA", None),
    Mechanism("KDA of layer 2", "layer 2: no KDA", None),
    Mechanism("MLA of layer 3", "layer 3: no MLA", None),
    Mechanism("KDA in no layer", None, "KDA"),
    Mechanism("MLA in no layer", None, "MLA"),
    Mechanism("routed experts", "experts: none but the shared", "routed experts"),
    Mechanism("fewer experts a token", "experts: top 1", "several experts"),
    Mechanism("routing bias", "experts: no routing bias", "routing bias"),
    Mechanism("shared expert", "experts: no shared one", "shared expert"),
)
"""In the order of the rows. Fewer experts: one instead of two."""

LEARNED = 0.5
"""The least share of right answers of the whole model in a skill that it has learned. Others are left empty."""

Losses = Mapping[str, Mapping[str, Sequence[float]]]
"""The losses in each skill, by mechanism: one, or one for each seed."""


def relied_on(*reports: Mapping[str, Any]) -> Losses:
    """Of the JSON of `ling3 ablate MODEL --skills …`, of one model and different skills."""
    shares: dict[str, dict[str, float]] = {}
    for row in (row for report in reports for row in report["rows"]):
        shares.setdefault(row["name"], {}).update({name: s["accuracy"] for name, s in row["scores"].items()})
    whole = shares["whole"]
    return {
        mechanism.name: {
            skill: [whole[skill] - share] if whole[skill] >= LEARNED else []
            for skill, share in shares[mechanism.cut].items()
        }
        for mechanism in MECHANISMS
        if mechanism.cut in shares
    }


def needed(runs: Sequence[Mapping[str, Any]]) -> Losses:
    """Of finished runs, those of one probe and seed against the whole model of both; ValueError for one run twice."""
    keys = [(run["probe"], run["recipe"]["without"], run["recipe"]["seed"]) for run in runs]
    shares = dict(zip(keys, (run["right"] for run in runs), strict=True))
    if len(shares) < len(runs):
        raise ValueError("runs: two of one probe and seed without the same mechanism, expected one of each")
    losses: dict[str, dict[str, list[float]]] = {}
    for mechanism, (probe, lacking, seed) in itertools.product(MECHANISMS, keys):
        whole = shares.get((probe, "nothing", seed))
        if whole is not None and mechanism.without == lacking:
            for skill, share in shares[probe, lacking, seed].items():
                losses.setdefault(mechanism.name, {}).setdefault(skill, []).append(whole[skill] - share)
    return losses


def _skills(losses: Losses) -> list[str]:
    """The columns of a table."""
    return [name for name in TEXTS if any(name in row for row in losses.values())]


def markdown(losses: Losses) -> str:
    """The table in points of a hundred; a median of ten points is bold."""
    skills = _skills(losses)
    lines = ["| | " + " | ".join(skills) + " |", "|---" * (len(skills) + 1) + "|"]
    for name, row in losses.items():
        lines.append(f"| {name} | " + " | ".join(_cell(row.get(skill, ())) for skill in skills) + " |")
    return "\n".join(lines)


def _cell(lost: Sequence[float]) -> str:
    """The median, and of several the least and the most."""
    if not lost:
        return ""
    least, middle, most = (round(100 * of(lost)) for of in (min, median, max))
    shown = f"**{middle}**" if median(lost) >= 0.1 else str(middle)
    return shown if len(lost) == 1 else f"{shown} ({least} to {most})"


def draw(title: str, losses: Losses, path: Path) -> None:
    """Draws a map of the losses, with the least and the most over seeds, as PNG and SVG."""
    from matplotlib.figure import Figure  # noqa: PLC0415 -- takes long to import

    rows, skills = list(losses), _skills(losses)
    seeds = [[losses[row].get(skill, ()) for skill in skills] for row in rows]
    cells = np.array([[median(cell or [np.nan]) for cell in row] for row in seeds])
    notes = {
        (i, j): f"{100 * min(cell):.0f} … {100 * max(cell):.0f}"
        for i, row in enumerate(seeds)
        for j, cell in enumerate(row)
        if len(cell) > 1
    }
    figure = Figure(
        figsize=(2.6 + 0.6 * len(skills), 1.7 + (0.36 if notes else 0.26) * len(rows)), layout="constrained"
    )
    axes = figure.subplots()
    figure.colorbar(draw_losses(axes, rows, skills, cells, notes), label="right answers lost, of 100")
    axes.set_title(title, fontsize=10)
    for suffix in (".png", ".svg"):
        figure.savefig(path.with_suffix(suffix), dpi=160)


def main(
    relied: tuple[Path, ...] = (RESULTS / "nano_relied_on.json", RESULTS / "nano_relied_on_long.json"),
    probes: Path = RESULTS / "nano_probes.jsonl",
    out: Path = DOCS,
) -> None:
    """Draw both tables and print them.

    Args:
        relied: what `ling3 ablate MODEL --skills … --json` wrote, of different skills.
        probes: the runs of `experiments.nano_probes`.
        out: the directory of the pictures.
    """
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in relied]
    tables = {"relied_on": ("Cut from nano (2.4 M parameters)", relied_on(*reports))}
    if losses := needed([run for probe in NEEDED for run in finished(probes, probe)]):
        tables["needed"] = ("Small models trained without it:\nthe median of three seeds, and their range", losses)
    for name, (title, losses) in tables.items():
        draw(title, losses, out / name)
        print(f"{title}\n\n{markdown(losses)}\n")


if __name__ == "__main__":
    tyro.cli(main)
