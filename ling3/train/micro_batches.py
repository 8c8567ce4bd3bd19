"""Which texts a step of fine-tuning has, and their padded micro-batches of few shapes."""

import hashlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ling3.train.loop import Batch
from ling3.train.texts import TrainingText

NARROWEST = 32
"""The smallest width of a micro-batch; further ones are 1.5 and 2 times as wide, 3 and 4 times, and so on."""


def step_texts(texts: Sequence[TrainingText], step: int, count: int, seed: int) -> list[TrainingText]:
    """The `count` texts of a step, counted from 1: all texts in a random order, then all in another one, and so on.

    They depend on `step` and `seed` alone, so training continues anywhere.
    """
    orders: dict[int, np.ndarray] = {}
    found = []
    for position in range((step - 1) * count, step * count):
        epoch, place = divmod(position, len(texts))
        if epoch not in orders:
            orders[epoch] = np.random.default_rng((seed, epoch)).permutation(len(texts))
        found.append(texts[orders[epoch][place]])
    return found


def width_of(length: int) -> int:
    """The width of a micro-batch whose longest text has `length` tokens: NARROWEST · 2^k or 1.5 times that."""
    width = NARROWEST
    while width < length:
        width = width * 3 // 2 if width & (width - 1) == 0 else width // 3 * 4
    return width


def micro_batches(texts: Sequence[TrainingText], tokens: int, devices: int = 1) -> list[Batch]:
    """The texts in padded batches of about `tokens` tokens, the longest texts first, so that neighbours are as long.

    A row is one text: no layer sees two texts in one row, so nothing leaks between them. The number of rows is
    `devices` times a power of two, and only on several devices are there empty rows. So a step has few shapes.
    """
    ordered = sorted(texts, key=lambda text: -len(text.ids))
    found = []
    while ordered:
        width = width_of(len(ordered[0].ids))
        most = min(max(1, tokens // (width * devices)), max(1, len(ordered) // devices))
        rows = devices * 2 ** (most.bit_length() - 1)
        ids, weights = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.float32)
        for row, text in enumerate(ordered[:rows]):
            ids[row, : len(text.ids)] = text.ids
            weights[row, 1 : len(text.ids)] = text.learnt[1:]
        found.append(Batch(jnp.asarray(ids), jnp.asarray(weights)))
        ordered = ordered[rows:]
    return found


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
