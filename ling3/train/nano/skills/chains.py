"""Chains: pairs whose values are keys of other pairs, and the end of a chain, asked for in one step.

    Chain: elm owl fox elm owl gold … ? 1 fox elm 3 fox gold 2 fox owl …

What is asked for after 2 is the value of the value, and nothing is said in between. Layers can look up one after the
other; and the delta rule can tie two keys to one value, by writing 0 at their difference.
"""

import itertools

import numpy as np

from ling3.train.nano.problems import Split
from ling3.train.nano.skills.skill import Segment, Skill, Text, split_of
from ling3.train.nano.skills.words import KEYS

COUNT, HOPS = 3, 3
"""Chains in a text, and the pairs of each."""


def _draw(rng: np.random.Generator, split: Split) -> Text:
    """All pairs in random order, and each question once; the last is for the end of a chain with ends of this split."""
    while True:
        chains = rng.permutation(len(KEYS))[: COUNT * (HOPS + 1)].reshape(COUNT, HOPS + 1)
        if [ends(*(KEYS[key] for key in chain)) for chain in chains] == ["train"] * (COUNT - 1) + [split]:
            break
    pairs = rng.permutation([pair for chain in chains for pair in itertools.pairwise(chain)])
    text = "Chain:" + "".join(f" {KEYS[key]} {KEYS[value]}" for key, value in pairs) + " ?"
    *questions, last = [
        (chain, hops, start) for chain in chains for hops in range(1, HOPS + 1) for start in range(HOPS + 1 - hops)
    ]
    pieces: list[Segment] = []
    for chain, hops, start in [*(questions[i] for i in rng.permutation(len(questions))), last]:
        pieces += [(f"{text} {hops} {KEYS[chain[start]]}", False), (f" {KEYS[chain[start + hops]]}", True)]
        text = ""
    return Text(tuple(pieces))


def ends(first: str, *rest: str) -> Split:
    """The split of a chain, by its two ends."""
    return split_of(f"chain {first} {rest[-1]}")


CHAINS = Skill("chains", _draw, longest=93, pulls=("decay", "writing strength", "short convolution"))
