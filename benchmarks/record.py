"""How the benchmarks record what they find: a JSON file with command, machine and versions, and a picture."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ling3.bench_report import machine

# Okabe and Ito's colours, told apart by the colour-blind; markers and dashes tell them apart in print.
BLACK, BLUE, ORANGE, GREEN, SKY = "#000000", "#0072B2", "#D55E00", "#009E73", "#56B4E9"


def write(out: Path, name: str, findings: dict[str, Any], figure: Figure, **versions: str) -> None:
    """Writes `name`.json and `name`.png into the directory `out`."""
    out.mkdir(parents=True, exist_ok=True)
    where = {
        "command": shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]]),
        "machine": machine() | versions,
    }
    (out / f"{name}.json").write_text(json.dumps(where | findings, indent=1) + "\n", encoding="utf-8")
    figure.savefig(out / f"{name}.png", dpi=150)
    print(out / f"{name}.json", out / f"{name}.png", file=sys.stderr)


def spread(values: Sequence[float]) -> dict[str, Any]:
    """The median of repeated measurements, and how far they lie apart."""
    return {
        "median": round(float(np.median(values)), 4),
        "least": round(min(values), 4),
        "most": round(max(values), 4),
        "all": [round(value, 4) for value in values],
    }
