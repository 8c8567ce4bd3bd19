"""Probes of nano's second edition: which skills are learned, and which of them without a mechanism.

    python -m experiments.nano_probes --probe short --without nothing RoPE
    python -m experiments.nano_probes --probe whole --steps 1000 --seeds 0 1 2

Each run appends its curve and its last scores as a line to `results/nano_probes.jsonl`; a stored run is not repeated.
`short`, or a skill's name, is a dense model of 64 channels on some skills or on this one, some minutes of one core;
`context` is the edition on three skills whose answers stand in the text, `whole` the edition with fewer steps: run
without each mechanism, it is the table of what is needed.
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tyro

from experiments.__main__ import RESULTS
from ling3.bench.report import machine
from ling3.train.nano.mixture import Rows
from ling3.train.nano.second_edition import EDITION, WITHOUT, SecondEdition, make
from ling3.train.nano.skills import SKILLS, Skill

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "first_k_dense_replace": 4,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "initializer_range": 0.1,
}
"""The edition's config in 64 channels, with two heads of 32 and without experts."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """What is trained, and on what."""

    cycle: tuple[Rows, ...]
    changes: Mapping[str, Any]
    beginning: int = 0
    """Steps on the edition's `BEGINNING` that come first."""


CONTEXT = {"recall": 0.3, "copying": 0.3, "positions": 0.4}
SOME = {"recall": 0.2, "resets": 0.2, "copying": 0.15, "tracking": 0.2, "positions": 0.15, "facts": 0.1}


def _alone(skill: Skill) -> Probe:
    """The small model on one skill."""
    rows = (12, 256) if skill.longest <= 256 else (2, 1536)
    return Probe((Rows(*rows, {skill.name: 1.0}),), SMALL)


PROBES = {
    "whole": Probe(EDITION.cycle, {}, EDITION.beginning),
    "context": Probe((Rows(12, 256, CONTEXT),), {}),
    "short": Probe((Rows(12, 256, SOME),), SMALL),
    **{name: _alone(skill) for name, skill in SKILLS.items()},
}


def _stored(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def main(
    probe: str,
    without: tuple[str, ...] = tuple(WITHOUT),
    steps: int = 600,
    learning_rate: float = EDITION.learning_rate,
    weight_decay: float = EDITION.weight_decay,
    quiet: bool = EDITION.quiet,
    seeds: tuple[int, ...] = (0,),
    out: Path = RESULTS,
) -> None:
    """Train what is not stored yet.

    Args:
        probe: `whole`, `short`, or the name of a skill.
        without: what the models lack, keys of `ling3.train.nano.second_edition.WITHOUT`; all of them by default.
        steps: batches of 3,072 tokens.
        learning_rate: at its peak.
        weight_decay: of matrices.
        quiet: whether KDA's lasting heads begin silent, the others local.
        seeds: of weights and texts.
        out: the directory of the results.
    """
    if probe not in PROBES:
        raise ValueError(f"probe is {probe!r}, expected one of {', '.join(PROBES)}")
    out.mkdir(parents=True, exist_ok=True)
    file = out / "nano_probes.jsonl"
    for seed, lacking in ((seed, lacking) for seed in seeds for lacking in without):
        own = {"seed": seed, "steps": steps, "learning_rate": learning_rate, "weight_decay": weight_decay}
        own |= {"quiet": quiet, "without": lacking}
        if any(line["probe"] == probe and own.items() <= line["recipe"].items() for line in _stored(file)):
            continue
        print(f"{probe} without {lacking}, seed {seed}", file=sys.stderr)
        chosen = PROBES[probe]
        recipe = SecondEdition(**own, warmup=40, beginning=chosen.beginning, cycle=chosen.cycle, changes=chosen.changes)
        with tempfile.TemporaryDirectory() as scratch:
            record = make(Path(scratch) / "probe", recipe, questions=200, every=max(1, steps // 6))
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"probe": probe, **record, "machine": machine()}) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
