"""Loads a bfloat16 checkpoint from disk as a float32 model, each time in a fresh process.

The file is in the page cache for both sides: the check before the first round has read it.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from benchmarks.fresh import PROBES, ask
from benchmarks.models import FOUR_LAYERS, TOY, checkpoint
from benchmarks.registry import Absent, Setting, Side, Trial, Wrong, case
from benchmarks.torch_peers import torch_module

ROWS = 8
"""Rows of each probe that are summed."""


@case("loading/time", "Load 1.49 billion parameters, stored as bfloat16, into float32.", wanted=1 / 0.7, rounds=3)
def load_time(setting: Setting) -> Trial:
    """Seconds from the call until the last page is touched; imports do not count."""
    return _trial(setting, "s", lambda found: found["seconds"])


@case("loading/peak", "The most memory that loading ever takes, over the model's own bytes.", limit=1.1, rounds=1)
def load_peak(setting: Setting) -> Trial:
    """The process's peak resident memory, interpreter and libraries included, as a multiple of the float32 model."""
    return _trial(setting, "× model", lambda found: found["peak_bytes"] / found["model_bytes"])


def _trial(setting: Setting, unit: str, value: Callable[[dict[str, Any]], float]) -> Trial:
    directory = checkpoint(setting.size(full=FOUR_LAYERS, toy=TOY), setting.scratch)
    sides = [
        Side("ling3.load", lambda: value(ask("load-ling3", directory)), _check("load-ling3", directory)),
        Side(
            "transformers, from_pretrained",
            lambda: value(ask("load-transformers", directory)),
            _check("load-transformers", directory),
        ),
    ]
    return Trial(sides, unit=unit, about={"bytes_stored": (directory / "model.safetensors").stat().st_size}, warm=False)


def _check(action: str, directory: Path) -> Callable[[], str]:
    """Checks the loaded weights against the file, by the sums of some rows."""

    def check() -> str:
        if action == "load-transformers":
            _needs_transformers()
        found, expected = ask(action, directory)["sums"], _sums(directory)
        if not np.allclose(found, expected, rtol=1e-9, atol=1e-9):
            raise Wrong(f"rows of {', '.join(PROBES)} sum to {found}, in the file to {list(expected)}")
        return "sums of rows of three tensors are the file's"

    return check


def _needs_transformers() -> None:
    torch_module(gpu=False)
    try:
        import transformers  # noqa: F401, PLC0415 -- an extra
    except ModuleNotFoundError as error:
        raise Absent("transformers is not installed: pip install -e '.[parity]'") from error


@functools.cache
def _sums(directory: Path) -> tuple[float, ...]:
    """The sums of the probes' rows, read without ling3."""
    with safetensors.safe_open(directory / "model.safetensors", framework="numpy") as file:
        return tuple(float(file.get_tensor(name)[:ROWS].astype(np.float64).sum()) for name in PROBES)
