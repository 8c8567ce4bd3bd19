"""A progress bar for work that takes long."""

import contextlib
import time
from collections.abc import Callable, Iterator

# ruff: noqa: PLC0415
# Rich is imported when there is work to show, so that importing ling3 does not wait for it.

PATIENCE = 2.0
"""Seconds before a bar is shown."""


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for work of `total` parts (bytes, requests), shown on a terminal once it has taken `PATIENCE`."""
    from rich.console import Console
    from rich.progress import Progress

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
