"""Attention and experts in separate processes, some of which die."""

import contextlib
import json
import os
import pathlib
import queue
import socket
import subprocess
import sys
import threading

import afd_process
import conftest
import pytest

import ling3

SCRIPT = pathlib.Path(afd_process.__file__)
# Seconds for an answer: the first needs programs that may have to be compiled.
PATIENCE = 120

pytestmark = pytest.mark.slow


class Process:
    """One worker: commands go in, answers come out, and what else it prints is kept."""

    def __init__(self, number, sessions, cards, port):
        paths = [str(SCRIPT.parent), str(SCRIPT.parents[2])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PROGRAMS": str(conftest.PROGRAMS)}
        environment |= {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # they compile in half the time
        environment.pop("XLA_FLAGS", None)
        self.popen = subprocess.Popen(
            [sys.executable, str(SCRIPT), *map(str, (number, sessions, cards, port))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        assert self.popen.stdin and self.popen.stdout
        self.stdin, self.stdout = self.popen.stdin, self.popen.stdout
        self.answers, self.printed = queue.SimpleQueue(), []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def ask(self, command):
        self.stdin.write(command + "\n")
        self.stdin.flush()
        return self.answer()

    def answer(self):
        try:
            return self.answers.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError("no answer; it printed " + "".join(self.printed)) from None

    def end(self):
        self.popen.kill()
        self.popen.wait()
        self.reader.join()
        self.stdin.close()
        self.stdout.close()

    def _read(self):
        for line in self.stdout:
            if line.startswith("answer "):
                self.answers.put(json.loads(line.removeprefix("answer ")))
            else:
                self.printed.append(line)


@contextlib.contextmanager
def processes(sessions, cards):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = [Process(i, sessions, cards, port) for i in range(sessions + cards)]
    try:
        assert [process.answer() for process in started] == ["joined"] * len(started)
        yield started
    finally:
        for process in started:
            process.end()


def test_processes_answer_as_the_whole_model_and_the_dead_harm_no_other():
    expected = ling3.generate(afd_process.model(), afd_process.PROMPTS, max_tokens=afd_process.TOKENS, ignore_eos=True)
    with processes(2, 2) as (first, second, card, other):
        assert first.ask("generate") == second.ask("generate") == expected
        assert second.ask("begin") == "begun"
        second.popen.kill()
        assert first.ask("generate") == expected
        other.popen.kill()
        assert "FFN worker 1 failed" in first.ask("generate")
        assert "FFN worker 1 failed" in first.ask("generate")
        assert first.ask("leave") == "left"
        assert card.answer()[0] > 0
        assert card.popen.wait(timeout=PATIENCE) == 0
