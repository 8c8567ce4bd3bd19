"""`ling3 inspect`: a checkpoint's shape on paper."""

import dataclasses
import os
import sys

from rich.console import Console

from ling3.cli.options import Model, TextOption
from ling3.cli.terminal import print_json

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.

# Columns where there is no terminal: lines for grep and files do not have to be broken.
WIDE = 160


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show a checkpoint's module tree, layers and memory; reads no weights."""

    model: Model
    """A checkpoint directory, a config.json, a hub id, or "nano" for the checkpoint in the package."""
    revision: TextOption = None
    """A branch, a tag or a commit, where MODEL is a hub id; the branch main without it."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show the traceback of an error, and check the types of what functions are given."""


def run(command: Inspect) -> None:
    """Prints the report."""
    from ling3.interpret import inspect

    report = inspect.report(command.model, revision=command.revision)
    if command.json:
        print_json(report.to_dict())
    else:
        Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE).print(report)
