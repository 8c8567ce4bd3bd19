"""A progress bar for work that takes a long time."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

# ruff: noqa: PLC0415
# Rich is imported when there is a bar to show, so that importing ling3 does not wait for it.

PATIENCE = 2.0
"""Seconds before a bar is shown."""


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar on stderr for work of `total` parts (bytes, requests), shown on a terminal once it has taken `PATIENCE`.

    Yields `advance(parts, what=None)`, which adds finished parts and may change the description.
    """
    state: dict[str, Any] = {"completed": 0, "description": what}
    bars = []

    def show() -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        bar = Progress(console=console, transient=True, disable=not console.is_terminal)
        bar.add_task(total=total, **state)
        bar.start()
        bars.append(bar)

    def advance(parts: int, what: str | None = None) -> None:
        state["completed"] += parts
        state["description"] = what or state["description"]
        for bar in bars:
            bar.update(bar.task_ids[0], **state)

    # A timer shows the bar even while the first part is still being done.
    timer = threading.Timer(PATIENCE, show)
    timer.daemon = True
    timer.start()
    try:
        yield advance
    finally:
        timer.cancel()
        timer.join()
        for bar in bars:
            bar.stop()
