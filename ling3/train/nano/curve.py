"""The plot of a training run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

STYLES = ("-", "--", ":", "-.")


def draw_curve(curve: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a PNG of the loss (log scale) and each skill's share of right held-out answers over training tokens."""
    millions = [point["tokens"] / 1e6 for point in curve]
    figure = Figure(figsize=(8, 6), layout="constrained")
    loss, right = figure.subplots(2, 1, sharex=True, height_ratios=(1, 2))
    loss.semilogy(millions, [point["loss"] for point in curve], color="black")
    loss.set(ylabel="loss of answers, nats", title="nano")
    for i, name in enumerate(curve[-1]["right"]):
        right.plot(millions, [point["right"][name] for point in curve], STYLES[i // 5], color=f"C{i % 5}", label=name)
    right.set(xlabel="training tokens, millions", ylabel="held-out answers right", ylim=(-0.02, 1.02))
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    for axes in (loss, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
