"""Bare equations, `43 + 12 = 55. 9 - 2 = 7.`; only the results count in the loss.

A model learns to read long before it learns to add; drills are the cheapest practice in arithmetic.
"""

from collections.abc import Iterator

from tokenizers import Tokenizer

from ling3.train.nano.problems import Problem, Step, problems
from ling3.train.nano.skills.skill import Row
from ling3.train.tokenizer import END_OF_TEXT

TOKENS_PER_EQUATION = 6


def single_steps(seed: int) -> Iterator[Step]:
    """The equations of training problems, except those that alone would be a held-out solution."""
    for problem in problems(seed, "train"):
        yield from (step for step in problem.steps if Problem("", (step,)).split == "train")


def drills(tokenizer: Tokenizer, equations: Iterator[Step], room: int) -> Row:
    """`room` tokens: as many complete equations as fit, then end-of-text tokens."""
    text = " ".join(str(next(equations)) for _ in range(room // TOKENS_PER_EQUATION))
    tokens = tokenizer.encode(text).ids
    equals = tokenizer.encode("1 = 1").ids[1]
    weights = [float(place > 0 and tokens[place - 1] == equals) for place in range(len(tokens))]
    missing = room - len(tokens)
    return tokens + tokenizer.encode(END_OF_TEXT).ids * missing, weights + [0.0] * missing
