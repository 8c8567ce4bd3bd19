"""`ling3 look` writes the page of `ling3.look`, and refuses what it cannot write before it loads a model."""

import io
import sys

import pytest

import ling3
from ling3 import cli


@pytest.mark.thorough
def test_the_page_is_that_of_the_function(directory, tmp_path, capsys):
    out = tmp_path / "look.html"
    assert cli.main(["look", str(directory), "-p", "hello 你好", "--new-tokens", "3", "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and f"{out}: <Look into " in captured.err
    tokenizer = ling3.load_tokenizer(directory)
    seen = ling3.look(ling3.load(directory), tokenizer, "hello 你好", new_tokens=3, title=directory.name)
    assert out.read_text(encoding="utf-8") == seen.html


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-p", "x", "--out", "nowhere/look.html"], "--out: there is no directory"),
        (["-p", "x", "--out", "."], "--out: . is a directory"),
        (["-p", "x", "--out", "look.html", "--system", "y"], "--system and --thinking are for --chat"),
        (["-p", "hello " * 150, "--out", "look.html"], "expected at most 256 together (longest)"),
        (["-p", "x", "--new-tokens", "-1", "--out", "look.html"], "new_tokens is -1"),
        (["--out", "look.html"], "no prompt: give one with -p"),
    ],
)
def test_errors_come_before_the_model_is_loaded(directory, monkeypatch, tmp_path, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    monkeypatch.setattr("ling3.cli.loading.ModelSource.load", lambda *given: pytest.fail("a model is loaded"))
    assert cli.main(["look", str(directory), *options]) == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())
