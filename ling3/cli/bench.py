"""`ling3 bench`: the engine's speed."""

import dataclasses
from typing import Annotated

import tyro

# ruff: noqa: PLC0415
# What a command needs is imported when it runs, so that help and errors come at once.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bench:
    """Measure the engine: throughput, and latency at a request rate."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A checkpoint directory, a hub id, or "nano" for the checkpoint in the package."""
    json: bool = False
    """Print one JSON object."""
    debug: bool = False
    """Show the traceback of an error."""


def run(command: Bench) -> None:
    """Measures and prints."""
    from ling3 import bench

    bench.run(command)
