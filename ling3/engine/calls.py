"""A call in flight, and what has come of it for each of its sequences."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, no_type_check

import jax
import numpy as np

from ling3.engine.request import TokenSequence
from ling3.engine.sampling import Choice


# Read in every turn: checking types would take longer than that.
@no_type_check
@dataclasses.dataclass
class Call:
    """A call in flight: its sequences, their rows, the most tokens that each can get, and the results to come."""

    choice: Choice | None  # None of a call that watches
    sequences: Sequence[TokenSequence]
    rows: Sequence[int]
    most: Sequence[int]
    lengths: Sequence[int] = ()
    """Of a call that scores or watches: the tokens of each chunk."""
    watched: Mapping[str, Any] | None = None
    """Of a call that watches: what it saw, by path."""

    @property
    def results(self) -> Any:
        """What the device computes."""
        return self.choice if self.watched is None else self.watched

    @property
    def wanted(self) -> bool:
        """True if any unfinished sequence can get a token."""
        return any(most and not each.ended for each, most in zip(self.sequences, self.most, strict=True))

    def tokens(self) -> Iterator[tuple[TokenSequence, tuple[np.ndarray, ...]]]:
        """The arguments of `TokenSequence.take` for each unfinished sequence that can get any; waits for the device."""
        choice = self.choice
        assert choice is not None, "a call that watches chooses no token"
        rows = choice.token.shape[0]
        tokens, logprobs = (np.asarray(x).reshape(rows, -1) for x in (choice.token, choice.logprob))
        shape = (*tokens.shape, -1)
        tops = (choice.top_ids, choice.top_logprobs)
        if any(sequence.params.logprobs for sequence in self.sequences):
            top_ids, top_logprobs = (np.asarray(x).reshape(shape) for x in tops)
        else:  # not asked for: they stay on the device
            top_ids, top_logprobs = (np.zeros((*tokens.shape, 0), x.dtype) for x in tops)
        for row, sequence, most in zip(self.rows, self.sequences, self.most, strict=True):
            if most and not sequence.ended:
                yield sequence, (tokens[row], logprobs[row], top_ids[row], top_logprobs[row])

    def scores(self) -> Iterator[tuple[TokenSequence, tuple[Any, ...]]]:
        """The arguments of `TokenSequence.take_scores` for each unfinished sequence; waits for the device."""
        choice = self.choice
        if not self.lengths or choice is None:
            return
        arrays = [np.asarray(x) for x in (choice.logprob, choice.top_ids, choice.top_logprobs)]
        for row, sequence, length in zip(self.rows, self.sequences, self.lengths, strict=True):
            if not sequence.ended:
                yield sequence, (length, *(x[row] for x in arrays))

    def chunks(self) -> Iterator[tuple[TokenSequence, int, Any]]:
        """The arguments of `TokenSequence.saw` for each watcher of an unfinished sequence; waits for the device."""
        for row, watcher, length in zip(self.rows, self.sequences, self.lengths, strict=True):
            if watcher.watched is not None and watcher.watched.completion is None:
                # A copy, since on a CPU the array may be the device's own memory.
                own = functools.partial(lambda row, length, x: np.array(x[row, :length]), row, length)
                yield watcher, length, jax.tree.map(own, jax.device_get(self.watched))
