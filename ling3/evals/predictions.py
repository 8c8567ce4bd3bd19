"""The predictions file: a JSON line per question, written when it is answered, so that a run can be resumed."""

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

from ling3.adapters.adapter import scales
from ling3.mesh.sharded import placement_of
from ling3.mesh.share import WHOLE
from ling3.model import CausalLM
from ling3.runtime import strict_json
from ling3.runtime.interrupts import held_back
from ling3.runtime.quoting import shown

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

BEGINNING = b'{"index": '
"""The first bytes of each line."""
SAMPLE = 4096
"""Elements of each array that `fingerprint` reads."""
ANOTHER = "give another file to write to (--out)"


class Predictions:
    """The answers of one run in the JSONL file `path`: the lines it already has, and appended ones.

    A line has its question's `index` and `prompt_sha256`, its `expected` answer, and the run's `settings`; a run can
    only be resumed with equal settings. An incomplete last line, left by a killed process, is dropped. Inside `with`
    the file is open and, if the system has `flock`, locked. Ctrl-C waits while a line is being written, and a written
    line has been synced to disk.

    `with` raises BlockingIOError if another run has locked the file, and ValueError, naming the line, if the file has
    other questions or settings or is not a predictions file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        questions: Sequence[Mapping[str, Any]],
        settings: Mapping[str, Any],
    ):
        self.path = pathlib.Path(path)
        self._questions = questions
        self._settings = json.loads(json.dumps(settings))  # as read back from JSON: tuples become lists
        self.lines: dict[int, dict[str, Any]] = {}
        """The lines by their questions' indices."""

    def __enter__(self) -> "Predictions":
        self._file = self.path.open("a+b")
        try:
            _lock(self._file)
            # Only under the lock: another run may have been writing until then.
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
        """Writes the line of question `index`: the question's fields, its `answer` and the settings."""
        line = {**self._questions[index], **answer, "settings": self._settings}
        with held_back():
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
            self.lines[index] = line

    def _whole_lines(self, content: bytes) -> tuple[list[bytes], int]:
        """The complete lines and their size in bytes. Raises ValueError if the rest does not begin like a line."""
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
    """Flattens nested settings, under names such as `engine.page_size`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def fingerprint(model: CausalLM) -> str:
    """A short hash that identifies a model: of its config, of elements of every array, and of adapters' scales.

    It does not depend on the mesh, nor on multi-token-prediction layers. All processes of a mesh must call this
    together.
    """
    digest = hashlib.sha256(repr(model.config).encode())
    digest.update("".join(f"{path} {scale!r}" for path, scale in scales(model)).encode())
    found, shares, read = jax.tree.leaves((model.model, model.lm_head)), itertools.repeat(WHOLE), _elements
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
    """The elements at these indices, one array per axis: flattening `x` would copy the experts."""
    return jnp.atleast_1d(x)[places]


def _lock(file: BinaryIO) -> None:
    """Locks the file until it is closed. Raises BlockingIOError if another run has locked it."""
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
