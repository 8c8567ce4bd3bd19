"""Grade-school word problems worked step by step: the data of the *nano* checkpoint.

A problem is a short story with one to four arithmetic steps; its solution is the chain of equations, for instance
"3 + 4 = 7. 7 - 2 = 5. The answer is 5.". Every number lies in 0..`LIMIT`. A hash of the solution decides whether a
problem is held out. So the split needs no list, and no training problem has a held-out solution, whatever its wording;
the single equations do occur in training, as steps of other solutions.
"""

import dataclasses
import hashlib
import itertools
import operator
import random
import re
from collections.abc import Iterator, Sequence
from typing import Literal

Split = Literal["train", "held_out"]
Operator = Literal["+", "-", "×"]

_LAWS = {"+": operator.add, "-": operator.sub, "×": operator.mul}

LIMIT = 60
"""The greatest number in any question or solution."""

HELD_OUT_SHARE = 16
"""One chain of equations in this many is held out."""

LARGEST_CHANGE = 20
MOST_STEPS = 4

PEOPLE = (
    ("Anna", "she"), ("Ben", "he"), ("Clara", "she"), ("David", "he"), ("Emma", "she"), ("Felix", "he"),
    ("Grace", "she"), ("Henry", "he"), ("Iris", "she"), ("Jack", "he"), ("Kate", "she"), ("Leo", "he"),
    ("Mia", "she"), ("Noah", "he"), ("Olivia", "she"), ("Paul", "he"), ("Rosa", "she"), ("Sam", "he"),
    ("Tina", "she"), ("Victor", "he"),
)  # fmt: skip
OBJECTS = (
    "apples", "balls", "books", "cards", "coins", "cookies", "eggs", "flowers", "marbles", "oranges",
    "pears", "pencils", "pens", "plums", "rings", "shells", "stamps", "stars", "stickers", "stones",
)  # fmt: skip
CONTAINERS = (("bags", "bag"), ("boxes", "box"), ("jars", "jar"), ("baskets", "basket"))
COLOURS = ("red", "blue", "green", "yellow", "white", "black")
MULTIPLES = ((2, "twice"), (3, "three times"), (4, "four times"))
COMPARISONS: tuple[tuple[Literal["+", "-"], str], ...] = (("+", "more"), ("-", "fewer"))


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation, `left operator right = result`."""

    left: int
    operator: Operator
    right: int

    @property
    def result(self) -> int:
        """The value of the step's equation."""
        return _LAWS[self.operator](self.left, self.right)

    def __str__(self) -> str:
        return f"{self.left} {self.operator} {self.right} = {self.result}."


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question in words and the equations that answer it."""

    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> int:
        """The problem's answer: the result of the last step."""
        return self.steps[-1].result

    @property
    def solution(self) -> str:
        """The worked solution, e.g. `3 + 4 = 7. 7 - 2 = 5. The answer is 5.`"""
        return f"{' '.join(map(str, self.steps))} The answer is {self.answer}."

    @property
    def split(self) -> Split:
        """`held_out` for one solution in `HELD_OUT_SHARE`, by a hash of its text, the same on every machine."""
        digest = hashlib.sha256(self.solution.encode()).digest()
        return "held_out" if int.from_bytes(digest[:8], "big") % HELD_OUT_SHARE == 0 else "train"


@dataclasses.dataclass
class _Story:
    """A story under construction: its sentences and equations so far, and the number that the hero has now."""

    rng: random.Random
    hero: str
    pronoun: str
    other: str
    neighbour: str
    things: str
    sentences: list[str] = dataclasses.field(default_factory=list)
    steps: list[Step] = dataclasses.field(default_factory=list)
    now: int = 0

    @classmethod
    def begin(cls, rng: random.Random) -> "_Story":
        (hero, pronoun), (other, _), (neighbour, _) = rng.sample(PEOPLE, 3)
        return cls(rng, hero, pronoun.capitalize(), other, neighbour, rng.choice(OBJECTS))

    def tell(self, sentence: str, *steps: Step) -> None:
        self.sentences.append(sentence)
        self.steps.extend(steps)
        if steps:
            self.now = steps[-1].result

    def operand(self, sign: Literal["+", "-"]) -> int | None:
        """A random number in 2..`LARGEST_CHANGE` that keeps `now ± number` in 0..`LIMIT`; None if there is none."""
        most = min(LARGEST_CHANGE, LIMIT - self.now if sign == "+" else self.now)
        return self.rng.randint(2, most) if most >= 2 else None


def _start(story: _Story) -> None:
    story.now = story.rng.randint(2, LIMIT)
    verb = story.rng.choice(("has", "starts with", "owns"))
    story.tell(f"{story.hero} {verb} {story.now} {story.things}.")


def _start_in_groups(story: _Story) -> None:
    groups = story.rng.randint(2, 9)
    each = story.rng.randint(2, min(12, LIMIT // groups))
    plural, one = story.rng.choice(CONTAINERS)
    story.tell(f"{story.hero} has {groups} {plural} with {each} {story.things} in each {one}.", Step(groups, "×", each))


def _start_in_two_colours(story: _Story) -> None:
    first = story.rng.randint(2, LIMIT - LARGEST_CHANGE)
    second = story.rng.randint(2, LARGEST_CHANGE)
    one, two = story.rng.sample(COLOURS, 2)
    story.tell(
        f"{story.hero} has {first} {one} {story.things} and {second} {two} {story.things}.", Step(first, "+", second)
    )


def _start_by_comparison(story: _Story) -> None:
    theirs = story.rng.randint(LARGEST_CHANGE, LIMIT - LARGEST_CHANGE)
    by = story.rng.randint(2, LARGEST_CHANGE)
    sign, word = story.rng.choice(COMPARISONS)
    story.tell(
        f"{story.other} has {theirs} {story.things}. {story.hero} has {by} {word} {story.things} than {story.other}.",
        Step(theirs, sign, by),
    )


def _start_by_multiple(story: _Story) -> None:
    times, word = story.rng.choice(MULTIPLES)
    theirs = story.rng.randint(2, LIMIT // times)
    story.tell(
        f"{story.other} has {theirs} {story.things}. {story.hero} has {word} as many {story.things} as {story.other}.",
        Step(theirs, "×", times),
    )


def _start_with_a_purchase(story: _Story) -> None:
    count = story.rng.randint(2, 9)
    price = story.rng.randint(2, min(12, LIMIT // count))
    purse = story.rng.randint(count * price, LIMIT)
    story.tell(
        f"{story.hero} has {purse} dollars. {story.pronoun} buys {count} {story.things} for {price} dollars each.",
        Step(count, "×", price),
        Step(purse, "-", count * price),
    )
    story.things = "dollars"


def _gain(story: _Story) -> bool:
    return _change(
        story,
        "+",
        "{pronoun} gets {by} more {things}.",
        "Then {hero} finds {by} {things}.",
        "{other} gives {hero} {by} {things}.",
        "Then {they} wins {by} more.",
    )


def _loss(story: _Story) -> bool:
    return _change(
        story,
        "-",
        "{pronoun} loses {by} {things}.",
        "Then {hero} gives {by} {things} to {other}.",
        "{other} takes {by} of them.",
        "Then {they} gives away {by}.",
    )


def _change(story: _Story, sign: Literal["+", "-"], *sentences: str) -> bool:
    """Adds an event, worded as one of the sentences, that adds or subtracts; returns False if no number fits."""
    if (by := story.operand(sign)) is None:
        return False
    sentence = story.rng.choice(sentences).format(by=by, they=story.pronoun.lower(), **vars(story))
    story.tell(sentence, Step(story.now, sign, by))
    return True


def _growth(story: _Story) -> bool:
    times, word = story.rng.choice(((2, "doubles"), (3, "triples")))
    if not 2 <= story.now <= LIMIT // times:
        return False
    story.tell(f"Then {story.hero} {word} the number of {story.things}.", Step(story.now, "×", times))
    return True


def _ask_how_many(story: _Story) -> bool:
    story.tell(f"How many {story.things} does {story.hero} have{story.rng.choice((' now', '', ' in the end'))}?")
    return True


def _ask_together(story: _Story) -> bool:
    """A neighbour has some more or fewer: two steps, the neighbour's number and the sum."""
    sign, word = story.rng.choice(COMPARISONS)
    if (by := story.operand(sign)) is None:
        return False
    theirs = Step(story.now, sign, by)
    if story.now + theirs.result > LIMIT:
        return False
    story.tell(
        f"{story.neighbour} has {by} {word} {story.things} than {story.hero}. "
        f"How many {story.things} do they have together?",
        theirs,
        Step(story.now, "+", theirs.result),
    )
    return True


_OPENINGS = (
    (0, _start),
    (0, _start),
    (1, _start_in_groups),
    (1, _start_in_two_colours),
    (1, _start_by_comparison),
    (1, _start_by_multiple),
    (2, _start_with_a_purchase),
)
_EVENTS = (_gain, _gain, _loss, _loss, _growth)
_CLOSINGS = ((0, _ask_how_many), (0, _ask_how_many), (0, _ask_how_many), (2, _ask_together))


def draw(rng: random.Random) -> Problem:
    """One problem of either split; its number of steps is uniform in 1..`MOST_STEPS`."""
    length = rng.randint(1, MOST_STEPS)
    while True:
        story = _Story.begin(rng)
        opening_steps, opening = rng.choice(_OPENINGS)
        closing_steps, closing = rng.choice(_CLOSINGS)
        middle = length - opening_steps - closing_steps
        if middle < 0:
            continue
        opening(story)
        if all(rng.choice(_EVENTS)(story) for _ in range(middle)) and closing(story):
            return Problem(" ".join(story.sentences), tuple(story.steps))


def problems(seed: int, split: Split) -> Iterator[Problem]:
    """An endless stream of problems of `split`; a seed gives the same stream on every machine."""
    rng = random.Random(seed)
    while True:
        problem = draw(rng)
        if problem.split == split:
            yield problem


def exam(count: int, seed: int = 2026) -> list[Problem]:
    """The first `count` of the held-out problems that nano is examined on."""
    return list(itertools.islice(problems(seed, "held_out"), count))


def worked_examples(count: int, seed: int = 2027, each: int = 4) -> list[list[Problem]]:
    """`each` training problems to show before each of `count` questions."""
    stream = problems(seed, "train")
    return [list(itertools.islice(stream, each)) for _ in range(count)]


def ask(problem: Problem, examples: Sequence[Problem] = ()) -> str:
    """The raw prompt: the worked `examples`, a blank line after each, then the question up to `Answer:`."""
    worked = [f"{ask(example)} {example.solution}\n\n" for example in examples]
    return f"{''.join(worked)}Question: {problem.question}\nAnswer:"


SYSTEM_TURN = "<role>SYSTEM</role>detailed thinking off<|role_end|>"


def chat_prompt(problem: Problem) -> str:
    """The problem as a user's turn, as the checkpoint's chat template renders it."""
    return f"{SYSTEM_TURN}<role>HUMAN</role>{problem.question}<|role_end|><role>ASSISTANT</role>\n<think></think>"


def last_integer(text: str) -> int | None:
    """The answer that `text` gives: its last number, or None if it has none."""
    numbers = re.findall(r"\d+", text)
    return int(numbers[-1]) if numbers else None
