"""Copying: a string of words, followed by the same string.

    Copy: elm fox elm owl … ; elm fox elm owl …

A string uses only eight words, so most occur several times, but no pair of neighbours occurs twice. So the last two
words determine the position in the string, and the last one alone does not: the short convolutions see such pairs.
"""

import itertools

import numpy as np

from ling3.train.nano.problems import Split
from ling3.train.nano.skills.skill import Skill, Text, split_of
from ling3.train.nano.skills.words import KEYS

LEAST, MOST, ALPHABET = 4, 20, 8


def _draw(rng: np.random.Generator, split: Split) -> Text:
    """4 to 20 words; a hash of the string decides its split."""
    size = rng.integers(LEAST, MOST + 1)
    while True:
        words = rng.permutation(len(KEYS))[:ALPHABET]
        chosen = rng.choice(words, size=size).tolist()
        string = "".join(f" {KEYS[i]}" for i in chosen)
        if len(set(itertools.pairwise(chosen))) == size - 1 and split_of(f"copy{string}") == split:
            return Text(((f"Copy:{string} ;", False), (string, True)))


COPYING = Skill("copying", _draw, longest=3 + 2 * MOST, pulls=("short convolution", "writing strength"))
