"""The plot of a fine-tuning's losses."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure


def draw_losses(log: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a PNG of each step's loss, a mean over 5 % of the steps, and the loss on held-out texts."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    steps = [(point["step"], point["loss"]) for point in log if "loss" in point]
    losses = [loss for _, loss in steps]
    width = -(-len(losses) // 20)
    means = [fmean(losses[max(0, i - width) : i]) for i in range(1, len(losses) + 1)]
    axes.plot(*zip(*steps, strict=True), color="0.75", label="each step")
    axes.plot([step for step, _ in steps], means, color="black", label=f"mean of {width} steps")
    if measured := [(point["step"], point["eval_loss"]) for point in log if "eval_loss" in point]:
        axes.plot(*zip(*measured, strict=True), "o-", color="C0", label="held-out texts")
    axes.set(xlabel="step", ylabel="loss of learnt tokens, nats")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
