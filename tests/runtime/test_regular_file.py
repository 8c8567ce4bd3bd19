"""What is no regular file, or far too large a one, is refused before it is read: a FIFO would never end."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from random_checkpoint import TINY_LIKE, draw, write

import ling3
from ling3 import checkpoint
from ling3.checkpoint import hub
from ling3.interpret import inspect
from ling3.runtime import regular_file, strict_json
from ling3.text import added_tokens, chat_template

CONFIG = dataclasses.replace(TINY_LIKE, num_hidden_layers=2, vocab_size=16)


@pytest.fixture
def directory(tmp_path) -> Path:
    write(tmp_path / "x", CONFIG, draw(CONFIG, seed=0))
    nano = hub.resolve("nano", ())
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copyfile(nano / name, tmp_path / "x" / name)
    settings = json.loads((nano / "tokenizer_config.json").read_text())
    del settings["chat_template"]  # it would go before chat_template.json
    (tmp_path / "x" / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "x" / "additional_chat_templates").mkdir()
    ling3.load_tokenizer(tmp_path / "x")
    return tmp_path / "x"


LOADED = ("config.json", "model.safetensors", "model.safetensors.index.json")
TOKENIZED = (
    "tokenizer.json",
    "config.json",
    "generation_config.json",
    *added_tokens.FILES,
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
)


@pytest.mark.parametrize("kind", ["a FIFO", "a character device", "a directory"])
@pytest.mark.parametrize(
    ("load", "name"),
    [(checkpoint.load, name) for name in LOADED] + [(ling3.load_tokenizer, name) for name in TOKENIZED],
)
def test_what_is_no_regular_file(directory, load, name, kind):
    path = directory / name
    path.unlink(missing_ok=True)
    if kind == "a FIFO":
        os.mkfifo(path)
    elif kind == "a directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    said = "is a link to /dev/zero" if kind == "a character device" and name == "model.safetensors" else f"it is {kind}"
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        load(directory)
    assert name in str(caught.value)


@pytest.mark.parametrize("name", TOKENIZED + LOADED[2:])
def test_what_is_too_large(directory, name):
    """A sparse file: it takes no room, and would take 4 GB of memory."""
    with (directory / name).open("ab") as file:
        os.truncate(file.fileno(), 2**32)
    load = checkpoint.load if name in LOADED else ling3.load_tokenizer
    with pytest.raises(ValueError, match=r"found 4,294,967,296 bytes; expected at most") as caught:
        load(directory)
    assert str(directory / name) in str(caught.value)


def test_a_report_of_what_is_no_regular_file(directory):
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")
    problem = inspect.report(directory).problem
    assert problem is not None and "it is a FIFO" in problem


def test_the_bound_itself(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps("abc"))
    assert strict_json.read(tmp_path / "x.json", 5) == "abc"
    assert regular_file.read(tmp_path / "x.json", 5) == b'"abc"'
    with pytest.raises(ValueError, match=r"x\.json: found 5 bytes; expected at most 4"):
        strict_json.read(tmp_path / "x.json", 4)
    with pytest.raises(FileNotFoundError):
        regular_file.read(tmp_path / "y.json", 4)


def test_a_template_is_read_as_far_as_one_may_be_long(directory):
    (directory / "chat_template.jinja").write_text("ä" * chat_template.LONGEST_TEMPLATE, encoding="utf-8")
    assert ling3.load_tokenizer(directory).chat_template is not None
    (directory / "chat_template.jinja").write_text("a" * (chat_template.LONGEST_TEMPLATE + 1))
    with pytest.raises(chat_template.ChatTemplateError, match="65537 characters long"):
        ling3.load_tokenizer(directory)
