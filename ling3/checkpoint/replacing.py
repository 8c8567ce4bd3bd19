"""Atomic replacement of a directory's files: all or none, on errors and after a crash.

The work on `DIR` happens in `DIR/.ling3.partial`, or beside `DIR` if that does not exist yet:

    lock      held by the process that saves
    new       the files that it writes
    old       the files that they replace, moved here
    ready     `new`, renamed once every old file is in `old`; its files are then moved to `DIR`
    replaced  `old`, renamed once all new files are in `DIR`

After a crash, a process that finds `ready` completes the replacement, and one that finds only `old` undoes it.
`config.json` is moved out first and in last, so no program takes a half-replaced `DIR` for a checkpoint.
"""

import contextlib
import errno
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator

import filelock

from ling3.checkpoint.safetensors_file import CheckpointError
from ling3.runtime import interrupts

WORK = ".ling3.partial"
TRAINING = "training"
"""The directory of a fine-tuning's state and log in the directory of its result, where it stays."""
PATIENCE = 10.0
"""Seconds that a reader waits for another process to move its files."""

_LOCK, _NEW, _OLD, _READY, _REPLACED = "lock", "new", "old", "ready", "replaced"
_FIRST = "config.json"


_ADVICE = {
    errno.ENOSPC: "make room on the disk",
    errno.EDQUOT: "make room in your quota",
    errno.EACCES: "get the right to write there",
    errno.EPERM: "get the right to write there",
    errno.EROFS: "mount it for writing",
    errno.EBUSY: "end the program that uses it",
}


@contextlib.contextmanager
def advised(target: pathlib.Path, what: str) -> Iterator[None]:
    """Adds to the errors of a replacement in `target` what could not be saved there, and what to do.

    Raises CheckpointError if another process saves there, and OSError if a file cannot be written.
    """
    try:
        yield
    except filelock.Timeout as error:
        raise CheckpointError(
            f"{target}: another process is saving there; wait for it, or give another directory"
        ) from error
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "remove the cause")
        raise OSError(
            error.errno,
            f"{what} could not be saved there, and nothing was replaced ({error}); {advice}, or give another directory",
            str(target),
        ) from error


@contextlib.contextmanager
def workspace(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields an empty directory for the new files of the directory `target`, for `commit`; removes it at the end.

    Completes or undoes what killed processes left. Raises filelock.Timeout if another process saves here, and OSError.
    """
    beside = target.parent / f".{target.name}{WORK}"
    if target.is_dir():
        if beside.exists():
            with _owned(beside):
                pass
        with _owned(target / WORK) as new:
            yield new
    else:
        with _owned(beside) as new:
            yield new


def commit(new: pathlib.Path, target: pathlib.Path, old: Iterable[str]) -> None:
    """Moves the files in `new`, the `workspace` of `target`, into `target`, where they replace the files `old`.

    Ctrl-C is held back meanwhile. If this raises an OSError, `target` is as it was before.
    """
    work = new.parent
    if work.parent != target:
        new.rename(target)
        return
    names = [path.name for path in new.iterdir()]
    with interrupts.held_back():
        (work / _OLD).mkdir()
        try:
            for name in sorted(old, key=lambda name: name != _FIRST):
                (target / name).rename(work / _OLD / name)
            new.rename(work / _READY)
            _settle(work)
        except BaseException:
            if (work / _OLD).exists():  # else all new files are in place
                if (work / _READY).exists():
                    for name in names:
                        if not (work / _READY / name).exists():
                            (target / name).rename(work / _READY / name)
                    (work / _READY).rename(new)
                _settle(work)
            raise


def recover(directory: pathlib.Path) -> None:
    """Completes or undoes a replacement in `directory` whose process was killed, if there is one.

    Raises OSError if that fails, or if another process is replacing files and does not finish within `PATIENCE`.
    """
    work = directory / WORK
    if not _is_directory(work) or not (_is_directory(work / _READY) or _is_directory(work / _OLD)):
        return
    try:
        with _owned(work, PATIENCE):
            pass
    except filelock.Timeout as error:
        raise TimeoutError(f"{directory}: another process is replacing this checkpoint; try again later") from error
    except OSError as error:
        raise OSError(
            error.errno, f"an interrupted save to this directory cannot be completed ({error})", str(directory)
        ) from error


@contextlib.contextmanager
def _owned(work: pathlib.Path, timeout: float = 0) -> Iterator[pathlib.Path]:
    """Locks `work`, completes or undoes what a killed process left in it, and yields an empty directory `new` in it."""
    lock = filelock.FileLock(work / _LOCK)
    while not lock.is_locked:
        work.mkdir(parents=True, exist_ok=True)
        if work.is_symlink():
            raise FileExistsError(errno.EEXIST, "is a link, which may lead anywhere; remove it", str(work))
        # Until the lock is held, another process may remove the directory, and the lock's file with it.
        with contextlib.suppress(FileNotFoundError):
            lock.acquire(timeout)
        if not (work / _LOCK).exists():
            lock.release()
    try:
        _settle(work)
        for name in (_NEW, _REPLACED):
            if (work / name).exists():
                shutil.rmtree(work / name)
        (work / _NEW).mkdir()
        try:
            yield work / _NEW
        finally:
            for name in (_NEW, _REPLACED):
                shutil.rmtree(work / name, ignore_errors=True)
            if not (_is_directory(work / _READY) or _is_directory(work / _OLD)):
                shutil.rmtree(work, ignore_errors=True)
    finally:
        lock.release()


def _settle(work: pathlib.Path) -> None:
    """Completes a replacement if there is `ready`, or else undoes it if there is `old`."""
    ready, old = work / _READY, work / _OLD
    if _is_directory(ready):
        _move(ready, work.parent)
        if old.exists():
            old.rename(work / _REPLACED)
        ready.rmdir()
    elif _is_directory(old):
        _move(old, work.parent)
        old.rmdir()


def _move(source: pathlib.Path, target: pathlib.Path) -> None:
    for path in sorted(source.iterdir(), key=lambda path: path.name == _FIRST):
        path.rename(target / path.name)


def _is_directory(path: pathlib.Path) -> bool:
    # Unlike pathlib's, these do not raise. A link in an untrusted checkpoint may lead anywhere.
    return os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114
