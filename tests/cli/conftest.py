"""A small checkpoint, and an engine that says what a test gives it."""

import dataclasses

import pytest
import random_checkpoint
from scripted_engine import END, Script
from tiny import TINY

from ling3.train.tokenizer import train_tokenizer, write_tokenizer


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A model of random weights with a tokenizer."""
    path = tmp_path_factory.mktemp("cli") / "model"
    config = dataclasses.replace(TINY, vocab_size=400, max_position_embeddings=512, eos_token_id=(END,))
    random_checkpoint.write(path, config, random_checkpoint.draw(config, seed=0))
    write_tokenizer(train_tokenizer(["hello 你好"] * 3, 400), path, 512)
    return path


@pytest.fixture
def scripted(monkeypatch):
    """Puts given texts in the place of the model's; the script remembers what was asked for."""

    def put(*texts, **others):
        script = Script(texts, **others)
        monkeypatch.setattr("ling3.serve.Engine", script.engine)
        return script

    return put
