"""Does a model want to forget by more than five nats a token? `lower_bound` swept in training, and the decays learned.

    python -m experiments.nano_probes --probe in_states --seeds 0 1 2 --without \\
        nothing "bound -0.1" "bound -1" "bound -10" "bound -20" bound
    python -m experiments.nano_bounds

Above, the share of right answers in the two skills of the probe, a point for each seed; below, which share of (token,
channel) of a layer decays by so many nats, over all seeds. The line is the bound. The picture goes to
`docs/bounds.png`, the same in Markdown to standard output.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from jaxtyping import Float

from experiments.__main__ import DOCS, RESULTS
from experiments.nano_probes import EDGES, finished

BOUNDS = {"bound -0.1": 0.1, "bound -1": 1.0, "nothing": 5.0, "bound -10": 10.0, "bound -20": 20.0, "bound": None}
"""Nats a token at most, by what a probe is trained without; None is the softplus law, which has no bound."""

Run = Mapping[str, Any]


def label(bound: float | None) -> str:
    """How a picture names a bound."""
    return "softplus" if bound is None else f"-{bound:g}"


def histogram(runs: Sequence[Run], layer: str) -> Float[np.ndarray, " bins"]:
    """Which share of the layer's decays is in each bin of `EDGES`, over runs."""
    counts = np.sum([run["decays"][layer] for run in runs], axis=0)
    return counts / counts.sum()


def at_least(runs: Sequence[Run], nats: float) -> float:
    """Which share of all decays, over layers and runs, is of so many nats a token or more, one of `EDGES`."""
    first = EDGES.index(nats)
    counts = np.sum([own for run in runs for own in run["decays"].values()], axis=0)
    return float(counts[first:].sum() / counts.sum())


def by_bound(runs: Sequence[Run]) -> dict[float | None, list[Run]]:
    """The runs of each bound that has some, in the order of `BOUNDS`."""
    own = {bound: [run for run in runs if run["recipe"]["without"] == name] for name, bound in BOUNDS.items()}
    return {bound: found for bound, found in own.items() if found}


def markdown(runs: Sequence[Run]) -> str:
    """Each bound's scores, seed by seed, and which share of its decays is of one and of five nats or more."""
    skills = list(runs[0]["right"])
    lines = ["| bound | " + " | ".join(skills) + " | 1 nat or more | 5 or more |", "|---" * (len(skills) + 3) + "|"]
    for bound, own in by_bound(runs).items():
        scores = [", ".join(f"{run['right'][skill]:.3f}" for run in own) for skill in skills]
        shares = [f"{at_least(own, nats):.1%}" for nats in (1.0, 5.0)]
        lines.append(f"| {label(bound)} | " + " | ".join([*scores, *shares]) + " |")
    return "\n".join(lines)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Scores by bound, and a histogram of decays for each bound with a line for each layer."""
    from matplotlib.figure import Figure  # noqa: PLC0415 -- takes long to import

    swept = by_bound(runs)
    figure = Figure(figsize=(2.4 * len(swept), 5.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1, 1.15))
    axes = above.subplots()
    for skill, marker, shift in zip(runs[0]["right"], "osD^", (-0.08, 0.08, -0.16, 0.16)):
        points = [(i + shift, run["right"][skill]) for i, own in enumerate(swept.values()) for run in own]
        axes.plot(*zip(*points), marker, label=skill, alpha=0.8)
    axes.set_xticks(range(len(swept)), [label(bound) for bound in swept])
    axes.set(xlabel="lower_bound in training, nats a token", ylabel="right answers")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    middles = np.sqrt(np.asarray(EDGES[1:-1]) * np.asarray(EDGES[2:]))
    panels = np.atleast_1d(below.subplots(1, len(swept), sharex=True, sharey=True))
    for panel, (bound, own) in zip(panels, swept.items(), strict=True):
        for layer, style in zip(sorted(own[0]["decays"]), ("-", "--", ":", "-.")):
            panel.plot(middles, 100 * histogram(own, layer)[1:], style, label=f"layer {layer}")
        if bound is not None:
            panel.axvline(bound, color="0.3", linewidth=1)
        panel.set(xscale="log", title=label(bound), xlabel="nats a token")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("% of decays in a bin")
    panels[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)


def main(file: Path = RESULTS / "nano_probes.jsonl", out: Path = DOCS / "bounds.png") -> None:
    """Draw the sweep and print it.

    Args:
        file: the runs of `experiments.nano_probes`.
        out: the picture.
    """
    swept = [run for run in finished(file, "in_states") if run["recipe"]["without"] in BOUNDS]
    if not swept:
        raise ValueError(f"{file} has no runs of the probe 'in_states' with a bound: run experiments.nano_probes")
    draw(swept, out)
    print(markdown(swept))


if __name__ == "__main__":
    tyro.cli(main)
