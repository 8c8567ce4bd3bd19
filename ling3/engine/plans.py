"""Plans of a decode call: the tokens that each of its sequences can get, and its number of steps.

The next mask of a sequence with a grammar follows from its last token, so it is in a call only when the host has read
all its tokens. Tokens that its grammar forces go in by several steps of one call. Each is a step as if it had been
sampled: caches, counts and log-probabilities are those of one token per call, bit for bit, however the steps are dealt
to calls.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The tokens that a sequence can get in a decode call."""

    count: int
    """How many tokens, unless it ends before."""
    forced: Sequence[int] = ()
    """The first of them, where they are known."""
    mask: UInt32[np.ndarray, " words"] | None = None
    """The tokens that may follow those, as in `masks.py`; None for any."""


def common_steps(plans: Sequence[StepPlan], idle: int) -> int:
    """The largest number of steps that leaves at most one in `idle` of a call's row-steps without a token."""
    steps = max(plan.count for plan in plans)
    while idle * sum(max(0, steps - plan.count) for plan in plans) > steps * len(plans):
        steps -= 1
    return steps
