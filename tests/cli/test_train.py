"""`ling3 train`: it shows what would be learnt, writes an adapter that other commands run, and names wrong options."""

import json

import pytest

from ling3 import cli

CHATS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "hello 你好"}]}
    for question in ("hello", "你好")
]


@pytest.fixture
def data(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(map(json.dumps, CHATS)), encoding="utf-8")
    return file


def run(capsys, *argv):
    code = cli.main(["train", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_learnt_tokens_are_marked(directory, data, capsys):
    code, out, err = run(capsys, directory, "--data", data, "--show", 1)
    assert (code, err) == (0, "")
    head, *lines = out.splitlines()
    assert head.startswith(f"{data}:1: ") and head.endswith(" learnt")
    shown = "\n".join(lines)
    assert shown.count("⟦") == 1 and "⟦hello 你好<|" in shown and shown.endswith("⟧") and "HUMAN" in shown.split("⟦")[0]


@pytest.mark.slow
def test_an_adapter_is_written_and_run(directory, data, tmp_path, capsys):
    out = tmp_path / "tuned"
    options = ["--data", data, "--out", out, "--lora", 2, "--targets", "o_proj,lm_head", "--steps", 2, "--batch", 1]
    code, _, err = run(capsys, directory, *options, "--eval-share", 0.5, "--learning-rate", 1e-3)
    assert code == 0 and "2 texts of" in err and f"{out}: loss" in err and "on held-out texts" in err
    argv = ["generate", directory, "--adapter", out, "-p", "hello", "--max-tokens", 2, "--ignore-eos"]
    assert cli.main(list(map(str, argv))) == 0
    capsys.readouterr()
    code, _, err = run(capsys, directory, *options)
    assert code == 2 and "is not empty; give another directory" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--out: absent; expected a directory"),
        (["--out", "x", "--full", "--lora", "4"], "--full trains all weights, and --lora an adapter: give one of them"),
        (["--out", "x", "--mtp"], "--mtp is for --full"),
        (["--out", "x", "--batch", "0"], "batch: found 0; expected at least 1"),
        (["--out", "x", "--data", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_wrong_options_are_named(directory, data, capsys, options, message):
    code, out, err = run(capsys, directory, "--data", data, *options)
    assert (code, out) == (2, "") and message in err
