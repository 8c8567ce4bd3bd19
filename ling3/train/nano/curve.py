"""The plot of a training run."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure


def draw(curve: Sequence[dict[str, float]], path: Path) -> None:
    """Writes a PNG: the training loss (log scale) and the share of unseen problems solved, over tokens seen."""
    millions = [point["tokens"] / 1e6 for point in curve]
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    loss = figure.add_subplot()
    solved = loss.twinx()
    loss.semilogy(millions, [point["loss"] for point in curve], color="tab:blue")
    solved.plot(millions, [point["solved"] for point in curve], color="tab:orange")
    loss.set(xlabel="training tokens, millions", title="nano")
    loss.set_ylabel("loss of solution tokens, nats", color="tab:blue")
    solved.set_ylabel("held-out problems solved", color="tab:orange")
    solved.set_ylim(0, 1.02)
    loss.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
