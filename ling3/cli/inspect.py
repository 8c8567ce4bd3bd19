"""`ling3 inspect`: a checkpoint's module tree, layers and memory."""

import dataclasses
import os
import sys

from rich.console import Console

from ling3.cli.options import Command, Common, Model
from ling3.cli.terminal import print_json

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.

# Columns without a terminal, so that lines for grep and files are not wrapped.
WIDE = 160


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect(Command):
    """Show a checkpoint's module tree, layers and memory; reads no weights."""

    model: Model
    """A checkpoint directory, a config.json, a hub id, or "nano" for the checkpoint in the package."""
    common: Common
    json: bool = False
    """Print one JSON object."""


def run(command: Inspect) -> None:
    """Prints the report."""
    from ling3.interpret import inspect

    report = inspect.report(command.model, revision=command.common.revision)
    if command.json:
        print_json(report.to_dict())
    else:
        Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDE).print(report)
