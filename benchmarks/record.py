"""Records the results of benchmarks: JSON with command, machine and versions, and a plot beside it."""

import functools
import importlib.metadata
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ling3.bench.report import machine
from ling3.ops.cpu import products
from ling3.runtime import native

ROOT = Path(__file__).parent.parent
PEERS = ("torch", "transformers", "flash-linear-attention", "triton")
"""Packages whose versions are recorded if they are installed."""


def where(module: str = "benchmarks") -> dict[str, Any]:
    """The running command, in a form that repeats it, and the machine with its installed packages.

    `native` is the C++ kernel that products run on, "none" if it could not be compiled or is switched off, and
    `instructions` are the instruction sets that it was compiled with.
    """
    versions = {}
    for name in PEERS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    kernel = None if native.missing(products.SOURCE) else native.target(products.SOURCE, "product")
    kernels = {"native": kernel or "none", "instructions": " ".join(native.instructions()) if kernel else "none"}
    where = {"command": shlex.join(["python", "-m", module, *_arguments()]), "machine": machine() | versions | kernels}
    return where | {"commit": commit} if (commit := _commit()) else where


def _arguments() -> Iterator[str]:
    """The arguments of the command line, without directories that exist only on this machine."""
    arguments = iter(sys.argv[1:])
    for argument in arguments:
        if argument in ("--scratch", "--out"):
            next(arguments, None)
        elif kind := {"--vllm": "PYTHON", "--mlx": "PYTHON", "--llama-cpp": "DIR"}.get(argument):
            next(arguments, None)
            yield from (argument, kind)
        elif not argument.startswith(("--scratch=", "--out=")):
            yield argument


@functools.cache
def _commit() -> str | None:
    """The measured commit, with "-dirty" if files differ from it; None without git."""
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run(
        [git, "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def write(out: Path, name: str, findings: dict[str, Any], figure: Figure) -> None:
    """Writes `name`.json and `name`.png into the directory `out`."""
    out.mkdir(parents=True, exist_ok=True)
    save(out / f"{name}.json", where(f"benchmarks.{name}") | findings)
    figure.savefig(out / f"{name}.png", dpi=150)
    print(out / f"{name}.json", out / f"{name}.png", file=sys.stderr)


def save(path: Path, findings: dict[str, Any]) -> None:
    """Writes plain values as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(findings, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def spread(values: Sequence[float]) -> dict[str, Any]:
    """The median, least and most of repeated measurements, and all of them, to five digits (integers exactly)."""
    return {
        "median": _digits(float(np.median(values))),
        "least": _digits(min(values)),
        "most": _digits(max(values)),
        "all": [_digits(value) for value in values],
    }


def _digits(value: float) -> float:
    return int(value) if float(value).is_integer() else float(f"{value:.5g}")
