"""Kernels in C++, compiled when first used, on the machine that runs them, and cached.

A kernel is one source file beside its operator, with the headers there, written against the headers of XLA's foreign
function interface in jaxlib. The C++ compiler (the variable CXX, else `c++`) compiles it for this processor. Without a
compiler, or if it fails, operators run in their plain form, and each process warns of every kernel that it lacks. It
does not warn if kernels are off, or on Windows without CXX, where `c++` is not tried.

A library's name contains a hash of everything it was made from, so a library of another machine or version is never
loaded, and a hash of its content: a truncated or changed file is compiled again, as calling it would crash the
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
"""Instruction sets that the kernels use if the processor has them, as the compiler's macros name them."""
LONGEST = 300.0
"""Seconds after which a compiler is killed."""


def missing(source: pathlib.Path, macro: str = "") -> str | None:
    """Why the kernels of a C++ file are not available; None if they are.

    With a `macro` the file is compiled with that macro defined, as a separate library.

    The first call on a machine compiles the file, which takes seconds; other processes wait for it. A file that does
    not compile is not tried again by later processes. Emits a RuntimeWarning in each process if the kernel is missing,
    except as this module's docstring says. Raises ValueError if an environment variable has an invalid value.
    """
    library, why = _library(source, macro)
    return None if library is not None else why


@functools.cache
def target(source: pathlib.Path, handler: str, macro: str = "") -> str:
    """The name for `jax.ffi.ffi_call` of a C++ file's `handler`, on CPUs. Raises OSError if the file is `missing`."""
    library, key = _library(source, macro)
    if library is None:
        raise OSError(key)
    name = f"ling3_{handler}_{key}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, handler)), platform="cpu")
    return name


@functools.cache
def instructions() -> tuple[str, ...]:
    """The `INSTRUCTIONS` with which kernels are compiled on this machine; empty without a compiler."""
    compiler = _compiler()
    macros = _processor(compiler).decode(errors="replace") if compiler else ""
    return tuple(name for name in INSTRUCTIONS if f"#define __{name}__ " in macros)


@functools.cache
def _library(source: pathlib.Path, macro: str) -> tuple[ctypes.CDLL | None, str]:
    """The library made from a source, compiled now if it is not cached or is damaged, and the hash of its sources.

    If there is none, None and the reason, after a warning (not if kernels are off, nor on Windows without CXX).
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
    """The library `stem`-hash.so whose content has the hash in its name, compiled now if there is none.

    Libraries whose content does not are damaged, and removed. Raises OSError or SubprocessError if it cannot compile.
    """
    failed = stem.with_suffix(".failed")
    with filelock.FileLock(stem.with_suffix(".lock"), timeout=2 * LONGEST):
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
    # None is searched for on Windows, where GCC does not align spilled wide registers.
    found = None if sys.platform == "win32" else shutil.which("c++")
    # On a Mac without developer tools, `c++` opens a dialog that offers to install them.
    if found is None or (sys.platform == "darwin" and _output(["xcode-select", "-p"]) is None):
        return []
    return [found]


def _processor(compiler: list[str]) -> bytes:
    """The compiler's predefined macros, which show its version and this machine's instructions.

    Raises OSError if there is no compiler, or if it cannot be run.
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

    Raises OSError if the compiler fails. If it refused the source, its messages go to `failed`, and later calls do not
    try again; after a compiler that was killed they do.
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
