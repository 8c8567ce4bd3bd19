"""The inputs of the two forward programs, made on the host: which row a sequence has, and what it does there."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from ling3.engine.forward import Batch
from ling3.engine.plans import StepPlan
from ling3.engine.pool import Rows
from ling3.engine.request import TokenSequence
from ling3.engine.settings import DECODE_STEPS
from ling3.engine.shapes import DraftShapes, Shapes
from ling3.engine.verification import Drafts


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
