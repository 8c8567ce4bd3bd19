"""The checkpoints of the parity suite, each with its tokens, its truth in float64, transformers' model and ling3's."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from oracle import Oracle
from random_checkpoint import FLASH_LIKE, REAL_HEADS, TINY_LIKE, draw_well_posed, write
from stages import ling3_stages

import ling3

LENGTHS = (1, 2, 63, 64, 65, 130, 257)
"""Around the 64-token chunk and its multiples, and the single token that never sees a chunk."""

LOGITS = 2e-4
"""The largest difference allowed between ling3's fp32 logits and transformers', whose standard deviation is near 1.

Each is within 1e-5 to 5e-5 of the float64 truth, so their roundings together stay below this; the smallest mistakes
that other ports made (an epsilon on the mean, a swapped rotary pair) do not.
"""

CONFIGS = {
    f"{name}, bound {bound}": dataclasses.replace(config, kda_lower_bound=bound)
    for name, config in (("tiny-like", TINY_LIKE), ("flash-like", FLASH_LIKE))
    for bound in (-5.0, -1.0, None)
} | {"real head sizes": REAL_HEADS}


class Case:
    """One random checkpoint in the published layout, and what reads it: the equations, transformers and ling3.

    The two models are built when first asked for. Shorter sequences are beginnings of `tokens`: all is causal, so
    `truth` holds their truth too.
    """

    def __init__(self, name: str, directory: Path):
        self.name, self.config = name, CONFIGS[name]
        self.weights, self.tokens, self.truth, self.truth_stages = draw_well_posed(self.config, max(LENGTHS))
        self._path, self._logits = directory / name.replace(" ", "-"), {}

    @functools.cached_property
    def oracle(self) -> Oracle:
        return Oracle(self.config, self.weights)

    @functools.cached_property
    def ling3(self) -> "ling3.CausalLM":
        write(self._path, self.config, self.weights)
        return ling3.load(self._path, dtype=jnp.float32)

    def logits(self, model: str, length: int) -> np.ndarray:
        """`[length, vocab]` of the first `length` tokens, from "truth", "transformers" or "ling3"."""
        if (model, length) not in self._logits:
            tokens = self.tokens[:length]
            if model == "truth":
                logits = self.truth[:length]
            elif model == "transformers":
                logits = self.oracle.logits(tokens)
            else:
                logits = np.asarray(self.ling3(jnp.array([tokens]))[0])
            self._logits[model, length] = logits
        return self._logits[model, length]

    def stages(self, model: str, length: int) -> dict[str, np.ndarray]:
        """Each module's output under its published name, in the order computed, from "transformers" or "ling3"."""
        tokens = self.tokens[:length]
        if model == "transformers":
            return self.oracle.stages(tokens)
        return jax.device_get(ling3_stages(self.ling3, jnp.array(tokens)))

    def diagnosis(self, length: int) -> str:
        """Where ling3 and transformers part, for the message of a failed comparison."""
        found = first_divergence(self.stages("ling3", length), self.stages("transformers", length))
        return f"{self.name}, {length} tokens: {found}"


def first_divergence(
    ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray], tolerance: float = LOGITS
) -> str | None:
    """The first stage, in the order of `theirs`, that differs by more than `tolerance`, or None."""
    assert ours.keys() == theirs.keys()
    for name, stage in theirs.items():
        difference = np.abs(ours[name] - stage).max()
        if not difference <= tolerance:
            return f"{name} is the first stage to differ, by {difference:.1e}"
    return None
