"""Positions: a string that repeats with a given period, in which only the distance tells what comes next.

    Every 8: owl elm owl owl fox elm owl fox  owl elm owl …

A string has three words alone, so that most of its short pieces occur at several places; looking back exactly one
period is what RoPE is for. Periods of 12 and 16 are further than the convolutions of three layers reach, which is 9.
"""

import numpy as np

from ling3.train.nano.problems import Split
from ling3.train.nano.skills.skill import Skill, Text, split_of
from ling3.train.nano.skills.words import KEYS

PERIODS, ALPHABET = (8, 12, 16), 3


def _draw(rng: np.random.Generator, split: Split) -> Text:
    """Three periods of 8, 12 or 16 words; a pattern is of one split, whatever its words are.

    So its hash is that of the pattern with its words numbered in the order in which they come.
    """
    while True:
        pattern = rng.integers(ALPHABET, size=rng.choice(PERIODS))
        first = list(dict.fromkeys(pattern.tolist()))
        if split_of(f"every {[first.index(place) for place in pattern.tolist()]}") == split:
            words = rng.permutation(len(KEYS))[:ALPHABET]
            string = "".join(f" {KEYS[i]}" for i in words[pattern])
            return Text(((f"Every {len(pattern)}:{string}", False), (string, True), (string, True)))


POSITIONS = Skill("positions", _draw, longest=4 + 3 * max(PERIODS), pulls=("rotary embedding", "attention"))
