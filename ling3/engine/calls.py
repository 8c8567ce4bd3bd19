"""A call in flight, and what has come of it for each of its sequences."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, no_type_check

import numpy as np

from ling3.engine.request import TokenSequence
from ling3.engine.sampling import Choice


# Read in every turn: checking types would take longer than that.
@no_type_check
@dataclasses.dataclass
class Call:
    """A call in flight: its sequences, their rows, the most tokens that each can get, and the results to come."""

    choice: Choice
    sequences: Sequence[TokenSequence]
    rows: Sequence[int]
    most: Sequence[int]
    lengths: Sequence[int] = ()
    """Of a call that scores prompts: the tokens of each chunk."""

    @property
    def wanted(self) -> bool:
        """True if any unfinished sequence can get a token."""
        return any(most and each.completion is None for each, most in zip(self.sequences, self.most, strict=True))

    def tokens(self) -> Iterator[tuple[TokenSequence, tuple[np.ndarray, ...]]]:
        """The arguments of `TokenSequence.take` for each unfinished sequence that can get any; waits for the device."""
        rows = self.choice.token.shape[0]
        tokens, logprobs = (np.asarray(x).reshape(rows, -1) for x in (self.choice.token, self.choice.logprob))
        shape = (*tokens.shape, -1)
        tops = (self.choice.top_ids, self.choice.top_logprobs)
        if any(sequence.params.logprobs for sequence in self.sequences):
            top_ids, top_logprobs = (np.asarray(x).reshape(shape) for x in tops)
        else:  # not asked for: they stay on the device
            top_ids, top_logprobs = (np.zeros((*tokens.shape, 0), x.dtype) for x in tops)
        for row, sequence, most in zip(self.rows, self.sequences, self.most, strict=True):
            if sequence.completion is None and most:
                yield sequence, (tokens[row], logprobs[row], top_ids[row], top_logprobs[row])

    def scores(self) -> Iterator[tuple[TokenSequence, tuple[Any, ...]]]:
        """The arguments of `TokenSequence.take_scores` for each unfinished sequence; waits for the device."""
        if not self.lengths:
            return
        arrays = [np.asarray(x) for x in (self.choice.logprob, self.choice.top_ids, self.choice.top_logprobs)]
        for row, sequence, length in zip(self.rows, self.sequences, self.lengths, strict=True):
            if sequence.completion is None:
                yield sequence, (length, *(x[row] for x in arrays))
