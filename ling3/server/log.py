"""The server's log: a line of JSON on stderr for each request, and for whatever else there is to say."""

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
"""Lines that wait to be written; later ones are dropped, and counted."""

logger = logging.getLogger("ling3.server")


@dataclasses.dataclass
class Entry:
    """The log's entry about a request."""

    request_id: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Those sent so far."""


current: contextvars.ContextVar[Entry | None] = contextvars.ContextVar("current", default=None)
"""The request that this task answers."""


class Lines(logging.Formatter):
    """A record as a line of JSON, with the `fields` of its `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of the log for a record, as JSON."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        said = {"time": time.isoformat(timespec="milliseconds"), "level": record.levelname.lower()}
        said |= {"message": record.getMessage().strip(), **getattr(record, "fields", {})}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said)


class Writer(logging.Handler):
    """Writes lines on a thread, as whoever reads them may stop, and the event loop must not wait for that."""

    def __init__(self, write: Callable[[bytes], object]):
        super().__init__()
        self._write, self._lines, self._dropped = write, queue.Queue[str](MOST_LINES), 0
        self.setFormatter(Lines())
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Hands the record's line to the thread."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:
            self.handleError(record)

    def drain(self, seconds: float) -> None:
        """Waits until all lines are written, at most so long."""
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
            except OSError:  # whoever read has gone
                self._dropped += dropped + 1
            self._lines.task_done()


def configure() -> Writer:
    """Sends the log, and the warnings of uvicorn, asyncio and Python, to stderr."""
    # Not by `sys.stderr`, whose lock the interpreter wants at its end.
    handler = Writer(functools.partial(_write_all, sys.stderr.fileno()))
    logging.captureWarnings(True)
    levels = {"ling3.server": logging.INFO, "uvicorn.error": logging.WARNING}
    for name, level in {**levels, "asyncio": logging.WARNING, "py.warnings": logging.WARNING}.items():
        each = logging.getLogger(name)
        each.handlers, each.propagate = [handler], False
        each.setLevel(level)
    return handler


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
