"""Compiled programs, kept on disk from one process to the next.

JAX has such a cache; this module chooses its directory and switches it on. The key of an entry covers the program, its
options, the versions of JAX and XLA, and the device with its instruction set, so a program of another machine is never
used. Several processes may share the directory.

    LING3_COMPILATION_CACHE=off            keeps nothing
    LING3_COMPILATION_CACHE=/some/where    keeps programs there
    (unset)                                keeps them in `ling3/programs` of the user's cache directory

Settings that the user has made in JAX itself (JAX_COMPILATION_CACHE_DIR, JAX_ENABLE_COMPILATION_CACHE or `jax.config`)
take precedence, bounds on size and compile time included.
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
"""Bytes that the directory may grow to; the least recently used entries are removed first."""
# Our value, and JAX's default, the only one replaced. Small programs are kept too: many take as long as a large one.
BOUNDS = {
    "jax_compilation_cache_max_size": (LARGEST, -1),
    "jax_persistent_cache_min_compile_time_secs": (0.0, 1.0),
    "jax_persistent_cache_min_entry_size_bytes": (-1, 0),
}


def switch_on() -> pathlib.Path | None:
    """Makes JAX cache everything that this process compiles from now on.

    Returns the directory, or None if nothing changes: because of the user's settings, or because the directory cannot
    be created or written or is writable by others. Raises ValueError if the variable is neither `off` nor an absolute
    path.
    """
    if _setting("jax_compilation_cache_dir") is not None or not _setting("jax_enable_compilation_cache"):
        return None
    directory = user_cache.directory(VARIABLE, "programs")
    if directory is None:
        return None
    _remove_incomplete(directory)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    for name, (value, default) in BOUNDS.items():
        if _setting(name) == default:
            jax.config.update(name, value)
    _watch(directory)
    return directory


@functools.cache
def _watch(directory: pathlib.Path) -> None:
    """Removes damaged entries from `directory` when JAX reads them: JAX would keep them and warn in every process.

    JAX stores the time of an entry's last read. It sends one event per request to the cache, and one after compiling a
    program that the cache did not provide. Entries read between these two may be damaged, and are checked.
    """
    request = threading.local()

    def listen(event: str, **kwargs: Any) -> None:
        if _setting("jax_compilation_cache_dir") != str(directory):
            return
        if event == "/jax/compilation_cache/compile_requests_use_cache":
            request.time = time.time_ns()
        elif event == "/jax/compilation_cache/cache_misses" and hasattr(request, "time"):
            _remove_damaged(directory, request.time)

    jax.monitoring.register_event_listener(listen)


def _remove_damaged(directory: pathlib.Path, since: int) -> None:
    """Removes the damaged entries that any process has read after `since`, in ns since the epoch."""
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
    """True if the entry's checksum is right. Entries compressed by zstandard have none and count as damaged."""
    try:
        zlib.decompress(entry.read_bytes())
    except zlib.error:
        return False
    return True


def _remove_incomplete(directory: pathlib.Path) -> None:
    """Removes entries without a time of use, left by a killed process: because of one, JAX would store nothing more.

    This takes JAX's lock. If another process holds it, nothing is removed until the next start.
    """
    try:
        with filelock.FileLock(directory / ".lockfile", timeout=0):
            for entry in directory.glob("*-cache"):
                if not entry.with_name(entry.name.removesuffix("-cache") + "-atime").exists():
                    entry.unlink(missing_ok=True)
    except (filelock.Timeout, OSError):
        pass


def _setting(name: str) -> Any:
    """A value of `jax.config`, whose attributes type checkers do not know."""
    return getattr(jax.config, name)
