"""Copying: a string of words, and the same string again.

    Copy: elm fox elm owl … ; elm fox elm owl …

The words of a string are eight, so most occur several times, and no two of them come twice in the same order: the last
two words tell where in the string one is, and the last one does not. That is what the short convolutions see.
"""

import itertools

import numpy as np

from ling3.train.nano.problems import Split
from ling3.train.nano.skills.skill import Skill, Text, split_of
from ling3.train.nano.skills.words import KEYS

LEAST, MOST, ALPHABET = 4, 20, 8


def _draw(rng: np.random.Generator, split: Split) -> Text:
    """4 to 20 words; a string is of one split, by its hash."""
    size = rng.integers(LEAST, MOST + 1)
    while True:
        words = rng.permutation(len(KEYS))[:ALPHABET]
        chosen = rng.choice(words, size=size).tolist()
        string = "".join(f" {KEYS[i]}" for i in chosen)
        if len(set(itertools.pairwise(chosen))) == size - 1 and split_of(f"copy{string}") == split:
            return Text(((f"Copy:{string} ;", False), (string, True)))


COPYING = Skill("copying", _draw, longest=3 + 2 * MOST, pulls=("short convolution", "writing strength"))
