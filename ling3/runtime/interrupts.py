"""Ctrl-C, held back while something is under way that must not be left half done."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Interrupt:
    """A Ctrl-C that has come, or has not come yet."""

    def __init__(self, handler: Callable[[int, FrameType | None], Any] | None):
        self._handler = handler
        self._signal: tuple[int, FrameType | None] | None = None

    def take(self, number: int, frame: FrameType | None) -> None:
        """Remembers it: a signal handler."""
        self._signal = number, frame

    def pass_on(self) -> None:
        """Does, for one that has come, what Ctrl-C did before it was held back: as a rule, raises KeyboardInterrupt."""
        came, self._signal = self._signal, None
        if came is not None and self._handler is not None:
            self._handler(*came)


@contextlib.contextmanager
def held_back() -> Iterator[Interrupt]:
    """Within it Ctrl-C waits, for `pass_on` or for the end. Blocks may stand in one another.

    Signals come to the main thread alone; in others it does nothing, nor where Ctrl-C is ignored or not Python's.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if main else None
    if not callable(before):
        yield Interrupt(None)
        return
    interrupt = Interrupt(before)
    signal.signal(signal.SIGINT, interrupt.take)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
        interrupt.pass_on()
