"""`ling3 inspect`: a checkpoint's shape on paper."""

import dataclasses
import json
from typing import Annotated

import tyro
from rich.console import Console

from ling3.cli.options import TextOption

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show a checkpoint's module tree, layers and memory; reads no weights."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A checkpoint directory, a config.json, a hub id, or "nano" for the checkpoint in the package."""
    revision: TextOption = None
    """A branch, a tag or a commit, where MODEL is a hub id; the branch main without it."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show the traceback of an error, and check the types of what functions are given."""


def run(command: Inspect) -> None:
    """Prints the report."""
    from ling3 import inspect

    report = inspect.report(command.model, revision=command.revision)
    if command.json:
        print(json.dumps(report.to_dict()))
    else:
        # Rich would leave out columns where there is no room for them.
        Console(width=max(100, Console().width)).print(report)
