"""Ctrl-C, held back while something is under way that must not be left half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Within it Ctrl-C waits for the end, and does then what it did before: as a rule, it raises KeyboardInterrupt.

    Signals come to the main thread alone; in others it does nothing, nor where Ctrl-C is ignored or not Python's.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if main else None
    if not callable(before):
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda *signal_and_frame: came.append(signal_and_frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[-1])
