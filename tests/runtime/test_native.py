"""Kernels in C++ are compiled once for a machine, and never stand in the way."""

import concurrent.futures
import hashlib
import os
import pathlib
import platform
import stat

import pytest
from native_kernels import forget, needs_compiler

from ling3.runtime import native, user_cache

# The smallest handler there is.
SOURCE = """
#include "xla/ffi/api/ffi.h"
static xla::ffi::Error Nothing() { return xla::ffi::Error::Success(); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(nothing, Nothing, xla::ffi::Ffi::Bind());
"""


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """The directory in which libraries are kept."""
    forget()
    directory = tmp_path / "native"
    monkeypatch.setenv(native.VARIABLE, str(directory))
    yield directory
    forget()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "nothing.cc"
    path.write_text(f"{SOURCE}// {tmp_path}: a process may load a library of this name once\n")
    return path


def files(directory):
    """The files in a directory, but for locks."""
    return [path for path in directory.iterdir() if path.suffix != ".lock"]


def compiler_of(tmp_path, monkeypatch, script):
    """A compiler that is a shell script."""
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))


@needs_compiler
def test_a_source_is_compiled_once(kept, source, monkeypatch):
    name = native.target(source, "nothing")
    (library,) = kept.glob("*.so")
    stem, digest = library.stem.rsplit("-", 1)
    assert name == f"ling3_nothing_{stem.removeprefix('nothing-')}"
    assert digest == hashlib.sha256(library.read_bytes()).hexdigest()[:16]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    forget()

    def never(*arguments):
        raise AssertionError("compiled again")

    monkeypatch.setattr(native, "_compile", never)
    assert native.target(source, "nothing") == name


def cut(content):
    return content[: len(content) // 2]


def flipped(content):
    return content[: len(content) // 2] + bytes([content[len(content) // 2] ^ 1]) + content[len(content) // 2 + 1 :]


@pytest.mark.slow
@needs_compiler
def test_a_damaged_library_is_compiled_again(kept, source, monkeypatch):
    """Loading one that was cut ends the process by SIGBUS."""
    native._library(source, "")
    (library,) = kept.glob("*.so")
    content, compiled = library.read_bytes(), []

    def again(command, source, stem, failed):
        compiled.append(source)
        (kept / "fresh").write_bytes(content)
        return (kept / "fresh").replace(library)

    monkeypatch.setattr(native, "_compile", again)
    for damage in (lambda content: b"", cut, lambda content: content[:-1], flipped):
        (kept / "damaged").write_bytes(damage(content))
        (kept / "damaged").replace(library)  # this process has the former file mapped
        forget()
        loaded, _ = native._library(source, "")
        assert loaded is not None and hasattr(loaded, "nothing") and library.read_bytes() == content
    assert len(compiled) == 4


@pytest.mark.slow
@needs_compiler
def test_a_library_is_replaced_and_never_written_to(kept, source):
    """Other processes may have it mapped: they keep the file that they opened."""
    native._library(source, "")
    (library,) = kept.glob("*.so")
    half = cut(library.read_bytes())
    (kept / "damaged").write_bytes(half)
    (kept / "damaged").replace(library)
    forget()
    with library.open("rb") as opened:
        loaded, _ = native._library(source, "")
        assert loaded is not None and opened.read() == half


@pytest.mark.slow
@needs_compiler
def test_of_several_that_want_a_library_one_compiles_it(kept, source, monkeypatch):
    """The lock holds between threads as between processes, as each opens its file anew."""
    compiled, compile_now = [], native._compile

    def counted(*arguments):
        compiled.append(arguments)
        return compile_now(*arguments)

    monkeypatch.setattr(native, "_compile", counted)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: native._library.__wrapped__(source, ""), range(4)))
    assert len(compiled) == 1 and all(library is not None for library, _ in found)


@pytest.mark.slow
@needs_compiler
def test_a_macro_makes_a_library_of_its_own(kept, source):
    one, other = native.target(source, "nothing"), native.target(source, "nothing", "SOME")
    assert one is not None and other is not None and one != other
    assert len(list(kept.glob("*.so"))) == 2


@needs_compiler
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the flags are for another processor")
def test_instructions_are_those_that_the_compiler_uses(kept, monkeypatch):
    monkeypatch.setenv("CXX", "c++ -mno-avx")
    assert native.instructions() == ("SSE2",)
    forget()
    monkeypatch.setenv("CXX", "c++ -mavx512bf16 -mavx512bw")
    assert native.instructions()[:1] == ("SSE2",) and {"AVX512BF16", "AVX512BW"} <= set(native.instructions())


@pytest.mark.slow
@needs_compiler
def test_another_source_is_another_library(kept, source):
    name = native.target(source, "nothing")
    forget()
    source.write_text(source.read_text() + "// changed\n")
    assert native.target(source, "nothing") not in (name, None)
    assert len(list(kept.glob("*.so"))) == 2


@needs_compiler
def test_what_does_not_compile_is_tried_once_and_said_by_each_process(kept, source, monkeypatch):
    source.write_text("this is no C++")
    with pytest.warns(
        RuntimeWarning, match=r"nothing\.cc could not .* ended with 1: .*\.failed has .*LING3_NATIVE=off"
    ):
        assert native.missing(source) is not None
    (failed,) = files(kept)
    assert failed.suffix == ".failed" and "error" in failed.read_text()

    def never(*arguments):
        raise AssertionError("compiled again")

    monkeypatch.setattr(native, "_compile", never)
    for _ in range(2):
        forget()
        with pytest.warns(
            RuntimeWarning, match=r"nothing\.cc could not .*\.failed has .* remove that file to try again"
        ):
            assert native.missing(source) is not None


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_no_error(kept, source, monkeypatch):
    def half(compiler, source, stem, failed):
        library = stem.with_name(f"{stem.name}-{native._hash(b'half of it')}.so")
        library.write_bytes(b"half of it")
        return library

    monkeypatch.setattr(native, "_compile", half)
    with pytest.warns(RuntimeWarning, match=r"could not be compiled or loaded.*nothing-.*\.so: file too short"):
        assert native.missing(source) is not None
    assert [path.suffix for path in files(kept)] == [".so"]


def test_a_compiler_that_breaks_down_leaves_nothing_half_done(kept, source, tmp_path, monkeypatch):
    broken = 'case "$*" in *-dM*) exit 0;; esac; for last; do :; done; echo half > "$last"; echo no room >&2; exit 3'
    compiler_of(tmp_path, monkeypatch, broken)
    with pytest.warns(RuntimeWarning, match=r"nothing\.cc could not be compiled .*compiler ended with 3"):
        assert native.missing(source) is not None
    (failed,) = files(kept)
    assert failed.suffix == ".failed" and failed.read_text() == "no room\n"


def test_a_compiler_that_was_killed_is_tried_again(kept, source, tmp_path, monkeypatch):
    compiler_of(tmp_path, monkeypatch, 'case "$*" in *-dM*) exit 0;; esac; kill -9 $$')
    for _ in range(2):
        forget()
        with pytest.warns(RuntimeWarning, match="compiler ended with -9"):
            assert native.missing(source) is not None
        assert not files(kept)


def test_a_source_that_is_not_there_is_no_error(kept, tmp_path, monkeypatch):
    compiler_of(tmp_path, monkeypatch, "exit 0")
    with pytest.warns(RuntimeWarning, match=r"No such file .*absent\.cc"):
        assert native.missing(tmp_path / "absent.cc") is not None


def test_a_compiler_nobody_can_read(kept, source, monkeypatch):
    monkeypatch.setenv("CXX", "g++ 'quoted")
    with pytest.raises(ValueError, match=r"CXX is .*expected the command of a C\+\+ compiler: No closing quotation"):
        native.target(source, "nothing")
    monkeypatch.setenv(native.VARIABLE, "off")
    forget()
    assert native.missing(source) is not None


@pytest.mark.parametrize(
    ("platform", "tools", "found"),
    [("linux", None, True), ("win32", b"", False), ("darwin", None, False), ("darwin", b"/Library", True)],
)
def test_where_the_systems_own_compiler_is_used(monkeypatch, platform, tools, found):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/c++")
    monkeypatch.setattr(native, "_output", lambda command: tools if command == ["xcode-select", "-p"] else b"macros")
    assert native._compiler() == (["/usr/bin/c++"] if found else [])


@pytest.mark.parametrize("script", ["exit 1", None], ids=["knows no native", "is not there"])
def test_what_cxx_names_and_is_no_compiler_is_said(kept, source, tmp_path, monkeypatch, script):
    if script is None:
        monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    else:
        compiler_of(tmp_path, monkeypatch, script)
    with pytest.warns(RuntimeWarning, match=r"nothing\.cc .* plain form.*CXX is '.*compiler', which cannot be run"):
        assert native.missing(source) is not None
    assert not files(kept)


def test_no_compiler_on_the_path(kept, source, tmp_path, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.warns(RuntimeWarning, match=r"nothing\.cc .* plain form\. There is no C\+\+ compiler: install one"):
        assert native.missing(source) is not None
    monkeypatch.setattr("sys.platform", "win32")  # where no compiler would do
    forget()
    assert native.missing(source) is not None


@pytest.mark.parametrize("wanted", ["off", "relative"])
def test_off_is_off_and_a_relative_path_is_refused(kept, source, monkeypatch, wanted):
    monkeypatch.setenv(native.VARIABLE, wanted)
    if wanted == "off":
        assert native.missing(source) is not None
    else:
        with pytest.raises(ValueError, match="LING3_NATIVE is 'relative', expected off or the absolute path"):
            native.target(source, "nothing")
    assert not kept.exists()


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners here")
def test_a_directory_that_others_may_write_is_not_used(kept, source):
    kept.mkdir()
    kept.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="Its cache directory cannot be written, or others may write to it"):
        assert native.missing(source) is not None
    assert not files(kept)


def test_it_is_the_users_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv(native.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    assert user_cache.directory(native.VARIABLE, "native") == pathlib.Path(tmp_path) / "ling3" / "native"
