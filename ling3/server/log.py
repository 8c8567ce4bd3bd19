"""The server's log: a line of JSON on stderr for each request, and for whatever else there is to say."""

import contextvars
import dataclasses
import datetime
import json
import logging

logger = logging.getLogger("ling3.server")


@dataclasses.dataclass
class Entry:
    """What the log says of a request beside its answer."""

    request_id: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Those sent so far."""


current: contextvars.ContextVar[Entry | None] = contextvars.ContextVar("current", default=None)
"""The request that this task answers."""


class Lines(logging.Formatter):
    """A record as a line of JSON, with the `fields` of its `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        said = {"time": time.isoformat(timespec="milliseconds"), "level": record.levelname.lower()}
        said |= {"message": record.getMessage().strip(), **getattr(record, "fields", {})}
        if record.exc_info:
            said["traceback"] = self.formatException(record.exc_info)
        return json.dumps(said)


def configure() -> None:
    """Sends the log, and uvicorn's warnings, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines())
    for name, level in (("ling3.server", logging.INFO), ("uvicorn.error", logging.WARNING)):
        each = logging.getLogger(name)
        each.handlers, each.propagate = [handler], False
        each.setLevel(level)
