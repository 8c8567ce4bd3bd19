"""`ling3 eval` as it is called: its options, its last line, and a run that is killed and taken up again."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import pytest
from rich.console import Console

from ling3 import cli
from ling3.cli.eval import Gsm8k, _bar
from ling3.cli.options import Sampling
from ling3.engine.settings import EngineSettings
from ling3.evals.answers import number
from ling3.evals.nano_files import files
from ling3.evals.prompts import Question, write
from ling3.evals.run import MAX_TOKENS, Score
from ling3.serve import Engine
from ling3.train.nano.problems import exam, worked_examples

# One shape of engine for all of these tests, so that its programs are compiled once.
ENGINE = ("--max-running-requests", "4", "--max-tokens", "64", "--dtype", "float32")
COUNT = 60


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return files(tmp_path_factory.mktemp("nano"), COUNT)[0]


def run(capsys, *argv):
    code = cli.main(["eval", *map(str, argv)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def timeless(path):
    return sorted(json.dumps({**line, "timings": None}) for line in lines(path))


@pytest.mark.slow
def test_the_last_line(prompts, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    code, text, err = run(capsys, "gsm8k", "nano", "--prompts", prompts, "--out", out, "--limit", 40, *ENGINE)
    assert code == 0
    interval, last = text.splitlines()
    settings, schedule = lines(out)[0]["settings"], lines(out)[0]["schedule"]
    assert settings["sampling"] == {"temperature": 0.0, "max_tokens": 64, "seed": 0}
    assert (settings["engine"]["page_size"], settings["engine"]["chunked_prefill_size"]) == (256, 512)
    assert settings["engine"]["token_paddings"] == [16, 128, 512]
    assert (schedule["mem_fraction"], schedule["max_running_requests"], schedule["overlap"]) == (0.6, 4, False)
    right = sum(line["right"] for line in lines(out))
    assert last == f"正确率: {right}/40 = {right / 40:.4f}"
    assert right >= 36, "nano answers nine in ten of its own problems"
    low, high = map(float, re.fullmatch(r"accuracy, 95 % \(Wilson\): (0\.\d{4}) to ([01]\.\d{4})", interval).groups())
    assert low < right / 40 <= high
    assert "nano: 2.37M parameters, float32, on cpu" in err
    options = ("--prompts", prompts, "--out", out, "--limit", 40, "--json", *ENGINE)
    found = json.loads(run(capsys, "gsm8k", "nano", *options)[1])
    assert (found["right"], found["total"], found["accuracy"]) == (right, 40, right / 40)
    assert found["wilson_95"] == pytest.approx([low, high], abs=1e-4)
    assert (found["model"], found["predictions"]) == ("nano", str(out))


def test_the_engine_s_settings_are_those_of_the_protocol(prompts, tmp_path, capsys, monkeypatch):
    """As Ling-3's own evaluation fixes them: nothing follows from the prompts or from the model."""
    asked = []

    def engine(model, tokenizer, settings):
        asked.append(settings)
        raise ValueError("asked")

    monkeypatch.setattr("ling3.serve.Engine", engine)
    options = ("gsm8k", "nano", "--prompts", prompts, "--out", tmp_path / "out.jsonl")
    for more in ((), ("--overlap", "--max-running-requests", 8)):
        assert "asked" in run(capsys, *options, *more)[2]
    protocol = EngineSettings(
        page_size=256,
        chunked_prefill_size=512,
        token_paddings=(16, 128, 512),
        mem_fraction=0.6,
        max_running_requests=64,
        overlap=False,
    )
    assert asked == [protocol, dataclasses.replace(protocol, overlap=True, max_running_requests=8)]
    assert MAX_TOKENS == 2000 == Gsm8k.max_tokens and Sampling().temperature == 0.0


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="SIGKILL is POSIX's")
def test_a_killed_run_is_taken_up(prompts, tmp_path, capsys, monkeypatch):
    """No line is lost, none is asked twice, and the half-written one is asked again."""
    out, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    arguments = ["gsm8k", "nano", "--prompts", str(prompts), *ENGINE, "--out"]
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "ling3.cli", "eval", *arguments, str(out)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 10):
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (-signal.SIGKILL, b""), stderr.decode()
    content = out.read_bytes()
    kept = content[: content.rfind(b"\n") + 1]
    assert 10 <= kept.count(b"\n") < COUNT, "killed amid the run"
    half = kept.splitlines(keepends=True)[3].replace(b'"index": ', b'"index": 1')
    out.write_bytes(kept + half[: len(half) // 2])

    asked = []

    def stream_all(engine, prompts, *others, original=Engine.stream_all, **options):
        asked.extend(prompts)
        return original(engine, prompts, *others, **options)

    monkeypatch.setattr(Engine, "stream_all", stream_all)
    code, text, _ = run(capsys, *arguments, out)
    assert code == 0 and out.read_bytes().startswith(kept)
    assert len(asked) == COUNT - kept.count(b"\n")
    assert sorted(line["index"] for line in lines(out)) == list(range(COUNT))
    monkeypatch.undo()
    assert run(capsys, *arguments, whole)[1] == text
    assert timeless(out) == timeless(whole)
    assert run(capsys, *arguments, out)[1] == text, "what is whole is only counted"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_public_files_of_gsm8k(tmp_path, capsys):
    """Nano's problems in the data set's own form: the prompts are those of its examination."""

    def public(problem):
        solution = f"{' '.join(map(str, problem.steps))}\n#### {problem.answer}"
        return json.dumps({"question": problem.question, "answer": solution})

    test, train, out = tmp_path / "test.jsonl", tmp_path / "train.jsonl", tmp_path / "out.jsonl"
    problems, shown = exam(6), worked_examples(1)[0]
    test.write_text("\n".join(map(public, problems)))
    train.write_text("\n".join(map(public, shown)))
    options = ("--questions", test, "--examples", train, "--shots", 1, "--out", out, *ENGINE)
    code, text, _ = run(capsys, "gsm8k", "nano", *options)
    assert code == 0 and text.splitlines()[1].startswith("正确率: ")
    assert sum(line["right"] for line in lines(out)) >= 5
    assert {tuple(line["settings"]["sampling"]["stop"]) for line in lines(out)} == {("Question:",)}


@pytest.mark.exhaustive
@pytest.mark.slow
def test_choices_are_counted_too(tmp_path, capsys):
    """Nano, which answers everything by a number, gets none right: the answers are read as choices."""
    prompts, out = tmp_path / "prompts.json", tmp_path / "out.jsonl"
    write(prompts, [Question("Question: 1 + 1?\nA. 2\nB. 3\nAnswer:", "A")])
    code, text, _ = run(capsys, "mmlu-pro", "nano", "--prompts", prompts, "--out", out, *ENGINE)
    assert code == 0 and text.splitlines()[1] == "正确率: 0/1 = 0.0000"
    (line,) = lines(out)
    assert line["expected"] == "A" and line["settings"]["parser"] == "choice"
    assert (line["parsed"], line["right"]) == (None, False) and number(line["text"]) is not None


@pytest.mark.slow
def test_a_chat(tmp_path, capsys):
    prompts, out = tmp_path / "prompts.json", tmp_path / "out.jsonl"
    write(prompts, [Question(problem.question, str(problem.answer)) for problem in exam(4)])
    code, _, _ = run(
        capsys, "gsm8k", "nano", "--prompts", prompts, "--chat", "--thinking", "off", "--out", out, *ENGINE
    )
    assert code == 0 and sum(line["right"] for line in lines(out)) >= 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give either --prompts"),
        (("--prompts", "{prompts}", "--questions", "q.jsonl"), "give either --prompts"),
        (("--prompts", "{prompts}", "--examples", "q.jsonl"), "--examples is for --questions"),
        (("--prompts", "{prompts}", "--shots", "9"), "--shots is for --questions"),
        (("--prompts", "{prompts}", "--seed", "2147483518"), "seed is 2147483518, and question i has seed + i"),
        (("--prompts", "{prompts}", "--out", ""), "--out: it is empty"),
        (("--prompts", "{prompts}", "--out", "."), "--out: . is a directory"),
        (("--prompts", "{prompts}", "--thinking", "on"), "--thinking is for --chat"),
        (("--questions", "q.jsonl", "--shots", "-1"), "--shots is -1"),
        (("--prompts", "{prompts}", "--max-tokens", "0"), "max_tokens is 0"),
        (("--prompts", "{prompts}", "--limit", "0"), "--limit is 0"),
        (("--prompts", "{prompts}", "--max-running-requests", "0"), "max_running_requests is 0, expected a whole"),
        (("--prompts", "no-such-file.json"), "no-such-file.json"),
        (("--prompts", "{prompts}", "--out", "nowhere/out.jsonl"), "--out: there is no directory"),
        (("--prompts", "{bad}"), "item 1 (line 2): the field 'answer' (or 'target'"),
    ],
)
def test_senseless_options(prompts, tmp_path, capsys, monkeypatch, arguments, message):
    """They are refused before any weight is read."""
    monkeypatch.setattr("ling3.cli.loading.ModelSource.load", lambda *arguments: pytest.fail("the weights are loaded"))
    bad = tmp_path / "bad.json"
    bad.write_text('[\n{"prompt": "a"}]')
    filled = [argument.format(prompts=prompts, bad=bad) for argument in arguments]
    out = () if "--out" in arguments else ("--out", tmp_path / "out.jsonl")
    code, text, err = run(capsys, "gsm8k", "nano", *filled, *out)
    assert (code, text) == (2, "")
    assert "ling3: error: " in err and message in err and "Traceback" not in err
    assert not (tmp_path / "out.jsonl").exists()


def test_the_bar_shows_the_accuracy_so_far():
    text = io.StringIO()
    with _bar(Console(file=text, force_terminal=True, width=100)) as shown:
        shown(Score(0, 0), 8)
        shown(Score(3, 4), 8)
    assert "4/8" in text.getvalue() and "0.7500 right" in text.getvalue()
    silent = io.StringIO()
    with _bar(Console(file=silent, width=100)) as shown:
        shown(Score(3, 4), 8)
    assert silent.getvalue() == "", "nothing where there is no terminal"


@pytest.mark.slow
def test_an_evaluation_needs_no_extra():
    """Neither what training needs, nor the harness."""
    code = (
        "import sys, ling3.cli.eval, ling3.evals.run, ling3.evals.public, ling3.evals.perplexity; print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "ling3.evals.run" in loaded
    assert not {"optax", "matplotlib", "lm_eval", "ray", "pyarrow", "torch", "datasets"} & set(loaded)
