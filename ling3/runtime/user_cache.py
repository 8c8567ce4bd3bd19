"""The user's cache directory, which keeps compiled programs and kernels between processes.

They are code, so only the user may have write access to it. An environment variable says where it is:

    off            caches nothing
    /some/where    caches there
    (unset)        caches in the user's cache directory
"""

import os
import pathlib
import sys


def directory(variable: str, name: str) -> pathlib.Path | None:
    """The directory that `variable` names, else `ling3/name` in the user's cache directory; it exists and is writable.

    None if the variable is `off`, or if the directory cannot be created or is writable by others. Raises ValueError if
    the variable is neither `off` nor an absolute path.
    """
    wanted = os.environ.get(variable, "")
    if wanted == "off":
        return None
    if wanted and not pathlib.Path(wanted).is_absolute():
        raise ValueError(f"{variable} is {wanted!r}, expected off or the absolute path of a directory")
    place = pathlib.Path(wanted) if wanted else _default(name)
    return place if place is not None and _made(place) else None


def _default(name: str) -> pathlib.Path | None:
    """`ling3/name` in this user's cache directory on this platform; None for users without a home."""
    named = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if named and pathlib.Path(named).is_absolute():
        return pathlib.Path(named) / "ling3" / name
    try:
        home = pathlib.Path.home()
    except RuntimeError:
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "ling3" / name


def _made(directory: pathlib.Path) -> bool:
    """True if the directory exists or could be created, belongs to the user alone, and is writable."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError:
        return False
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return False
    return os.access(directory, os.W_OK | os.X_OK)
