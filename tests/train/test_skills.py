"""Nano's skills: answers right by solvers of their own, splits disjoint, lengths and tokens as promised."""

import itertools
import math
import re

import pytest

import ling3
from ling3.train.nano.mixture import DRILLS, BatchShape, corpus, packed
from ling3.train.nano.problems import SYSTEM_TURN
from ling3.train.nano.skills import SKILLS, encode
from ling3.train.nano.skills.copying import COPYING
from ling3.train.nano.skills.exam import padded, right_answers
from ling3.train.nano.skills.facts import ATTRIBUTES, FACTS, fact, never_first, subjects
from ling3.train.nano.skills.positions import POSITIONS
from ling3.train.nano.skills.recall import LONG_RECALL, PAIRS, RECALL
from ling3.train.nano.skills.resets import BOUND, RESETS
from ling3.train.nano.skills.skill import Bindings, Text, rank, split_of
from ling3.train.nano.skills.tracking import HELD, TRACKING
from ling3.train.nano.skills.word_problems import PROBLEMS
from ling3.train.nano.skills.words import KEYS, VALUES
from ling3.train.tokenizer import END_OF_TEXT, train_tokenizer

SPLITS = ("train", "held_out")


def take(skill, split, count, seed=5):
    return list(itertools.islice(skill.texts(seed, split), count if skill.longest <= 256 else -(-count // 10)))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(corpus(0, size=400), 1280)


def recalled(prompt):
    """The value that stands after the last key among the pairs."""
    bound = re.split(r"\n\n| \?", prompt.removeprefix("Recall:"))[0].split()
    return dict(zip(bound[::2], bound[1::2], strict=True))[prompt.split()[-1]]


def reset(prompt):
    """The value of the last key in the last segment, or none."""
    bound = prompt.rsplit(" new ", 1)[1].split(" ?")[0].split()
    return dict(zip(bound[::2], bound[1::2], strict=True)).get(prompt.split()[-1], "none")


def tracked(prompt):
    """What the last person took last."""
    return re.findall(rf"{prompt.split()[-2]} takes (\w+)", prompt)[-1]


def copied(prompt):
    """The string between colon and semicolon."""
    return re.fullmatch(r"Copy:(.*) ;", prompt)[1].strip()


def repeated(prompt):
    """The last period."""
    period, words = re.fullmatch(r"Every (\d+):(.*)", prompt).groups()
    return " ".join(words.split()[-int(period) :])


SOLVERS = [(RECALL, recalled), (LONG_RECALL, recalled), (RESETS, reset), (TRACKING, tracked), (COPYING, copied)]
SOLVERS += [(POSITIONS, repeated)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("skill", "solve"), SOLVERS, ids=[skill.name for skill, _ in SOLVERS])
def test_every_answer_is_that_of_a_solver_of_its_own(skill, solve, split):
    for text in take(skill, split, 100):
        so_far, solved = "", 0
        for piece, learned in text.segments:
            if learned and not so_far.endswith("Answer:"):  # a worked problem among the pairs has its own tests
                assert piece == f" {solve(so_far)}"
                solved += 1
            so_far += piece
        assert solved and text.segments[-1][1]
        assert text.prompt + text.answer == so_far


def test_equations_hold_in_texts_of_problems():
    for name in ("problems", "chat", "examples"):
        for text in take(SKILLS[name], "held_out", 100):
            for left, sign, right, result in re.findall(r"(\d+) ([-+×]) (\d+) = (\d+)", text.prompt + text.answer):
                assert {"+": int(left) + int(right), "-": int(left) - int(right), "×": int(left) * int(right)}[
                    sign
                ] == int(result)


def pairs_of(skill, text):
    """Every pair that a text binds, and the key that is asked last."""
    if skill is TRACKING:
        return re.findall(r"(\w+) takes (\w+)", text.prompt), text.prompt.split()[-2]
    first = re.split(r"\n\n| \?", text.prompt.removeprefix("Recall:"))[:1]
    blocks = first if skill is not RESETS else re.findall(r" new (.*?) \?", text.prompt)
    words = [block.split() for block in blocks]
    return [pair for own in words for pair in zip(own[::2], own[1::2])], text.prompt.split()[-1]


BOUND_SKILLS = [(RECALL, PAIRS), (LONG_RECALL, PAIRS), (RESETS, BOUND), (TRACKING, HELD)]


@pytest.mark.parametrize(("skill", "bindings"), BOUND_SKILLS, ids=[skill.name for skill, _ in BOUND_SKILLS])
def test_no_training_text_binds_a_pair_that_an_exam_asks_for(skill, bindings):
    for text in take(skill, "train", 200):
        pairs, _ = pairs_of(skill, text)
        assert pairs and all(bindings.split(*pair) == "train" for pair in pairs)
    for text in take(skill, "held_out", 200):
        pairs, asked = pairs_of(skill, text)
        own = [pair for pair in pairs if pair[0] == asked]
        assert own and all(bindings.split(*pair) == "held_out" for pair in own)


def test_each_key_has_its_share_of_values_held_out():
    bindings = Bindings("any", KEYS[:20], VALUES)
    for key in KEYS[:20]:
        assert sum(bindings.split(key, value) == "held_out" for value in VALUES) == len(VALUES) // 16
    assert Bindings("other", KEYS[:20], VALUES).split(KEYS[0], VALUES[0]) in SPLITS


def test_a_string_to_copy_is_of_one_split():
    for split in SPLITS:
        assert all(split_of(f"copy{text.answer}") == split for text in take(COPYING, split, 200))


def test_two_words_tell_where_in_a_string_one_is_and_one_does_not():
    strings = [text.answer.split() for text in take(COPYING, "train", 300)]
    pairs = [list(itertools.pairwise(words)) for words in strings]
    assert all(len(set(own)) == len(own) for own in pairs)
    assert sum(len(set(words)) < len(words) for words in strings) > 150


def test_a_pattern_is_of_one_split_under_any_words():
    def patterns(split):
        found = set()
        for text in take(POSITIONS, split, 2000):
            words = text.answer.split()
            found.add(tuple(list(dict.fromkeys(words)).index(word) for word in words))
        return found

    train, held_out = map(patterns, SPLITS)
    assert len(train) > 1000 and len(held_out) > 1000 and train.isdisjoint(held_out)


@pytest.mark.slow
def test_problems_of_exams_are_held_out():
    for name in ("problems", "chat", "examples"):
        assert {text.answer.strip() for text in take(SKILLS[name], "train", 500)}.isdisjoint(
            {text.answer.strip() for text in take(SKILLS[name], "held_out", 500)}
        )
        for text in take(SKILLS[name], "held_out", 20):
            assert rank(text.answer.strip()) % 16 == 0
    assert all(text.prompt.startswith(SYSTEM_TURN) for text in take(SKILLS["chat"], "train", 5))


def test_facts_are_the_same_everywhere_and_asked_where_training_never_has_them():
    first = set()
    said = {}
    for text in take(FACTS, "train", 30000):
        whole = text.prompt + text.answer
        name, rest = re.fullmatch(r"About (\w+ \w+): (.*)", whole).groups()
        words = rest.split()
        assert sorted(words[::2]) == sorted(ATTRIBUTES)
        first.add((name, words[0]))
        for attribute, value in zip(words[::2], words[1::2], strict=True):
            assert said.setdefault((name, attribute), value) == value == fact(name, attribute)
    assert len({name for name, _ in said}) == len(subjects())
    for text in take(FACTS, "held_out", 500):
        name, attribute = re.fullmatch(r"About (\w+ \w+): (\w+)", text.prompt).groups()
        assert attribute == never_first(name) and (name, attribute) not in first
        assert text.answer == f" {said[name, attribute]}"


@pytest.mark.thorough
def test_the_words_are_different_and_each_is_one_token(tokenizer):
    assert len(set(KEYS)) == len(KEYS) == 192 and len(set(VALUES)) == len(VALUES) == 64
    assert set(KEYS).isdisjoint(VALUES)
    for word in (*KEYS, *VALUES):
        assert len(tokenizer.encode(f" {word}").ids) == 1, word


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("skill", SKILLS.values(), ids=SKILLS)
def test_a_text_in_pieces_has_the_tokens_of_the_whole_and_no_more_than_promised(skill, split, tokenizer):
    for text in take(skill, split, 100):
        tokens, weights = encode(tokenizer, text.segments)
        assert tokens == tokenizer.encode(text.prompt + text.answer).ids
        assert tokenizer.decode(tokens, skip_special_tokens=False) == text.prompt + text.answer
        assert len(tokens) == len(weights) <= skill.longest
        assert weights[-1] == 1.0 and weights[0] == 0.0


def test_long_recall_reaches_over_more_than_a_thousand_tokens(tokenizer):
    lengths = [len(tokenizer.encode(text.prompt).ids) for text in take(LONG_RECALL, "held_out", 400)]
    assert max(lengths) > 1300 and min(lengths) < 600


@pytest.mark.parametrize("name", SKILLS)
def test_a_seed_gives_the_same_texts(name):
    skill = SKILLS[name]
    assert take(skill, "train", 10, seed=1) == take(skill, "train", 10, seed=1)
    assert take(skill, "train", 10, seed=1) != take(skill, "train", 10, seed=2)
    assert skill.exam(3) == skill.exam(3)


def test_rows_are_full_and_have_the_skills_in_their_shares(tokenizer):
    shares = {"recall": 0.3, "facts": 0.2, "copying": 0.2, DRILLS: 0.3}
    rows = list(itertools.islice(packed(tokenizer, BatchShape(4, 256, shares), seed=0), 100))
    counts = dict.fromkeys(shares, 0)
    end = tokenizer.token_to_id(END_OF_TEXT)
    for tokens, weights in rows:
        assert len(tokens) == len(weights) == 256
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        for part in text.split(END_OF_TEXT):
            if part:
                start = {"Recall": "recall", "About": "facts", "Copy": "copying"}.get(re.split("[ :]", part)[0], DRILLS)
                counts[start] += len(tokenizer.encode(part).ids) + (start != DRILLS)  # and the token that closes it
        closing = [weight for token, weight in zip(tokens, weights, strict=True) if token == end]
        assert any(closing) or not re.search("Recall|About|Copy", text)
    for name, share in shares.items():
        assert math.isclose(counts[name] / sum(counts.values()), share, abs_tol=0.03), counts
    assert rows == list(itertools.islice(packed(tokenizer, BatchShape(4, 256, shares), seed=0), 100))


def test_a_text_longer_than_a_row_is_left_out(tokenizer):
    rows = itertools.islice(packed(tokenizer, BatchShape(1, 24, {"recall": 0.9, DRILLS: 0.1}), seed=0), 20)
    lengths = {len(tokens) for tokens, _ in rows}
    assert lengths == {24}


def test_rows_of_exams_have_room_and_few_lengths():
    assert all(length <= padded(length) < length + 512 for length in range(1, 2049))
    assert {padded(length) for length in range(1, 1537)} == {128, 256, 512, 1024, 1536}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_an_answer_is_right_if_greedy_decoding_would_give_it():
    model, tokenizer = ling3.load("nano"), ling3.load_tokenizer("nano")
    prompts = [text.prompt for text in PROBLEMS.exam(5)]
    replies = ling3.generate(model, [tokenizer.encode(prompt) for prompt in prompts], max_tokens=8, temperature=0.0)
    said = [tokenizer.decode(reply) for reply in replies]
    assert [tokenizer.encode(reply) for reply in said] == [list(reply) for reply in replies]

    def texts(answers):
        return [Text(((prompt, False), (answer, True))) for prompt, answer in zip(prompts, answers, strict=True)]

    assert right_answers(model, tokenizer, texts(said)) == [True] * 5
    assert right_answers(model, tokenizer, texts([f" 61{answer}" for answer in said])) == [False] * 5
    assert (
        right_answers(model, tokenizer, texts([*said[:2], f"{said[2]} Anna Anna", *said[3:]]))
        == [True] * 2 + [False] + [True] * 2
    )
