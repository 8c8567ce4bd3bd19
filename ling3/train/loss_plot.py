"""The plot of a fine-tuning's losses."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def draw_losses(log: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a PNG of each step's loss, their running mean, and the loss on held-out texts if that was measured."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    steps = [(point["step"], point["loss"]) for point in log if "loss" in point]
    mean, means = steps[0][1] if steps else 0.0, []
    for _, loss in steps:
        mean += 0.1 * (loss - mean)
        means.append(mean)
    axes.plot(*zip(*steps, strict=True), color="0.75", label="each step")
    axes.plot([step for step, _ in steps], means, color="black", label="running mean")
    if measured := [(point["step"], point["eval_loss"]) for point in log if "eval_loss" in point]:
        axes.plot(*zip(*measured, strict=True), "o-", color="C0", label="held-out texts")
    axes.set(xlabel="step", ylabel="loss of learnt tokens, nats")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=110)
