"""The descendants of this process: its children, their children, and so on."""

import contextlib
import os
import pathlib
import signal

PROCESSES = pathlib.Path("/proc")


def descendants() -> list[int]:
    """The process ids of all descendants, parents before children; none if the system has no /proc."""
    children: dict[int, list[int]] = {}
    for file in PROCESSES.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            # The name, in parentheses, may have spaces; the state and the parent's id follow it.
            parent = int(file.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    found = children.get(os.getpid(), [])
    for process in found:  # the list grows in the loop
        found += children.get(process, [])
    return found


def kill() -> None:
    """Kills all descendants of this process with SIGKILL."""
    for process in descendants():
        with contextlib.suppress(OSError):
            os.kill(process, signal.SIGKILL)
