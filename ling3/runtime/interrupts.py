"""Holding back Ctrl-C during work that must not be left half done."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Delays Ctrl-C to the end of the block, where it is handled as before, usually by raising KeyboardInterrupt.

    Without effect outside the main thread, which alone gets signals, and if Ctrl-C is ignored or not handled in Python.
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
