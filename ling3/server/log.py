"""The server's log: a line of JSON on stderr for each request and each other message."""

import contextvars
import dataclasses
import datetime
import functools
import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Callable

MOST_LINES = 4096
"""The most lines that wait to be written; further ones are dropped and counted."""

logger = logging.getLogger("ling3.server")


@dataclasses.dataclass
class Entry:
    """One request's entry in the access log."""

    request_id: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Tokens sent so far."""


current: contextvars.ContextVar[Entry | None] = contextvars.ContextVar("current", default=None)
"""The entry of the request that the current task answers."""


class Lines(logging.Formatter):
    """Formats a record as a line of JSON, with the `fields` of its `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record as one line of JSON."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        said = {"time": time.isoformat(timespec="milliseconds"), "level": record.levelname.lower()}
        said |= {"message": record.getMessage().strip(), **getattr(record, "fields", {})}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said)


class Writer(logging.Handler):
    """Writes lines on a thread: the reader of stderr may stall, and the event loop must not wait for it."""

    def __init__(self, write: Callable[[bytes], object]):
        super().__init__()
        self._write, self._lines, self._dropped = write, queue.Queue[str](MOST_LINES), 0
        self.setFormatter(Lines())
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queues the record's line for the thread."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:
            self.handleError(record)

    def drain(self, seconds: float) -> None:
        """Waits until all lines are written, for at most `seconds`."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, seconds)

    def _run(self) -> None:
        while True:
            line = self._lines.get()
            dropped, self._dropped = self._dropped, 0
            if dropped:
                text = f"{dropped} lines of the log were dropped, as nobody read them"
                line = f"{self.format(logger.makeRecord(logger.name, logging.WARNING, '', 0, text, (), None))}\n{line}"
            try:
                self._write(line.encode() + b"\n")
            except OSError:  # the reader has gone
                self._dropped += dropped + 1
            self._lines.task_done()


def configure() -> Writer:
    """Sends the log, and the warnings of the engine, uvicorn, asyncio and Python, to stderr, and returns the writer."""
    # Not with `sys.stderr`: a blocked write would hold its lock, which the interpreter takes at exit.
    handler = Writer(functools.partial(_write_all, sys.stderr.fileno()))
    logging.captureWarnings(True)
    warnings = ("ling3.engine", "ling3.fleet", "uvicorn.error", "asyncio", "py.warnings")
    for name, level in {"ling3.server": logging.INFO, **dict.fromkeys(warnings, logging.WARNING)}.items():
        each = logging.getLogger(name)
        each.handlers, each.propagate = [handler], False
        each.setLevel(level)
    return handler


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
