"""Quoting untrusted text in messages: escaped, so that it cannot control a terminal, and cut to fit a screen."""

import os
from typing import Any

LONGEST_VALUE, LONGEST_LINE, MOST_LINES = 80, 600, 24

_FILES: dict[str, str] = {}
"""The files that messages name in place of temporary directories, by the directory."""


def unpacked(directory: os.PathLike[str], file: os.PathLike[str]) -> None:
    """Makes messages name `file` in place of the temporary `directory`, which has its contents."""
    _FILES[os.fspath(directory)] = os.fspath(file)


def named(text: object) -> str:
    """`text` with the names of files in place of the temporary directories that have their contents."""
    written = str(text)
    for directory, file in _FILES.items():
        written = written.replace(f"{directory}{os.sep}", f"{file}, ").replace(directory, file)
    return written


def shown(value: Any) -> str:
    """The repr of `value` on one line, cut to `LONGEST_VALUE` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python writes no number of over 4,300 digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return printable(text, LONGEST_VALUE)


def printable(text: object, longest: int = LONGEST_LINE) -> str:
    """`text` on one line of at most `longest` characters; control characters are written as `\\x1b`."""
    written = str(text)[: longest + 1]
    # Lone surrogates and characters that change the direction of text are not printable either.
    written = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in written)
    return written if len(written) <= longest else f"{written[: longest - 3]}..."


def message(text: str, longest: int = LONGEST_LINE) -> str:
    """An error's message with printable lines that name no temporary directory, cut to fit on a screen."""
    lines = named(text).split("\n")
    more = [f"  ... and {len(lines) - MOST_LINES + 1:,} more"] if len(lines) > MOST_LINES else []
    return "\n".join([printable(line, longest) for line in lines[: MOST_LINES - len(more)]] + more)


class QuotingError(ValueError):
    """An error that quotes untrusted text: its message is printable and fits on a screen."""

    def __init__(self, text: str):
        super().__init__(message(text))
