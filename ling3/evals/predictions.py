"""The predictions file: a JSON line for each question, written as it is answered, so that a run can be resumed."""

import hashlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, ArrayLike, Int32, Shaped

from ling3.mesh.rules import WHOLE
from ling3.mesh.sharded import placement_of
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
    """The answers of one run in the JSONL file `path`: those that it has already, and those that are appended.

    A line has its question's `index` and `prompt_sha256`, its `expected` answer, and the run's `settings`, which must
    be the same for a run to be resumed. A line that a killed process left without its newline is dropped. Within
    `with` the file is open and, if the system has `flock`, locked; Ctrl-C waits while a line is being written, and a
    written line has reached the disk.

    `with` raises BlockingIOError while another run has locked the file, and ValueError, naming the line, for a file of
    other questions or settings and for any other file.
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
        """The lines by their questions' indices."""

    def __enter__(self) -> "Predictions":
        self._file = self.path.open("a+b")
        try:
            _lock(self._file)
            # After the lock: another run may have written until then.
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

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def append(self, index: int, answer: Mapping[str, Any]) -> None:
        """Writes the line of question `index`: the question, its `answer`, the settings."""
        line = {**self._questions[index], **answer, "settings": self._settings}
        with held_back():
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self.lines[index] = line

    def _whole_lines(self, content: bytes) -> tuple[list[bytes], int]:
        """The lines that end with a newline, and their size in bytes; the rest must be the beginning of a line."""
        end = content.rfind(b"\n") + 1
        if content[end:][: len(BEGINNING)] != BEGINNING[: len(content) - end]:
            raise ValueError(
                f"{self.path}: its last line, {content[end:][:60]!r}, is not the beginning of a line of predictions; "
                f"{ANOTHER}"
            )
        return content[:end].split(b"\n")[:-1], end

    def _take(self, text: bytes, number: int) -> None:
        where = f"{self.path}, line {number}"
        line = strict_json.parse_line(text, where, f"remove the line, or {ANOTHER}")
        index = line.get("index") if isinstance(line, dict) else None
        if type(index) is not int or not isinstance(line.get("right"), bool):
            raise ValueError(f"{where}: this is not a line of predictions; {ANOTHER}")
        if line.get("settings") != self._settings:
            raise ValueError(
                f"{where} was written with other settings: {self._differences(line.get('settings'))}; resume "
                f"with the same, or {ANOTHER}"
            )
        asked = self._questions[index] if 0 <= index < len(self._questions) else {}
        other = [name for name in ("prompt_sha256", "expected") if line.get(name) != asked.get(name)]
        if not asked or other:
            raise ValueError(
                f"{where} answers question {index}, which is another one in these prompts ({', '.join(other)}): resume "
                f"with the same prompts, or {ANOTHER}"
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
    """A short hash that identifies a model: of its config, and of elements spread over every array.

    On a mesh it is the same, and its processes call this at once.
    """
    digest = hashlib.sha256(repr(model.config).encode())
    found, shares, read = jax.tree.leaves(model), itertools.repeat(WHOLE), _elements
    if (placement := placement_of(model)) is not None:
        shares, read = placement.shares, jax.jit(_elements, out_shardings=placement.sharding(PartitionSpec()))
    for leaf, share, shape in zip(found, shares, model.shapes):
        whole = shape or (1,)
        size = math.prod(whole)
        places = np.unravel_index(np.linspace(0, size - 1, min(SAMPLE, size)).astype(np.int64), whole)
        sample = read(leaf, tuple(axis.astype(np.int32) for axis in share.places(places)))
        digest.update(f"{whole} {leaf.dtype.name}".encode() + np.asarray(sample).tobytes())
    return digest.hexdigest()[:16]


def _elements(x: Shaped[Array, "..."], places: tuple[Int32[ArrayLike, " sample"], ...]) -> Shaped[Array, " sample"]:
    """By an index for each axis: flattening would copy the experts."""
    return jnp.atleast_1d(x)[places]


def _lock(file: BinaryIO) -> None:
    """Locks the file until it is closed; BlockingIOError if another run has locked it."""
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
