"""A progress bar for work that takes long."""

import contextlib
import time
from collections.abc import Callable, Iterator

# ruff: noqa: PLC0415
# Rich is imported when there is a bar to show, so that importing ling3 does not wait for it.

PATIENCE = 2.0
"""Seconds before a bar is shown."""


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr for work of `total` parts (bytes, requests), shown on a terminal once it has taken `PATIENCE`."""
    begin, done, bar = time.monotonic(), 0, None

    def advance(parts: int) -> None:
        nonlocal done, bar
        done += parts
        if bar is None and time.monotonic() - begin > PATIENCE:
            from rich.console import Console
            from rich.progress import Progress

            console = Console(stderr=True)
            bar = Progress(console=console, transient=True, disable=not console.is_terminal)
            bar.add_task(what, total=total)
            bar.start()
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done)

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()
