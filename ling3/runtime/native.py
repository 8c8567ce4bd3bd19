"""Kernels in C++, compiled on the machine that they run on, when they are first wanted, and kept.

A kernel is one source file beside its operator, against the headers of XLA's foreign function interface that jaxlib
carries. It is compiled for the very processor by the C++ compiler that is there (the variable CXX, else `c++`); where
none is, and on Windows, operators run in their plain form, as they do where the compiler fails. A library's name has a
hash of all that it was made from: no other machine's or version's is taken for one's own.

    LING3_NATIVE=off            compiles nothing, and loads nothing
    LING3_NATIVE=/some/where    keeps libraries there
    (unset)                     keeps them in `ling3/native` of the user's cache directory
"""

import ctypes
import functools
import hashlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings

import filelock
import jax
import jaxlib.version

from ling3.runtime import user_cache

VARIABLE = "LING3_NATIVE"
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-w")
LONGEST = 300.0
"""Seconds after which a compiler is given up."""


@functools.cache
def target(source: pathlib.Path, handler: str) -> str | None:
    """The name by which `jax.ffi.ffi_call` finds `handler` of a C++ file on a CPU; None where it cannot be had.

    The first call on a machine compiles the file, which takes seconds; others wait for it. A file that does not compile
    is a RuntimeWarning the first time, and not tried again; whatever else goes wrong, also that what CXX names is no
    compiler, is one each time. ValueError if a variable makes no sense.
    """
    library, key = _library(source)
    if library is None:
        return None
    name = f"ling3_{handler}_{key}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, handler)), platform="cpu")
    return name


@functools.cache
def _library(source: pathlib.Path) -> tuple[ctypes.CDLL | None, str]:
    """The library made from a source, if need be now, and the hash in its name."""
    directory = user_cache.directory(VARIABLE, "native")
    try:
        compiler = [] if directory is None else _compiler()
        processor = _processor(compiler) if compiler else None
        content = source.read_bytes()
    except OSError as error:
        return _without(source, str(error))
    if directory is None or processor is None:
        return None, ""
    made_from = (content, processor, jaxlib.version.__version__.encode(), repr((compiler, FLAGS)).encode())
    key = hashlib.sha256(b"\0".join(made_from)).hexdigest()[:16]
    library = directory / f"{source.stem}-{key}.so"
    failed = library.with_suffix(".failed")
    try:
        with filelock.FileLock(directory / ".lock", timeout=2 * LONGEST):
            if not library.exists():
                if failed.exists():
                    return None, ""
                _compile(compiler, source, library, failed)
        return ctypes.CDLL(str(library)), key
    except subprocess.CalledProcessError as error:
        words = f": {failed} has its words, and is to be removed for another try" if failed.exists() else ""
        return _without(source, f"{shlex.join(compiler)} ended with {error.returncode}{words}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return _without(source, str(error))


def _without(source: pathlib.Path, reason: str) -> tuple[None, str]:
    """No library, and a warning that says why."""
    warnings.warn(
        f"{source.name} could not be compiled or loaded, and its operator runs in its plain form, slower. {reason}. "
        f"{VARIABLE}=off compiles and loads nothing.",
        RuntimeWarning,
        stacklevel=2,
    )
    return None, ""


def _compiler() -> list[str]:
    """The command of a C++ compiler; empty if there is none."""
    if named := os.environ.get("CXX"):
        try:
            return shlex.split(named)
        except ValueError as error:
            raise ValueError(f"CXX is {named!r}, expected the command of a C++ compiler: {error}") from None
    # On Windows GCC does not align what it keeps in wide registers.
    found = None if sys.platform == "win32" else shutil.which("c++")
    # A Mac without developer tools has a `c++` that asks its user to install them.
    if found is None or (sys.platform == "darwin" and _output(["xcode-select", "-p"]) is None):
        return []
    return [found]


def _processor(compiler: list[str]) -> bytes | None:
    """What the compiler says of itself and of this machine's instructions; None if it does not know them.

    OSError if it is CXX that names such a compiler, or none.
    """
    said = _output([*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    if said is None and (named := os.environ.get("CXX")):
        raise OSError(f"CXX is {named!r}, which cannot be run or does not know -march=native")
    return said


def _output(command: list[str]) -> bytes | None:
    """What a command writes; None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=LONGEST).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(compiler: list[str], source: pathlib.Path, library: pathlib.Path, failed: pathlib.Path) -> None:
    """Compiles a source; the library is there whole or not at all. Raises what `subprocess.run` does.

    What a compiler says that refuses the source goes to `failed`; one that was killed may fare better another time.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as aside:
        made = pathlib.Path(aside) / library.name
        command = [*compiler, *FLAGS, "-isystem", jax.ffi.include_dir(), str(source), "-o", str(made)]
        try:
            subprocess.run(command, capture_output=True, check=True, timeout=LONGEST)
        except subprocess.CalledProcessError as error:
            if error.returncode > 0:
                failed.write_bytes(error.stderr)
            raise
        made.replace(library)
