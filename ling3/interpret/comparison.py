"""Models side by side: their parameters, and the memory of a sequence against its length."""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.table import Table

from ling3.interpret.inspect import ModelReport

LENGTHS = tuple(2**i for i in range(10, 21))
"""The lengths that are compared: 1,024 to 1,048,576 tokens, whatever context a model was made for."""
SHOWN = (2**10, 2**15, 2**17, 2**20)
"""The lengths that the table has columns for."""
SUFFIXES = (".pdf", ".png", ".svg")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Several models' reports; `print` it with rich, take `to_dict()`, or `draw` it."""

    reports: tuple[ModelReport, ...]

    def to_dict(self) -> dict[str, Any]:
        """The numbers of the table and the plot, for JSON: bytes of a sequence by its length in tokens."""
        return {
            "models": [
                {
                    "source": report.source,
                    "parameters": report.parameters,
                    "activated_parameters_per_token": report.activated,
                    "context": report.config.max_position_embeddings,
                    "bytes_per_sequence": {str(tokens): report.memory.sequence(tokens) for tokens in LENGTHS},
                }
                for report in self.reports
            ]
        }

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        table = Table("model", "parameters", "activated", "bytes per token", "state", box=None, pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for tokens in SHOWN:
            table.add_column(f"at {tokens:,}", justify="right")
        for report in self.reports:
            memory, sizes = report.memory, [report.memory.sequence(tokens) for tokens in SHOWN]
            counts = f"{report.parameters:,}", f"{report.activated:,}", f"{memory.cache_per_token:,}"
            table.add_row(report.source, *counts, *map(_size, (sum(memory.state_per_sequence.values()), *sizes)))
        yield table

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Writes a plot of bytes against tokens, both in powers of two; dotted beyond the context of the config."""
        import matplotlib  # noqa: PLC0415 -- takes half a second, and a table does not need it
        from matplotlib.figure import Figure  # noqa: PLC0415

        from ling3.runtime import plots  # noqa: PLC0415

        with matplotlib.rc_context():
            plots.use()
            figure = Figure(figsize=(8, 4.6))
            axes = figure.subplots()
            for report in sorted(self.reports, key=lambda report: -report.memory.sequence(LENGTHS[-1])):
                within = [tokens for tokens in LENGTHS if tokens <= report.config.max_position_embeddings]
                (line,) = axes.plot(within, list(map(report.memory.sequence, within)), label=_name(report))
                beyond = LENGTHS[max(0, len(within) - 1) :]
                style: dict[str, Any] = {"color": line.get_color(), "linestyle": ":", "marker": "", "alpha": 0.6}
                axes.plot(beyond, list(map(report.memory.sequence, beyond)), **style)
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            axes.set_xticks(LENGTHS, [f"{tokens // 1024}k" if tokens < 2**20 else "1M" for tokens in LENGTHS])
            axes.yaxis.set_major_formatter(lambda size, _: _size(round(size)))
            axes.set(xlabel="tokens of a sequence", ylabel="memory of a sequence (cache and state)")
            axes.legend(frameon=False)
            figure.savefig(path)


def _name(report: ModelReport) -> str:
    """The last part of the model's source; of a file config.json, its directory's name."""
    path = Path(report.source)
    return path.parent.name if path.name == "config.json" and path.parent.name else path.name


def _size(size: int) -> str:
    """A number of bytes in the largest binary unit that leaves at least 1, with three digits."""
    unit = min(4, max(0, size.bit_length() - 1) // 10)
    return f"{size / 1024**unit:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"
