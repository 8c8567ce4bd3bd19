"""Comparisons that decide whether two answers count as the same; every side must pass one before it is timed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.registry import Wrong

FLOAT32, BFLOAT16 = 2e-4, 3e-2
"""How far an operator may be from its specification, relative to the largest number, for sums in another order or for
bfloat16's eight bits. A wrong mask, state or expert differs by the size of the numbers themselves."""


def close(found: Callable[[], Any], expected: Callable[[], Any], allowed: float) -> Callable[[], str]:
    """A check that two trees of arrays differ by at most `allowed` times the largest expected number of an array."""

    def check() -> str:
        ours, theirs = ([_host(x) for x in jax.tree.leaves(run())] for run in (found, expected))
        if [x.shape for x in ours] != [x.shape for x in theirs]:
            raise Wrong(f"shapes are {[x.shape for x in ours]}, expected {[x.shape for x in theirs]}")
        if not all(np.isfinite(x).all() for x in ours):
            raise Wrong("some numbers are not finite")
        worst = max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))
        if worst > allowed:
            raise Wrong(f"off by {worst:.1e} of the largest number, allowed are {allowed:.0e}")
        return f"within {worst:.1e} of the specification (allowed {allowed:.0e})"

    return check


def is_specification() -> str:
    """The check of a side that is the oracle itself."""
    return "is the specification"


def is_peer() -> str:
    """The check of a side that serves as the oracle of another."""
    return "is the oracle"


def likeliest(
    tokens: Sequence[Sequence[int]], logits: Callable[[], np.ndarray], nats: float = 0.05, share: float = 0.97
) -> str:
    """Checks greedy tokens [batch, new] against an oracle's logits [batch, new, vocab] after the same tokens.

    Each must be within `nats` of the best one, except in a share `1 - share` of places: where two experts are nearly
    equally good, rounding chooses, in any implementation. A wrong model's tokens are several nats below the best nearly
    everywhere. Returns the finding in words. Raises Wrong.
    """
    best = logits()
    chosen = np.take_along_axis(best, np.asarray(tokens)[..., None], axis=-1)[..., 0]
    short = best.max(axis=-1) - chosen
    good = float(np.mean(short <= nats))
    found = f"{100 * good:.1f} % of {short.size} greedy tokens within {nats} nats of the oracle's best"
    if not np.isfinite(short).all() or good < share:
        raise Wrong(f"{found}, at worst {short.max():.2f} below; expected {100 * share:.0f} %")
    return found


def as_near_to_exact(
    tokens: Sequence[Sequence[int]], plain: np.ndarray, exact: np.ndarray, times: float = 1.5, nats: float = 0.02
) -> str:
    """Checks greedy tokens [batch, new] against the logits [batch, new, vocab] of two passes over the same tokens.

    `exact` is in float32, `plain` in the measured dtype. In bfloat16 a model with random weights has near ties
    everywhere, so no fixed bound separates rounding from errors. On average, tokens may be below the exact pass's best
    by `times` as much as the plain pass's best tokens are, plus `nats`. Raises Wrong.
    """

    def shortfall(chosen: np.ndarray) -> float:
        taken = np.take_along_axis(exact, chosen[..., None], axis=-1)[..., 0]
        return float(np.mean(exact.max(axis=-1) - taken))

    ours, theirs = shortfall(np.asarray(tokens)), shortfall(plain.argmax(axis=-1))
    found = f"{ours:.3f} nats below float32's best on average, the plain pass in this dtype {theirs:.3f}"
    if not ours <= times * theirs + nats:
        raise Wrong(f"{found}; expected at most {times} times that and {nats} more")
    return found


def _host(x: Any) -> np.ndarray:
    """An array of jax or torch on the host, in float64."""
    if type(x).__module__.split(".")[0] == "torch":
        x = x.detach().double().cpu().numpy()
    return np.asarray(x, np.float64)
