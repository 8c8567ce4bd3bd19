"""Positions: a string that repeats with a stated period; only the distance tells which word comes next.

    Every 8: owl elm owl owl fox elm owl fox  owl elm owl …

A string uses only three words, so that most short sequences in it occur at several places; RoPE is for looking back
exactly one period. Periods of 12 and 16 are beyond the 9 tokens that the convolutions of three layers reach.
"""

import numpy as np

from ling3.train.nano.problems import Split
from ling3.train.nano.skills.skill import Skill, Text, split_of
from ling3.train.nano.skills.words import KEYS

PERIODS, ALPHABET = (8, 12, 16), 3


def _draw(rng: np.random.Generator, split: Split) -> Text:
    """Three periods of 8, 12 or 16 words; the split of a pattern does not depend on which words it uses.

    So its hash is that of the pattern with words numbered in order of first occurrence.
    """
    while True:
        pattern = rng.integers(ALPHABET, size=rng.choice(PERIODS))
        first = list(dict.fromkeys(pattern.tolist()))
        if split_of(f"every {[first.index(place) for place in pattern.tolist()]}") == split:
            words = rng.permutation(len(KEYS))[:ALPHABET]
            string = "".join(f" {KEYS[i]}" for i in words[pattern])
            return Text(((f"Every {len(pattern)}:{string}", False), (string, True), (string, True)))


POSITIONS = Skill("positions", _draw, longest=4 + 3 * max(PERIODS), pulls=("rotary embedding", "attention"))
