"""Runs the suite: `python -m benchmarks --help`."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks import cases, report
from benchmarks.registry import CASES, Case, Setting, chosen
from benchmarks.run import run

__all__ = ["cases", "main"]

QUICK_ROUNDS = 2
SCRATCH = Path(tempfile.gettempdir()) / "ling3-benchmarks"


def main(
    only: tuple[str, ...] = ("*",),
    quick: bool = False,
    rounds: int | None = None,
    show: Annotated[bool, tyro.conf.arg(name="list")] = False,
    vllm: Path | None = None,
    mlx: Path | None = None,
    llama_cpp: Path | None = None,
    out: Path = Path("benchmarks/results"),
    scratch: Path = SCRATCH,
) -> None:
    """Run benchmark cases: check each side against its oracle, measure all sides in turns, and record the results.

    Results at toy sizes go into the subdirectory `toy`. The exit status is 1 if the first side of a case, which is
    ling3's, is wrong or fails.

    Args:
        only: names or patterns of cases, such as 'model/*'.
        quick: use toy sizes, to see that everything runs.
        rounds: measurements of each side (by default, as many as each case says).
        show: list the cases, and measure nothing.
        vllm: the Python of an environment with vLLM, for the cases that compare with it.
        mlx: the Python of an environment with mlx-lm, for the cases that compare with it.
        llama_cpp: the directory of llama.cpp's source code, with programs in build/bin, for `peers/*`.
        out: directory for a JSON file and a plot of each group.
        scratch: directory for random checkpoints and caches, which are kept; the largest checkpoint has 5 GB.
    """
    try:
        wanted = chosen(only)
    except ValueError as error:
        raise SystemExit(f"--only: {error}") from None
    if rounds is not None and rounds < 1:
        raise SystemExit(f"--rounds is {rounds}, expected at least 1")
    if show:
        for case in wanted:
            print(f"{case.name}: {case.question}")
        return
    records = run_all(wanted, quick, rounds, out, scratch, vllm, mlx, llama_cpp)
    Console(width=None if sys.stdout.isatty() else 160).print(report.table(records))
    if any(record["outcome"] in ("wrong", "failed") for record in records):
        sys.exit(1)


def run_all(
    wanted: list[Case],
    quick: bool,
    rounds: int | None,
    out: Path,
    scratch: Path,
    vllm: Path | None = None,
    mlx: Path | None = None,
    llama_cpp: Path | None = None,
) -> list[report.Record]:
    """Runs the cases and returns their records, each written to `out` as soon as it is complete.

    Cases of the group gpu run at full size only on a GPU. Cases of one scale have one `Setting`, which keeps what they
    share.
    """
    settings = {scale: Setting(scale, scratch, vllm, mlx, llama_cpp) for scale in ("full", "toy")}
    records = []
    with _progress() as progress:
        task = progress.add_task("", total=len(wanted))
        for case in wanted:
            toy = quick or (case.group == "gpu" and not settings["full"].gpu)
            setting = settings["toy" if toy else "full"]

            def note(what: str, case: Case = case) -> None:
                progress.update(task, description=f"{case.name}: {what}")

            record = run(case, setting, min(case.rounds, QUICK_ROUNDS) if quick and rounds is None else rounds, note)
            report.keep(out / "toy" if toy else out, record)
            records.append(record)
            progress.advance(task)
    return records


def _progress() -> Progress:
    """A progress bar on stderr, with the current activity."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


if __name__ == "__main__":
    assert CASES, "importing the cases registers them"
    tyro.cli(main)
