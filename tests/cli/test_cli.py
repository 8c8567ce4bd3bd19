import dataclasses
import io
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from scripted_engine import ScriptedEngine

import ling3
from ling3 import cli
from ling3.checkpoint import load
from ling3.cli.terminal import print_json
from ling3.engine.sampling_params import SamplingParams
from ling3.text.tokenizer import load_tokenizer


def run(capsys, *argv):
    code = cli.main(["generate", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_what_the_model_says(directory, capsys):
    tokenizer, model = load_tokenizer(directory), load(directory)
    prompts = ["hello", "你好", "hello 你好 hello"]
    alone = [
        ling3.generate(model, [tokenizer.encode(p)], max_tokens=20, ignore_eos=True, temperature=1.0, seed=5 + i)[0]
        for i, p in enumerate(prompts)
    ]
    texts = [tokenizer.decode(ids) for ids in alone]
    options = ["--max-tokens", 20, "--ignore-eos", "--temperature", 1, "--seed", 5]
    options += [x for prompt in prompts for x in ("-p", prompt)]

    code, out, err = run(capsys, directory, *options)
    assert code == 0
    assert out == "".join(f"{text}\n" for text in texts), "text, and nothing else, goes to stdout"
    assert "float32, on cpu" in err
    assert all(prompt in err for prompt in prompts)
    assert re.search(
        r"\n60 tokens in .* s, the first after .* s: [\d,]+ tokens/s, prompts included; compiled in .* s besides\n$",
        err,
    )

    _, out, _ = run(capsys, directory, *options, "--json", "--logprobs", 1, "--stop", texts[1][3:6])
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows[1]["finish_reason"] == "stop"
    for row, text, ids in zip(rows, texts, alone):
        assert row["text"] == text.partition(texts[1][3:6])[0]
        assert row["token_ids"] == ids[: len(row["token_ids"])]
        assert [each["token_id"] for each in row["logprobs"]] == row["token_ids"]


def test_several_prompts_are_one_batch_and_shown_one_by_one(directory, scripted, capsys):
    script = scripted("a first, long answer", "二", "the third")
    code, out, err = run(capsys, directory, "-p", "one", "-p", "two", "--prompt", "three")
    assert code == 0
    assert out == "a first, long answer\n二\nthe third\n"
    assert [line for line in err.splitlines() if line.startswith("prompt")] == [f"prompt {i} of 3" for i in (1, 2, 3)]
    assert script.prompts == [load_tokenizer(directory).encode(prompt) for prompt in ("one", "two", "three")]
    assert script.engines[0].steps == -(-(1 + len(load_tokenizer(directory).encode("a first, long answer"))) // 4)


def test_options_reach_the_model(directory, scripted, capsys):
    script = scripted("x")
    options = (
        "--max-tokens 7 --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.1 --seed 3 --repetition-penalty 1.1 "
        "--presence-penalty 0.2 --frequency-penalty -0.3 --min-tokens 2 --stop a --stop b --ignore-eos"
    )
    run(capsys, directory, "-p", "hello", "-p", "there", *options.split())
    run(capsys, directory, "-p", "hello", "--json", "--logprobs", 2)
    wanted = SamplingParams(
        max_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        seed=3,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        min_tokens=2,
        stop=("a", "b"),
        ignore_eos=True,
    )
    assert script.params[:2] == [wanted, dataclasses.replace(wanted, seed=4)]
    assert script.params[2:] == [SamplingParams(max_tokens=256, seed=0, logprobs=2)]


def test_the_engine_is_as_large_as_the_prompts_need(directory, scripted, capsys):
    script = scripted("x")
    run(capsys, directory, "-p", "hello", "--max-tokens", 7)
    run(capsys, directory, *["-p", "a " * 20] * 70, "--max-tokens", 7)
    small, large = script.settings
    lengths = [len(prompt) for prompt in script.prompts]
    assert (small.max_running_requests, small.max_model_len) == (1, lengths[0] + 7)
    assert (large.max_running_requests, large.max_model_len) == (64, lengths[1] + 7)
    assert small.token_paddings == (16,)
    assert large.token_paddings == (128,)


def test_max_tokens_is_what_there_is_room_for(directory, scripted, capsys):
    script = scripted("x")
    run(capsys, directory, "-p", "a " * 200)
    assert script.params[0].max_tokens == 512 - len(script.prompts[0]) < 256


def test_chat(directory, scripted, capsys):
    script = scripted("x")
    run(capsys, directory, "-p", "hello", "--chat")
    run(capsys, directory, "-p", "hello", "--chat", "--system", "be kind", "--thinking", "on")
    tokenizer = load_tokenizer(directory)
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}]
    assert script.prompts[0] == tokenizer.apply_chat_template(messages[1:])
    assert script.prompts[1] == tokenizer.apply_chat_template(messages, enable_thinking=True)
    code, _, err = run(capsys, directory, "-p", "hello", "--system", "be kind")
    assert (code, err) == (2, "ling3: error: --system and --thinking are for --chat\n")


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
    assert "tokens/s" in err


def test_json_with_logprobs(directory, scripted, capsys):
    scripted("x", end=False)
    _, out, _ = run(capsys, directory, "-p", "hello", "--json", "--logprobs", 2)
    (token,) = load_tokenizer(directory).encode("x")
    top = [{"token_id": token, "logprob": -0.5}, {"token_id": 0, "logprob": -1.0}]
    assert json.loads(out)["logprobs"] == [{"token_id": token, "logprob": -0.5, "top": top}]
    code, out, err = run(capsys, directory, "-p", "hello", "--logprobs", 2)
    assert (code, out, err) == (2, "", "ling3: error: --logprobs is for --json\n")


def test_a_prompt_that_the_model_breaks_off_does_not_cost_the_others(directory, scripted, capsys):
    scripted("one, and more", "two", error="its logits were NaN")
    code, out, err = run(capsys, directory, "-p", "a", "-p", "b")
    assert (code, out.splitlines()[1]) == (2, "two")
    assert err.endswith("ling3: error: prompt 1: its logits were NaN\n")
    scripted("one, and more", "two", error="its logits were NaN")
    code, out, _ = run(capsys, directory, "-p", "a", "-p", "b", "--json")
    broken, whole = (json.loads(line) for line in out.splitlines())
    assert (code, broken["finish_reason"], broken["error"]) == (2, "error", "its logits were NaN")
    assert (whole["finish_reason"], whole["text"]) == ("stop", "two")
    assert "error" not in whole


def test_control_characters_are_shown_on_a_terminal(directory, scripted, capsys, monkeypatch):
    scripted("a\x1b[2Jb\r\n\tc\x9b")
    assert run(capsys, directory, "-p", "hello")[1] == "a\x1b[2Jb\r\n\tc\x9b\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run(capsys, directory, "-p", "hello")[1] == "a␛[2Jb␍\n\tc\ufffd\n"


def test_a_prompt_from_standard_input(directory, scripted, capsys, monkeypatch):
    script = scripted("x")
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nthere\n"))
    assert run(capsys, directory)[0] == 0
    assert script.prompts == [load_tokenizer(directory).encode("hello\nthere")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "hello", "--max-tokens", "600"], "there is room for 512"),
        (["-p", "hello", "--max-tokens", "0"], "max_tokens is 0"),
        (["-p", "hello", "--temperature", "-1"], "temperature"),
        (["-p", "hello", "--stop", ""], "stop is"),
        (["-p", ""], "the prompt is empty"),
        (["-p", "hello", "-p", ""], "prompt 2 is empty"),
        (["-p", "hello", "--json", "--logprobs", "21"], "logprobs is 21"),
        (["-p", "hello", "--min-tokens", "9", "--max-tokens", "8"], "min_tokens is 9"),
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


@pytest.fixture
def bare(directory, tmp_path):
    """A directory with a configuration and a tokenizer, and no weights."""
    shutil.copytree(directory, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    return tmp_path / "bare"


@pytest.mark.slow
def test_an_adapter(directory, tmp_path, capsys):
    """`--adapter` is `with_adapter`, on a mesh too."""
    model = load(directory)
    adapter = ling3.new_adapter(model, rank=2, alpha=8, key=jax.random.key(0))
    adapter = jax.tree.map(lambda array: jax.random.normal(jax.random.key(1), array.shape), adapter)
    ling3.save_adapter(adapter, tmp_path / "lora")
    prompt = load_tokenizer(directory).encode("hello")
    expected = ling3.generate(ling3.with_adapter(model, adapter), [prompt], max_tokens=6, ignore_eos=True)
    options = ["-p", "hello", "--max-tokens", 6, "--ignore-eos", "--json", "--adapter"]
    for devices in ((), ("--tp", 2)):
        code, out, _ = run(capsys, directory, *options, tmp_path / "lora", *devices)
        assert code == 0 and json.loads(out)["token_ids"] == expected[0]
    code, _, err = run(capsys, directory, *options, tmp_path / "none")
    assert code == 2 and "none" in err


@pytest.mark.slow
def test_random_weights(bare, scripted, capsys):
    script = scripted("x")
    code, _, err = run(capsys, bare, "-p", "hello")
    assert code == 2 and "found no .safetensors file" in err
    options = ["-p", "hello", "--random-weights"]
    code, out, err = run(capsys, bare, *options)
    assert (code, out) == (0, "x\n") and "random parameters, bfloat16, on cpu" in err
    run(capsys, bare / "config.json", *options, "--weights-seed", 1)
    run(capsys, bare / "config.json", *options, "--weights-seed", 1, "--dtype", "float32")
    (bare / "tokenizer.json").unlink()
    code, _, err = run(capsys, bare / "config.json", *options)
    assert (
        code == 2 and "the model has no tokenizer, and 'hello' has to be token ids: give them as in -p '5 17 3'" in err
    )
    config = ling3.Ling3Config.from_file(bare)
    wanted = [(0, jnp.bfloat16), (1, jnp.bfloat16), (1, jnp.float32)]
    for engine, (seed, dtype) in zip(script.engines, wanted, strict=True):
        expected = ling3.init(config, key=jax.random.key(seed), dtype=dtype)
        assert eqx.tree_equal(engine.model, expected)


@pytest.mark.slow
def test_without_a_tokenizer_ids_take_the_place_of_text(bare, capsys):
    (bare / "tokenizer.json").unlink()
    options = ["--random-weights", "--max-tokens", 3, "-p", "5 17 3"]
    code, out, _ = run(capsys, bare / "config.json", *options)
    ids = [int(word) for word in out.split()]
    assert code == 0 and len(ids) == 3
    code, out, _ = run(capsys, bare / "config.json", *options, "--json")
    assert code == 0 and (json.loads(out)["token_ids"], json.loads(out)["text"]) == (ids, None)


def test_random_weights_that_do_not_fit(bare, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ling3.families.init", lambda *args, **others: pytest.fail("allocated"))
    monkeypatch.setattr("ling3.engine.memory.free_bytes", lambda *_: 10**9)
    large = dataclasses.replace(ling3.Ling3Config.from_file(bare), hidden_size=2**16, intermediate_size=2**16)
    (bare / "config.json").write_text(json.dumps(large.to_dict()))
    code, out, err = run(capsys, bare, "-p", "hello", "--random-weights")
    assert (code, out) == (2, "")
    assert re.search(r"drawing [\d.]+B weights in bfloat16 takes [\d.]+ GB of memory, and 1\.0 GB are free: give", err)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--revision", "main"], "revision: found 'main' for "),
        (["--weights-seed", "1"], "--weights-seed is for --random-weights"),
        (["--random-weights", "--weights-seed", "-1"], "--weights-seed is -1"),
    ],
)
def test_senseless_weights(directory, capsys, options, message):
    code, out, err = run(capsys, directory, "-p", "hello", *options)
    assert (code, out) == (2, "") and message in err


def test_a_checkpoint_that_is_not_there(tmp_path, capsys):
    code, out, err = run(capsys, tmp_path / "nonesuch", "-p", "hello")
    assert (code, out, err) == (2, "", f"ling3: error: no checkpoint directory at {tmp_path / 'nonesuch'}\n")


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(FileNotFoundError):
        cli.main(["generate", str(tmp_path / "nonesuch"), "-p", "hello", "--debug"])


def test_an_interrupted_run_keeps_what_it_has_shown(directory, scripted, capsys):
    scripted("hello there", interrupt=KeyboardInterrupt())
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


@pytest.mark.thorough
def test_a_reader_that_goes_away(directory):
    command = [sys.executable, "-m", "ling3.cli", "inspect", str(directory), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 141


PROBE = """
import gc, sys
from ling3 import cli
from ling3.cli import generate
from ling3.cli.terminal import print_json
sys.argv = {argv!r}
assert cli.process() == 0 and gc.get_freeze_count() > 0
from ling3 import cache
cache.KDAState("no array", "nor this")
"""


@pytest.mark.thorough
@pytest.mark.parametrize(("debug", "code"), [([], 0), (["--debug"], 1)])
def test_a_process_checks_types_only_where_it_is_debugged(debug, code):
    program = PROBE.format(argv=["ling3", "inspect", "nano", *debug])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert ("TypeCheckError" in done.stderr) == (code == 1)


INTERRUPTED = """
import sys
from ling3.cli import interruption, process
interruption.end_process()
print("ready", flush=True)
sys.argv = ["ling3", "generate", "nano", "--ignore-eos", *["-p", "Sam has 3 pens."] * 400]
sys.exit(process())
"""


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is a signal on POSIX")
@pytest.mark.parametrize("delay", [0.0, 0.3, 1.5])
def test_ctrl_c_ends_a_process_at_once(delay):
    """While it imports, loads, compiles or generates; before `end_process`, Python itself answers Ctrl-C."""
    # What a child inherits may be that Ctrl-C is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        command = [sys.executable, "-c", INTERRUPTED]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout.readline() == "ready\n"
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("\ninterrupted\n") and "Traceback" not in err


class Panic(BaseException):
    """Like pyo3's, which is no Exception."""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (Panic("index out of bounds\nnote: …"), 1, "Panic: index out of bounds (--debug shows the traceback)"),
        (KeyError("weight"), 1, "KeyError: 'weight' (--debug shows the traceback)"),
        (MemoryError(), 1, "MemoryError (--debug shows the traceback)"),
        (ValueError("two\nlines"), 2, "two\nlines"),
    ],
)
def test_any_exception_is_a_message(directory, capsys, monkeypatch, error, code, message):
    def fail(*arguments, **settings):
        raise error

    monkeypatch.setattr("ling3.interpret.inspect.report", fail)
    assert cli.main(["inspect", str(directory)]) == code
    assert capsys.readouterr().err == f"ling3: error: {message}\n"
    with pytest.raises(type(error)):
        cli.main(["inspect", str(directory), "--debug"])


def test_what_takes_long_to_compile_is_said(directory, scripted, capsys, monkeypatch):
    monkeypatch.setattr("ling3.cli.terminal.PATIENCE", 0.0)
    monkeypatch.setattr(ScriptedEngine, "warmup", lambda engine, first_token: time.sleep(0.2))
    scripted("x")
    assert "compiling (first time)…" in run(capsys, directory, "-p", "hello")[2]


@pytest.mark.parametrize("option", ["--max-tokens", "--top-k", "--logprobs"])
def test_an_option_that_may_be_left_out_is_read_plainly(option, capsys):
    with pytest.raises(SystemExit) as raised:
        cli.main(["generate", "nano", option, "None"])
    error = capsys.readouterr().err
    assert raised.value.code == 2
    assert f"Error parsing {option}: found 'None', expected a whole number" in error and "NoneType" not in error


def test_help_shows_no_python(capsys):
    for command in (
        ["generate"],
        ["chat"],
        ["bench"],
        ["ablate"],
        ["inspect"],
        ["eval", "gsm8k"],
        ["eval", "perplexity"],
    ):
        with pytest.raises(SystemExit):
            cli.main([*command, "--help"])
        assert "None" not in capsys.readouterr().out, command


def test_json_has_only_characters_that_stdout_can_write(monkeypatch):
    value = {"text": "é 你好 😀"}
    for encoding, written in (("ascii", r"\u4f60"), ("latin-1", r"\u4f60"), ("utf-8", "你好")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        print_json(value)
        text = stream.buffer.getvalue().decode(encoding)
        assert json.loads(text) == value and written in text


@pytest.mark.skipif(os.name != "posix", reason="needs a POSIX shell")
@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("inspect nano --json >&-", 1, "ling3: error: standard output is closed"),
        ("--version >/dev/full", 2, "No space left on device"),
    ],
)
def test_stdout_that_takes_nothing(line, code, message):
    if "/dev/full" in line and not pathlib.Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    done = subprocess.run(f"{sys.executable} -m ling3 {line}", shell=True, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert message in done.stderr and done.stderr.count("\n") == 1
