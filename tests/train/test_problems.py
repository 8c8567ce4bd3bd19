"""The word problems: right, bounded, the same everywhere, and split without overlap."""

import itertools
import random
import re

import pytest

from ling3.train.nano.problems import (
    HELD_OUT_SHARE,
    LIMIT,
    MOST_STEPS,
    Problem,
    Step,
    ask,
    draw,
    last_integer,
    problems,
)

WORDS = {"twice": 2, "doubles": 2, "three times": 3, "triples": 3, "four times": 4}


def take(seed: int, split: str, count: int) -> list[Problem]:
    return list(itertools.islice(problems(seed, split), count))


@pytest.fixture(scope="module")
def many() -> list[Problem]:
    rng = random.Random(7)
    return [draw(rng) for _ in range(4000)]


def test_every_equation_holds_and_every_number_is_in_range(many):
    for problem in many:
        for equation in re.findall(r"(\d+) ([-+×]) (\d+) = (\d+)\.", problem.solution):
            left, right, result = (int(equation[place]) for place in (0, 2, 3))
            assert {"+": left + right, "-": left - right, "×": left * right}[equation[1]] == result
        assert all(0 <= int(number) <= LIMIT for number in re.findall(r"\d+", problem.question + problem.solution))
        assert problem.solution.count("=") == len(problem.steps)


def test_operands_come_from_the_question_or_from_earlier_steps(many):
    for problem in many:
        known = {int(number) for number in re.findall(r"\d+", problem.question)}
        known |= {number for word, number in WORDS.items() if word in problem.question}
        for step in problem.steps:
            assert {step.left, step.right} <= known, problem
            known.add(step.result)


def test_one_to_four_steps_are_equally_frequent(many):
    lengths = [len(problem.steps) for problem in many]
    assert set(lengths) == set(range(1, MOST_STEPS + 1))
    assert all(abs(lengths.count(length) / len(many) - 1 / MOST_STEPS) < 0.03 for length in set(lengths))


def test_a_seed_gives_the_same_problems_everywhere():
    first = take(0, "train", 3)
    assert first == take(0, "train", 3)
    assert first != take(1, "train", 3)
    assert [problem.solution for problem in first] == [
        "8 + 12 = 20. 20 × 2 = 40. 40 - 15 = 25. 25 × 2 = 50. The answer is 50.",
        "29 + 7 = 36. 36 + 3 = 39. 39 - 4 = 35. 35 + 6 = 41. The answer is 41.",
        "8 × 6 = 48. 52 - 48 = 4. 4 - 3 = 1. 1 + 12 = 13. The answer is 13.",
    ]


@pytest.mark.slow
def test_no_held_out_solution_occurs_in_training():
    train = {problem.solution for problem in take(1, "train", 8000)}
    held_out = {problem.solution for problem in take(2, "held_out", 800)}
    assert train.isdisjoint(held_out)
    assert all(not solution.startswith(tuple(held_out)) for solution in train)


def test_the_held_out_share(many):
    share = sum(problem.split == "held_out" for problem in many) / len(many)
    assert share == pytest.approx(1 / HELD_OUT_SHARE, abs=0.015)


def test_the_split_depends_on_the_equations_and_not_on_the_words():
    steps = (Step(3, "+", 4), Step(7, "-", 2))
    assert Problem("One story.", steps).split == Problem("Another.", steps).split


def test_prompts():
    problem = Problem("Mia has 3 apples. She gets 4 more apples. How many?", (Step(3, "+", 4),))
    example = Problem("Ben has 9 pens. He loses 2 pens. How many?", (Step(9, "-", 2),))
    assert problem.solution == "3 + 4 = 7. The answer is 7."
    assert problem.answer == 7
    assert ask(problem) == f"Question: {problem.question}\nAnswer:"
    assert ask(problem, [example]) == f"{ask(example)} 9 - 2 = 7. The answer is 7.\n\n{ask(problem)}"


@pytest.mark.parametrize(
    ("text", "number"), [("3 + 4 = 7. The answer is 7.", 7), ("12, then 5", 5), ("none", None), ("", None)]
)
def test_last_number(text, number):
    assert last_integer(text) == number
