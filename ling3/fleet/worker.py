"""The process of a replica that streams: it takes requests from a pipe and sends back the deltas of each turn.

A message to it is (method of `Worker`, arguments). A message from it is a list of (key, item, last): `key` is the
sender's number for the request or `COUNTS`, `item` a delta, an error or the counts, and `last` says that no more come.
"""

import contextlib
import functools
import logging
import queue
import signal
import threading
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

from ling3.engine.front import Front
from ling3.engine.outputs import Delta
from ling3.engine.sampling_params import SamplingParams
from ling3.fleet.replica import Plan, Replica
from ling3.server import log

logger = logging.getLogger(__name__)

AHEAD = 4
"""The turns whose deltas may wait for the reader: with more, the engine pauses."""

COUNTS = -1
"""The key of the engine's counts."""

TurnNews = list[tuple[int, Any, bool]]


def work(pipe: Connection, plan: Plan) -> None:
    """Loads and warms up an engine, sends its `Card`, or the error of loading, and answers until the pipe is closed.

    Signals are the other process's to handle, as Ctrl-C and service managers send them to both.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    log.configure()
    replica = Replica()
    with contextlib.suppress(OSError):  # the other process has ended meanwhile
        try:
            card = replica.start(plan)
            replica.warm(False)
        except Exception as error:
            pipe.send(error)
            return
        pipe.send(card)
    Worker(replica.engine, pipe).run()


class Worker:
    """Runs an engine for another process. The methods without underscore, but `run`, are that process's messages.

    The thread of `run` handles messages and steps the engine; two others read and write the pipe.
    """

    def __init__(self, engine: Front, pipe: Connection):
        self._engine, self._pipe = engine, pipe
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._outbox: queue.Queue[TurnNews] = queue.Queue(AHEAD)
        self._news: deque[tuple[int, Any, bool]] = deque()
        self._preparing: set[int] = set()
        self._running: dict[int, int] = {}
        """The engine's ids of unfinished requests, by their keys."""

    def run(self) -> None:
        """Answers messages, and steps the engine while requests run, until the other process closes the pipe."""
        for target in (self._receive, self._send):
            threading.Thread(target=target, daemon=True).start()
        while self._handle_messages():
            if self._running:
                try:
                    self._engine.step()
                except Exception:  # its requests have ended in an error
                    logger.exception("the engine failed")
            self._publish()

    def ask(self, key: int, ids: list[int], params: SamplingParams) -> None:
        """Begins a request. A grammar is first compiled on another thread, which may take seconds."""
        self._preparing.add(key)
        if params.structured is None:
            self._begin(key, ids, params)
        else:
            threading.Thread(target=self._prepare, args=(key, ids, params), daemon=True).start()

    def leave(self, key: int) -> None:
        """Aborts a request, unless it has ended."""
        self._preparing.discard(key)
        if (request := self._running.pop(key, None)) is not None:
            self._engine.abort(request)

    def count(self) -> None:
        """Sends the engine's counts beside the news of requests."""
        self._news.append((COUNTS, self._engine.stats(), True))

    def _prepare(self, key: int, ids: list[int], params: SamplingParams) -> None:
        try:
            with contextlib.suppress(ValueError):  # `submit` raises it again
                self._engine.check(ids, params)
        finally:
            self._inbox.put((Worker._begin, key, ids, params))

    def _begin(self, key: int, ids: list[int], params: SamplingParams) -> None:
        if key not in self._preparing:
            return
        self._preparing.remove(key)
        try:
            self._running[key] = self._engine.submit(ids, params, on_delta=functools.partial(self._collect, key))
        except (ValueError, RuntimeError) as error:
            self._news.append((key, error, True))

    def _collect(self, key: int, delta: Delta) -> None:
        """Takes a delta, in the engine's thread."""
        self._news.append((key, delta, delta.output is not None))

    def _publish(self) -> None:
        """Has the news sent; waits while `AHEAD` messages are on their way."""
        news = [self._news.popleft() for _ in range(len(self._news))]
        for key, _, last in news:
            if last:
                self._running.pop(key, None)
        if news:
            self._outbox.put(news)

    def _handle_messages(self) -> bool:
        """Handles what has arrived; if no request runs, first waits for something. Returns False at the end."""
        with contextlib.suppress(queue.Empty):
            message = self._inbox.get(block=not self._running)
            while message is not None:
                method, *arguments = message
                method(self, *arguments)
                message = self._inbox.get_nowait()
            return False
        return True

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._inbox.put(self._pipe.recv())
        self._inbox.put(None)

    def _send(self) -> None:
        while True:
            with contextlib.suppress(OSError):  # the reader is gone, which `_receive` notices
                self._pipe.send(self._outbox.get())
