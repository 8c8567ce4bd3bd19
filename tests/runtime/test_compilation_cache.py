import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
import random_checkpoint
from tiny import TINY

from ling3.runtime import compilation_cache, user_cache
from ling3.train.tokenizer import train_tokenizer, write_tokenizer

# What a process compiles: requests to the cache and hits in it, counted by JAX's own events.
GENERATE = """
import collections, json, sys
import jax
from ling3 import cli
events = collections.Counter()
jax.monitoring.register_event_listener(lambda name, **kwargs: events.update([name.rpartition("/")[2]]))
code = cli.main(["generate", sys.argv[1], "-p", "Sam has 3 pens.", "--max-tokens", "4"])
print(json.dumps([events["compile_requests_use_cache"], events["cache_hits"]]), file=sys.stderr)
sys.exit(code)
"""
SMALL = """
import jax
from ling3.runtime import compilation_cache
compilation_cache.switch_on()

@jax.jit
def triple(x):
    return 3 * x

assert triple(2) == 6
"""
DAMAGED = """
import pathlib, warnings
import jax
from ling3.runtime import compilation_cache
directory = compilation_cache.switch_on()

@jax.jit
def triple(x):
    return 3 * x

def warned():
    jax.clear_caches()  # as in a new process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert triple(2) == 6
    return [str(warning.message) for warning in caught]

assert warned() == []
entries = {path: path.read_bytes() for path in directory.glob("*-cache")}
for damage in (lambda whole: b"", lambda whole: whole[:-20], lambda whole: b"x" * len(whole)):
    for path, whole in entries.items():
        path.write_bytes(damage(whole))
    assert any("Error reading" in text for text in warned())
    assert warned() == []
    assert {path for path in directory.glob("*-cache")} == set(entries)
"""


@pytest.fixture
def untold(monkeypatch):
    """JAX has been told no directory; what a test tells it is forgotten."""
    names = (
        "jax_compilation_cache_dir",
        "jax_compilation_cache_max_size",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    for name, (_, default) in compilation_cache.BOUNDS.items():
        jax.config.update(name, default)
    monkeypatch.delenv(compilation_cache.VARIABLE)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def environment(directory):
    """That of a user's process which is told this directory."""
    unwanted = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, compilation_cache.VARIABLE: str(directory)}


@pytest.mark.slow
def test_the_second_process_compiles_nothing(tmp_path):
    config = dataclasses.replace(TINY, vocab_size=400)
    random_checkpoint.write(tmp_path / "model", config, random_checkpoint.draw(config, seed=0))
    write_tokenizer(train_tokenizer(["Sam has 3 pens."], 400), tmp_path / "model", 400)
    counts, texts = [], []
    for _ in range(2):
        command = [sys.executable, "-c", GENERATE, str(tmp_path / "model")]
        variables = environment(tmp_path / "programs")
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
        counts.append(json.loads(done.stderr.splitlines()[-1]))
        texts.append(done.stdout)
    (programs, none), (again, found) = counts
    assert none == 0
    assert programs == again == found
    assert programs <= 12, "six programs of the engine, and few for what it begins with"
    assert texts[0] == texts[1]
    assert (tmp_path / "programs").stat().st_mode & 0o777 == 0o700


def test_a_process_that_was_killed_as_it_wrote_costs_the_next_nothing(tmp_path):
    """JAX writes an entry and then the time of its use, and cannot do without the second."""
    programs = tmp_path / "programs"
    programs.mkdir(mode=0o700)
    (programs / "jit_half-0123-cache").write_bytes(b"half")
    command = [sys.executable, "-W", "error::UserWarning", "-c", SMALL]
    done = subprocess.run(command, env=environment(programs), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    kept = {path.name for path in programs.glob("jit*")}
    assert "jit_half-0123-cache" not in kept and any(name.startswith("jit_triple") for name in kept)


def test_a_damaged_entry_is_replaced(tmp_path):
    """JAX by itself warns of it in every later process, and compiles again."""
    command = [sys.executable, "-c", DAMAGED]
    done = subprocess.run(command, env=environment(tmp_path / "programs"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_bounds_of_ones_own_are_kept(untold, monkeypatch, tmp_path):
    monkeypatch.setenv(compilation_cache.VARIABLE, str(tmp_path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 5.0)
    jax.config.update("jax_compilation_cache_max_size", 10**6)
    assert compilation_cache.switch_on() == tmp_path
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 5.0
    assert jax.config.jax_compilation_cache_max_size == 10**6
    assert compilation_cache.switch_on() is None, "JAX has been told now"


def test_it_is_the_users_cache_directory(untold, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert compilation_cache.switch_on() == tmp_path / "ling3" / "programs"
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "ling3" / "programs")
    assert jax.config.jax_compilation_cache_max_size == compilation_cache.LARGEST
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


@pytest.mark.parametrize(
    ("platform", "variable", "expected"),
    [
        ("linux", None, ".cache/ling3/programs"),
        ("linux", ("XDG_CACHE_HOME", "relative"), ".cache/ling3/programs"),
        ("darwin", None, "Library/Caches/ling3/programs"),
        ("win32", ("LOCALAPPDATA", "/local"), "/local/ling3/programs"),
    ],
)
def test_each_platform_has_it_elsewhere(monkeypatch, tmp_path, platform, variable, expected):
    for name in ("XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(*variable)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(pathlib.Path, "home", lambda: tmp_path)
    assert user_cache._default("programs") == tmp_path / expected


def test_no_home_is_no_error(untold, monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pathlib.Path, "home", homeless)
    assert compilation_cache.switch_on() is None


def test_off_is_off(untold, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(compilation_cache.VARIABLE, "off")
    assert compilation_cache.switch_on() is None
    assert jax.config.jax_compilation_cache_dir is None
    assert list(tmp_path.iterdir()) == []


def test_who_has_told_jax_already_is_obeyed(untold, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "mine"))
    size = jax.config.jax_compilation_cache_max_size
    assert compilation_cache.switch_on() is None
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "mine")
    assert jax.config.jax_compilation_cache_max_size == size
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert compilation_cache.switch_on() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


@pytest.mark.parametrize("value", ["on", "0", "programs/here"])
def test_a_senseless_variable_is_named(untold, monkeypatch, value):
    monkeypatch.setenv(compilation_cache.VARIABLE, value)
    with pytest.raises(ValueError, match=rf"LING3_COMPILATION_CACHE is '{value}', expected off or the absolute path"):
        compilation_cache.switch_on()


def test_a_directory_that_cannot_be_made_is_no_error(untold, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(compilation_cache.VARIABLE, str(tmp_path / "file" / "programs"))
    assert compilation_cache.switch_on() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_a_directory_that_others_may_write_is_not_used(untold, monkeypatch, tmp_path):
    """An entry is code that this process would run."""
    monkeypatch.setenv(compilation_cache.VARIABLE, str(tmp_path))
    tmp_path.chmod(0o777)
    assert compilation_cache.switch_on() is None
    tmp_path.chmod(0o755)
    assert compilation_cache.switch_on() == tmp_path
