"""The findings of a soak: counts, differences, leaks, and memory and load over time."""

import dataclasses
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ling3.runtime.plots import BLACK, BLUE, RED, SKY

MEMORY = ("requests", "resident", "arrays")
"""Columns: finished requests; then resident memory (RSS) in bytes and live jax arrays, after collecting garbage."""
LOAD = ("steps", "running", "waiting", "free_pages")
"""Columns: the state of the busy engine after one of its steps."""


def table(columns: Sequence[str]) -> dict[str, array]:
    """Columns of eight-byte integers, since the record of memory should itself take little."""
    return {name: array("q") for name in columns}


@dataclasses.dataclass(frozen=True)
class Soak:
    """The counts and findings of a run."""

    requests: int
    seed: int
    settings: Mapping[str, Any]
    seconds: float
    completions: Mapping[str, int]
    """Completions by finish reason; a request has one or two."""
    aborted: Mapping[str, int]
    """Aborted requests, by the stage they were in."""
    preemptions: int
    steps: int
    prompt_tokens: int
    """Prompt tokens that the busy engine computed."""
    cached_tokens: int
    """Prompt tokens found in its prefix cache."""
    output_tokens: int
    compiled: int
    """Programs compiled after the warm-up."""
    compared: int
    """Completions compared with their solo run."""
    differences: list[str]
    """Completions that differed, in words."""
    leaks: list[str]
    """Whatever was left at the end, in words."""
    memory: Mapping[str, Sequence[int]]
    """The columns of `MEMORY`, from before the first request to the end of the last."""
    load: Mapping[str, Sequence[int]]
    """The columns of `LOAD`, every few steps."""

    @property
    def slope(self) -> tuple[float, float]:
        """Growth of resident memory over the second half, in bytes per request, and its standard error.

        Both are by least squares.
        """
        done, resident = (np.asarray(self.memory[name], float) for name in ("requests", "resident"))
        done, resident = done[len(done) // 2 :], resident[len(resident) // 2 :]
        away, offset = done - done.mean(), resident - resident.mean()
        slope = float(away @ offset / (away @ away))
        residual = offset - slope * away
        return slope, float(np.sqrt(residual @ residual / (len(done) - 2) / (away @ away)))

    def to_dict(self) -> dict[str, Any]:
        """All fields in plain values, for JSON; memory and load by columns."""
        slope, error = self.slope
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            "rss_slope_bytes_per_request": round(slope, 1),
            "rss_slope_standard_error": round(error, 1),
            **{name: value for name, value in fields.items() if name not in ("memory", "load")},
            "memory": {name: list(column) for name, column in self.memory.items()},
            "load": {name: list(column) for name, column in self.load.items()},
        }

    def summary(self) -> str:
        """The values of `to_dict` without memory and load, as readable text."""
        return json.dumps({k: v for k, v in self.to_dict().items() if k not in ("memory", "load")}, indent=1)

    def figure(self) -> Figure:
        """Memory against requests done, and the load against steps."""
        figure = Figure(figsize=(9, 6), layout="constrained")
        memory, load = figure.subplots(2, 1)
        done, resident = self.memory["requests"], [size / 1e6 for size in self.memory["resident"]]
        memory.plot(done, resident, color=BLUE)
        memory.set(xlabel="requests done", ylim=(0, 1.2 * max(resident)))
        memory.set_ylabel("resident memory, MB", color=BLUE)
        memory.grid(alpha=0.3)
        arrays = memory.twinx()
        arrays.plot(done, self.memory["arrays"], color=RED, linewidth=1, linestyle="--")
        arrays.set_ylabel("live arrays (dashed)", color=RED)
        arrays.set_ylim(0, 2 * max(self.memory["arrays"]))
        steps = self.load["steps"]
        load.fill_between(steps, self.load["free_pages"], color=SKY, alpha=0.5, linewidth=0, label="free pages")
        load.plot(steps, self.load["waiting"], color=RED, linewidth=0.9, label="waiting")
        load.plot(steps, self.load["running"], color=BLACK, linewidth=0.9, label="running")
        load.set(xlabel="steps", ylim=(0, 1.25 * max(*self.load["free_pages"], *self.load["waiting"])))
        load.legend(loc="upper right", ncols=3, fontsize=8)
        load.grid(alpha=0.3)
        slope, error = self.slope
        figure.suptitle(
            f"{self.requests} requests, {sum(self.aborted.values())} aborted, {self.preemptions} preemptions: "
            f"{len(self.differences)} of {self.compared} answers differ from their solo run, {len(self.leaks)} leaks,\n"
            f"memory grows by {slope:,.0f} ± {error:,.0f} bytes per request in the second half",
            fontsize=10,
        )
        return figure
