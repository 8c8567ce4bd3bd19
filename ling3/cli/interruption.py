"""Ctrl-C for the command line: the process ends at once with status 130 and no traceback."""

import _thread
import contextlib
import os
import signal
from collections.abc import Callable
from types import FrameType

STATUS = 130
SHOW_CURSOR = b"\x1b[?25h"

_ending = _thread.allocate_lock()
_last: list[Callable[[], object]] = []


def do_last(step: Callable[[], object]) -> None:
    """Registers a quick step that Ctrl-C runs, in any thread, before the process ends; its errors are dropped."""
    _last.append(step)


def end_process() -> None:
    """Makes Ctrl-C end the process from now on, even while C++ code imports, loads or compiles something.

    A KeyboardInterrupt would wait for that code, crash in it, or be swallowed by a callback of the garbage collector.
    If Ctrl-C is ignored, as under nohup, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    signal.signal(signal.SIGINT, _end)
    # Python runs a handler between two bytecodes of the main thread; a thread that waits for the signal runs at once.
    reader, writer = os.pipe()
    if os.name == "posix":
        os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _thread.start_new_thread(_wait, (reader,))


def raise_again() -> None:
    """Undoes `end_process`: Ctrl-C raises KeyboardInterrupt again, which a conversation catches."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _wait(reader: int) -> None:
    while signal.SIGINT not in os.read(reader, 1):
        pass
    _end()


def _end(number: int = signal.SIGINT, frame: FrameType | None = None) -> None:
    if not _ending.acquire(blocking=False):
        return
    try:
        # A progress bar may have hidden the cursor.
        os.write(2, (SHOW_CURSOR if os.isatty(2) else b"") + b"\ninterrupted\n")
        for step in _last:
            with contextlib.suppress(Exception):
                step()
    finally:
        os._exit(STATUS)
