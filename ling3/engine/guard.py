"""One engine, many callers: threads, callbacks, Ctrl-C and iterators that are dropped anywhere."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator

from ling3.engine.outputs import Delta
from ling3.engine.request import Request
from ling3.runtime.entry_checks import refuse_fork
from ling3.runtime.interrupts import Interrupt, held_back


class Guard:
    """Lets one thread at a time move the loop, and one at a time look at the books or change them.

    Ctrl-C waits until nothing is left half done. A callback runs while the books are in order: it may change them, but
    cannot move the loop that called it. `dropped` holds how to end the requests whose readers have left; whoever
    appends to it calls `sweep` next.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._lock = threading.RLock()
        self._changing = 0  # depth of the changes under way; 0 in callbacks
        self._calling: int | None = None  # the thread that is in a callback
        self.dropped: deque[Callable[[], object]] = deque()
        self._raised: list[BaseException] = []

    @contextlib.contextmanager
    def moving(self) -> Iterator[Interrupt]:
        """Held by the one thread that moves the loop."""
        refuse_fork()
        if self._calling == threading.get_ident():
            raise RuntimeError(
                "a callback for deltas cannot move the loop that called it: submit there, and the loop will come to it"
            )
        with self._turn, held_back() as interrupt:
            yield interrupt

    @contextlib.contextmanager
    def books(self) -> Iterator[None]:
        """Held by the one thread that looks at the books or changes them."""
        refuse_fork()
        with held_back():
            with self._lock:
                self._changing += 1
                try:
                    yield
                finally:
                    self._changing -= 1
            self._sweep()

    def hand_out(self, request: Request, delta: Delta) -> Exception | None:
        """Calls who waits for a delta; returns what was raised there, and keeps KeyboardInterrupt and its like."""
        before, self._changing, self._calling = (self._changing, self._calling), 0, threading.get_ident()
        try:
            request.deliver(delta)
        except Exception as error:
            return error
        except BaseException as error:
            self._raised.append(error)
        finally:
            self._changing, self._calling = before
        return None

    def pass_on(self) -> None:
        """Raises what a callback raised that is not its request's affair, such as KeyboardInterrupt."""
        raised, self._raised = self._raised, []
        if raised:
            raise raised[0]

    def forget(self) -> None:
        """Raises it not, since who asked is being told already."""
        self._raised = []

    def sweep(self) -> None:
        """Calls what `dropped` holds, now or when the books are no longer in use.

        It never waits, as an event loop must not, and changes nothing amid another change: the garbage collector may
        close an iterator anywhere.
        """
        with held_back():
            self._sweep()

    def _sweep(self) -> None:
        while self.dropped and self._lock.acquire(blocking=False):
            try:
                if self._changing or not self.dropped:
                    return
                self._changing += 1
                try:
                    self.dropped.popleft()()
                finally:
                    self._changing -= 1
            finally:
                self._lock.release()
