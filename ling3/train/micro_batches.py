"""Which texts a step of fine-tuning has, and their micro-batches of few shapes, with one text in a row or several."""

import hashlib
import itertools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ling3.train.loop import Batch
from ling3.train.texts import TrainingText

NARROWEST = 32
"""The smallest width of a micro-batch; the others are 5, 6, 7 and 8 quarters of it, twice these, and so on.

Packed rows have every second of these widths."""
WINDOW = 32
"""Steps among whose texts those of like length come together, where a row has one text."""
ATTENTION = 2**14
"""The width of a row at which attention, whose work grows with it, is taken to cost as much as all else."""
TOGETHER = 256
"""Texts that are packed together: the time to pack them grows with the square of their number."""


def steps_of(texts: int, count: int) -> int:
    """The steps in which all texts are learnt once, `count` in each but the last of them."""
    return -(-texts // count)


def step_texts(
    texts: Sequence[TrainingText], step: int, count: int, seed: int, packing: bool = False
) -> list[TrainingText]:
    """The `count` texts of a step, counted from 1; each text is in one step of an epoch.

    With `packing` they are the next ones of the epoch's random order. Without it, that order is cut into windows of
    WINDOW steps. In each the texts are sorted by length and dealt to steps, and the order of all steps is random again:
    so a step's texts have like lengths, and need little padding. One step of an epoch may have fewer texts. They depend
    on `step` and `seed` alone, so training continues anywhere.
    """
    epoch, place = divmod(step - 1, steps_of(len(texts), count))
    rng = np.random.default_rng((seed, epoch))
    order, steps = rng.permutation(len(texts)), 1 if packing else WINDOW
    window, at = divmod(int(rng.permutation(steps_of(len(texts), count))[place]), steps)
    around = order[window * steps * count : (window + 1) * steps * count].tolist()
    around.sort(key=lambda i: len(texts[i].ids))
    return [texts[i] for i in around[at * count : (at + 1) * count]]


def width_of(length: int, parts: int = 4) -> int:
    """The width of a micro-batch whose longest row has `length` tokens: NARROWEST · 2^k · (1 to 2 in steps of 1/parts).

    The narrowest of these widths that is at least `length`.
    """
    part = NARROWEST // parts
    while 2 * parts * part < length:
        part *= 2
    return max(NARROWEST, -(-length // part) * part)


def rows_of(width: int, tokens: int, rows: int, devices: int = 1) -> int:
    """The rows of a micro-batch of this width, for `rows` rows that are left: `devices` times a power of two."""
    most = min(max(1, tokens // (width * devices)), max(1, rows // devices))
    return devices * 2 ** (most.bit_length() - 1)


def micro_batches(texts: Sequence[TrainingText], tokens: int, devices: int = 1, packing: bool = False) -> list[Batch]:
    """The texts in padded batches of about `tokens` tokens, the longest texts first, so that neighbours are as long.

    A row is one text, repeated as padding: nothing leaks into it, and a router's load, which counts padding too, is
    that of texts. The number of rows is `devices` times a power of two, and only on several devices are there rows that
    are padding alone. So a step has few shapes.

    With `packing` a row holds several texts, repeated as padding too, and `text_starts` keeps them apart. Each text is
    put into the first row with room for it. Every batch has the width up to `tokens` that leaves the least padding,
    where wider rows count as more work (ATTENTION). TOGETHER texts at a time are packed.
    """
    found = []
    for first in range(0, len(texts), TOGETHER if packing else max(1, len(texts))):
        rest = texts[first : first + TOGETHER] if packing else texts
        while rest:
            rest = sorted(rest, key=lambda text: -len(text.ids))
            choices = [_filled(rest, width, tokens, devices, packing) for width in _widths(rest, tokens, packing)]
            rows, shape, rest = max(choices, key=lambda choice: _share(*choice[:2]))
            found.append(_batch(rows, shape, packing))
    return found


def _widths(ordered: Sequence[TrainingText], tokens: int, packing: bool) -> list[int]:
    """The widths to choose from, narrowest first, for texts of which the first is the longest."""
    if not packing:
        return [width_of(len(ordered[0].ids))]
    widths, total = [width_of(len(ordered[0].ids), 2)], sum(len(text.ids) for text in ordered)
    while widths[-1] < total and (width := width_of(widths[-1] + 1, 2)) <= tokens:
        widths.append(width)
    return widths


_Rows = list[list[TrainingText]]


def _filled(
    ordered: Sequence[TrainingText], width: int, tokens: int, devices: int, packing: bool
) -> tuple[_Rows, tuple[int, int], list[TrainingText]]:
    """The rows of a batch of this width, first fit; the batch's shape; and the texts that are left."""
    rows: _Rows = []
    room: list[int] = []
    for text in ordered:
        row = next((i for i, left in enumerate(room) if packing and left >= len(text.ids)), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(width)
        rows[row].append(text)
        room[row] -= len(text.ids)
    count = rows_of(width, tokens, len(rows), devices)
    return rows[:count], (count, width), list(itertools.chain(*rows[count:]))


def _share(rows: _Rows, shape: tuple[int, int]) -> float:
    """The share of a batch's work that is for texts and not for padding."""
    count, width = shape
    return sum(len(text.ids) for row in rows for text in row) / (count * width * (1 + width / ATTENTION))


def _batch(rows: _Rows, shape: tuple[int, int], packing: bool) -> Batch:
    """The rows, each repeated up to the width of `shape`; further rows repeat these without a weight."""
    ids, starts, weights = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    for row in range(shape[0]):
        texts, start = rows[row % len(rows)], 0
        for i, text in enumerate(itertools.cycle(texts)):
            end = min(start + len(text.ids), shape[1])
            ids[row, start:end], starts[row, start:end] = text.ids[: end - start], start
            if row < len(rows) and i < len(texts):
                weights[row, start + 1 : end] = text.learnt[1:]
            if (start := end) == shape[1]:
                break
    return Batch(jnp.asarray(ids), jnp.asarray(weights), jnp.asarray(starts) if packing else None)


def learnt_tokens(texts: Sequence[TrainingText]) -> int:
    """The number of targets in the loss of these texts."""
    return sum(sum(text.learnt[1:]) for text in texts)


def fingerprint(texts: Sequence[TrainingText]) -> str:
    """A hash of the texts' tokens and masks, by which a continued training knows its data."""
    digest = hashlib.sha256()
    for text in texts:
        for numbers in (np.asarray(text.ids, np.int64), np.asarray(text.learnt, np.int8)):
            digest.update(len(numbers).to_bytes(8, "little") + numbers.tobytes())
    return digest.hexdigest()
