"""Plans of decode calls: the tokens that each sequence can get, and the number of steps.

The next mask of a sequence with a grammar depends on its last token, so the sequence joins a call only when the host
has read all its tokens. Tokens that its grammar forces take several steps of one call. Each is a step as if the token
had been sampled: caches, counts and log-probabilities are those of one token per call, bit for bit, however the steps
are divided into calls.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import UInt32


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """The tokens that a sequence can get in a decode call."""

    count: int
    """The number of tokens, unless the sequence ends earlier."""
    forced: Sequence[int] = ()
    """The first tokens, if the grammar forces them."""
    mask: UInt32[np.ndarray, " words"] | None = None
    """The tokens that may follow the forced ones, as in `masks.py`; None allows any."""
    drafts: Sequence[int] | None = None
    """Guesses of the tokens, for passes that check several at once; None for plain steps."""
    depth: int = 0
    """The most guesses that a pass checks."""


def common_steps(plans: Sequence[StepPlan], idle: int) -> int:
    """The largest number of steps that leaves at most 1/`idle` of a call's row-steps without a token."""
    steps = max(plan.count for plan in plans)
    while idle * sum(max(0, steps - plan.count) for plan in plans) > steps * len(plans):
        steps -= 1
    return steps
