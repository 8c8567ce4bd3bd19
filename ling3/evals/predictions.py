"""The file of a run: a JSON line for each question, written as it is answered, so that a run can be taken up again."""

import hashlib
import json
import os
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ling3 import strict_json
from ling3.interrupts import held_back
from ling3.model import Ling3ForCausalLM

BEGINNING = b'{"index": '
"""What each line begins with."""
SAMPLE = 1024
"""Elements of each array that `fingerprint` looks at."""


class Predictions:
    """The answers of one run, in the JSONL file `path`: those it has already, and each further one as it comes.

    A line has its question's `index` and `prompt_sha256`, its `expected` answer, and the run's `settings`: a file can
    only be taken up with the same. A line that a killed process left half written (without its newline) is dropped.
    Within `with` the file is open; Ctrl-C waits while a line is being written, and a written line has reached the disk.

    Raises ValueError, naming the line, for a file of other questions or settings, and for one that is no such file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        questions: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
    ):
        self.path = pathlib.Path(path)
        self._questions = questions
        self._settings = json.loads(json.dumps(settings))  # as it is read back: tuples are lists
        self.lines: dict[int, dict[str, Any]] = {}
        """What is answered, by the question's index."""
        whole, self._end = self._whole_lines()
        for number, line in enumerate(whole, 1):
            self._take(line, f"{self.path}, line {number}")

    def __enter__(self) -> "Predictions":
        self._file = self.path.open("ab")
        self._file.truncate(self._end)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._file.close()

    def append(self, index: int, answer: Mapping[str, Any]) -> None:
        """Writes the line of question `index`: the question, the `answer`, the settings."""
        line = {**self._questions[index], **answer, "settings": self._settings}
        with held_back():
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self.lines[index] = line

    def _whole_lines(self) -> tuple[list[bytes], int]:
        """The lines that end with a newline, and how many bytes they are; the rest has to be a beginning of one."""
        content = self.path.read_bytes() if self.path.exists() else b""
        end = content.rfind(b"\n") + 1
        if content[end:][: len(BEGINNING)] != BEGINNING[: len(content) - end]:
            raise ValueError(
                f"{self.path}: its last line, {content[end:][:60]!r}, is no beginning of a line of predictions; give "
                "another file to write to (--out)"
            )
        return content[:end].split(b"\n")[:-1], end

    def _take(self, text: bytes, where: str) -> None:
        line = strict_json.parse(text, where)
        index = line.get("index") if isinstance(line, dict) else None
        if type(index) is not int or not isinstance(line.get("right"), bool):
            raise ValueError(f"{where}: this is no line of predictions; give another file to write to (--out)")
        if line.get("settings") != self._settings:
            raise ValueError(
                f"{where} was written with other settings: {self._differences(line.get('settings'))}; take the run up "
                "with the same, or give another file to write to (--out)"
            )
        asked = self._questions[index] if 0 <= index < len(self._questions) else {}
        other = [name for name in ("prompt_sha256", "expected") if line.get(name) != asked.get(name)]
        if not asked or other:
            raise ValueError(
                f"{where} answers question {index}, which is another one in these prompts ({', '.join(other)}): take "
                "the run up with the same prompts, or give another file to write to (--out)"
            )
        if index in self.lines:
            raise ValueError(f"{where} answers question {index} a second time: two runs wrote to this file; delete it")
        self.lines[index] = line

    def _differences(self, settings: Any) -> str:
        there = settings if isinstance(settings, dict) else {}
        return "; ".join(
            f"{name} is {there.get(name)!r} there and {self._settings.get(name)!r} now"
            for name in sorted({*there, *self._settings})
            if there.get(name) != self._settings.get(name)
        )


def fingerprint(model: Ling3ForCausalLM) -> str:
    """A short hash that tells models apart: of the config, and of the first elements of every array."""
    digest = hashlib.sha256(repr(model.config).encode())
    for leaf in jax.tree.leaves(model):
        first = np.ravel(leaf[(0,) * (leaf.ndim - 1)])[:SAMPLE]
        digest.update(f"{leaf.shape} {leaf.dtype.name}".encode() + first.tobytes())
    return digest.hexdigest()[:16]
