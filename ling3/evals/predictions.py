"""The file of a run: a JSON line for each question, written as it is answered, so that a run can be taken up again."""

import hashlib
import json
import os
import pathlib
import types
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from ling3.model import CausalLM
from ling3.runtime import strict_json
from ling3.runtime.interrupts import held_back
from ling3.runtime.quoting import shown

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

BEGINNING = b'{"index": '
"""What each line begins with."""
SAMPLE = 4096
"""Elements of each array that `fingerprint` looks at."""
ANOTHER = "give another file to write to (--out)"


class Predictions:
    """The answers of one run, in the JSONL file `path`: those it has already, and each further one as it comes.

    A line has its question's `index` and `prompt_sha256`, its `expected` answer, and the run's `settings`: a file can
    only be taken up with the same. A line that a killed process left half written (without its newline) is dropped.
    Within `with` the file is open and, where the system has `flock`, no other run's; Ctrl-C waits while a line is being
    written, and a written line has reached the disk.

    `with` raises BlockingIOError while another run has the file, and ValueError, naming the line, for a file of other
    questions or settings, and for one that is no such file.
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

    def __enter__(self) -> "Predictions":
        self._file = self.path.open("a+b")
        try:
            _lock(self._file)
            # Not before the lock is held: another run may have written until then.
            self._file.seek(0)
            whole, end = self._whole_lines(self._file.read())
            self.lines.clear()
            for number, line in enumerate(whole, 1):
                self._take(line, number)
            self._file.truncate(end)
        except BaseException:
            self._file.close()
            raise
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

    def _whole_lines(self, content: bytes) -> tuple[list[bytes], int]:
        """The lines that end with a newline, and how many bytes they are; the rest has to be a beginning of one."""
        end = content.rfind(b"\n") + 1
        if content[end:][: len(BEGINNING)] != BEGINNING[: len(content) - end]:
            raise ValueError(
                f"{self.path}: its last line, {content[end:][:60]!r}, is no beginning of a line of predictions; "
                f"{ANOTHER}"
            )
        return content[:end].split(b"\n")[:-1], end

    def _take(self, text: bytes, number: int) -> None:
        where = f"{self.path}, line {number}"
        line = strict_json.parse_line(text, where, f"remove the line, or {ANOTHER}")
        index = line.get("index") if isinstance(line, dict) else None
        if type(index) is not int or not isinstance(line.get("right"), bool):
            raise ValueError(f"{where}: this is no line of predictions; {ANOTHER}")
        if line.get("settings") != self._settings:
            raise ValueError(
                f"{where} was written with other settings: {self._differences(line.get('settings'))}; take the run up "
                f"with the same, or {ANOTHER}"
            )
        asked = self._questions[index] if 0 <= index < len(self._questions) else {}
        other = [name for name in ("prompt_sha256", "expected") if line.get(name) != asked.get(name)]
        if not asked or other:
            raise ValueError(
                f"{where} answers question {index}, which is another one in these prompts ({', '.join(other)}): take "
                f"the run up with the same prompts, or {ANOTHER}"
            )
        if index in self.lines:
            raise ValueError(f"{where} answers question {index} a second time; remove this line")
        self.lines[index] = line

    def _differences(self, settings: Any) -> str:
        there, now = (_flat(each) if isinstance(each, dict) else {} for each in (settings, self._settings))
        return "; ".join(
            f"{name} is {shown(there.get(name))} there and {shown(now.get(name))} now"
            for name in sorted({*there, *now})
            if there.get(name) != now.get(name)
        )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The settings with those of nested objects under names such as `engine.page_size`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def fingerprint(model: CausalLM) -> str:
    """A short hash that tells models apart: of the config, and of elements from all over every array."""
    digest = hashlib.sha256(repr(model.config).encode())
    for leaf in map(jnp.atleast_1d, jax.tree.leaves(model)):
        places = np.linspace(0, leaf.size - 1, min(SAMPLE, leaf.size)).astype(np.int64)
        # By an index for each axis: a flat copy of the experts would be as large as they are.
        sample = leaf[tuple(axis.astype(np.int32) for axis in np.unravel_index(places, leaf.shape))]
        digest.update(f"{leaf.shape} {leaf.dtype.name}".encode() + np.asarray(sample).tobytes())
    return digest.hexdigest()[:16]


def _lock(file: BinaryIO) -> None:
    """Keeps other runs from the file until it is closed; BlockingIOError where one has it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(
            f"{file.name}: another run is writing to this file; wait until it ends, or {ANOTHER}"
        ) from None
    except OSError:  # a file system without locks
        return
