"""The report of a measurement: requests as their clients saw them, and their statistics as table, JSON and plot."""

import dataclasses
import datetime
import math
import os
import pathlib
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Float64
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ling3.engine.outputs import FinishReason
from ling3.runtime.cores import cores
from ling3.runtime.plots import BLUE, RED
from ling3.version import __version__

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_SUFFIXES = (".png", ".pdf", ".svg")


@dataclasses.dataclass(frozen=True)
class Distribution:
    """The mean and percentiles of a quantity over requests or tokens; percentiles interpolate linearly, as numpy's."""

    mean: float
    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> "Distribution | None":
        """The mean and percentiles of `values`; None if there are none."""
        if not values:
            return None
        return Distribution(float(np.mean(values)), *map(float, np.percentile(values, (50, 90, 99))))


@dataclasses.dataclass(frozen=True)
class ServedRequest:
    """One request as its client saw it; times are in seconds from the start of the measurement."""

    due: float
    """When the request was due; its latencies count from here."""
    prompt_tokens: int
    deltas: Sequence[tuple[float, int]]
    """The time of arrival and the number of tokens of each delta."""
    end: float
    finish_reason: FinishReason
    cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache."""
    error: str | None = None
    """The server's error message, or what was wrong with its answer."""

    @property
    def completed(self) -> bool:
        """True if the request ended with `stop` or `length`."""
        return self.finish_reason in ("stop", "length")

    @property
    def output_tokens(self) -> int:
        """The number of tokens in the request's answer."""
        return sum(tokens for _, tokens in self.deltas)

    @property
    def latency(self) -> float:
        """Seconds from the due time to the end (E2EL)."""
        return self.end - self.due

    @property
    def ttft(self) -> float | None:
        """Seconds from the due time to the first token; None if none came."""
        return self.deltas[0][0] - self.due if self.deltas else None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two tokens."""
        return (self.deltas[-1][0] - self.deltas[0][0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between one delta and the next."""
        return [later[0] - earlier[0] for earlier, later in zip(self.deltas, self.deltas[1:])]

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies in seconds: a delta's tokens share the wait for it evenly."""
        return [gap / tokens for gap, (_, tokens) in zip(self.gaps, self.deltas[1:]) for _ in range(tokens)]


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """One measurement. Times are in seconds; latencies and token counts are over completed requests only."""

    served: Sequence[ServedRequest]
    duration: float
    """Seconds from the start of the measurement to the last request's end."""
    request_rate: float
    """Requests due per second; infinite offline, where all are due at once."""
    about: Mapping[str, Any]
    """The model, the workload and the command."""
    engine: Mapping[str, Any]
    """The engine's settings; empty for a server."""
    turns: Mapping[str, int]
    """How many steps, calls and preemptions the engine made; empty for a server."""
    machine: Mapping[str, Any]

    @property
    def completed(self) -> int:
        """The number of requests that ended with `stop` or `length`."""
        return len(self._good)

    @property
    def failed(self) -> int:
        """The number of requests that ended in an error or were aborted."""
        return len(self.served) - self.completed

    @property
    def errors(self) -> dict[str, int]:
        """The errors of failed requests, and how often each occurred."""
        return dict(Counter(request.error for request in self.served if request.error is not None))

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens in the prompts of completed requests."""
        return sum(request.prompt_tokens for request in self._good)

    @property
    def cached_tokens(self) -> int:
        """The number of these prompt tokens that were found in the prefix cache."""
        return sum(request.cached_tokens for request in self._good)

    @property
    def cached_share(self) -> float:
        """`cached_tokens` as a fraction of `prompt_tokens`."""
        return self.cached_tokens / max(self.prompt_tokens, 1)

    @property
    def output_tokens(self) -> int:
        """The number of tokens in the answers of completed requests."""
        return sum(request.output_tokens for request in self._good)

    @property
    def request_throughput(self) -> float:
        """Completed requests per second of the measurement."""
        return self.completed / self.duration

    @property
    def output_throughput(self) -> float:
        """New tokens per second of the measurement."""
        return self.output_tokens / self.duration

    @property
    def total_token_throughput(self) -> float:
        """Tokens of prompts and outputs per second."""
        return (self.prompt_tokens + self.output_tokens) / self.duration

    @property
    def concurrency(self) -> float:
        """How many requests were in flight on average, counting completed ones only."""
        return sum(request.latency for request in self._good) / self.duration

    @property
    def latencies(self) -> dict[str, Distribution | None]:
        """Distributions of TTFT, TPOT, ITL, the times between deltas, and E2EL, in seconds."""
        good = self._good
        return {
            "ttft": Distribution.of([request.ttft for request in good if request.ttft is not None]),
            "tpot": Distribution.of([request.tpot for request in good if request.tpot is not None]),
            "itl": Distribution.of([wait for request in good for wait in request.itl]),
            "delta_gap": Distribution.of([gap for request in good for gap in request.gaps]),
            "e2el": Distribution.of([request.latency for request in good]),
        }

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON; times are in milliseconds, except where a name ends in `_s`."""
        return {
            "command": self.about.get("command"),
            "machine": dict(self.machine),
            "about": {name: value for name, value in self.about.items() if name != "command"},
            "engine": dict(self.engine),
            "turns": dict(self.turns),
            "request_rate": None if math.isinf(self.request_rate) else self.request_rate,
            "duration_s": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "errors": self.errors,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "cached_share": round(self.cached_share, 6),
            "output_tokens": self.output_tokens,
            "request_throughput": self.request_throughput,
            "output_throughput": self.output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "concurrency": self.concurrency,
            **{
                f"{name}_ms": None if spread is None else _milliseconds(dataclasses.asdict(spread))
                for name, spread in self.latencies.items()
            },
            "requests": [
                {
                    "due_s": round(request.due, 6),
                    "prompt_tokens": request.prompt_tokens,
                    "cached_tokens": request.cached_tokens,
                    "output_tokens": request.output_tokens,
                    "finish_reason": request.finish_reason,
                    **_milliseconds({"ttft_ms": request.ttft, "tpot_ms": request.tpot, "e2el_ms": request.latency}),
                }
                for request in self.served
            ],
        }

    @property
    def load(self) -> str:
        """How the requests were sent, in words."""
        if (concurrency := self.about.get("concurrency")) is not None:
            return f"{concurrency} at a time"
        return "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} requests/s, Poisson"

    def facts(self) -> Table:
        """Rows of the table that say which model was measured, and where."""
        parts = [str(self.about[name]) for name in ("model", "dtype") if name in self.about]
        if "parameters" in self.about:
            parts.insert(1, f"{self.about['parameters']:,} parameters")
        machine = self.machine
        where = f"{machine['cpu']}, {machine['cores']} cores"
        facts = Table.grid(padding=(0, 2))
        facts.add_row("model", ", ".join(parts))
        if "base_url" in self.about:
            facts.add_row("at", f"{self.about['base_url']}, by {self.about['endpoint']}")
            facts.add_row("client", f"{where}, of which it took {self.about['client_cpu']:.2f}")
        else:
            facts.add_row("on", f"{machine['backend']} ({machine['device']}), {where}")
        return facts

    def __rich__(self) -> Group:
        facts = self.facts()
        facts.add_row("requests", f"{self.completed} finished, {self.failed} failed; {self.load}")
        for error, count in self.errors.items():
            facts.add_row("", f"{count} × {error}")
        facts.add_row("duration", f"{self.duration:.2f} s; {self.concurrency:.1f} requests in flight on average")
        facts.add_row("tokens", f"{self.prompt_tokens:,} of prompts, {self.output_tokens:,} of output")
        known = f"{self.cached_tokens:,} of the prompts' tokens ({100 * self.cached_share:.1f} %) were known"
        facts.add_row("prefix cache", known if self.engine.get("prefix_cache", True) else "off")
        rates = Table("throughput", box=None, pad_edge=False, header_style="bold")
        rates.add_column("", justify="right")
        for name, value, unit in (
            ("output", self.output_throughput, "tokens/s"),
            ("total", self.total_token_throughput, "tokens/s"),
            ("requests", self.request_throughput, "requests/s"),
        ):
            rates.add_row(name, f"{value:,.2f} {unit}" if value < 100 else f"{value:,.0f} {unit}")
        times = Table("latency, ms", box=None, pad_edge=False, header_style="bold")
        for column in ("mean", "p50", "p90", "p99"):
            times.add_column(column, justify="right", min_width=9)
        for name, label in LABELS.items():
            spread = self.latencies[name]
            cells = ("-",) * 4 if spread is None else (f"{1e3 * x:,.2f}" for x in dataclasses.astuple(spread))
            times.add_row(label, *cells)
        return Group(facts, Text(), rates, Text(), times)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Plots the distributions of TTFT and inter-token latency, and the load over time, into a PNG, PDF or SVG.

        Raises ValueError as `check_plot` does.
        """
        check_plot(path)
        from matplotlib.figure import Figure  # noqa: PLC0415 -- takes long to import

        good = self._good
        figure = Figure(figsize=(10.5, 3.3), layout="constrained")
        first, between, load = figure.subplots(1, 3)
        ttft = [request.ttft for request in good if request.ttft is not None]
        _distribution(first, ttft, "time to first token (TTFT), ms", "share of requests")
        waits = [wait for request in good for wait in request.itl]
        _distribution(between, waits, "inter-token latency (ITL), ms", "share of tokens")
        times, requests, tokens = in_flight(self.served)
        load.step(times, requests, where="post", color=BLUE)
        load.set(xlabel="time, s", ylim=(0, None))
        load.set_ylabel("requests in flight", color=BLUE)
        held = load.twinx()
        held.step(times, tokens, where="post", color=RED, linestyle="--", linewidth=1.2)
        held.set_ylabel("tokens of running requests (dashed)", color=RED)
        held.set_ylim(0, None)
        speed = f"{self.output_throughput:,.0f} output tokens/s"
        title = f"{self.about.get('model', 'engine')}: {len(self.served)} requests, {self.load}, {speed}"
        if self.cached_tokens:
            title += f", {100 * self.cached_share:.0f} % of prompt tokens cached"
        figure.suptitle(f"{title}, on {self.machine['device']}", fontsize=10)
        figure.savefig(pathlib.Path(path), dpi=160)

    @property
    def _good(self) -> list[ServedRequest]:
        return [request for request in self.served if request.completed]


LABELS = {
    "ttft": "TTFT, to the first token",
    "tpot": "TPOT, per token after it",
    "itl": "ITL, between two tokens",
    "delta_gap": "between two deltas",
    "e2el": "E2EL, to the last token",
}
"""The latencies of a report, with their labels in the table."""


def in_flight(
    served: Sequence[ServedRequest],
) -> tuple[Float64[np.ndarray, " times"], Float64[np.ndarray, " times"], Float64[np.ndarray, " times"]]:
    """Times, and from each on the number of requests in flight and of tokens (prompt and output) of running ones."""
    events: list[tuple[float, int, int]] = []
    for request in served:
        events += [(request.due, 1, 0), (request.end, -1, 0)]
        if request.deltas:
            events.append((request.deltas[0][0], 0, request.prompt_tokens))
            events += [(time, 0, tokens) for time, tokens in request.deltas]
            events.append((request.end, 0, -request.prompt_tokens - request.output_tokens))
    changes = np.asarray(events, np.float64)
    times, at = np.unique(changes[:, 0], return_inverse=True)
    requests, tokens = (np.bincount(at, changes[:, column], len(times)) for column in (1, 2))
    return times, np.cumsum(requests), np.cumsum(tokens)


def machine() -> dict[str, Any]:
    """The machine that is measured, its load, and the versions of Python, JAX and ling3."""
    device = jax.devices()[0]
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": cores(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "python": platform.python_version(),
        "jax": jax.__version__,
        "ling3": __version__,
    }


def check_plot(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if no plot can be written to `path`: the suffix is unknown, or there is no such directory."""
    path = pathlib.Path(path)
    if path.suffix.lower() not in PLOT_SUFFIXES:
        raise ValueError(f"plot: {path} ends in {path.suffix!r}, expected one of {', '.join(PLOT_SUFFIXES)}")
    if path.is_dir():
        raise ValueError(f"plot: {path} is a directory, expected a file")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"plot: there is no directory {path.absolute().parent} for {path.name}: make it first")


def _distribution(axes: "Axes", seconds: Sequence[float], xlabel: str, ylabel: str) -> None:
    """Plots the share of values up to each value, and marks the median and the 99th percentile."""
    axes.set(xlabel=xlabel, ylabel=f"{ylabel} up to this", ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    if not seconds:
        axes.text(0.5, 0.5, "none", ha="center", transform=axes.transAxes)
        return
    values = np.sort(1e3 * np.asarray(seconds, np.float64))
    axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=BLUE)
    median, last = np.percentile(values, (50, 99))
    axes.axvline(median, color="black", linestyle=":", linewidth=1.2, label=f"p50 {median:,.3g} ms")
    axes.axvline(last, color=RED, linestyle="--", linewidth=1.2, label=f"p99 {last:,.3g} ms")
    if values[-1] > 2 * last > 0:
        axes.set_xlim(right=2 * last)
        axes.plot([], [], " ", label=f"longest {values[-1]:,.3g} ms")
    axes.legend(fontsize=8, loc="lower right")


def _milliseconds(seconds: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else round(1e3 * value, 3) for name, value in seconds.items()}


def _cpu() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
