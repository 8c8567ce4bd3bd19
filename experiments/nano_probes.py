"""Small probes before nano's long run: which skills a small model learns, and which of them without a mechanism.

    python -m experiments.nano_probes --probe short --without RoPE

trains a dense model of 64 channels in Ling-3's pattern on some skills, with one mechanism left out, and appends its
curve as a line to `results/nano_probes.jsonl`. A probe takes some minutes of one core.
"""

import json
import tempfile
from pathlib import Path
from typing import Literal

import tyro

from experiments.__main__ import RESULTS
from ling3.bench.report import machine
from ling3.train.nano.mixture import Rows
from ling3.train.nano.second_edition import SecondEdition, make

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "first_k_dense_replace": 4,
    "num_attention_heads": 2,
    "q_lora_rank": None,
    "initializer_range": 0.1,
}
"""The edition's config in 64 channels, with two heads of 32 and without experts."""

PROBES = {
    "short": Rows(
        12,
        256,
        {"recall": 0.2, "resets": 0.2, "copying": 0.15, "tracking": 0.2, "positions": 0.15, "facts": 0.1},
    ),
    "long": Rows(2, 1536, {"long_recall": 1.0}),
}


def main(
    probe: Literal["short", "long"],
    without: str = "nothing",
    steps: int = 600,
    learning_rate: float = 6e-3,
    seed: int = 0,
    out: Path = RESULTS,
) -> None:
    """Train a small model on some of nano's skills.

    Args:
        probe: `short`: the skills of short texts but for problems. `long`: exact recall of 192 keys.
        without: what the model lacks, a key of `ling3.train.nano.second_edition.WITHOUT`.
        steps: batches of 3,072 tokens.
        learning_rate: at its peak.
        seed: of weights and texts.
        out: the directory of the results.
    """
    recipe = SecondEdition(
        seed=seed,
        steps=steps,
        learning_rate=learning_rate,
        warmup=40,
        cycle=(PROBES[probe],),
        without=without,
        changes=SMALL,
    )
    with tempfile.TemporaryDirectory() as scratch:
        record = make(Path(scratch) / "probe", recipe, questions=200, every=max(1, steps // 6))
    line = {"probe": probe, **record, "machine": machine()}
    line["recipe"] = {name: value for name, value in record["recipe"].items() if name != "cycle"}
    out.mkdir(parents=True, exist_ok=True)
    with (out / "nano_probes.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
