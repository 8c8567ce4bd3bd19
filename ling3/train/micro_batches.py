"""Which texts a step of fine-tuning has, and their padded micro-batches of few shapes."""

import hashlib
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ling3.train.loop import Batch
from ling3.train.texts import TrainingText

NARROWEST = 32
"""The smallest width of a micro-batch; the others are 5, 6, 7 and 8 quarters of it, twice these, and so on."""
WINDOW = 32
"""Steps among whose texts those of like length come together."""


def steps_of(texts: int, count: int) -> int:
    """The steps in which all texts are learnt once, `count` in each but the last of them."""
    return -(-texts // count)


def step_texts(texts: Sequence[TrainingText], step: int, count: int, seed: int) -> list[TrainingText]:
    """The `count` texts of a step, counted from 1; each text is in one step of an epoch.

    An epoch's random order is cut into windows of WINDOW steps. In each the texts are sorted by length and dealt to
    steps, and the order of all steps is random again: so a step's texts have like lengths, and need little padding. One
    step of an epoch may have fewer texts. They depend on `step` and `seed` alone, so training continues anywhere.
    """
    epoch, place = divmod(step - 1, steps_of(len(texts), count))
    rng = np.random.default_rng((seed, epoch))
    order = rng.permutation(len(texts))
    window, at = divmod(int(rng.permutation(steps_of(len(texts), count))[place]), WINDOW)
    around = order[window * WINDOW * count : (window + 1) * WINDOW * count].tolist()
    around.sort(key=lambda i: len(texts[i].ids))
    return [texts[i] for i in around[at * count : (at + 1) * count]]


def width_of(length: int) -> int:
    """The width of a micro-batch whose longest text has `length` tokens: (4 to 7) quarters of NARROWEST · 2^k."""
    quarter = NARROWEST // 4
    while 8 * quarter < length:
        quarter *= 2
    return max(NARROWEST, -(-length // quarter) * quarter)


def shape_of(longest: int, tokens: int, texts: int, devices: int = 1) -> tuple[int, int]:
    """The rows and the width of the next micro-batch of `texts` texts, of which the longest has `longest` tokens."""
    width = width_of(longest)
    most = min(max(1, tokens // (width * devices)), max(1, texts // devices))
    return devices * 2 ** (most.bit_length() - 1), width


def micro_batches(texts: Sequence[TrainingText], tokens: int, devices: int = 1) -> list[Batch]:
    """The texts in padded batches of about `tokens` tokens, the longest texts first, so that neighbours are as long.

    A row is one text, repeated as padding: no layer sees two texts in one row, so nothing leaks between them, and a
    router's load, which counts padding too, is that of texts. The number of rows is `devices` times a power of two, and
    only on several devices are there rows that are padding alone. So a step has few shapes.
    """
    ordered = sorted(texts, key=lambda text: -len(text.ids))
    found = []
    while ordered:
        rows, width = shape_of(len(ordered[0].ids), tokens, len(ordered), devices)
        ids, weights = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.float32)
        for row in range(rows):
            ids[row] = np.resize(ordered[row % len(ordered)].ids, width)
        for row, text in enumerate(ordered[:rows]):
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
