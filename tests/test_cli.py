import dataclasses
import io
import json
import re
import subprocess
import sys

import jax
import pytest
import random_checkpoint
from tiny import TINY

import ling3
from ling3 import cli
from ling3.checkpoint import load
from ling3.tokenizer import load_tokenizer
from ling3.train.tokenizer import train_tokenizer, write_tokenizer

END = 1


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model of random weights with a tokenizer."""
    path = tmp_path_factory.mktemp("cli") / "model"
    backend = train_tokenizer(["hello 你好"] * 3, 400)
    config = dataclasses.replace(TINY, vocab_size=400, max_position_embeddings=512, eos_token_id=(END,))
    random_checkpoint.write(path, config, random_checkpoint.draw(config, seed=0))
    write_tokenizer(backend, path, 512)
    return path


@pytest.fixture
def scripted(monkeypatch, directory):
    """Puts given texts in the place of the model's; the calls' arguments are kept."""
    tokenizer = load_tokenizer(directory)
    calls = []

    def script(*texts, end=True, size=4, error=None):
        def stream_tokens(model, prompts, **arguments):
            calls.append({"prompts": prompts, **arguments})
            rows = [[*tokenizer.encode(text), *([END] if end else [])] for text in texts]
            for start in range(0, max(map(len, rows)), size):
                yield [row[start : start + size] for row in rows]
                if error is not None:
                    raise error

        monkeypatch.setattr(sys.modules["ling3.generate"], "stream_tokens", stream_tokens)
        return calls

    return script


def run(capsys, *argv):
    code = cli.main(["generate", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_text_goes_to_stdout_and_the_rest_to_stderr(directory, capsys):
    code, out, err = run(capsys, directory, "-p", "hello 你", "--max-tokens", 40, "--ignore-eos")
    tokenizer, model = load_tokenizer(directory), load(directory)
    (new,) = ling3.generate(model, [tokenizer.encode("hello 你")], max_tokens=40, ignore_eos=True)
    assert code == 0
    assert out == tokenizer.decode(new) + "\n"
    assert "float32, on cpu" in err
    assert "hello 你" in err
    assert re.search(r"40 tokens in .* s, the first after .* s; [\d,]+ tokens/s once compiled\n$", err)


def test_several_prompts_are_one_batch_and_shown_one_by_one(directory, scripted, capsys):
    calls = scripted("a first, long answer", "二", "the third")
    code, out, err = run(capsys, directory, "-p", "one", "-p", "two", "--prompt", "three")
    assert code == 0
    assert out == "a first, long answer\n二\nthe third\n"
    assert [line for line in err.splitlines() if line.startswith("prompt")] == [f"prompt {i} of 3" for i in (1, 2, 3)]
    assert len(calls) == 1
    assert len(calls[0]["prompts"]) == 3


def test_options_reach_the_model(directory, scripted, capsys):
    calls = scripted("x")
    options = "--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3"
    run(capsys, directory, "-p", "hello", *options.split())
    run(capsys, directory, "-p", "hello", "--ignore-eos")
    assert calls[0] | {"stop_token_ids": None} == {
        "prompts": [load_tokenizer(directory).encode("hello")],
        "max_tokens": 7,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 3,
        "stop_token_ids": None,
        "ignore_eos": False,
    }
    assert set(calls[0]["stop_token_ids"]) == {0, 1}
    assert (calls[1]["stop_token_ids"], calls[1]["ignore_eos"], calls[1]["max_tokens"]) == ((), True, 256)


def test_max_tokens_is_what_there_is_room_for(directory, scripted, capsys):
    calls = scripted("x")
    run(capsys, directory, "-p", "a " * 200)
    assert calls[0]["max_tokens"] == 512 - len(calls[0]["prompts"][0]) < 256


def test_chat(directory, scripted, capsys):
    calls = scripted("x")
    run(capsys, directory, "-p", "hello", "--chat")
    run(capsys, directory, "-p", "hello", "--chat", "--system", "be kind", "--thinking", "on")
    tokenizer = load_tokenizer(directory)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert calls[0]["prompts"] == [tokenizer.apply_chat_template(messages[1:])]
    assert calls[1]["prompts"] == [tokenizer.apply_chat_template(messages, enable_thinking=True)]
    code, _, err = run(capsys, directory, "-p", "hello", "--system", "be kind")
    assert (code, err) == (2, "ling3: error: --system and --thinking are for --chat\n")


@pytest.mark.parametrize("size", [1, 3, 100])
def test_stop_strings_end_a_text_wherever_tokens_end(directory, scripted, capsys, size):
    scripted("one. two; three", "one; two. three", "neither", size=size)
    code, out, _ = run(capsys, directory, *["-p", "x"] * 3, "--stop", ". t", "--stop", "; th", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [row["text"] for row in rows] == ["one", "one; two", "neither"]
    assert [row["finish_reason"] for row in rows] == ["stop"] * 3
    tokenizer = load_tokenizer(directory)
    assert tokenizer.decode(rows[0]["token_ids"]).startswith("one. t")
    assert len(rows[0]["token_ids"]) < len(tokenizer.encode("one. two; three"))


def test_json(directory, scripted, capsys):
    scripted("你好", end=False)
    code, out, err = run(capsys, directory, "-p", "hello", "--json")
    tokenizer = load_tokenizer(directory)
    assert code == 0
    assert json.loads(out) == {
        "prompt": "hello",
        "text": "你好",
        "finish_reason": "length",
        "prompt_tokens": len(tokenizer.encode("hello")),
        "token_ids": tokenizer.encode("你好"),
    }
    assert "compiling included" in err


def test_an_unfinished_character_is_shown_at_the_end(directory, scripted, capsys, monkeypatch):
    scripted("x")
    half = load_tokenizer(directory).encode("\U0001f600")[:-1]
    monkeypatch.setattr(sys.modules["ling3.generate"], "stream_tokens", lambda *args, **kwargs: iter([[half]]))
    assert run(capsys, directory, "-p", "hello")[1] == "\ufffd\n"


def test_control_characters_are_shown_on_a_terminal(directory, scripted, capsys, monkeypatch):
    scripted("a\x1b[2Jb\r\n\tc\x9b")
    assert run(capsys, directory, "-p", "hello")[1] == "a\x1b[2Jb\r\n\tc\x9b\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run(capsys, directory, "-p", "hello")[1] == "a␛[2Jb␍\n\tc\ufffd\n"


def test_a_prompt_from_standard_input(directory, scripted, capsys, monkeypatch):
    calls = scripted("x")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nthere\n"))
    assert run(capsys, directory)[0] == 0
    assert calls[0]["prompts"] == [load_tokenizer(directory).encode("hello\nthere")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "hello", "--max-tokens", "600"], "the model's context (max_position_embeddings) is 512"),
        (["-p", "hello", "--max-tokens", "0"], "max_tokens is 0"),
        (["-p", "hello", "--temperature", "-1"], "temperature"),
        (["-p", "hello", "--stop", ""], "stop: found"),
        (["-p", ""], "prompt 0 is empty"),
        ([], "no prompt: give one with -p"),
    ],
)
def test_errors_are_one_line(directory, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, out, err = run(capsys, directory, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ling3: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_checkpoint_that_is_not_there(tmp_path, capsys):
    code, out, err = run(capsys, tmp_path / "nonesuch", "-p", "hello")
    assert (code, out, err) == (2, "", f"ling3: error: no checkpoint directory at {tmp_path / 'nonesuch'}\n")


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        cli.main(["generate", str(tmp_path / "nonesuch"), "-p", "hello", "--debug"])


def test_an_interrupted_run_keeps_what_it_has_shown(directory, scripted, capsys):
    scripted("hello there", error=KeyboardInterrupt())
    code, out, err = run(capsys, directory, "-p", "x")
    assert code == 130
    assert out and "hello there".startswith(out)
    assert err.endswith("\ninterrupted\n")


def test_inspect(directory, capsys):
    assert cli.main(["inspect", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert "model.word_embeddings.weight" in shown
    assert cli.main(["inspect", str(directory), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert f"{report['parameters']:,}" in shown
    assert report["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(load(directory)))
    assert cli.main(["inspect", str(directory / "config.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == report["parameters"]


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ling3 {ling3.version.__version__}\n"


@pytest.mark.parametrize("argv", [["--nonesuch"], ["generate"], ["generate", "nano", "--dtype", "float16"]])
def test_a_wrong_command_line(argv, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(argv)
    assert raised.value.code == 2
    assert capsys.readouterr().out == ""


def test_a_reader_that_goes_away(directory):
    command = [sys.executable, "-m", "ling3.cli", "inspect", str(directory), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141
