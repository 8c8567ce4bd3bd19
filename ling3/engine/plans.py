"""What a decode call does for sequences with grammars.

Such a sequence's next mask follows from its last token, so it is in a call only when the host has read all its tokens.
It does not stop the others: its call is dispatched first in a turn, and the host reads it and computes the next masks
while the device works on the calls without grammars, which it reads a turn later as always. While both run, those calls
are of `BESIDE` steps at most, so that the sequences with grammars come to their turn.

Tokens that the grammar forces go in by several steps of one call. Each is a step as if it had been chosen: caches,
counts and log-probabilities are those of one token per call, bit for bit, however the steps are dealt to calls.
"""

from collections.abc import Sequence
from typing import no_type_check

import numpy as np

from ling3.engine.request import TokenSequence

BESIDE = 4
"""The most steps of a call without grammars while sequences with grammars run."""

Plan = tuple[int, Sequence[int], np.ndarray | None]
"""A sequence's newest token, the tokens that are forced, and the mask of one more, if it gets one."""


# Asked in every turn: checking types would take longer than the answers.
@no_type_check
def planned(sequence: TokenSequence, most: int) -> Plan:
    """What the sequence can get in a call of `most` steps."""
    constraint, most = sequence.constraint, min(most, sequence.left, 1 if sequence.stepwise else most)
    forced = [token for token, _ in zip(constraint.forced, range(most))]
    free = len(forced) < most and len(forced) == len(constraint.forced) and not constraint.whole
    newest = (sequence.token_ids or sequence.prompt)[-1]
    return newest, forced, constraint.mask if free else None


@no_type_check
def common_steps(sequences: Sequence[TokenSequence], most: int) -> int:
    """Steps of a call of sequences with grammars, at most `most`: as many as leave at most half of its rows idle."""
    wanted = [tokens(planned(sequence, most)) for sequence in sequences]
    steps = max(wanted)
    while 2 * sum(max(0, steps - own) for own in wanted) > steps * len(wanted):
        steps -= 1
    return steps


@no_type_check
def tokens(plan: Plan) -> int:
    """How many tokens the sequence gets by a plan, unless it ends before."""
    _, forced, mask = plan
    return len(forced) + (mask is not None)
