"""Reading untrusted files: only regular ones, up to a size that fits their kind."""

import os
import pathlib
import stat

TOKENIZER_BYTES = 2**27
"""The largest `tokenizer.json` that is read; Gemma 3's, with 262,144 tokens, has 33 million bytes."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
}


def check(path: str | os.PathLike[str]) -> None:
    """Raises ValueError if `path` (or its target) is not a regular file: reading a FIFO or a device may never end.

    Raises OSError if it does not exist.
    """
    kind = stat.S_IFMT(pathlib.Path(path).stat().st_mode)
    if kind != stat.S_IFREG:
        raise ValueError(f"{path}: cannot be read (it is {_KINDS.get(kind, 'no file')}); expected a regular file")


def read(path: str | os.PathLike[str], largest: int) -> bytes:
    """The content of a regular file of at most `largest` bytes. Raises what `check` does, and ValueError if larger."""
    check(path)
    with pathlib.Path(path).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(largest + 1) if size <= largest else b""
    if max(size, len(content)) > largest:
        raise ValueError(f"{path}: found {max(size, len(content)):,} bytes; expected at most {largest:,}")
    return content
