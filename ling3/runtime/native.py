"""Kernels in C++, compiled when first used, on the machine that runs them, and cached.

A kernel is one source file beside its operator, with the headers there, written against the headers of XLA's foreign
function interface in jaxlib. The C++ compiler (the variable CXX, else `c++`) compiles it for this processor. Without a
compiler, where it fails, and on Windows, operators run in their plain form. A library's name contains a hash of
everything it was made from, so a library of another machine or version is never loaded.

    LING3_NATIVE=off            compiles and loads nothing
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
INSTRUCTIONS = ("SSE2", "AVX2", "FMA", "F16C", "AVX512F", "AVX512BW", "AVX512BF16", "ARM_NEON")
"""Sets of instructions that the kernels use where the processor has them, by the names of the compiler's macros."""
LONGEST = 300.0
"""Seconds after which a compiler is killed."""


@functools.cache
def target(source: pathlib.Path, handler: str, macro: str = "") -> str | None:
    """The name by which `jax.ffi.ffi_call` finds `handler` of a C++ file on a CPU; None if it is not available.

    With a `macro` the file is compiled with that defined, as a library of its own.

    The first call on a machine compiles the file, which takes seconds; other processes wait for it. A file that does
    not compile gives a RuntimeWarning once and is not tried again. Any other failure, such as a CXX that names no
    compiler, gives one each time. ValueError if a variable has an invalid value.
    """
    library, key = _library(source, macro)
    if library is None:
        return None
    name = f"ling3_{handler}_{key}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, handler)), platform="cpu")
    return name


@functools.cache
def instructions() -> tuple[str, ...]:
    """Which of `INSTRUCTIONS` the kernels are compiled with on this machine; none without a compiler."""
    compiler = _compiler()
    macros = (_processor(compiler) or b"").decode(errors="replace") if compiler else ""
    return tuple(name for name in INSTRUCTIONS if f"#define __{name}__ " in macros)


@functools.cache
def _library(source: pathlib.Path, macro: str) -> tuple[ctypes.CDLL | None, str]:
    """The library made from a source, compiled now if it is not cached, and the hash in its name."""
    directory = user_cache.directory(VARIABLE, "native")
    try:
        compiler = [] if directory is None else _compiler()
        processor = _processor(compiler) if compiler else None
        content = b"\0".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    except OSError as error:
        return _without(source, str(error))
    if directory is None or processor is None:
        return None, ""
    command = [*compiler, *FLAGS, *([f"-D{macro}"] if macro else [])]
    made_from = (content, processor, jaxlib.version.__version__.encode(), repr(command).encode())
    key = hashlib.sha256(b"\0".join(made_from)).hexdigest()[:16]
    library = directory / f"{source.stem}-{key}.so"
    failed = library.with_suffix(".failed")
    try:
        with filelock.FileLock(directory / ".lock", timeout=2 * LONGEST):
            if not library.exists():
                if failed.exists():
                    return None, ""
                _compile(command, source, library, failed)
        return ctypes.CDLL(str(library)), key
    except subprocess.CalledProcessError as error:
        advice = f": {failed} has its messages; remove that file to try again" if failed.exists() else ""
        return _without(source, f"{shlex.join(compiler)} ended with {error.returncode}{advice}")
    except (OSError, subprocess.TimeoutExpired) as error:
        return _without(source, str(error))


def _without(source: pathlib.Path, reason: str) -> tuple[None, str]:
    """What `_library` returns without a library, and a warning that says why."""
    warnings.warn(
        f"{source.name} could not be compiled or loaded; its operator runs in its slower plain form. {reason}. "
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
    # On Windows GCC does not align spilled wide registers.
    found = None if sys.platform == "win32" else shutil.which("c++")
    # On a Mac without developer tools, `c++` opens a dialog that offers to install them.
    if found is None or (sys.platform == "darwin" and _output(["xcode-select", "-p"]) is None):
        return []
    return [found]


def _processor(compiler: list[str]) -> bytes | None:
    """The compiler's predefined macros, which tell its version and this machine's instructions; None if it has none.

    OSError if CXX names such a compiler.
    """
    said = _output([*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    if said is None and (named := os.environ.get("CXX")):
        raise OSError(f"CXX is {named!r}, which cannot be run or does not know -march=native")
    return said


def _output(command: list[str]) -> bytes | None:
    """A command's standard output; None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=LONGEST).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(command: list[str], source: pathlib.Path, library: pathlib.Path, failed: pathlib.Path) -> None:
    """Compiles a source into `library`, atomically. Raises what `subprocess.run` does.

    If the compiler refuses the source, its messages go to `failed`. A compiler that was killed may be tried again.
    """
    with tempfile.TemporaryDirectory(dir=library.parent) as aside:
        made = pathlib.Path(aside) / library.name
        whole = [*command, "-isystem", jax.ffi.include_dir(), str(source), "-o", str(made)]
        try:
            subprocess.run(whole, capture_output=True, check=True, timeout=LONGEST)
        except subprocess.CalledProcessError as error:
            if error.returncode > 0:
                failed.write_bytes(error.stderr)
            raise
        made.replace(library)
