"""Exact recall: pairs of keys and values, then some of the keys, each of which asks for its value.

    Recall: fox gold elm tin owl silk … ? elm tin fox gold …

A short text has 2 to 96 pairs, mostly few. The long form has up to 192 pairs (in an exam all 192), more than the states
of nano's KDA layers can keep apart, then worked problems, then the questions, up to 1,535 tokens: it is meant for MLA.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ling3.train.nano.problems import Split, ask, problems
from ling3.train.nano.skills.skill import Bindings, Segment, Skill, Text
from ling3.train.nano.skills.words import KEYS, VALUES

PAIRS = Bindings("recall", KEYS, VALUES)


def _recall(rng: np.random.Generator, split: Split, pairs: int, asked: int, between: Sequence[Segment] = ()) -> Text:
    """`pairs` pairs, the pieces `between`, and `asked` questions; the last question's pair is from this split."""
    keys = rng.permutation(len(KEYS))[:pairs]
    values = PAIRS.draw(rng, keys, "train")
    order = rng.permutation(pairs)[:asked]
    values[order[-1]] = PAIRS.draw(rng, keys[order[-1:]], split)[0]
    pieces: list[Segment] = [("Recall:" + "".join(f" {KEYS[k]} {v}" for k, v in zip(keys, values)), False), *between]
    question = " ?"
    for i in order:
        pieces += [(f"{question} {KEYS[keys[i]]}", False), (f" {values[i]}", True)]
        question = ""
    return Text(tuple(pieces))


LEAST, MOST, ASKED = 2, 96, 28
"""The fewest and most pairs, and the most questions, of a short text."""


def _pairs(rng: np.random.Generator, least: int, most: int) -> int:
    """A log-uniform number: few pairs are learned first, and many pairs need mechanisms that few do not."""
    return int(least * (most / least) ** rng.random() + 0.5)


def _short(rng: np.random.Generator, split: Split) -> Text:
    """`LEAST` to `MOST` pairs, mostly few, and a question for up to `ASKED` of them."""
    pairs = _pairs(rng, LEAST, MOST)
    return _recall(rng, split, pairs, min(pairs, ASKED))


def _many(rng: np.random.Generator, split: Split) -> Text:
    """Like `_short`, with a uniform number of pairs."""
    pairs = int(rng.integers(LEAST, MOST + 1))
    return _recall(rng, split, pairs, min(pairs, ASKED))


PROBLEMS, QUESTIONS = 13, 96
"""The most worked problems, and the most questions, of a long text."""


def _long(rng: np.random.Generator, split: Split) -> Text:
    """All keys (in training, a twelfth of them or more), up to `PROBLEMS` problems, and up to `QUESTIONS` questions."""
    pairs = len(KEYS) if split == "held_out" else _pairs(rng, len(KEYS) // 12, len(KEYS))
    stream = problems(int(rng.integers(2**31)), "train")
    between: list[Segment] = []
    for _ in range(rng.integers(PROBLEMS + 1)):
        problem = next(stream)
        between += [(f"\n\n{ask(problem)}", False), (f" {problem.solution}", True)]
    return _recall(rng, split, pairs, min(pairs, QUESTIONS), [*between, *([("\n\n", False)] if between else [])])


RECALL = Skill("recall", _short, longest=3 + 2 * (MOST + ASKED), pulls=("short convolution", "writing strength"))
MANY = dataclasses.replace(RECALL, draw=_many)
"""Recall with all numbers of pairs equally likely, for a recipe's beginning: 800 steps hardly learn it."""
LONG_RECALL = Skill("long_recall", _long, longest=1535, pulls=("short convolution", "attention"))
