"""Copying: a string of words, and the same string again.

    Copy: elm fox elm owl … ; elm fox elm owl …

The words of a string are eight, so in a long one each occurs several times, and only the last two or three words tell
where in the string one is: that is what the short convolutions see.
"""

import numpy as np

from ling3.train.nano.problems import Split
from ling3.train.nano.skills.skill import Skill, Text, split_of
from ling3.train.nano.skills.words import KEYS

LEAST, MOST, ALPHABET = 6, 24, 8


def _draw(rng: np.random.Generator, split: Split) -> Text:
    """6 to 24 words; a string is of one split, by its hash."""
    while True:
        words = rng.permutation(len(KEYS))[:ALPHABET]
        string = "".join(f" {KEYS[i]}" for i in rng.choice(words, size=rng.integers(LEAST, MOST + 1)))
        if split_of(f"copy{string}") == split:
            return Text(((f"Copy:{string} ;", False), (string, True)))


COPYING = Skill("copying", _draw, longest=3 + 2 * MOST, pulls=("short convolution", "writing strength"))
