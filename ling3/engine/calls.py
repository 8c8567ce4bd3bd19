"""Calls in flight, and the results of each for its sequences."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from ling3.engine.forward import Extension
from ling3.engine.outputs import Delta, Logprob
from ling3.engine.request import TokenSequence
from ling3.engine.sampling import Choice

Taken = tuple[TokenSequence, Callable[[], Delta | None]]
"""A sequence, and a function that adds a call's results to it and returns its delta, if anything is new."""


@dataclasses.dataclass(frozen=True)
class Extended:
    """A call of `extend`: its sequences, their rows, and the tokens of each chunk."""

    results: Extension
    sequences: Sequence[TokenSequence]
    rows: Sequence[int]
    lengths: Sequence[int]
    last: Sequence[bool]
    """True for a sequence whose prompt ends with the chunk."""

    @property
    def ahead(self) -> Sequence[int]:
        """The tokens that each sequence can get: none."""
        return [0] * len(self.sequences)

    def taken(self) -> Iterator[Taken]:
        """Each unfinished sequence with a function that adds the results to it; waits for the device."""
        scores = None if self.results.scores is None else _on_host(self.results.scores)
        for i, sequence in enumerate(self.sequences):
            if sequence.completion is None:
                yield sequence, functools.partial(self._take, i, scores)

    def _take(self, i: int, scores: Choice | None) -> Delta | None:
        sequence, row, length = self.sequences[i], self.rows[i], self.lengths[i]
        if scores is not None:
            done = len(sequence.request.prompt_logprobs)
            tokens = sequence.prompt[done : done + length]
            delta = sequence.take_scores(_logprobs(tokens, scores, row, sequence.params.prompt_logprobs))
            if delta is not None:
                return delta
        if self.results.seen:
            # A copy, since on a CPU the array may be the device's own memory.
            chunk = jax.tree.map(lambda x: np.array(x[row, :length]), jax.device_get(self.results.seen))
            sequence.seen.append(chunk)
        return sequence.finish("length") if self.last[i] and not sequence.params.max_tokens else None


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A call of `decode`: its sequences, their rows, and the most tokens that each can get."""

    results: Choice
    sequences: Sequence[TokenSequence]
    rows: Sequence[int]
    ahead: Sequence[int]

    def taken(self) -> Iterator[Taken]:
        """Each unfinished sequence with a function that adds the results to it; waits for the device."""
        if all(sequence.completion is not None for sequence in self.sequences):
            return
        choice = _on_host(self.results, any(sequence.params.logprobs for sequence in self.sequences))
        for row, sequence in zip(self.rows, self.sequences, strict=True):
            if sequence.completion is None:  # which may change while these are taken
                tokens = choice.token[row].tolist()
                yield (
                    sequence,
                    functools.partial(sequence.take, tokens, _logprobs(tokens, choice, row, sequence.params.logprobs)),
                )


def _on_host(choice: Choice, reported: bool = True) -> Choice:
    """The choice in the host's memory; unless the likeliest tokens are `reported`, those stay on the device."""
    tops = (choice.top_ids, choice.top_logprobs)
    none = (*choice.token.shape, 0)
    tops = map(np.asarray, tops) if reported else (np.zeros(none, np.int32), np.zeros(none, np.float32))
    return Choice(np.asarray(choice.token), np.asarray(choice.logprob), *tops)


def _logprobs(tokens: Sequence[int], choice: Choice, row: int, wanted: int | None) -> list[Logprob]:
    """Each token with its log-probability, and the `wanted` likeliest beside it; nothing if None are wanted."""
    if wanted is None:
        return []
    ids, values = choice.top_ids[row, :, :wanted].tolist(), choice.top_logprobs[row, :, :wanted].tolist()
    tops = [dict(zip(*top, strict=True)) for top in zip(ids, values, strict=True)]
    return list(map(Logprob, tokens, choice.logprob[row].tolist(), tops))


Call = Extended | Decoded
