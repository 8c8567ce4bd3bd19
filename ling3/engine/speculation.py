"""Speculation: guesses of a sequence's next tokens, which one pass over the model checks.

A row of a call does not depend on the other rows, so the rows of one call can be one sequence's newest token and
guesses of those after it. Each row's token is the one that a single step would give, as long as the guesses before it
are right, and so are its log-probability and every bit of its state: a wrong guess costs time, and changes nothing.
"""

from collections.abc import Callable, Sequence

import numpy as np

from ling3.engine.settings import EngineSettings

LEAST = 4
"""Tokens that must have occurred before to guess from: shorter matches do not pay."""

Draft = Callable[[Sequence[int]], Sequence[int]]
"""Guesses the tokens that follow some tokens; it may return none."""


def lookup(tokens: Sequence[int], least: int = LEAST) -> Sequence[int]:
    """The tokens that followed the last `least` tokens where these last occurred before."""
    own = np.asarray(tokens, np.int32)
    if len(own) <= least:
        return ()
    ends = np.flatnonzero(own[least - 1 : -1] == own[-1]) + least - 1
    for back in range(1, least):
        ends = ends[own[ends - back] == own[-1 - back]]
    return own[ends[-1] + 1 :].tolist() if len(ends) else ()


class Speculation:
    """Guesses up to `most` tokens of a sequence by `draft`."""

    def __init__(self, draft: Draft, most: int):
        self.draft, self.most = draft, most

    @staticmethod
    def of(settings: EngineSettings) -> "Speculation | None":
        """What the settings name; None for none."""
        draft = lookup if settings.speculation == "lookup" else settings.speculation
        return None if draft is None else Speculation(draft, settings.draft_tokens)

    def __call__(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """The guesses for the next call, at most `most`."""
        return tuple(self.draft(tokens))[: min(most, self.most)]
