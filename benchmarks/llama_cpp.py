"""llama.cpp on the weights of a random checkpoint: a GGUF by its own converter, and times of `llama-batched-bench`."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import llama_cpp_convert
from benchmarks.registry import Absent

INSTALL = "benchmarks/README.md says how to build llama.cpp; then --llama-cpp names its directory"

TRIES = 8
"""Runs of `llama-batched-bench` for one time, as it can end before its log is written."""


class LlamaCpp:
    """A checkpoint in llama.cpp's `form`, such as Q4_0 for every matrix, or BF16 as it is, on all cores.

    `source` is the directory of llama.cpp's source code, with programs in build/bin. Raises Absent without it, or if a
    program fails.
    """

    def __init__(self, source: Path | None, checkpoint: Path, form: str):
        if source is None:
            raise Absent(f"no build of llama.cpp is named: {INSTALL}")
        self.form = form
        self._programs = source / "build" / "bin"
        converted, self.file = checkpoint / "llama_cpp-BF16.gguf", checkpoint / f"llama_cpp-{form}.gguf"
        if not converted.exists():
            self._made(converted, sys.executable, llama_cpp_convert.__file__, source, checkpoint)
        if not self.file.exists():
            self._made(self.file, self._programs / "llama-quantize", "--pure", converted, after=(form,))

    def prefill(self, tokens: int) -> float:
        """Milliseconds of a prompt of so many tokens."""
        return 1e3 * self._measured(tokens, 1, 1)["t_pp"]

    def step(self, rows: int, prompt: int, new: int) -> float:
        """Milliseconds of one of `new` decode steps of so many rows after a prompt of so many tokens."""
        return 1e3 * self._measured(prompt, new, rows)["t_tg"] / new

    def _measured(self, prompt: int, new: int, rows: int) -> dict[str, float]:
        sizes = {"-npp": prompt, "-ntg": new, "-npl": rows, "-c": rows * (prompt + new), "-t": os.cpu_count() or 1}
        options = [str(word) for option in sizes.items() for word in option]
        program = self._programs / "llama-batched-bench"
        for _ in range(TRIES):
            output = _output(program, "-m", self.file, *options, "--output-format", "jsonl")
            for line in output.splitlines():
                if line.startswith("{"):
                    return json.loads(line)
        raise Absent(f"{program.name} printed no times for {rows} rows of {prompt} + {new} tokens in {TRIES} tries")

    def _made(self, file: Path, *command: str | Path, after: tuple[str, ...] = ()) -> None:
        """Runs a command that writes `file`, which is there afterwards only if it is complete."""
        part = file.with_suffix(".part")
        try:
            _output(*command, part, *after)
            part.rename(file)
        finally:
            part.unlink(missing_ok=True)


def _output(*command: str | Path) -> str:
    try:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
    except OSError as error:
        raise Absent(f"{error}: {INSTALL}") from None
    except subprocess.CalledProcessError as error:
        raise Absent(f"{Path(command[0]).name} ended with {error.returncode}: {error.stderr[-500:]}") from None
    return done.stdout
