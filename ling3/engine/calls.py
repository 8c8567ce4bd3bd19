"""Calls of the two forward programs: their inputs, made on the host, and how sequences take results from them."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from ling3.engine.forward import Batch, Extension
from ling3.engine.outputs import Delta, Logprob
from ling3.engine.plans import StepPlan
from ling3.engine.pool import Rows
from ling3.engine.request import TokenSequence
from ling3.engine.sampling import Choice
from ling3.engine.settings import DECODE_STEPS
from ling3.engine.shapes import DraftShapes, Shapes
from ling3.engine.verification import Drafts, Verified


def block_table(sequences: Sequence[TokenSequence], count: int, shapes: Shapes) -> tuple[Rows, Sequence[int]]:
    """The rows of a call with `count` rows for each group of devices, and the row of each sequence.

    If there is a row for every slot, row i is slot i, so that no state has to be moved. Slots and pages of unused rows
    and columns are out of range.
    """
    slots = np.full(count * shapes.groups, shapes.slots, np.int32)
    table = np.full((len(slots), shapes.columns), shapes.pages, np.int32)
    in_place = len(slots) == shapes.slots
    free = [itertools.count(group * count) for group in range(shapes.groups)]
    places = [sequence.memory for sequence in sequences]
    own = [place.slot for place in places if place.slot is not None]
    rows = own if in_place else [next(free[place.group]) for place in places]
    for row, slot, place in zip(rows, own, places, strict=True):
        slots[row] = slot
        table[row, place.first_page : place.first_page + len(place.pages)] = place.pages
    return Rows(slots, table, in_place), rows


def adapters_of(sequences: Sequence[TokenSequence], rows: Sequence[int], count: int) -> np.ndarray | None:
    """The index of the adapter of each of `count` rows, -1 for an unused row; None if the sequences have no adapter.

    Either all sequences of a call have an adapter or none has (`TokenSequence.key`).
    """
    if sequences[0].adapter is None:
        return None
    which = np.full(count, -1, np.int32)
    for row, sequence in zip(rows, sequences, strict=True):
        which[row] = -1 if sequence.adapter is None else sequence.adapter
    return which


def prompt_batch(where: Rows, rows: Sequence[int], chunks: Sequence[Sequence[int]], width: int) -> Batch:
    """The input of `extend`: each chunk of a prompt in its row, padded to `width`."""
    tokens = np.zeros((len(where.table), width), np.int32)
    lengths = np.zeros(len(tokens), np.int32)
    for row, chunk in zip(rows, chunks, strict=True):
        tokens[row, : len(chunk)], lengths[row] = chunk, len(chunk)
    return Batch(where, tokens, lengths)


def step_batch(where: Rows, rows: Sequence[int], plans: Sequence[StepPlan]) -> Batch:
    """The input of `decode`: the number of tokens that each row gets, its forced tokens and its mask."""
    words = max((len(plan.mask) for plan in plans if plan.mask is not None), default=0)
    lengths = np.zeros(len(where.table), np.int32)
    known = words or any(plan.forced for plan in plans)
    tokens = np.full((len(lengths), DECODE_STEPS if known else 0), -1, np.int32)
    masks = np.zeros((len(lengths), words), np.uint32)
    for row, plan in zip(rows, plans, strict=True):
        lengths[row] = plan.count
        tokens[row, : len(plan.forced)] = plan.forced
        if plan.mask is not None:
            masks[row] = plan.mask
    return Batch(where, tokens, lengths, masks if words else None)


def pass_batch(where: Rows, rows: Sequence[int], plans: Sequence[StepPlan], sizes: DraftShapes, most: int) -> Batch:
    """The input of `decode` with drafts: each row's tokens at most, and its drafts, for at most `most` passes."""
    batch = step_batch(where, rows, plans)
    passes, depth = np.zeros((2, len(where.table)), np.int32)
    tokens = np.full((len(depth), sizes.tokens - 1), -1, np.int32)
    for row, plan in zip(rows, plans, strict=True):
        passes[row], depth[row] = most, plan.depth
        tokens[row, : len(plan.drafts or ())] = plan.drafts or ()
    return dataclasses.replace(batch, drafts=Drafts(tokens, passes, depth, sizes.each, sizes.mtp))


@dataclasses.dataclass(frozen=True)
class Extended:
    """A dispatched call of `extend`: its sequences, their rows, and the length of each chunk in tokens."""

    results: Extension
    sequences: Sequence[TokenSequence]
    rows: Sequence[int]
    lengths: Sequence[int]
    last: Sequence[bool]
    """True for each sequence whose prefill ends with its chunk."""

    @property
    def ahead(self) -> Sequence[int]:
        """The most tokens that each sequence can get: 0, as `extend` samples nothing."""
        return [0] * len(self.sequences)

    def on_host(self) -> Choice | None:
        """Waits for the scores of the prompts' tokens and returns them; None at once if no scores are requested."""
        return None if self.results.scores is None else _on_host(self.results.scores)

    def take(self, scores: Choice | None, i: int) -> Delta | None:
        """Adds sequence i's results, given the `scores` of `on_host`; returns its delta, or None if nothing is new."""
        sequence, row, length = self.sequences[i], self.rows[i], self.lengths[i]
        if scores is not None:
            done = len(sequence.request.prompt_logprobs)
            tokens = sequence.prompt[done : done + length]
            delta = sequence.take_scores(_logprobs(tokens, scores, row, sequence.params.prompt_logprobs))
            if delta is not None:
                return delta
        if self.results.seen:
            # A copy, since on a CPU `device_get` may return a view of the device's memory.
            chunk = jax.tree.map(lambda x: np.array(x[row, :length]), jax.device_get(self.results.seen))
            sequence.seen.append(chunk)
        return sequence.finish("length") if self.last[i] and not sequence.params.max_tokens else None


@dataclasses.dataclass(frozen=True)
class Decoded:
    """A dispatched call of `decode`: its sequences, their rows, and the most tokens that each can get."""

    results: Choice
    sequences: Sequence[TokenSequence]
    rows: Sequence[int]
    ahead: Sequence[int]

    def on_host(self) -> Choice:
        """Waits for the device and returns the tokens of all rows."""
        return _on_host(self.results, any(sequence.params.logprobs for sequence in self.sequences))

    def take(self, choice: Choice, i: int) -> Delta | None:
        """Adds sequence i's results, given the `choice` of `on_host`; returns its delta, or None if nothing is new."""
        return _taken(self.sequences[i], choice, self.rows[i])


@dataclasses.dataclass(frozen=True)
class Passed:
    """A dispatched call of `decode` with drafts: its sequences, their rows, and the most tokens that each can get."""

    results: Verified
    sequences: Sequence[TokenSequence]
    rows: Sequence[int]
    ahead: Sequence[int]
    depths: Sequence[int]
    """The most guesses of each sequence in a pass."""

    def on_host(self) -> Verified:
        """Waits for the device and returns the tokens of all rows, and what came of their drafts."""
        choice = _on_host(self.results.choice, any(sequence.params.logprobs for sequence in self.sequences))
        found = self.results
        counts = (np.asarray(x) for x in (found.passes, found.drafted, found.rejected, found.following))
        return Verified(choice, *counts)

    def take(self, found: Verified, i: int) -> Delta | None:
        """Adds sequence i's results, given those of `on_host`; returns its delta, or None if nothing is new."""
        sequence, row = self.sequences[i], self.rows[i]
        assert sequence.speculation is not None, "whose drafts the call checked"
        given, passes = int((found.choice.token[row] != -1).sum()), int(found.passes[row])
        following = (len(sequence.prompt) + len(sequence.token_ids) + given, found.following[row].tolist())
        sequence.speculation.learn(int(found.drafted[row]), given - passes, int(found.rejected[row]), following)
        return _taken(sequence, found.choice, row)


def _taken(sequence: TokenSequence, choice: Choice, row: int) -> Delta | None:
    tokens = choice.token[row].tolist()
    return sequence.take(tokens, _logprobs(tokens, choice, row, sequence.params.logprobs))


def _on_host(choice: Choice, reported: bool = True) -> Choice:
    """Copies a choice to the host, but the likeliest tokens only if they are `reported`."""
    tops = (choice.top_ids, choice.top_logprobs)
    none = (*choice.token.shape, 0)
    tops = map(np.asarray, tops) if reported else (np.zeros(none, np.int32), np.zeros(none, np.float32))
    return Choice(np.asarray(choice.token), np.asarray(choice.logprob), *tops)


def _logprobs(tokens: Sequence[int], choice: Choice, row: int, wanted: int | None) -> list[Logprob]:
    """The log-probability of each token, each with the `wanted` likeliest tokens; empty if `wanted` is None."""
    if wanted is None:
        return []
    ids, values = choice.top_ids[row, :, :wanted].tolist(), choice.top_logprobs[row, :, :wanted].tolist()
    tops = [dict(zip(*top, strict=True)) for top in zip(ids, values, strict=True)]
    return list(map(Logprob, tokens, choice.logprob[row].tolist(), tops))


Call = Extended | Decoded | Passed
