"""Compiled programs, kept on disk from one process to the next.

JAX keeps them if it is told a directory; here is which, and that it is told. An entry's key is made of the program, its
options, the versions of JAX and XLA, and the device with its instruction set: no other machine's program is taken for
one's own. Several processes may share the directory.

    LING3_COMPILATION_CACHE=off            keeps nothing
    LING3_COMPILATION_CACHE=/some/where    keeps programs there
    (unset)                                keeps them in `ling3/programs` of the user's cache directory

Whoever has told JAX already, by JAX_COMPILATION_CACHE_DIR, `jax.config` or JAX_ENABLE_COMPILATION_CACHE, is obeyed,
and so are bounds of their own for what is kept.
"""

import functools
import pathlib
import threading
import time
import zlib
from typing import Any

import filelock
import jax
import jax.monitoring

from ling3.runtime import user_cache

VARIABLE = "LING3_COMPILATION_CACHE"
LARGEST = 2**30
"""Bytes that the directory may grow to; what was used longest ago goes first."""
# What is set, and JAX's own default: only that is replaced. Many small programs take as long as a large one.
BOUNDS = {
    "jax_compilation_cache_max_size": (LARGEST, -1),
    "jax_persistent_cache_min_compile_time_secs": (0.0, 1.0),
    "jax_persistent_cache_min_entry_size_bytes": (-1, 0),
}


def switch_on() -> pathlib.Path | None:
    """Makes JAX keep all that this process compiles from now on; the directory, or None where JAX stays as it is.

    A directory that cannot be made or written, or that others may write, is not used: that is no error. ValueError if
    the variable is neither `off` nor an absolute path.
    """
    if _told("jax_compilation_cache_dir") is not None or not _told("jax_enable_compilation_cache"):
        return None
    directory = user_cache.directory(VARIABLE, "programs")
    if directory is None:
        return None
    _drop_halves(directory)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    for name, (value, default) in BOUNDS.items():
        if _told(name) == default:
            jax.config.update(name, value)
    _watch(directory)
    return directory


@functools.cache
def _watch(directory: pathlib.Path) -> None:
    """Removes damaged entries from `directory` as JAX meets them: it would keep them, and warn in every process.

    JAX records the time at which it reads an entry, and sends an event for each request, and for each program that it
    compiled, just before it writes that. An entry that was read in between is the damaged one.
    """
    request = threading.local()

    def listen(event: str, **kwargs: Any) -> None:
        if _told("jax_compilation_cache_dir") != str(directory):
            return
        if event == "/jax/compilation_cache/compile_requests_use_cache":
            request.time = time.time_ns()
        elif event == "/jax/compilation_cache/cache_misses" and hasattr(request, "time"):
            _drop_unreadable(directory, request.time)

    jax.monitoring.register_event_listener(listen)


def _drop_unreadable(directory: pathlib.Path, since: int) -> None:
    """Removes the damaged entries that this process or another has read after `since`, in ns since the epoch."""
    try:
        with filelock.FileLock(directory / ".lockfile", timeout=1):
            for used in directory.glob("*-atime"):
                entry = used.with_name(used.name.removesuffix("-atime") + "-cache")
                if int.from_bytes(used.read_bytes(), "little") >= since and not _is_whole(entry):
                    entry.unlink(missing_ok=True)
                    used.unlink(missing_ok=True)
    except (filelock.Timeout, OSError):
        pass


def _is_whole(entry: pathlib.Path) -> bool:
    """Whether its checksum is right; one that zstandard compressed has none, and counts as damaged."""
    try:
        zlib.decompress(entry.read_bytes())
    except zlib.error:
        return False
    return True


def _drop_halves(directory: pathlib.Path) -> None:
    """Removes entries whose writing was broken off: JAX would find no time of use beside them, and keep nothing more.

    Under JAX's own lock; if another process holds it, the next one will see to it.
    """
    try:
        with filelock.FileLock(directory / ".lockfile", timeout=0):
            for entry in directory.glob("*-cache"):
                if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
                    entry.unlink(missing_ok=True)
    except (filelock.Timeout, OSError):
        pass


def _told(name: str) -> Any:
    """JAX's configuration, whose names type checkers do not know."""
    return getattr(jax.config, name)
