"""One model in several processes, each with its own devices: the commands, and what becomes of them if one dies."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import conftest
import pytest
from tiny import TINY, open_model

import ling3

pytestmark = pytest.mark.slow

QUESTIONS = [
    {"prompt": f"Sam has {a} pens. He gets {b} more pens. How many pens does Sam have?", "answer": str(a + b)}
    for a, b in ((3, 4), (5, 9), (12, 7), (8, 8))
]


def command(count, devices, *words, **environment):
    """The processes of a `ling3` command, each with so many devices."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    own = {**os.environ, "DIST_INIT_ADDR": address, "LING3_COMPILATION_CACHE": str(conftest.PROGRAMS), **environment}
    own["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    nodes = ["--nnodes", str(count)] if count > 1 else []
    return [
        subprocess.Popen(
            [sys.executable, "-m", "ling3", *words, *nodes],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            env={**own, "NODE_RANK": str(i)},
        )
        for i in range(count)
    ]


def ends(processes, seconds):
    """Their exit codes and what they printed."""
    found = [process.communicate(timeout=seconds) for process in processes]
    return [process.returncode for process in processes], *zip(*found, strict=True)


def predictions(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "timings"} for line in lines]


def sixteen_heads(path):
    """A checkpoint shaped like Ling-3.0-tiny with its sixteen heads, small and random, with nano's tokenizer."""
    nano = ling3.load("nano").config
    sizes = {"vocab_size": nano.vocab_size, "hidden_size": 64, "num_attention_heads": 16, "num_experts": 16}
    config = dataclasses.replace(TINY, **sizes, eos_token_id=nano.eos_token_id)
    ling3.save(open_model(config), path, tokenizer_from="nano")
    return str(path)


@pytest.mark.parametrize(("name", "count", "devices"), [("nano", 2, 2), ("sixteen heads", 4, 4)])
def test_an_evaluation_writes_what_one_process_writes(tmp_path, name, count, devices):
    (tmp_path / "questions.json").write_text(json.dumps(QUESTIONS))
    model = name if name == "nano" else sixteen_heads(tmp_path / "model")
    words = ["eval", "gsm8k", model, "--prompts", str(tmp_path / "questions.json"), "--chat", "--max-tokens", "40"]
    words += ["--max-running-requests", "4", "--tp", str(count * devices)]
    shown = {}
    for processes, each in ((count, devices), (1, count * devices)):
        out = tmp_path / f"{processes}.jsonl"
        codes, stdout, stderr = ends(command(processes, each, *words, "--out", str(out)), 600)
        assert codes == [0] * processes, stderr
        assert not any(stdout[1:])
        shown[processes] = stdout[0]
    assert shown[count] == shown[1] and ("4/4" if name == "nano" else "/4") in shown[1]
    assert predictions(tmp_path / f"{count}.jsonl") == predictions(tmp_path / "1.jsonl")


@pytest.mark.parametrize("victim", [1, 0])
def test_the_others_end_when_one_is_killed(victim):
    processes = command(3, 1, "generate", "nano", "-p", "Sam has", "--max-tokens", "1900", "--ignore-eos", "--dp", "3")
    try:
        assert processes[0].stdout.read(1)  # it generates
        processes[victim].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        codes, _, stderr = ends(processes, 60)
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - begin < 60 and all(codes)
    for i in {0, 1, 2} - {victim}:
        lost = rf"\(stopped sending heartbeats\):\n{victim}\n|Task {victim} heartbeat timeout"  # at work, at its end
        assert re.search("leader task" if victim == 0 else lost, stderr[i])
