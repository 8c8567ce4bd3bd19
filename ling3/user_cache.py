"""Where a user's own derived files are kept from one process to the next: compiled programs and kernels.

They are code, so that a directory has to be the user's alone.
"""

import os
import pathlib
import sys


def directory(name: str) -> pathlib.Path | None:
    """`ling3/name` in the user's cache directory, which each platform has elsewhere; None without a home."""
    named = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if named and pathlib.Path(named).is_absolute():
        return pathlib.Path(named) / "ling3" / name
    try:
        home = pathlib.Path.home()
    except RuntimeError:
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "ling3" / name


def made(directory: pathlib.Path) -> bool:
    """Whether the directory is there, if need be from now on, is the user's own, and can be written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError:
        return False
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return False
    return os.access(directory, os.W_OK | os.X_OK)
