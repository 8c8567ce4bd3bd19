"""Does a model want to forget by more than five nats a token? Sweeps `lower_bound` in training; plots learned decays.

    python -m experiments.nano_probes --probe needed --seeds 0 1 2 --without \\
        nothing "bound -0.1" "bound -1" "bound -10" "bound -20" bound
    python -m experiments.nano_bounds

The upper plot has the share of right answers in the probes' skills, with a point for each seed. Below it, each probe
has a row of histograms: the share of a layer's decays (one per token and channel, over all seeds) by their nats, with a
vertical line at the bound. The plot is written to `docs/bounds.png`, a Markdown table to standard output.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from jaxtyping import Float

from experiments.__main__ import DOCS, RESULTS
from experiments.nano_probes import EDGES, NEEDED, finished

BOUNDS = {"bound -0.1": 0.1, "bound -1": 1.0, "nothing": 5.0, "bound -10": 10.0, "bound -20": 20.0, "bound": None}
"""The most nats a token can decay by, for each `without` of a probe; None is the softplus law, which has no bound."""

Run = Mapping[str, Any]


def label(bound: float | None) -> str:
    """The name of a bound in plots and tables."""
    return "softplus" if bound is None else f"-{bound:g}"


def histogram(runs: Sequence[Run], layer: str) -> Float[np.ndarray, " bins"]:
    """The share of the layer's decays in each bin of `EDGES`, over all runs."""
    counts = np.sum([run["decays"][layer] for run in runs], axis=0)
    return counts / counts.sum()


def at_least(runs: Sequence[Run], nats: float) -> float:
    """The share of all decays, over layers and runs, of at least `nats` a token, which must be one of `EDGES`."""
    first = EDGES.index(nats)
    counts = np.sum([own for run in runs for own in run["decays"].values()], axis=0)
    return float(counts[first:].sum() / counts.sum())


def by_bound(runs: Sequence[Run]) -> dict[float | None, list[Run]]:
    """The runs of each bound that has any, in the order of `BOUNDS`."""
    own = {bound: [run for run in runs if run["recipe"]["without"] == name] for name, bound in BOUNDS.items()}
    return {bound: found for bound, found in own.items() if found}


def markdown(probes: Mapping[str, Sequence[Run]]) -> str:
    """A table: for each bound, scores of each probe's skills, and shares of decays of at least one and five nats."""
    head, rows = ["bound"], {label(bound): [label(bound)] for bound in BOUNDS.values()}
    for runs in probes.values():
        skills = list(runs[0]["right"])
        head += [*skills, "≥ 1 / ≥ 5 nats"]
        swept = by_bound(runs)
        for bound in BOUNDS.values():
            own = swept.get(bound, [])
            scores = [_spread([run["right"][skill] for run in own]) for skill in skills]
            shares = " / ".join(f"{at_least(own, nats):.1%}" for nats in (1.0, 5.0)) if own else ""
            rows[label(bound)] += [*scores, shares]
    told = [row for row in rows.values() if any(row[1:])]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *told))


def _spread(scores: Sequence[float]) -> str:
    """The least and the most score, as text."""
    if not scores:
        return ""
    least, most = f"{min(scores):.2f}", f"{max(scores):.2f}"
    return least if least == most else f"{least} to {most}"


def draw(probes: Mapping[str, Sequence[Run]], path: Path) -> None:
    """Plots scores by bound, and for each probe and bound a histogram of decays with a line for each layer."""
    from matplotlib.figure import Figure  # noqa: PLC0415 -- takes long to import

    bounds = [bound for bound in BOUNDS.values() if any(bound in by_bound(runs) for runs in probes.values())]
    figure = Figure(figsize=(2.3 * len(bounds) + 0.4, 2.7 + 2.1 * len(probes)), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(2.7, 2.1 * len(probes)))
    axes = above.subplots()
    skills = [(skill, runs) for runs in probes.values() for skill in runs[0]["right"]]
    for (skill, runs), marker, shift in zip(skills, "osD^vPX", np.linspace(-0.24, 0.24, len(skills))):
        swept = by_bound(runs)
        points = [(i + shift, run["right"][skill]) for i, bound in enumerate(bounds) for run in swept.get(bound, ())]
        axes.plot(*zip(*points), marker, label=skill, alpha=0.8)
    axes.set_xticks(range(len(bounds)), [label(bound) for bound in bounds])
    axes.set(xlabel="lower_bound in training, nats a token", ylabel="right answers")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    middles = np.sqrt(np.asarray(EDGES[1:-1]) * np.asarray(EDGES[2:]))
    for panels, runs in zip(below.subplots(len(probes), len(bounds), sharex=True, squeeze=False), probes.values()):
        swept = by_bound(runs)
        for panel, bound in zip(panels, bounds, strict=True):
            if bound not in swept:
                panel.set_axis_off()
                continue
            for layer, style in zip(sorted(swept[bound][0]["decays"]), ("-", "--", ":", "-.")):
                panel.plot(middles, 100 * histogram(swept[bound], layer)[1:], style, label=f"layer {layer}")
            if bound is not None:
                panel.axvline(bound, color="0.3", linewidth=1)
            panel.set(xscale="log", title=label(bound))
            panel.tick_params(labelbottom=True)
            panel.grid(alpha=0.3)
        drawn = [panel for panel, bound in zip(panels, bounds, strict=True) if bound in swept]
        drawn[0].set_ylabel(f"{', '.join(runs[0]['right'])}:\n% of decays in a bin")
        drawn[0].legend(frameon=False, fontsize=8)
    below.supxlabel("nats a token", fontsize=10)
    figure.savefig(path, dpi=160)


def main(file: Path = RESULTS / "nano_probes.jsonl", out: Path = DOCS / "bounds.png") -> None:
    """Plot the sweep and print its table.

    Args:
        file: file with the runs of `experiments.nano_probes`.
        out: file for the plot.
    """
    found = {name: [run for run in finished(file, name) if run["recipe"]["without"] in BOUNDS] for name in NEEDED}
    probes = {name: runs for name, runs in found.items() if runs}
    if not probes:
        raise ValueError(
            f"{file} has no runs of the probes {', '.join(NEEDED)} with a bound: run experiments.nano_probes"
        )
    draw(probes, out)
    print(markdown(probes))


if __name__ == "__main__":
    tyro.cli(main)
