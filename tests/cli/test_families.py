"""Every command on a model of every family, with nano's tokenizer and chat template beside it."""

import io
import json
import pathlib
import shutil
import sys

import deepseek_v4_checkpoint
import kimi_reference
import pytest
import tiny_transformers

import ling3
from ling3 import cli

NANO = pathlib.Path(ling3.__file__).parent / "checkpoints" / "nano"
ROOM = {"vocab_size": 1248, "max_position_embeddings": 256}
CASES = {
    name: {field: tiny_transformers.SIZES.get(field, value) for field, value in base.items()} | own | ROOM
    for name, (base, own) in tiny_transformers.CASES.items()
} | {
    "deepseek-v4": deepseek_v4_checkpoint.SMALL
    | ROOM
    | {"compress_ratios": [4, 128], "num_hash_layers": 1, "num_hidden_layers": 2},
    "kimi-linear": kimi_reference.SMALL | {"vocab_size": ROOM["vocab_size"], "model_max_length": 256},
}
ENGINE = ["--max-running-requests", "2", "--num-pages", "8", "--page-size", "128", "--max-model-len", "128"]


@pytest.fixture(scope="module", params=CASES)
def directory(request, tmp_path_factory):
    """A checkpoint of random weights, as `save` writes it."""
    path = tmp_path_factory.mktemp(request.param)
    (path / "config.json").write_text(json.dumps(CASES[request.param]))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, path)
    return str(path)


def run(capsys, *argv):
    code = cli.main([*argv])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_every_command(directory, tmp_path, capsys, monkeypatch):
    drawn = ["--random-weights", "--dtype", "float32"]
    architecture = json.loads((pathlib.Path(directory) / "config.json").read_text())["architectures"][0]
    assert "model.layers.0" in run(capsys, "inspect", directory)
    asked = ["generate", directory, *drawn, "--chat", "-p", "Sam has 3 pens.", "--max-tokens", "5", "--ignore-eos"]
    (line,) = run(capsys, *asked, "--json").splitlines()
    assert len(json.loads(line)["token_ids"]) == 5, architecture
    text = tmp_path / "book.txt"
    text.write_text("Sam has 3 pens. " * 20)
    found = json.loads(run(capsys, "eval", "perplexity", directory, str(text), *drawn, "--json"))
    assert 1 < found["perplexity"] < 1e9
    lengths = ["--num-prompts", "3", "--input-len", "8", "--output-len", "4", "--json", str(tmp_path / "bench.json")]
    run(capsys, "bench", directory, *drawn, *lengths, *ENGINE)
    assert json.loads((tmp_path / "bench.json").read_text())["output_tokens"] == 12
    monkeypatch.setattr(sys, "stdin", io.StringIO("Sam has 3 pens. How many pens does Sam have?\n"))
    assert run(capsys, "chat", directory, *drawn, "--max-tokens", "4")
