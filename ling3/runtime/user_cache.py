"""Where a user's own derived files are kept from one process to the next: compiled programs and kernels.

They are code, so that a directory has to be the user's alone. A variable of the environment says where:

    off            keeps nothing
    /some/where    keeps them there
    (unset)        keeps them in the user's cache directory
"""

import os
import pathlib
import sys


def directory(variable: str, name: str) -> pathlib.Path | None:
    """What `variable` says, else `ling3/name` in the user's cache directory; it is there and can be written.

    None where nothing is to be kept, and where the directory cannot be made or others may write it: that is no error.
    ValueError if the variable is neither `off` nor an absolute path.
    """
    wanted = os.environ.get(variable, "")
    if wanted == "off":
        return None
    if wanted and not pathlib.Path(wanted).is_absolute():
        raise ValueError(f"{variable} is {wanted!r}, expected off or the absolute path of a directory")
    place = pathlib.Path(wanted) if wanted else _default(name)
    return place if place is not None and _made(place) else None


def _default(name: str) -> pathlib.Path | None:
    """`ling3/name` in the user's cache directory, which each platform has elsewhere; None without a home."""
    named = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME", "")
    if named and pathlib.Path(named).is_absolute():
        return pathlib.Path(named) / "ling3" / name
    try:
        home = pathlib.Path.home()
    except RuntimeError:
        return None
    return home / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "ling3" / name


def _made(directory: pathlib.Path) -> bool:
    """Whether the directory is there, if need be from now on, is the user's own, and can be written."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError:
        return False
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        return False
    return os.access(directory, os.W_OK | os.X_OK)
