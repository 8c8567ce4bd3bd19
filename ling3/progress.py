"""A progress bar for work that takes long."""

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import Progress

PATIENCE = 2.0
"""Seconds before a bar is shown."""


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for work of `total` parts (bytes, requests), shown on a terminal once it has taken `PATIENCE`."""
    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(what, total=total)
    begin = time.monotonic()
    shown = False

    def advance(parts: int) -> None:
        nonlocal shown
        bar.advance(task, parts)
        if not shown and time.monotonic() - begin > PATIENCE:
            bar.start()
            shown = True

    try:
        yield advance
    finally:
        bar.stop()
