"""Files that commands read and write: results, texts and prompts."""

import dataclasses
import json
import pathlib
import sys
from typing import TYPE_CHECKING

from rich.console import Console

from ling3.cli.options import FileOption
from ling3.cli.terminal import print_json

if TYPE_CHECKING:
    from ling3.bench.levels import Levels
    from ling3.bench.report import BenchReport
    from ling3.evals.ablations import AblationReport
    from ling3.evals.skill_table import SkillTable


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """Where to write the numbers, besides the table or instead of it."""

    json: FileOption = None
    """Write the numbers as JSON to this file; - prints them instead of the table."""
    plot: FileOption = None
    """Plot them into this file (PNG, PDF or SVG)."""

    def check(self) -> None:
        """Raises ValueError for files that cannot be written, before any work."""
        from ling3.bench.report import check_plot

        if self.json not in (None, "-"):
            check_directory("--json", self.json)
        if self.plot is None:
            return
        check_plot(self.plot)
        if self.json is not None and pathlib.Path(self.plot).absolute() == pathlib.Path(self.json).absolute():
            raise ValueError(f"--json and --plot name the same file, {self.json}: give two")

    def write(self, report: "BenchReport | Levels | AblationReport | SkillTable", width: int) -> None:
        """Prints the table, or JSON, and writes the files.

        The table has at least `width` columns, since rich leaves out what does not fit.
        """
        if self.json == "-":
            print_json(report.to_dict(), indent=1)
        else:
            Console(width=max(width, Console().width)).print(report)
        if self.json not in (None, "-"):
            numbers = json.dumps(report.to_dict(), indent=1, ensure_ascii=False)
            pathlib.Path(self.json).write_text(numbers + "\n", encoding="utf-8")
        if self.plot is not None:
            report.plot(self.plot)


def check_directory(option: str, path: str) -> None:
    """Raises ValueError unless `path` names a file in an existing directory; called before the work is done."""
    if not path:
        raise ValueError(f"{option}: it is empty, expected the name of a file")
    if pathlib.Path(path).is_dir():
        raise ValueError(f"{option}: {path} is a directory, expected the name of a file")
    directory = pathlib.Path(path).absolute().parent
    if not directory.is_dir():
        raise ValueError(f"{option}: there is no directory {directory}: make it first")


def read_text(path: str) -> str:
    """Reads a UTF-8 file, or standard input for -. Raises ValueError if it is not UTF-8."""
    content = sys.stdin.buffer.read() if path == "-" else pathlib.Path(path).read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error}): convert it first") from error


def prompt_from_stdin() -> str:
    """Reads the prompt of a command without -p. Raises ValueError if nothing is piped to standard input."""
    text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    if not text:
        raise ValueError("no prompt: give one with -p, or pipe it to standard input")
    return text
