"""Memorised facts: a fixed world of people, each with a value for each of four attributes.

    About Anna fox: likes gold fears tin owns silk seeks lead

There is no rule to learn: the answers have to be in the weights, above all in the experts. A training text has a
person's four attributes in random order. One of them never comes first in training, and the exam asks for that one.
"""

import functools
from collections.abc import Sequence

import numpy as np

from ling3.train.nano.problems import PEOPLE, Split
from ling3.train.nano.skills.skill import Segment, Skill, Text, rank
from ling3.train.nano.skills.words import KEYS, VALUES

ATTRIBUTES = ("likes", "fears", "owns", "seeks")
SUBJECTS = 2048
"""People in the world; each is worth 4 log2(64) = 24 bits."""


@functools.cache
def subjects(count: int = SUBJECTS) -> tuple[str, ...]:
    """The people's names, of two words each. Raises ValueError if `count` is below 1 or above the number of names."""
    names = [f"{first} {last}" for first, _ in PEOPLE for last in KEYS]
    if not 1 <= count <= len(names):
        raise ValueError(f"count is {count}, expected 1 to {len(names)} people")
    return tuple(sorted(names, key=lambda name: rank(f"subject: {name}"))[:count])


@functools.cache
def fact(subject: str, attribute: str) -> str:
    """A person's value of one of `ATTRIBUTES`."""
    return VALUES[rank(f"fact: {subject} {attribute}") % len(VALUES)]


@functools.cache
def never_first(subject: str) -> str:
    """The attribute that comes first in no training text about this person."""
    return ATTRIBUTES[rank(f"never first: {subject}") % len(ATTRIBUTES)]


def tell(subject: str, order: Sequence[str]) -> Text:
    """A text that tells a person's attributes in this order."""
    text, pieces = f"About {subject}:", []
    for attribute in order:
        pieces += [(f"{text} {attribute}", False), (f" {fact(subject, attribute)}", True)]
        text = ""
    return Text(tuple[Segment, ...](pieces))


def _draw(rng: np.random.Generator, split: Split, people: int) -> Text:
    """A random person with all attributes, or in an exam with the one that never comes first in training."""
    subject = subjects(people)[rng.integers(people)]
    order = [ATTRIBUTES[i] for i in rng.permutation(len(ATTRIBUTES))]
    if split == "held_out":
        order = [never_first(subject)]
    elif order[0] == never_first(subject):
        order = order[1:] + order[:1]
    return tell(subject, order)


def facts(people: int) -> Skill:
    """The skill in a world of `people` people. Raises ValueError if there are not enough names."""
    subjects(people)
    draw = functools.partial(_draw, people=people)
    return Skill("facts", draw, longest=12, pulls=("experts per token", "routing bias", "shared expert"))


FACTS = facts(SUBJECTS)
