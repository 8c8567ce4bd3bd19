"""Positions: a string that repeats with a given period, in which only the distance tells what comes next.

    Every 7: owl elm owl owl fox elm owl  owl elm owl …

A string has three words alone, so that most of its short pieces occur at several places; looking back exactly one
period is what RoPE is for.
"""

import numpy as np

from ling3.train.nano.problems import Split
from ling3.train.nano.skills.skill import Skill, Text, split_of
from ling3.train.nano.skills.words import KEYS

LEAST, MOST, ALPHABET = 4, 16, 3


def _draw(rng: np.random.Generator, split: Split) -> Text:
    """Three periods of 4 to 16 words; a pattern is of one split, whatever its words are.

    So its hash is that of the pattern with its words numbered in the order in which they come.
    """
    while True:
        pattern = rng.integers(ALPHABET, size=rng.integers(LEAST, MOST + 1))
        first = list(dict.fromkeys(pattern.tolist()))
        if split_of(f"every {[first.index(place) for place in pattern.tolist()]}") == split:
            words = rng.permutation(len(KEYS))[:ALPHABET]
            string = "".join(f" {KEYS[i]}" for i in words[pattern])
            return Text(((f"Every {len(pattern)}:{string}", False), (string, True), (string, True)))


POSITIONS = Skill("positions", _draw, longest=4 + 3 * MOST, pulls=("rotary embedding", "attention"))
