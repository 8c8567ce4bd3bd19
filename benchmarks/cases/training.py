"""Fine-tuning a LoRA adapter beside transformers with PEFT: SmolLM2-135M's shapes, float32, layers recomputed in both.

Each measurement is a fresh process of three steps: the time of those after the first, which compiles, or the peak of
its resident memory, with interpreter, libraries, weights and compilation. The oracle is PEFT's loss of each step.
"""

import importlib.util
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ling3
from benchmarks.fresh import ask
from benchmarks.models import DENSE_TOY, SMOLLM2, checkpoint, prompts
from benchmarks.oracles import is_peer
from benchmarks.registry import Absent, Setting, Side, Trial, Wrong, case
from ling3.checkpoint.adapters import save_adapter

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ROWS, STEPS = 16, 2, 3
CLOSE = 1e-3
"""The largest difference of losses near 10 nats: fp32 both ways, in other orders, through 30 layers."""


@case("training/lora-135m", "How long does a LoRA step take, beside transformers with PEFT?", wanted=1.2, rounds=3)
def lora(setting: Setting) -> Trial:
    """A step of an adapter of rank 16 on all matrices of the layers."""
    return _trial(setting, "ms", lambda found: 1e3 * found["seconds"])


@case("training/lora-135m-memory", "How much memory does it take, beside transformers with PEFT?", wanted=1.0, rounds=1)
def memory(setting: Setting) -> Trial:
    """The peak of the process's resident memory in such steps, in MB."""
    return _trial(setting, "MB", lambda found: found["peak_bytes"] / 1e6)


def _trial(setting: Setting, unit: str, value: Callable[[dict[str, Any]], float]) -> Trial:
    given = setting.once("training", lambda: _given(setting))
    tokens, kept = given["tokens"], {}

    def run(action: str) -> dict[str, Any]:
        if action == "train-peft" and importlib.util.find_spec("peft") is None:
            raise Absent("peft is not installed: pip install -e '.[parity]'")
        return ask(action, json.dumps(given))

    def check() -> str:
        """Compares the losses of a first measurement, which counts as that of the first round."""
        kept.update({action: run(action) for action in ("train-ling3", "train-peft")})
        off = float(np.abs(np.subtract(*(found["losses"] for found in kept.values()))).max())
        if off > CLOSE:
            raise Wrong(f"losses differ by {off:.1e} nats; at most {CLOSE:.0e} was allowed")
        return f"the losses of {STEPS} steps are PEFT's within {off:.0e} nats"

    def measure(action: str) -> float:
        return value(kept.pop(action, None) or run(action))

    sides = [
        Side("ling3", lambda: measure("train-ling3"), check),
        Side("transformers and PEFT", lambda: measure("train-peft"), is_peer),
    ]
    about = {"rank": RANK, "texts": ROWS, "tokens": tokens}
    return Trial(sides, unit, tokens=tokens if unit == "ms" else None, about=about, warm=False)


def _given(setting: Setting) -> dict[str, Any]:
    """What both processes are given: a checkpoint, its first adapter in PEFT's layout, and the texts, all learnt."""
    config = setting.size(full=SMOLLM2, toy=DENSE_TOY)
    directory = checkpoint(config, setting.scratch)
    adapter = setting.scratch / f"{directory.name}-adapter"
    model = ling3.load(directory, dtype=jnp.float32)
    save_adapter(ling3.new_adapter(model, rank=RANK, key=jax.random.key(0), targets=TARGETS), adapter, overwrite=True)
    rows = [list(map(int, row)) for row in prompts(config, ROWS, setting.size(full=256, toy=32))]
    paths = {"model": str(directory.absolute()), "adapter": str(adapter.absolute()), "dtype": "float32"}
    how = {"rank": RANK, "targets": TARGETS, "steps": STEPS, "tokens": sum(map(len, rows))}
    return {**paths, **how, "rows": rows}
