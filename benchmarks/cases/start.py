"""The time before the first token: import, compilation, and the command line from its start to the first word."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.fresh import ROOT, ask
from benchmarks.registry import Setting, Side, Trial, Wrong, case
from ling3.train.nano import problems

QUESTION = "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"
ANSWER = 7


@case("start/import", "import ling3, in a fresh process.", limit=1.0, always_measured=True)
def import_ling3(setting: Setting) -> Trial:
    """Seconds to import ling3 and its public names, without the start of the interpreter."""
    return Trial([Side("import ling3", lambda: ask("import", "ling3")["seconds"], lambda: "imports")], unit="s")


@case(
    "start/generate-empty",
    "ling3 generate nano to its first word, with an empty compilation cache.",
    limit=6.0,
    rounds=3,
    always_measured=True,
)
def generate_empty(setting: Setting) -> Trial:
    """Seconds from the process's start to the first byte on stdout; all programs are compiled."""

    def fresh() -> tuple[float, str]:
        with tempfile.TemporaryDirectory() as cache:
            return first_word(Path(cache))

    side = Side("ling3 generate", lambda: fresh()[0], lambda: _answered(fresh()[1]))
    return Trial([side], unit="s", warm=False)


@case(
    "start/generate-warm",
    "The same with the cache that an earlier run has left.",
    limit=2.5,
    always_measured=True,
)
def generate_warm(setting: Setting) -> Trial:
    """The same as a user sees it from the second run on."""
    cache = (setting.scratch / "warm-cache").absolute()
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir(parents=True, mode=0o700)
    side = Side("ling3 generate", lambda: first_word(cache)[0], lambda: _answered(first_word(cache)[1]))
    return Trial([side], unit="s", warm=False)


def first_word(cache: Path, *arguments: str) -> tuple[float, str]:
    """Seconds from starting `ling3 generate` to its first byte, and its output; by default nano answers QUESTION."""
    arguments = arguments or ("nano", "--chat", "-p", QUESTION)
    command = [sys.executable, "-m", "ling3.cli", "generate", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    environment["LING3_COMPILATION_CACHE"] = str(cache)
    begin = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as run:
        assert run.stdout is not None
        first = run.stdout.read(1)
        seconds = time.perf_counter() - begin
        said = first + run.stdout.read()
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {run.returncode}")
    return seconds, said.decode()


def _answered(said: str) -> str:
    if problems.last_integer(said) != ANSWER:
        raise Wrong(f"nano was asked {QUESTION!r} and said {said!r}, expected {ANSWER}")
    return f"nano answers {ANSWER}"


@case("start/compile-decode", "Trace and compile a decode step of the whole Ling-3.0-tiny.", limit=40.0, rounds=1)
def compile_decode(setting: Setting) -> Trial:
    """Compiles 24 layers from shapes alone, in a fresh process without a compilation cache."""
    return _compiled(setting, "decode")


@case("start/compile-prefill", "Trace and compile a prefill step of 2,048 tokens of it.", limit=60.0, rounds=1)
def compile_prefill(setting: Setting) -> Trial:
    """The same for a chunk of a prompt."""
    return _compiled(setting, "prefill")


def _compiled(setting: Setting, program: str) -> Trial:
    about: dict[str, Any] = {}

    def measure() -> float:
        about.update(ask("compile", f"{setting.scale}:{program}"))
        return about["seconds"]

    def check() -> str:
        """Makes and checks the first measurement, which also counts as that of the first round."""
        measure()
        temporary, arguments = about["temporary_bytes"], about["argument_bytes"]
        if setting.scale == "full" and temporary > arguments / 4:
            raise Wrong(f"{temporary:,} bytes of temporaries beside {arguments:,} of arguments: copies of weights")
        return f"{temporary / 1e6:,.0f} MB of temporaries beside {arguments / 1e6:,.0f} MB of arguments"

    def seen() -> float:
        found = about.pop("seconds", None)
        return measure() if found is None else found

    return Trial([Side(f"ling3, {program}", seen, check)], unit="s", about=about, warm=False)
