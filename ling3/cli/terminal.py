"""Prints text, JSON and numbers on a terminal."""

import contextlib
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rich.console import Console

# Makes control characters visible: a model may write any bytes to a terminal.
VISIBLE = {**{code: 0x2400 + code for code in range(32)}, 0x7F: 0x2421, **dict.fromkeys(range(0x80, 0xA0), 0xFFFD)}
del VISIBLE[ord("\t")], VISIBLE[ord("\n")]
# Seconds after which something slow, such as compiling, is announced.
PATIENCE = 2.0


def show(text: str) -> None:
    """Writes a model's text to stdout at once; on a terminal, with its control characters made visible."""
    sys.stdout.write(text.translate(VISIBLE) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_json(value: Any, indent: int | None = None) -> None:
    """Writes a value to stdout at once as JSON, with escapes if stdout's encoding lacks characters of it."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        text = json.dumps(value, indent=indent)
    print(text, flush=True)


def count(number: int) -> str:
    """A number in three significant digits with a unit, as in 2.37M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


@contextlib.contextmanager
def compiling(console: Console) -> Iterator[None]:
    """Prints on stderr that programs are being compiled, once that has taken `PATIENCE` seconds."""
    with announced("compiling (first time)…", console):
        yield


@contextlib.contextmanager
def announced(words: str, console: Console | None = None) -> Iterator[None]:
    """Prints `words` on stderr once the block has taken `PATIENCE` seconds."""
    console = Console(stderr=True, highlight=False) if console is None else console
    how = {"style": "dim", "markup": False, "soft_wrap": True}
    timer = threading.Timer(PATIENCE, console.print, [words], how)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
