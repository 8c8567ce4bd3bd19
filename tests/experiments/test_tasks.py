"""The tasks keep their word: answers as a slow second definition gives them, streams that repeat, sizes, chances."""

import re

import numpy as np
import pytest

from experiments.design import EXPERIMENTS
from experiments.tasks import (
    NULL,
    RESET,
    SEPARATOR,
    TASKS,
    mqar,
    palindrome,
    parity,
    segment_reset,
    tokenizer,
    word_recall,
)
from ling3.train.nano.problems import Problem, Step

SMALL = {
    "parity": parity(7),
    "mqar": mqar(20, 4, 6, 5),
    "segment_reset": segment_reset(4, 3, 4, 8, 6),
    "palindrome": palindrome(12, 5),
    "recall": word_recall(24, 4),
}


def slow_parity(tokens):
    return [sum(tokens[: t + 1]) % 2 for t in range(len(tokens))]


def slow_mqar(tokens):
    """A key's second appearance asks for what followed the first."""
    answers = [None] * len(tokens)
    for t, token in enumerate(tokens):
        if token and tokens.index(token) < t and tokens.index(token) % 2 == 0 and t >= 8:
            answers[t] = tokens[tokens.index(token) + 1]
    return answers


def slow_segment_reset(tokens, pairs=3):
    answers, memory, place = [], {}, 0
    for before, token in zip([None, *tokens], tokens):
        place = 0 if token == RESET else place + 1
        if place == 0:
            memory.clear()
        elif place <= 2 * pairs and place % 2 == 0:
            memory[before] = token
        answers.append(memory.get(token, NULL) if place > 2 * pairs else None)
    return answers


def slow_palindrome(tokens):
    half = tokens.index(SEPARATOR)
    return [None] * half + tokens[:half][::-1]


def slow_recall(tokens, pairs=4):
    """A word that is there for the second time, or a later one, asks for what followed the first."""
    answers = [None] * len(tokens)
    for t in range(2 * pairs, len(tokens), 2):
        answers[t] = tokens[tokens.index(tokens[t]) + 1]
        assert answers[t] == tokens[t + 1]
    return answers


SLOW = {
    "parity": slow_parity,
    "mqar": slow_mqar,
    "segment_reset": slow_segment_reset,
    "palindrome": slow_palindrome,
    "recall": slow_recall,
}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("seed", [0, 7])
def test_answers_are_those_of_the_slow_definition(name, seed):
    batch = SMALL[name].batch(seed, 3, 200)
    for tokens, targets, mask in zip(batch.tokens.tolist(), batch.targets.tolist(), batch.mask.tolist(), strict=True):
        expected = SLOW[name](tokens)
        assert [target if asked else None for target, asked in zip(targets, mask, strict=True)] == expected


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_is_a_function_of_task_seed_and_step(name):
    task = TASKS[name]()
    first, again = task.batch(3, 5, 16), task.batch(3, 5, 16)
    assert np.array_equal(first.tokens, again.tokens) and np.array_equal(first.targets, again.targets)
    assert np.array_equal(first.mask, again.mask)
    for other in (task.batch(4, 5, 16), task.batch(3, 6, 16)):
        # A row of random tokens comes twice by chance less than once in 2^40 times.
        assert not set(map(tuple, first.tokens.tolist())) & set(map(tuple, other.tokens.tolist()))


@pytest.mark.parametrize("name", TASKS)
def test_tokens_and_targets_are_in_the_vocabulary_and_all_of_it_is_used(name):
    task = TASKS[name]()
    batch = task.batch(0, 0, 500)
    assert batch.tokens.shape == batch.targets.shape == batch.mask.shape
    assert batch.tokens.dtype == batch.targets.dtype == np.int32
    used = set(batch.tokens.ravel().tolist()) | set(batch.targets[batch.mask].tolist())
    # Word problems have few words, and the vocabulary is nano's.
    assert used <= set(range(task.vocabulary)) if task.parts else used == set(range(task.vocabulary))


def test_the_sizes_are_those_of_the_stored_results():
    batches = {name: task().batch(0, 0, 4) for name, task in TASKS.items()}
    asked = {name: (batch.tokens.shape[1], batch.mask.sum(1).tolist()) for name, batch in batches.items()}
    assert asked == {
        "segment_reset": (85, [30] * 4),
        "mqar": (32, [6] * 4),
        "parity": (40, [40] * 4),
        "palindrome": (40, [20] * 4),
        "text_and_recall": (128, [128, 128, 56, 56]),
    }


def test_parity_can_not_be_guessed_from_the_bit_alone():
    batch = TASKS["parity"]().batch(0, 0, 2000)
    agree = (batch.tokens == batch.targets)[:, 5:].mean()
    assert abs(agree - 0.5) < 0.01  # 70,000 fair coins: five standard deviations


def test_each_key_of_mqar_is_asked_once_and_half_of_the_queries_of_a_segment_are_stale():
    batch = TASKS["mqar"]().batch(0, 0, 300)
    keys = batch.tokens[:, :12:2]
    asked = np.sort(batch.tokens[batch.mask].reshape(300, 6), axis=1)
    assert np.array_equal(np.sort(keys, axis=1), asked)
    assert all(len(set(row)) == 6 for row in keys.tolist())

    batch = TASKS["segment_reset"]().batch(0, 0, 300)
    assert np.array_equal((batch.targets == NULL).reshape(300, 5, 17).sum(2), np.full((300, 5), 3))


def test_stale_keys_were_bound_in_an_earlier_segment():
    segments = TASKS["segment_reset"]().batch(0, 0, 300).tokens.reshape(300, 5, 17)
    for row in segments.tolist():
        seen = set(row[0][1:11:2])
        for segment in row[1:]:
            own = set(segment[1:11:2])
            stale = set(segment[11:]) - own
            # Three stale queries: there may be fewer than three such keys right after the first segment, never more.
            assert len(stale & seen) == min(3, len(seen - own))
            seen |= own


def test_text_asks_for_each_next_token_and_held_out_problems_have_solutions_of_their_own():
    task, tok = TASKS["text_and_recall"](), tokenizer()
    unseen, recall = (part.batch(0, 0, 40) for part in task.parts)
    assert (task.parts[0].name, task.parts[1].name) == ("text", "recall")
    rows = {"train": task.batch(0, 0, 80).tokens[:40], "held_out": unseen.tokens}
    for split, tokens in rows.items():
        solutions = re.findall(r"\nAnswer: (.*)\n\n", "".join(tok.decode(row) for row in tokens.tolist()))
        assert len(solutions) > 40
        for solution in solutions:
            steps = [Step(int(a), sign, int(b)) for a, sign, b in re.findall(r"(\d+) ([-+×]) (\d+) =", solution)]
            problem = Problem("", tuple(steps))
            assert (problem.solution, problem.split) == (solution, split)
    assert np.array_equal(unseen.targets[:, :-1], unseen.tokens[:, 1:]) and unseen.mask.all()
    assert all(tok.decode(row).startswith("Question: ") for row in unseen.tokens.tolist())
    assert set(recall.tokens.ravel().tolist()) < set(unseen.tokens.ravel().tolist())


def test_pairs_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="12 tokens, but there are 32 and 11"):
        mqar(length=11, pairs=4)
    with pytest.raises(ValueError, match="8 pairs of 20 names and their queries do not fit in 16 tokens"):
        word_recall(length=16)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_variants_of_a_task_have_the_same_task_and_no_variant_twice(name):
    experiment = EXPERIMENTS[name]
    assert experiment.task is TASKS[name]()
    configs = [experiment.config(variant) for variant in experiment.variants]
    assert len(set(map(repr, configs))) == len(configs)
    assert experiment.sweep_seed not in experiment.seeds and len(experiment.learning_rates) >= 4
