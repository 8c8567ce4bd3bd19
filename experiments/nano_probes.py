"""Probes of nano: which skills are learned, and which of them without a mechanism.

    python -m experiments.nano_probes --probe short --without nothing RoPE
    python -m experiments.nano_probes --probe needed --steps 500 --seeds 0 1 2

Each run appends its curve and its last scores as a line to `results/nano_probes.jsonl`; a stored run is not repeated.
`short`, or a skill's name, is a dense model of 64 channels on some skills or on this one, some minutes of one core;
`context` is the recipe on three skills whose answers stand in the text, `whole` the recipe with fewer steps. `needed`
has half of its rows and the skills that are learned soon: without each mechanism it is the table of what is needed.
`forgetting` is the recipe on two skills for which a state has to forget: with each bound on the decay it tells how
many nats a model wants. Each run has a histogram of the decays that it learned.
"""

import dataclasses
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
from ling3.train.nano.mixture import Rows
from ling3.train.nano.recipe import BEGINNING, NANO, WITHOUT, Recipe, make
from ling3.train.nano.skills import SKILLS, Skill
from ling3.train.nano.skills.exam import PADDING

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "first_k_dense_replace": 4,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "initializer_range": 0.1,
}
"""Nano's config in 64 channels, with two heads of 32 and without experts."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """What is trained, and on what."""

    cycle: tuple[Rows, ...]
    changes: Mapping[str, Any]
    beginning: int = 0
    """Steps on `first` that come first."""
    first: Rows = BEGINNING


CONTEXT = {"recall": 0.3, "copying": 0.3, "positions": 0.4}
BUDGET = {
    "problems": 0.25,
    "drills": 0.15,
    "recall": 0.15,
    "resets": 0.12,
    "copying": 0.13,
    "tracking": 0.08,
    "positions": 0.12,
}
"""The skills that are learned within a thousand steps, which `facts` are not."""
SOME = {"recall": 0.2, "resets": 0.2, "copying": 0.15, "tracking": 0.2, "positions": 0.15, "facts": 0.1}


def _alone(skill: Skill) -> Probe:
    """The small model on one skill."""
    rows = (12, 256) if skill.longest <= 256 else (2, 1536)
    return Probe((Rows(*rows, {skill.name: 1.0}),), SMALL)


PROBES = {
    "whole": Probe(NANO.cycle, {}, NANO.beginning),
    "needed": Probe((Rows(6, 256, BUDGET),), {}, 350, Rows(6, 256, BEGINNING.shares)),
    "context": Probe((Rows(12, 256, CONTEXT),), {}),
    "forgetting": Probe((Rows(12, 256, {"resets": 0.5, "tracking": 0.5}),), {}),
    "short": Probe((Rows(12, 256, SOME),), SMALL),
    **{name: _alone(skill) for name, skill in SKILLS.items()},
}


STEPS = (1.0, 1.25, 1.6, 2.0, 2.5, 3.2, 4.0, 5.0, 6.3, 8.0)
EDGES = (0.0, *(float(f"{step * 10.0**power:.4g}") for power in range(-4, 2) for step in STEPS), 100.0)
"""Of the bins of decays, in nats a token."""


def decays(checkpoint: str | Path, names: Sequence[str], texts: int = 64) -> dict[str, list[int]]:
    """How many channels of how many tokens decay by so many nats, in bins between `EDGES`, per KDA layer.

    On the first held-out texts of skills. Empty for a model whose states never decay.
    """
    model, tokenizer = load(checkpoint), load_tokenizer(checkpoint)
    counts: dict[str, list[int]] = {}
    for name in names:
        for text in SKILLS[name].exam(texts if SKILLS[name].longest <= 256 else 2):
            tokens = tokenizer.encode(text.prompt + text.answer)
            padded = jnp.asarray([tokens + tokens[-1:] * (-len(tokens) % PADDING)], jnp.int32)
            for i, layer in trace(model, padded, logit_lens=False).kda.items():
                rates = -np.asarray(layer.decay[0, : len(tokens)], np.float32)
                found, _ = np.histogram(rates[rates > 0], EDGES)
                counts[str(i)] = (found + counts.get(str(i), 0)).tolist()
    return {layer: own for layer, own in counts.items() if any(own)}


def main(
    probe: str,
    without: tuple[str, ...] = tuple(WITHOUT),
    steps: int = 600,
    learning_rate: float = NANO.learning_rate,
    weight_decay: float = NANO.weight_decay,
    quiet: bool = NANO.quiet,
    seeds: tuple[int, ...] = (0,),
    out: Path = RESULTS,
) -> None:
    """Train what is not stored yet.

    Args:
        probe: `whole`, `short`, or the name of a skill.
        without: what the models lack, keys of `ling3.train.nano.WITHOUT`; all of them by default.
        steps: batches of 3,072 tokens; half of that in `needed`.
        learning_rate: at its peak.
        weight_decay: of matrices.
        quiet: whether KDA's lasting heads begin silent, the others local.
        seeds: of weights and texts.
        out: the directory of the results.
    """
    if probe not in PROBES:
        raise ValueError(f"probe is {probe!r}, expected one of {', '.join(PROBES)}")
    file = out / "nano_probes.jsonl"
    for seed, lacking in ((seed, lacking) for seed in seeds for lacking in without):
        own = {"seed": seed, "steps": steps, "learning_rate": learning_rate, "weight_decay": weight_decay}
        own |= {"quiet": quiet, "without": lacking}
        if any(line["probe"] == probe and own.items() <= line["recipe"].items() for line in stored(file)):
            continue
        print(f"{probe} without {lacking}, seed {seed}", file=sys.stderr)
        chosen = PROBES[probe]
        begins = {"beginning": chosen.beginning, "first": chosen.first}
        recipe = Recipe(**own, **begins, warmup=40, cycle=chosen.cycle, changes=chosen.changes)
        with tempfile.TemporaryDirectory() as scratch:
            record = make(made := Path(scratch) / "probe", recipe, questions=200, every=max(1, steps // 6))
            names = [name for name in record["right"] if SKILLS[name].longest <= 256]
            record["decays"] = decays(made, names)
        append(file, {"probe": probe, **record, "machine": machine()})


if __name__ == "__main__":
    tyro.cli(main)
