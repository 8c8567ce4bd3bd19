"""What the capacity experiment measures: nothing known before training, all of it where the answers are given."""

import json

import jax
import jax.numpy as jnp
import pytest

from experiments import nano_capacity
from experiments.nano_capacity import BITS, ROWS, TEXTS, batches, config, known, word_tokenizer
from ling3.families import init
from ling3.train.nano.recipe import Recipe
from ling3.train.nano.skills.facts import ATTRIBUTES, fact, subjects

PEOPLE = 20


@pytest.fixture(scope="module")
def tokenizer():
    return word_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return init(Recipe(changes=config(16)).config(tokenizer), key=jax.random.key(0))


@pytest.mark.slow
def test_a_new_model_knows_next_to_nothing(model, tokenizer):
    assert known(model, tokenizer, PEOPLE) < 0.1 * PEOPLE * len(ATTRIBUTES) * BITS


def test_a_model_that_knows_all_has_all_bits(model, tokenizer, monkeypatch):
    monkeypatch.setattr(nano_capacity, "_losses", lambda model, batch: jnp.zeros(len(batch.tokens)))
    assert known(model, tokenizer, PEOPLE) == pytest.approx(PEOPLE * len(ATTRIBUTES) * BITS)


def test_a_batch_tells_of_this_world_alone(tokenizer):
    batch = next(batches(tokenizer, PEOPLE, seed=0))
    assert batch.tokens.shape[0] == ROWS and batch.weights.shape == batch.tokens.shape
    assert float(batch.weights.sum()) == ROWS * TEXTS * len(ATTRIBUTES)
    texts = tokenizer.decode(batch.tokens[0].tolist()).split("About ")[1:]
    assert len(texts) == TEXTS
    for text in texts:
        name, rest = text.split(" : ")
        words = rest.split()
        assert name in subjects(PEOPLE)
        assert all(value == fact(name, key) for key, value in zip(words[::2], words[1::2], strict=True))


def test_more_people_than_names_is_an_error():
    with pytest.raises(ValueError, match="count is 3841, expected 1 to 3840 people"):
        subjects(3841)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_run_is_stored_once_and_drawn(tmp_path):
    file, picture = tmp_path / "runs.jsonl", tmp_path / "capacity.png"
    for _ in range(2):
        nano_capacity.main(hidden=(16,), people=(10, 20), exposures=400, file=file, out=picture)
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    assert [run["people"] for run in runs] == [10, 20] and picture.stat().st_size > 5000
    assert all(0 < run["bits"] <= run["of"] for run in runs)
