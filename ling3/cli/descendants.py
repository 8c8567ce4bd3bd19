"""The processes that this one has started, and those that they have started."""

import contextlib
import os
import pathlib
import signal

PROCESSES = pathlib.Path("/proc")


def descendants() -> list[int]:
    """Their ids, parents before their children; none where the system has no /proc."""
    children: dict[int, list[int]] = {}
    for file in PROCESSES.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            # The name, in parentheses, may have spaces; behind it come the state and the parent.
            parent = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found = children.get(os.getpid(), [])
    for process in found:  # which grows
        found += children.get(process, [])
    return found


def kill() -> None:
    """Kills the processes that this one has started."""
    for process in descendants():
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
