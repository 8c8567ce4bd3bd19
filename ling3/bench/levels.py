"""Reports of one engine or server at several concurrencies, side by side."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ling3.bench.report import BenchReport, Distribution, check_plot
from ling3.runtime.plots import BLUE, RED


@dataclasses.dataclass(frozen=True)
class Levels:
    """One report for each concurrency, which is its `about["concurrency"]`."""

    reports: Sequence[BenchReport]

    def to_dict(self) -> dict[str, Any]:
        """The reports in plain values, for JSON."""
        return {"levels": [report.to_dict() for report in self.reports]}

    def __rich__(self) -> Group:
        facts = self.reports[0].facts()
        for report in self.reports:
            for error, count in report.errors.items():
                facts.add_row("errors", f"{count} × {error}, {report.load}")
        rows = Table(box=None, pad_edge=False, header_style="bold")
        columns = ("at a time", "finished", "failed", "requests/s", "output tokens/s")
        for column in (*columns, "TTFT ms, p50", "p99", "TPOT ms, p50", "p99"):
            rows.add_column(column, justify="right")
        for report in self.reports:
            counts = (report.about["concurrency"], report.completed, report.failed)
            rates = (f"{report.request_throughput:,.2f}", f"{report.output_throughput:,.0f}")
            times = [cell for name in ("ttft", "tpot") for cell in _cells(report.latencies[name])]
            rows.add_row(*map(str, counts), *rates, *times)
        return Group(facts, Text(), rows)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plots throughput and time per token against the concurrency, into a PNG, PDF or SVG.

        Raises ValueError as `check_plot` does.
        """
        check_plot(path)
        from matplotlib.figure import Figure  # noqa: PLC0415 -- takes long to import

        figure = Figure(figsize=(7, 3.3), layout="constrained")
        axes = figure.subplots()
        at = [report.about["concurrency"] for report in self.reports]
        axes.plot(at, [report.output_throughput for report in self.reports], "o-", color=BLUE)
        axes.set(xlabel="requests at a time", xscale="log", ylim=(0, None))
        axes.set_xticks(at, map(str, at), minor=False)
        axes.minorticks_off()
        axes.set_ylabel("output tokens/s", color=BLUE)
        times = axes.twinx()
        spreads = [(n, spread) for n, report in zip(at, self.reports) if (spread := report.latencies["tpot"])]
        times.plot([n for n, _ in spreads], [1e3 * spread.p50 for _, spread in spreads], "s--", color=RED)
        times.set_ylabel("time per token, p50, ms (dashed)", color=RED)
        times.set_ylim(0, None)
        about = self.reports[0].about
        figure.suptitle(f"{about.get('model')} at {about.get('base_url')}", fontsize=10)
        figure.savefig(pathlib.Path(path), dpi=160)


def _cells(spread: Distribution | None) -> tuple[str, str]:
    return ("-", "-") if spread is None else (f"{1e3 * spread.p50:,.2f}", f"{1e3 * spread.p99:,.2f}")
