"""Kernels in C++, compiled when first used, on the machine that runs them, and cached.

A kernel is one source file beside its operator, with the headers there, written against the headers of XLA's foreign
function interface in jaxlib. The C++ compiler (the variable CXX, else `c++`) compiles it for this processor. Without a
compiler, where it fails, and on Windows, operators run in their plain form; each process warns of every kernel that it
does without, unless it was set to or runs on Windows.

A library's name contains a hash of everything it was made from, so a library of another machine or version is never
loaded, and a hash of its content: a file that was cut or changed is compiled again, as calling it would end the
process. Files are only ever replaced, never written to, since other processes may have them mapped.

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


def missing(source: pathlib.Path, macro: str = "") -> str | None:
    """Why the kernels of a C++ file are not available; None if they are.

    With a `macro` the file is compiled with that defined, as a library of its own.

    The first call on a machine compiles the file, which takes seconds; other processes wait for it. A file that does
    not compile is not tried again by later processes. RuntimeWarning, in each process, if the kernel is missing for any
    reason but `LING3_NATIVE=off` and Windows. ValueError if a variable has an invalid value.
    """
    library, why = _library(source, macro)
    return None if library is not None else why


@functools.cache
def target(source: pathlib.Path, handler: str, macro: str = "") -> str:
    """The name by which `jax.ffi.ffi_call` finds `handler` of a C++ file on a CPU. OSError if it is `missing`."""
    library, key = _library(source, macro)
    if library is None:
        raise OSError(key)
    name = f"ling3_{handler}_{key}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, handler)), platform="cpu")
    return name


@functools.cache
def instructions() -> tuple[str, ...]:
    """The `INSTRUCTIONS` with which kernels are compiled on this machine; none without a compiler."""
    compiler = _compiler()
    macros = _processor(compiler).decode(errors="replace") if compiler else ""
    return tuple(name for name in INSTRUCTIONS if f"#define __{name}__ " in macros)


@functools.cache
def _library(source: pathlib.Path, macro: str) -> tuple[ctypes.CDLL | None, str]:
    """The library made from a source, compiled now if it is not cached or is damaged, and the hash of its sources.

    Without one, None and why, of which there is a warning.
    """
    if os.environ.get(VARIABLE) == "off":
        return None, f"{VARIABLE} is off"
    directory, compiler = user_cache.directory(VARIABLE, "native"), _compiler()
    if not compiler and sys.platform == "win32":
        return None, "there is no C++ compiler, for which CXX could name one"
    try:
        if directory is None:
            raise OSError(f"Its cache directory cannot be written, or others may write to it: name one in {VARIABLE}")
        command = [*compiler, *FLAGS, *([f"-D{macro}"] if macro else [])]
        texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h")))]
        version = jaxlib.version.__version__.encode()
        key = _hash(b"\0".join((*texts, _processor(compiler), version, repr(command).encode())))
        return ctypes.CDLL(str(_cached(directory / f"{source.stem}-{key}", source, command))), key
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"{source.name} could not be compiled or loaded; its operator runs in its slower plain form. {error}. "
            f"{VARIABLE}=off compiles and loads nothing.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None, f"{source.name} could not be compiled or loaded. {error}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _cached(stem: pathlib.Path, source: pathlib.Path, command: list[str]) -> pathlib.Path:
    """The library of this name whose content has the hash that its name says, compiled now if there is none.

    Others of this name are damaged, and removed. OSError or SubprocessError if the source does not compile.
    """
    failed = stem.with_suffix(".failed")
    with filelock.FileLock(stem.with_name(".lock"), timeout=2 * LONGEST):
        for library in stem.parent.glob(f"{stem.name}-*.so"):
            if library.stem == f"{stem.name}-{_hash(library.read_bytes())}":
                return library
            library.unlink()
        if failed.exists():
            raise OSError(f"{command[0]} has refused it{_advice(failed)}")
        return _compile(command, source, stem, failed)


def _advice(failed: pathlib.Path) -> str:
    return f": {failed} has its messages; remove that file to try again" if failed.exists() else ""


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


def _processor(compiler: list[str]) -> bytes:
    """The compiler's predefined macros, which tell its version and this machine's instructions.

    OSError if there is no compiler, or none that can be run.
    """
    if not compiler:
        raise OSError("There is no C++ compiler: install one that is called c++, or name one in CXX")
    said = _output([*compiler, "-march=native", "-dM", "-E", "-x", "c++", os.devnull])
    if said is None:
        named = "CXX is " if os.environ.get("CXX") else "The compiler is "
        raise OSError(f"{named}{shlex.join(compiler)!r}, which cannot be run or does not know -march=native")
    return said


def _output(command: list[str]) -> bytes | None:
    """A command's standard output; None if it fails."""
    try:
        return subprocess.run(command, capture_output=True, check=True, timeout=LONGEST).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _compile(command: list[str], source: pathlib.Path, stem: pathlib.Path, failed: pathlib.Path) -> pathlib.Path:
    """Compiles a source into a library whose name is `stem` and the hash of its content, atomically; returns its path.

    OSError if the compiler refuses the source, whose messages then go to `failed`. A compiler that was killed may be
    tried again.
    """
    with tempfile.TemporaryDirectory(dir=stem.parent) as aside:
        made = pathlib.Path(aside) / f"{stem.name}.so"
        options = ["-isystem", jax.ffi.include_dir(), str(source), "-o", str(made)]
        try:
            subprocess.run([*command, *options], capture_output=True, check=True, timeout=LONGEST)
        except subprocess.CalledProcessError as error:
            if error.returncode > 0:
                failed.write_bytes(error.stderr)
            raise OSError(f"{command[0]} ended with {error.returncode}{_advice(failed)}") from error
        return made.replace(stem.with_name(f"{stem.name}-{_hash(made.read_bytes())}.so"))
