"""Files of known prefixes: each is written as a unit, and the least recently used are deleted beyond a limit.

Several processes may use one directory. A file's name is a hash of everything that its arrays depend on, and its first
bytes are a hash of the name and of the rest, so that a file that is damaged or of another name is not taken for it.
"""

import contextlib
import errno
import hashlib
import logging
import math
import os
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

SUFFIX, PARTIAL = ".prefix", ".partial"
DIGEST = 32
"""Bytes of the hash at the beginning of a file."""

logger = logging.getLogger(__name__)


class PrefixFiles:
    """The files in a directory, of at most `limit` bytes together. `write` and `touch` may run on another thread."""

    def __init__(self, directory: str | os.PathLike[str], limit: int):
        self.directory, self.limit = pathlib.Path(directory), limit

    def prepare(self) -> None:
        """Makes the directory. Raises OSError, which names it, if files cannot be written there."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "files of known prefixes cannot be written there", str(self.directory))

    def has(self, name: str) -> bool:
        """Whether there is a file of this name, damaged or not."""
        return self._path(name).exists()

    def read(self, name: str, expected: Sequence[Any]) -> list[np.ndarray] | None:
        """The arrays in a file, with the `expected` shapes and dtypes; None without such a file.

        A damaged file is deleted with a warning in the log.
        """
        path = self._path(name)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read, and its prefix is computed again: %s", path, error)
            return None
        sizes = [math.prod(each.shape) * np.dtype(each.dtype).itemsize for each in expected]
        rest = memoryview(content)[DIGEST:]
        if len(rest) != sum(sizes) or content[:DIGEST] != _digest(name, rest):
            logger.warning("%s is damaged: it is deleted, and its prefix computed again", path)
            path.unlink(missing_ok=True)
            return None
        arrays, start = [], DIGEST
        for each, size in zip(expected, sizes, strict=True):
            flat = np.frombuffer(content, np.uint8, size, start)
            arrays.append(flat.view(each.dtype).reshape(each.shape))
            start += size
        return arrays

    def write(self, name: str, arrays: Sequence[np.ndarray]) -> None:
        """Writes a file, after deleting the least recently used ones beyond the limit. Errors go to the log."""
        content = b"".join(np.ascontiguousarray(each).tobytes() for each in arrays)
        path = self._path(name)
        part = path.with_name(f"{name}.{os.getpid()}{PARTIAL}")
        try:
            self._make_room(DIGEST + len(content))
            if DIGEST + len(content) <= self.limit:
                part.write_bytes(_digest(name, content) + content)
                part.replace(path)
        except OSError as error:
            logger.warning("%s cannot be written, and its prefix is not kept: %s", path, error)
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def touch(self, names: Sequence[str]) -> None:
        """Makes files the most recently used, the first one last to be deleted."""
        now = time.time_ns()
        for i, name in enumerate(names):
            with contextlib.suppress(OSError):
                os.utime(self._path(name), ns=(now - i, now - i))

    def _make_room(self, size: int) -> None:
        """Deletes the least recently used files until `size` more bytes fit into the limit."""
        found = sorted(self._files())
        taken = sum(each.st_size for _, each, _ in found)
        for _, each, path in found:
            if taken + size <= self.limit:
                return
            path.unlink(missing_ok=True)
            taken -= each.st_size

    def _files(self) -> Iterator[tuple[int, os.stat_result, pathlib.Path]]:
        """Each file of a prefix, also those that killed processes left unfinished, by the time of its last use."""
        for path in self.directory.iterdir():
            if path.suffix in (SUFFIX, PARTIAL):
                with contextlib.suppress(FileNotFoundError):
                    found = path.stat()
                    yield found.st_mtime_ns, found, path

    def _path(self, name: str) -> pathlib.Path:
        return self.directory / f"{name}{SUFFIX}"


def _digest(name: str, content: bytes | memoryview) -> bytes:
    found = hashlib.blake2b(name.encode(), digest_size=DIGEST, person=b"ling3 prefix")
    found.update(content)
    return found.digest()
