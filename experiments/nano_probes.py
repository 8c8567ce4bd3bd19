"""Small trainings on nano's skills: which are learned, and which of them without a given mechanism.

    python -m experiments.nano_probes --probe needed --seeds 0 1 2
    python -m experiments.nano_probes --probe short --without nothing RoPE

`needed` means three probes, each a model of 64 channels with all mechanisms that trains for two or three minutes on one
core: answers in the context, answers that a state has to keep, and answers in the weights. Repeated without each
mechanism they show what is needed, and `in_states` with each bound on the decay shows how many nats a model wants.
`short` is a dense model on several skills, a skill's name the same on that skill, and `whole` nano's recipe with fewer
steps. Each run appends a line with its curve, its last scores and a histogram of its decays to
`results/nano_probes.jsonl`; a stored run is not repeated.
"""

import dataclasses
import itertools
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tyro

from experiments.__main__ import RESULTS, append, stored
from ling3.bench.report import machine
from ling3.checkpoint import load
from ling3.interpret.trace import trace
from ling3.text.tokenizer import load_tokenizer
from ling3.train.nano.mixture import TEXTS, BatchShape
from ling3.train.nano.recipe import NANO, WITHOUT, Recipe, make
from ling3.train.nano.skills import SKILLS, Skill
from ling3.train.nano.skills.exam import padded

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "first_k_dense_replace": 4,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "initializer_range": 0.1,
}
"""Changes to nano's config: 64 channels, two heads of 32, and no experts."""

LITTLE = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "num_experts": 16,
    "n_group": 4,
    "initializer_range": 0.07,
}
"""Changes to nano's config: 64 channels, two heads, and 16 experts a layer, two of them chosen, beside a shared one."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """The batches of a probe, its changes to nano's config, and its budget."""

    cycle: tuple[BatchShape, ...]
    changes: Mapping[str, Any]
    steps: int = 600
    learning_rate: float = NANO.learning_rate
    quiet: bool = NANO.quiet
    """Whether to start from `quieted` weights (`ling3.train.nano.recipe`)."""
    beginning: int = 0
    """Steps of a first training on nano's `BEGINNING`."""


NEEDED = {
    "in_context": Probe((BatchShape(12, 64, {"copying": 0.5, "positions": 0.5}),), LITTLE, 700, 0.015),
    "in_states": Probe((BatchShape(12, 128, {"resets": 0.5, "tracking": 0.5}),), LITTLE, 450, 0.01, quiet=False),
    "in_weights": Probe((BatchShape(12, 64, {"facts of 1024": 1.0}),), LITTLE, 700, 0.01),
}
"""Probes by where the answers are. Heads that begin silent (`quieted`) may not learn to keep a state in 800 steps."""

SOME = {"recall": 0.2, "resets": 0.2, "copying": 0.15, "tracking": 0.2, "positions": 0.15, "facts": 0.1}


def _alone(skill: Skill) -> Probe:
    """A probe of the small model on one skill."""
    rows = (12, 256) if skill.longest <= 256 else (2, 1536)
    return Probe((BatchShape(*rows, {skill.name: 1.0}),), SMALL)


PROBES = {
    "whole": Probe(NANO.cycle, {}, beginning=NANO.beginning),
    "short": Probe((BatchShape(12, 256, SOME),), SMALL),
    **NEEDED,
    **{name: _alone(skill) for name, skill in SKILLS.items()},
}


STEPS = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)
EDGES = (0.0, *(float(f"{step * 10.0**power:.4g}") for power in range(-4, 2) for step in STEPS), 100.0)
"""Edges of the bins of decays, in nats a token."""


def decays(checkpoint: str | Path, names: Sequence[str], texts: int = 64) -> dict[str, list[int]]:
    """For each KDA layer, the number of decays (one per token and channel) in each bin between `EDGES`.

    Counted on the first held-out texts of the skills `names`. Layers whose states never decay are left out.
    """
    model, tokenizer = load(checkpoint), load_tokenizer(checkpoint)
    counts: dict[str, list[int]] = {}
    for name in names:
        for text in TEXTS[name].exam(texts if TEXTS[name].longest <= 256 else 2):
            tokens = tokenizer.encode(text.prompt + text.answer)
            row = jnp.asarray([tokens + tokens[-1:] * (padded(len(tokens)) - len(tokens))], jnp.int32)
            for i, layer in trace(model, row, logit_lens=False).kda.items():
                rates = -np.asarray(layer.decay[0, : len(tokens)], np.float32)
                found, _ = np.histogram(rates[rates > 0], EDGES)
                counts[str(i)] = (found + counts.get(str(i), 0)).tolist()
    return {layer: own for layer, own in counts.items() if any(own)}


def finished(file: Path, probe: str) -> list[dict[str, Any]]:
    """The stored runs of a probe with its steps, rate and `quiet`, and nano's weight decay."""
    chosen = PROBES[probe]
    own = {"steps": chosen.steps, "learning_rate": chosen.learning_rate}
    own |= {"weight_decay": NANO.weight_decay, "quiet": chosen.quiet}
    return [run for run in stored(file) if run["probe"] == probe and own.items() <= run["recipe"].items()]


def main(
    probe: str,
    without: tuple[str, ...] = tuple(WITHOUT),
    steps: int | None = None,
    learning_rate: float | None = None,
    weight_decay: float = NANO.weight_decay,
    quiet: bool | None = None,
    seeds: tuple[int, ...] = (0,),
    out: Path = RESULTS,
) -> None:
    """Make the trainings that are not stored yet.

    Args:
        probe: a key of `PROBES`, or `needed`, which is three of them.
        without: mechanisms that the models lack, keys of `ling3.train.nano.recipe.WITHOUT`; all of them by default.
        steps: number of batches; by default as the probe has it.
        learning_rate: peak learning rate; by default as the probe has it.
        weight_decay: weight decay of matrices.
        quiet: whether to start from `quieted` weights; by default as the probe has it.
        seeds: seeds of weights and texts.
        out: directory of the results.
    """
    if probe not in (*PROBES, "needed"):
        raise ValueError(f"probe is {probe!r}, expected needed or one of {', '.join(PROBES)}")
    file = out / "nano_probes.jsonl"
    for seed, lacking, name in itertools.product(seeds, without, NEEDED if probe == "needed" else (probe,)):
        chosen = PROBES[name]
        own = {"seed": seed, "steps": steps or chosen.steps, "learning_rate": learning_rate or chosen.learning_rate}
        own |= {"weight_decay": weight_decay, "quiet": chosen.quiet if quiet is None else quiet, "without": lacking}
        if any(line["probe"] == name and own.items() <= line["recipe"].items() for line in stored(file)):
            continue
        print(f"{name} without {lacking}, seed {seed}", file=sys.stderr)
        recipe = Recipe(
            **own, beginning=chosen.beginning, warmup=40, predictor=0, cycle=chosen.cycle, changes=chosen.changes
        )
        with tempfile.TemporaryDirectory() as scratch:
            record = make(made := Path(scratch) / "probe", recipe, questions=200, every=max(1, own["steps"] // 4))
            names = [skill for skill in record["right"] if TEXTS[skill].longest <= 256]
            record["decays"] = decays(made, names)
        append(file, {"probe": name, **record, "machine": machine()})


if __name__ == "__main__":
    tyro.cli(main)
