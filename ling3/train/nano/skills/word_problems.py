"""Word problems worked step by step (`ling3.train.nano.problems`): as plain text, as a chat turn, after examples."""

import itertools

import numpy as np

from ling3.train.nano.problems import Split, ask, chat_prompt, problems
from ling3.train.nano.skills.skill import Segment, Skill, Text
from ling3.train.tokenizer import END_OF_TURN

MOST_EXAMPLES = 7
PULLS = ("attention", "short convolution", "decay", "output gate")


def _plain(rng: np.random.Generator, split: Split) -> Text:
    problem = next(problems(int(rng.integers(2**31)), split))
    return Text(((ask(problem), False), (f" {problem.solution}", True)))


def _chat(rng: np.random.Generator, split: Split) -> Text:
    problem = next(problems(int(rng.integers(2**31)), split))
    return Text(((chat_prompt(problem), False), (problem.solution, True)))


def _after_examples(rng: np.random.Generator, split: Split) -> Text:
    """Worked training problems (four in an exam), then one problem of this split, separated by blank lines."""
    shown = 4 if split == "held_out" else int(rng.integers(1, MOST_EXAMPLES + 1))
    examples = itertools.islice(problems(int(rng.integers(2**31)), "train"), shown)
    last = next(problems(int(rng.integers(2**31)), split))
    pieces: list[Segment] = []
    for i, problem in enumerate((*examples, last)):
        blank_line = "\n\n" if i else ""
        pieces += [(blank_line + ask(problem), False), (f" {problem.solution}", True)]
    return Text(tuple(pieces))


PROBLEMS = Skill("problems", _plain, longest=128, pulls=PULLS)
CHAT = Skill("chat", _chat, longest=128, pulls=PULLS, end=END_OF_TURN)
EXAMPLES = Skill("examples", _after_examples, longest=128 * (MOST_EXAMPLES + 1), pulls=PULLS)
