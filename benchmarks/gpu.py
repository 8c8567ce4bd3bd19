"""Tests and measures one GPU, and ends after at most eight minutes: `python -m benchmarks.gpu`.

In this order, so that a machine that is lent for minutes has told the most important things first:

1. `forms`: each operator's form on the device against its plain form (`probes.py`).
2. `model`: Ling-3.0-tiny with random weights in bfloat16: the time to the first token after 8,192 tokens, and a decode
   step of 1 and 16 rows, against the limits of `cases/gpu.py`.
3. `profile`: one decode step, and the ten kernels in which it spends most time.
4. `kernels`: whether to keep each Pallas kernel, by its time beside the plain form's, torch's and
   flash-linear-attention's where these are installed.

The report is written again after each finding. What has not ended when the time is over is named in it, and lost.
Without a GPU everything runs at toy sizes, to show that it runs.
"""

import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.table import Table

from benchmarks import cases, report
from benchmarks.cases.gpu import GPU, one_row
from benchmarks.probes import examine, passed, probes
from benchmarks.record import save, where
from benchmarks.registry import CASES, Setting
from benchmarks.run import run

assert cases, "importing the cases registers them"

SCRATCH = Path(tempfile.gettempdir()) / "ling3-benchmarks"
SECONDS = 480.0
ROUNDS = 3
LONGEST = 10
"""The number of kernels in the profile."""
STEPS = 8
"""The number of decode steps that are profiled."""
MODEL = ("gpu/prefill-8192", "gpu/decode-1-at-1024", "gpu/decode-16-at-1024")
KERNELS = {
    "kda_step": ("gpu/kda-step-1", "gpu/kda-step-128"),
    "latent_attention": ("gpu/mla-decode-16",),
    "experts": ("gpu/experts-16", "gpu/experts-8192"),
}
"""The cases that time each Pallas kernel."""
PLAINLY = "ling3, without a kernel"


class Report:
    """The findings so far, written to a file after each of them, and the time at which the process ends."""

    def __init__(self, path: Path, seconds: float, setting: Setting):
        self.path, self.ends = path, time.monotonic() + seconds
        self.doing = "beginning"
        self.findings: dict[str, Any] = {**where("benchmarks.gpu"), "scale": setting.scale, "seconds": seconds}
        self._lock = threading.Lock()
        self._alarm = threading.Timer(seconds, self._cut)
        self._alarm.daemon = True
        self._alarm.start()

    def add(self, part: str, name: str, found: Any) -> None:
        """Adds a finding and writes the report."""
        with self._lock:
            self.findings.setdefault(part, {})[name] = found
            self._write()

    def close(self) -> None:
        """Writes the report as complete, unless the time is over."""
        self._alarm.cancel()
        with self._lock:
            self.findings["complete"] = True
            self._write()

    def _write(self) -> None:
        self.findings["took"] = round(self.findings["seconds"] - (self.ends - time.monotonic()), 1)
        save(self.path, self.findings)

    def _cut(self) -> None:
        """Ends the process: a compiler that has begun cannot be stopped in another way."""
        with self._lock:
            self.findings["cut_off"] = self.doing
            self._write()
            print(f"{self.path}: time was over during {self.doing}", file=sys.stderr, flush=True)
            os._exit(3)


def main(
    out: Path = Path("benchmarks/results/gpu_report.json"),
    seconds: float = SECONDS,
    scratch: Path = SCRATCH,
) -> None:
    """Test and measure this machine's GPU, and write a JSON report as it goes.

    The exit status is 1 if a form is wrong or an operator or case fails, and 3 if the time was not enough.

    Args:
        out: the report's file.
        seconds: after this time the process ends, with what it has found.
        scratch: directory for the profile.
    """
    setting = Setting("full" if jax.default_backend() == "gpu" else "toy", scratch)
    found = Report(out, seconds, setting)
    good = [
        *_each(found, "forms", {probe.operator: lambda probe=probe: _form(probe) for probe in probes(setting)}),
        *_each(found, "model", {name: lambda name=name: run(CASES[name], setting, ROUNDS) for name in MODEL}),
        *_each(found, "profile", {"decode, 1 row": lambda: profile(one_row(setting), setting)}),
        *_each(found, "kernels", {name: lambda name=name: verdict(name, setting) for name in KERNELS}),
    ]
    found.close()
    shown = Console(width=None if sys.stdout.isatty() else 160)
    for part in tables(json.loads(out.read_text(encoding="utf-8"))):
        shown.print(part)
    if not all(good):
        sys.exit(1)


def _each(found: Report, part: str, work: Mapping[str, Callable[[], Any]]) -> list[bool]:
    """Does each piece of work and adds what it returns, or its error; True for each that went well."""
    good = []
    for name, do in work.items():
        found.doing = f"{part}: {name}"
        print(f"{time.strftime('%H:%M:%S')} {found.doing}", file=sys.stderr, flush=True)
        try:
            told = do()
        except Exception as error:
            # The other findings of a machine that is lent for minutes must not be lost.
            told = {"failed": f"{type(error).__name__}: {error}"}
        found.add(part, name, told)
        good.append(not {"failed", "wrong"} & told.keys() and told.get("outcome") not in ("failed", "wrong"))
    return good


def _form(probe: Any) -> dict[str, Any]:
    """The findings of `examine`, with `wrong` among them if the form does not pass."""
    told = examine(probe, GPU)
    return told if passed(told) or "wrong" in told else told | {"wrong": "bits depend on the call or on other rows"}


def verdict(kernel: str, setting: Setting) -> dict[str, Any]:
    """The kernel's times and ratios in each of its cases, and `verdict`: keep, delete, or keep where it is faster."""
    records = {name: run(CASES[name], setting, ROUNDS) for name in KERNELS[kernel]}
    told: dict[str, Any] = {name: _short(record) for name, record in records.items()}
    faster = {name: each.get("times_faster_than", {}).get(PLAINLY) for name, each in told.items()}
    wins = [name for name, ratio in faster.items() if ratio is not None and ratio >= 1]
    if setting.scale == "toy":
        told["verdict"] = "none at toy sizes"
    elif None in faster.values():
        told["verdict"] = f"unknown: {', '.join(name for name, ratio in faster.items() if ratio is None)} has no number"
    elif wins:
        told["verdict"] = "keep" if len(wins) == len(faster) else f"keep for {', '.join(wins)} only"
    else:
        told["verdict"] = "delete"
    failed = [
        f"{name}: {record['why']}" for name, record in records.items() if record["outcome"] in ("wrong", "failed")
    ]
    return told | ({"failed": "; ".join(failed)} if failed else {})


def _short(record: dict[str, Any]) -> dict[str, Any]:
    """Medians of a record, with the reason of each side that has none."""
    sides = {
        side["name"]: side["values"]["median"] if "values" in side else report.why_no_number(side)
        for side in record["sides"]
    }
    ratios = {name: values["median"] for name, values in record.get("times_faster_than", {}).items()}
    return {"unit": record.get("unit"), "sides": sides, "times_faster_than": ratios}


def profile(generate: Callable[[int], Any], setting: Setting) -> dict[str, Any]:
    """The kernels in which a decode step spends most time: a profile of 1 + STEPS new tokens, less one of 1.

    `kernels` has for each its microseconds and its calls per decode step; `busy` is their sum over all kernels, and
    `wall` the time of a step by the clock. Where the GPU waits for the host, `busy` is less than `wall`.
    """
    for count in (1, 1 + STEPS):
        generate(count)
    (prefill, before), (both, after) = (_profiled(generate, count, setting) for count in (1, 1 + STEPS))
    step = {name: [x - y for x, y in zip(both[name], prefill.get(name, (0, 0)), strict=True)] for name in both}
    longest = sorted(step, key=lambda name: step[name][0], reverse=True)[:LONGEST]
    return {
        "wall": round(1e6 * (after - before) / STEPS, 1),
        "busy": round(sum(time_of for time_of, _ in step.values()) / STEPS / 1e3, 1),
        "kernels": {
            name: {"us": round(step[name][0] / STEPS / 1e3, 2), "calls": step[name][1] / STEPS} for name in longest
        },
    }


def _profiled(generate: Callable[[int], Any], count: int, setting: Setting) -> tuple[dict[str, list[float]], float]:
    """For each kernel that ran for `count` new tokens its nanoseconds and calls; and the seconds by the clock."""
    setting.scratch.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    with tempfile.TemporaryDirectory(dir=setting.scratch) as directory:
        with jax.profiler.trace(directory):
            begin = time.perf_counter()
            generate(count)
            seconds = time.perf_counter() - begin
        (path,) = Path(directory).rglob("*.xplane.pb")
        for name, nanoseconds in _kernels(path, setting.gpu):
            found[name][0] += nanoseconds
            found[name][1] += 1
    return found, seconds


def _kernels(path: Path, gpu: bool) -> list[tuple[str, float]]:
    """(name, nanoseconds) of every kernel in a profile; on a CPU, of every operation in XLA's threads."""
    found = []
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if gpu != plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            # A GPU's streams have kernels; its other lines group them by module and by operation.
            if ("Stream" if gpu else "XLA") in (line.name or ""):
                found += [(each.name, each.duration_ns) for each in line.events if "ThunkExecutor" not in each.name]
    return found


def tables(findings: dict[str, Any]) -> list[Table]:
    """The report as tables, one for each part."""
    forms = Table("operator", "form", "values", "same again", "in any company", title="forms")
    for name, told in findings.get("forms", {}).items():
        values = told.get("values") or told.get("wrong") or told.get("refused") or told["failed"]
        forms.add_row(name, told.get("form", ""), values, str(told.get("same_again")), str(told.get("in_any_company")))
    profiled = Table("kernel", "µs per step", "calls per step", title="a decode step")
    for told in findings.get("profile", {}).values():
        for name, kernel in told.get("kernels", {}).items():
            profiled.add_row(name, f"{kernel['us']:.1f}", f"{kernel['calls']:.1f}")
        profiled.add_row(f"all kernels: {told.get('busy')} µs, by the clock {told.get('wall')} µs", "", "")
    kernels = Table("kernel", "case", "side", "ms", "× faster is the kernel", title="keep or delete")
    for name, told in findings.get("kernels", {}).items():
        kernels.add_section()
        kernels.add_row(f"{name}: {told.get('verdict', told.get('failed'))}")
        for case in KERNELS[name]:
            for side, value in told.get(case, {}).get("sides", {}).items():
                ratio = told[case]["times_faster_than"].get(side)
                kernels.add_row("", case, side, str(value), "" if ratio is None else f"{ratio:.2f}")
    records = [told for told in findings.get("model", {}).values() if "outcome" in told]
    return [forms, report.table(records), profiled, kernels]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        tyro.cli(main)
