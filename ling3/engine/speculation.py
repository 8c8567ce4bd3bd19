"""Speculation: guesses of a sequence's next tokens (drafts), which one pass over the model checks.

A row of a call does not depend on the other rows, so the rows of one call can be one sequence's newest token and
guesses of those after it. Each row's token is the one that a single step would give, as long as the guesses before it
are right, and so are its log-probability and every bit of its state: a wrong guess costs time, and changes nothing.
"""

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ling3.cache import CacheSpec, Span
from ling3.execution import Execution
from ling3.model import CausalLM

LEAST = 4
"""Tokens that must have occurred before to guess from: shorter matches do not pay."""
WORTH = 0.5
"""Guesses that must have been right in a pass, in the running mean, for the next pass to have some."""
MEMORY = 0.7
"""The weight of the passes before in the running mean."""
LONGEST_PAUSE = 64
"""The most tokens without a guess after guesses that were not worth it."""

Draft = Callable[[Sequence[int]], Sequence[int]]
"""Guesses the tokens that follow some tokens, as many as it likes; none if it has no guess."""


def lookup(tokens: Sequence[int], least: int = LEAST) -> Sequence[int]:
    """The tokens that followed the last `least` tokens where these last occurred before (prompt lookup)."""
    own = np.asarray(tokens, np.int32)
    if len(own) <= least:
        return ()
    ends = np.flatnonzero(own[least - 1 : -1] == own[-1]) + least - 1
    for back in range(1, least):
        ends = ends[own[ends - back] == own[-1 - back]]
    return own[ends[-1] + 1 :].tolist() if len(ends) else ()


class Speculation:
    """The guesses of one sequence: at most `most` in a pass, and none for a while after guesses that were mostly wrong.

    Whether it guesses changes no bit of the answer.
    """

    def __init__(self, draft: Draft | Literal["lookup"], most: int, vocab: int):
        self.draft, self.most, self.vocab = (lookup if draft == "lookup" else draft), most, vocab
        self.drafted = self.accepted = 0
        self._mean, self._pause, self._until = float(most), 1, 0

    def guesses(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        """The guesses for the next pass, at most `most`, up to the first that is no token.

        Raises what `draft` raises, and TypeError for anything but whole numbers.
        """
        if len(tokens) < self._until:
            return ()
        found = map(operator.index, tuple(self.draft(tokens))[: min(most, self.most)])
        return tuple(itertools.takewhile(lambda token: 0 <= token < self.vocab, found))

    def learn(self, drafted: int, accepted: int, length: int) -> None:
        """Notes how many guesses of a pass were right, after which the sequence has `length` tokens."""
        self.drafted += drafted
        self.accepted += accepted
        self._mean = MEMORY * self._mean + (1 - MEMORY) * accepted
        if self._mean >= WORTH:
            self._pause = 1
            return
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._until, self._mean = length + self._pause, WORTH


def fitting(most: int, rows: int) -> int:
    """The most guesses, up to `most`, that with one more divide the rows of a call. Raises ValueError for none."""
    found = max((count for count in range(1, most + 1) if rows % (count + 1) == 0), default=0)
    if not found:
        raise ValueError(
            f"engine settings: speculation with decode_rows {rows}: found no number of draft_tokens up to {most} that, "
            "with one more, divides it; give decode_rows as a multiple of 2 or 4"
        )
    return found


def check_drafts(model: CausalLM, execution: Execution) -> None:
    """Raises ValueError, with the reason, if a layer of the model cannot go back behind wrong guesses."""
    spec = CacheSpec(1, 1, model.page_size, model.dtype)

    def run(model: CausalLM) -> Any:
        row = jnp.zeros(2, jnp.int32)
        span = Span(row, row, jnp.zeros((2, 1), jnp.int32), execution, rows_each=2)
        return model.model(row[:, None], model.empty_states(spec), span)

    try:
        eqx.filter_eval_shape(run, model)
    except ValueError as error:
        raise ValueError(f"engine settings: speculation: {error}; set it to None for this model") from error
