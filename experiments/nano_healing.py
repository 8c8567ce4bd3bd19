"""Healing: nano without one of its mechanisms, trained for a hundred steps more, and asked its skills again.

    python -m experiments.nano_healing                       # all runs that are not stored yet
    python -m experiments.nano_healing --cuts "RoPE" "whole"

A cut model has lost what it relied on the mechanism for. Whether the *mechanism* is needed, the cut does not say: the
other weights were trained to work with it. So all of them are trained for `steps` steps more, without it, on fresh
texts of the same skills. `whole` is trained alike without a cut: what it gains or loses is due to the training alone.

Each run appends a line to `results/nano_healing.jsonl`: the share of right answers to held-out texts of each skill at
the cut (step 0) and during the training. `draw` plots them, in notebook 17 too.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from experiments.__main__ import RESULTS, append, stored
from ling3.bench.report import machine
from ling3.checkpoint import load
from ling3.interpret import ablate
from ling3.model import CausalLM
from ling3.text.tokenizer import load_tokenizer
from ling3.train.loop import Optimization, Progress, train
from ling3.train.nano.mixture import batches
from ling3.train.nano.recipe import NANO, SHORT, shares_right

CUTS: Mapping[str, Callable[[CausalLM], CausalLM]] = {
    "whole": lambda model: model,
    "KDA output gate": lambda model: ablate.no_output_gate(model, "kda"),
    "MLA output gate": lambda model: ablate.no_output_gate(model, "mla"),
    "RoPE": ablate.no_rope,
    "lower_bound -1": lambda model: ablate.lower_bound(model, -1.0),
    "no bound: softplus": lambda model: ablate.lower_bound(model, None),
    "decay": ablate.no_decay,
    "short convolution": ablate.no_short_conv,
}
"""The cuts, by the names of `experiments.nano_tables.MECHANISMS`; `whole` cuts nothing."""

SKILLS = ("problems", "recall", "resets", "copying", "facts", "tracking", "positions")
"""The skills that are asked, all of which nano has learned."""

EVERY, POINTS = 5, (5, 10, 20, 50)
"""Steps between two reports of the training, and the steps with an exam; the end of the training has one too."""


def heal(cut: str, steps: int, rate: float, questions: int, seed: int = 1) -> dict[str, Any]:
    """Cuts nano and trains it on; returns the record of the run.

    The batches are those of nano's short texts, with another seed. Muon's rate rises for a tenth of the steps to `rate`
    and falls to zero. `seconds` counts the training, with the compilation of its step and without the exams.
    """
    tokenizer = load_tokenizer("nano")
    curve: list[dict[str, Any]] = []
    examined = 0.0

    def examine(step: int, loss: float | None, seconds: float, model: CausalLM) -> None:
        nonlocal examined
        start = time.monotonic()
        right = shares_right(model, tokenizer, list(SKILLS), questions)
        curve.append({"step": step, "loss": loss, "seconds": round(seconds - examined, 1), "right": right})
        examined += time.monotonic() - start
        print(f"{cut}, step {step}: {', '.join(f'{k} {v:.2f}' for k, v in right.items())}", file=sys.stderr)

    def report(progress: Progress, model: CausalLM) -> None:
        if progress.step in (*POINTS, steps):
            examine(progress.step, round(progress.loss, 4), progress.seconds, model)

    model = CUTS[cut](load("nano", dtype=jnp.float32))
    examine(0, None, 0.0, model)
    examined = 0.0
    warmup = max(1, steps // 10)
    optimization = Optimization(steps, learning_rate=rate, warmup=warmup, weight_decay=NANO.weight_decay)
    texts = batches(tokenizer.backend, (SHORT,), NANO.seed + 100 + seed)
    train(model, texts, optimization, every=EVERY, report=report)
    jax.clear_caches()  # no other cut runs these programs
    return {"cut": cut, "steps": steps, "learning_rate": rate, "seed": seed, "questions": questions, "curve": curve}


def draw(runs: Sequence[Mapping[str, Any]], axes: Sequence[Any]) -> None:
    """Draws each skill's share of right answers over the steps, a line for each cut and a grey one for `whole`."""
    for skill, ax in zip(SKILLS, axes, strict=True):
        for run in runs:
            steps, shares = zip(*((point["step"], point["right"][skill]) for point in run["curve"]), strict=True)
            look = {"color": "0.6", "linewidth": 4, "marker": ""} if run["cut"] == "whole" else {}
            ax.plot(steps, shares, label=run["cut"], **look)
        ax.set(title=skill, ylim=(-0.04, 1.04))


def main(
    cuts: tuple[str, ...] = tuple(CUTS),
    steps: int = 100,
    rate: float = 0.003,
    questions: int = 100,
    out: Path = RESULTS / "nano_healing.jsonl",
) -> None:
    """Make the runs that are not stored yet.

    Args:
        cuts: the mechanisms to cut.
        steps: steps of training after the cut, of 3,072 tokens each; 100 take two to three minutes on two cores.
        rate: the highest learning rate.
        questions: held-out texts of each skill in an exam.
        out: the file of the runs.
    """
    if unknown := [cut for cut in cuts if cut not in CUTS]:
        raise SystemExit(f"found no cut {', '.join(unknown)}; expected some of {', '.join(CUTS)}")
    done = [(run["cut"], run["steps"], run["learning_rate"]) for run in stored(out)]
    for cut in cuts:
        if (cut, steps, rate) not in done:
            append(out, heal(cut, steps, rate, questions) | {"machine": machine()})


if __name__ == "__main__":
    tyro.cli(main)
