"""Mechanisms against tasks: the same small model, stream and code, with one mechanism changed in three of four layers.

    python -m experiments.hybrids

The last layer is MLA in all variants, as in Ling-3 at 3:1. Each variant is trained on five tasks, at swept learning
rates and with three seeds; what was expected is in `hybrids_predictions.md`, which was committed before the first run.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro
from jaxtyping import PRNGKeyArray

from experiments.__main__ import DOCS, RESULTS, conduct
from experiments.design import Experiment
from experiments.mechanisms import HeadDecay
from experiments.reported import Reported
from experiments.tasks import TASKS, Task, word_problems
from ling3.layers.gqa import GQA, GQAConfig
from ling3.layers.kda import KDAConfig
from ling3.layers.rope import Rope
from ling3.model import Mixer
from ling3.runtime import plots

LAYERS, WINDOW = 4, 16
KDA_SIZES = KDAConfig(hidden=64, heads=2, head_dim=32, eps=1e-6, std=0.1)


def _attention(window: int | None, key: PRNGKeyArray) -> GQA:
    """Softmax attention of two heads with RoPE, over all tokens or over the last `window`."""
    rope = Rope.plain(10000.0, 32)
    sizes = GQAConfig(hidden=64, heads=2, kv_heads=2, head_dim=32, std=0.1, rope=rope, window=window)
    return GQA.init(sizes, key=key, dtype=jnp.float32)


def _head_decay(key: PRNGKeyArray, **how: bool) -> HeadDecay:
    return HeadDecay.init(KDA_SIZES, key=key, **how)


MIXERS: dict[str, Callable[[PRNGKeyArray], Mixer]] = {
    "Gated DeltaNet": _head_decay,
    "Mamba-2": functools.partial(_head_decay, delta=False),
    "lightning": functools.partial(_head_decay, delta=False, fixed=True),
    "window": functools.partial(_attention, WINDOW),
    "full attention": functools.partial(_attention, None),
}
"""The mixers of the variants that Ling-3's config does not have, in the place of its KDA layers."""

HEAD, FIXED, ATTENTION = ({"intermediate_size": width} for width in (80, 80, 100))
"""Wider MLPs, so that all variants have equally many parameters within 1 %."""

VARIANTS = {
    "KDA": {},
    "KDA, softplus": {"kda_lower_bound": None},
    "KDA, beta to 2": {"kda_allow_neg_eigval": True},
    "Gated DeltaNet": HEAD,
    "Mamba-2": HEAD,
    "lightning": FIXED,
    "window": ATTENTION,
    "full attention": ATTENTION,
}
"""Changes to the small Ling-3 of `design.py`, beside the mixers."""


def text() -> Task:
    """Next tokens of *nano*'s word problems, measured on problems whose solutions no training text has."""
    train, held_out = word_problems("train"), word_problems("held_out")
    return dataclasses.replace(train, parts=(held_out,))


def _experiment(task: Task, steps: int, rows: int = 16) -> Experiment:
    return Experiment(
        task,
        layers=LAYERS,
        variants={name: {"layer_group_size": LAYERS} | changes for name, changes in VARIANTS.items()},
        mixers=MIXERS,
        steps=steps,
        rows=rows,
        learning_rates=(4e-3, 8e-3, 1.6e-2),
        points=10,
    )


HYBRIDS: dict[str, Callable[[], Experiment]] = {
    "recall": lambda: _experiment(TASKS["mqar"](), 360),
    "copying": lambda: _experiment(TASKS["palindrome"](), 480),
    "tracking": lambda: _experiment(TASKS["parity"](), 420),
    "resets": lambda: _experiment(TASKS["segment_reset"](), 420),
    "text": lambda: dataclasses.replace(_experiment(text(), 400, rows=8), held_out=32),
}
"""The five tasks: recall, copying, state tracking, resets and text."""


COLOURS = {"KDA": plots.BLUE, "delta": plots.SKY, "decay": plots.GREEN, "attention": plots.RED}
KINDS = {
    "KDA": "KDA",
    "KDA, softplus": "KDA",
    "KDA, beta to 2": "KDA",
    "Gated DeltaNet": "delta",
    "Mamba-2": "decay",
    "lightning": "decay",
    "window": "attention",
    "full attention": "attention",
}
"""What a variant's three layers are: KDA, the delta rule with a decay per head, a decay alone, or softmax attention."""


def reported(out: Path = RESULTS) -> dict[str, Reported]:
    """The stored runs of each task."""
    return {name: Reported(make(), out / f"hybrids_{name}.jsonl") for name, make in HYBRIDS.items()}


def draw(tasks: Mapping[str, Reported], figure: Any) -> None:
    """Draws mechanisms against tasks: a point per seed, a line at the geometric mean, a panel per task.

    The measure is the share of wrong answers in percent, on a logarithmic axis; of text it is the loss in nats.
    """
    from matplotlib.ticker import LogLocator, NullFormatter  # noqa: PLC0415 -- takes long to import

    panels = figure.subplots(1, len(tasks), sharey=True)
    for (name, runs), axes in zip(tasks.items(), panels, strict=True):
        for row, variant in enumerate(runs.variants):
            losses = name == "text"
            values = runs.losses(variant) if losses else 100 * runs.errors(variant)
            mean = runs.loss(variant) if losses else 100 * runs.error(variant)
            colour = COLOURS[KINDS[variant]]
            places = row + np.linspace(-0.16, 0.16, len(values))
            axes.plot(values, places, "o", color=colour, markersize=5, alpha=0.8, markeredgewidth=0)
            axes.vlines(mean, row - 0.36, row + 0.36, color=colour, linewidth=2)
        axes.set_title(name, fontsize=10)
        if losses:
            axes.set_xlabel("nats per token", fontsize=8)
        else:
            axes.set(xscale="log")
            axes.set_xlabel("wrong answers, %", fontsize=8)
            low, high = axes.get_xlim()
            axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if high < 1000 * low else (1.0,)))
            axes.xaxis.set_major_formatter(lambda percent, _: f"{percent:g}")
            axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", labelsize=8)
    panels[0].set_yticks(range(len(VARIANTS)), list(VARIANTS), fontsize=9)
    panels[0].invert_yaxis()
    figure.supxlabel("left is better; a point is a seed, a line the geometric mean of three", fontsize=9)


def plot(tasks: Mapping[str, Reported], path: Path) -> None:
    """Writes the figure as PNG and as SVG."""
    import matplotlib  # noqa: PLC0415 -- takes long to import
    from matplotlib.figure import Figure  # noqa: PLC0415

    with matplotlib.rc_context():
        plots.use()
        figure = Figure(figsize=(11, 3.6))
        draw(tasks, figure)
        for suffix in (".png", ".svg"):
            figure.savefig(path.with_suffix(suffix), dpi=160)


def main(
    task: Literal["recall", "copying", "tracking", "resets", "text", "all"] = "all",
    out: Path = RESULTS,
    figure: Path = DOCS / "mechanisms",
) -> None:
    """Make the runs that are not stored yet; when all are, draw mechanisms against tasks.

    Args:
        task: which task; all of them take some hours of one core.
        out: directory of the results.
        figure: the figure of all tasks, a path without its ending; written as PNG and as SVG.
    """
    for name in HYBRIDS if task == "all" else (task,):
        conduct(HYBRIDS[name](), out / f"hybrids_{name}.jsonl")
    if task == "all":
        plot(reported(out), figure)


if __name__ == "__main__":
    tyro.cli(main)
