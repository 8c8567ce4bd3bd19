"""The result of comparing ablations, as a table, as JSON or as a plot."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from rich.table import Table

from ling3.bench.report import check_plot, machine
from ling3.evals.run import Score
from ling3.runtime.plots import BLUE, RED


@dataclasses.dataclass(frozen=True)
class AblationRow:
    """One row of the table: an ablation and the ablated model's scores."""

    name: str
    suite: str
    formula: str
    perplexity: float
    problems: Score | None
    recall: Score | None


@dataclasses.dataclass(frozen=True)
class AblationReport:
    """A table of ablations, the unchanged model first; `print` it with rich, take `to_dict()`, or `plot` it."""

    rows: tuple[AblationRow, ...]
    scored: str
    """The text that the perplexity is computed on: `solutions` or `text`."""
    context: int
    """Mean length of the prompts of `recall`, in tokens."""
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The report in plain values, for JSON."""
        return {
            **self.about,
            "perplexity_of": self.scored,
            "recall_context_tokens": self.context,
            "machine": machine(),
            "rows": [
                {name: value.to_dict() if isinstance(value, Score) else value for name, value in vars(row).items()}
                for row in self.rows
            ],
        }

    def __rich__(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("ablation")
        table.add_column("what the formula says")
        table.add_column(f"perplexity of {self.scored}", justify="right")
        table.add_column("problems", justify="right")
        table.add_column(f"in {self.context:,} tokens" if self.context else "in a long context", justify="right")
        suite = None
        for row in self.rows:
            if suite is not None and row.suite != suite:
                table.add_section()
            suite = row.suite
            cost = f"{row.perplexity:,.4g}" if row.perplexity < 1e6 else f"{row.perplexity:.1e}"
            table.add_row(row.name, row.formula, cost, *(_share(score) for score in (row.problems, row.recall)))
        return table

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws ln(perplexity) on a log scale, and both right answers in percent with 95 % intervals, a row each.

        Writes PNG, PDF or SVG. Raises ValueError for other file names (see `bench.report.check_plot`).
        """
        check_plot(path)
        from matplotlib.figure import Figure  # noqa: PLC0415 -- takes long to import

        height = 1.3 + 0.27 * len(self.rows)
        figure = Figure(figsize=(9.5, height), layout="constrained")
        cost, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.2))
        places = [-i for i in range(len(self.rows))]
        nats = [math.log(row.perplexity) for row in self.rows]
        cost.plot(nats, places, "o", color=BLUE)
        cost.axvline(nats[0], color="black", linestyle=":", linewidth=1)
        cost.set(xscale="log", xlabel=f"nats per token of {self.scored} (log scale)")
        cost.set_yticks(places, [row.name for row in self.rows])
        series = (
            ("problems", "asked alone", BLUE, "o", 0.12),
            ("recall", f"in {self.context:,} tokens", RED, "s", -0.12),
        )
        for name, label, colour, marker, shift in series:
            scores = {place + shift: getattr(row, name) for place, row in zip(places, self.rows, strict=True)}
            scores = {place: score for place, score in scores.items() if score is not None}
            shares = [100 * score.accuracy for score in scores.values()]
            reach = [[100 * abs(score.interval[side] - score.accuracy) for score in scores.values()] for side in (0, 1)]
            filled, at = "white" if marker == "s" else colour, list(scores)
            if scores:
                right.errorbar(shares, at, xerr=reach, fmt=marker, color=colour, mfc=filled, ms=5, lw=1.2, label=label)
        alone = 0 if self.rows[0].problems is None else 100 * self.rows[0].problems.accuracy
        right.axvline(alone, color="black", linestyle=":", linewidth=1)
        right.set(xlim=(-3, 103), xlabel="word problems answered right, %, with 95 % intervals")
        right.legend(loc="upper center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=8, frameon=True)
        right.set_ylim(places[-1] - 0.7, 1.4)
        for axes in (cost, right):
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(f"{self.about.get('model', 'A model')} with one mechanism cut out; dotted: the whole model")
        figure.suptitle(f"{self.about.get('model', 'A model')} with one mechanism cut out; dotted: the whole model")
        figure.savefig(pathlib.Path(path), dpi=160)


def _share(score: Score | None) -> str:
    if score is None:
        return "-"
    low, high = score.interval
    return f"{score.accuracy:.3f} ({low:.2f}-{high:.2f})"
