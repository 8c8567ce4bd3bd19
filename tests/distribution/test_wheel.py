"""What `make wheel` has built: the sdist is the repository, and the wheel works away from it with what it requires."""

import json
import pathlib
import re
import subprocess
import tarfile
import urllib.request
import zipfile

import apart
import http_server
import jax
import pytest
from native_kernels import needs_compiler
from test_pages import SHOWN, python

ROOT = pathlib.Path(__file__).parents[2]
QUESTION = "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"
ANSWER = "3 + 4 = 7. The answer is 7."
COMPILE_ONE = """
from ling3.ops.cpu import rows
from ling3.runtime import native
assert native.missing(rows.SOURCE) is None
"""


def built(ending):
    found = list((ROOT / "dist").glob(f"ling3-*{ending}"))
    assert len(found) == 1, f"dist/ has {found}, expected one file *{ending}: run `make wheel`"
    return found[0]


def tracked(*under):
    """The files of the repository."""
    done = subprocess.run(["git", "ls-files", "-z", *under], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("this is not a clone")
    return set(done.stdout.decode().split("\0")) - {""}


def files(directory):
    return {path: path.stat().st_mtime_ns for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def wheel():
    return built(".whl")


class Installed:
    """The wheel in an environment without matplotlib, which a server, an answer and a page do not need."""

    def __init__(self, place, wheel):
        names = apart.needed("ling3", ["serve"], without=["matplotlib"]) - {"ling3"}
        assert {"jaxlib", "uvicorn"} <= names and not {"matplotlib", "optax", "pytest", "torch"} & names
        self.packages = apart.environment(place / "environment", wheel, names)
        self.bin, self.home = place / "environment" / "bin", place / "home"
        self.home.mkdir()
        self.without_compiler = place / "no compiler"
        self.without_compiler.mkdir()
        programs = str(jax.config.jax_compilation_cache_dir)
        self.variables = apart.variables(self.home, JAX_COMPILATION_CACHE_DIR=programs, LING3_NATIVE="off")

    def run(self, *command, **variables):
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=self.home,
            env=self.variables | variables,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory, wheel):
    """What runs in it writes nothing beside the package, which a user may not be able to."""
    made = Installed(tmp_path_factory.mktemp("apart"), wheel)
    package = made.packages / "ling3"
    made.run("python", "-m", "compileall", "-q", str(package))
    before = files(package)
    yield made
    assert {path for path in files(package).items() ^ before.items() if path[0].suffix != ".pyc"} == set()


def test_the_sdist_is_the_repository():
    with tarfile.open(built(".tar.gz")) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames() if sdist.getmember(name).isfile()}
    made = {name for name in names if name.startswith("ling3.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert names - made == tracked()


def test_the_wheel_is_the_package(wheel):
    with zipfile.ZipFile(wheel) as file:
        own = {name for name in file.namelist() if ".dist-info/" not in name}
        assert own == tracked("ling3")
        assert all(file.read(name) == (ROOT / name).read_bytes() for name in own)
        [about] = [file.read(name).decode() for name in file.namelist() if name.endswith("/METADATA")]
    assert "License-File: LICENSE" in about and "\n# ling3\n" in about


def test_it_answers_without_a_compiler(installed):
    path = str(installed.without_compiler)
    done = installed.run("ling3", "generate", "nano", "--chat", "-p", QUESTION, PATH=path, LING3_NATIVE="")
    assert done.stdout.strip() == ANSWER and "There is no C++ compiler" in done.stderr


@needs_compiler
def test_kernels_are_kept_in_the_users_cache(installed):
    installed.run("python", "-c", COMPILE_ONE, LING3_NATIVE="")
    assert len(list((installed.home / ".cache/ling3/native").glob("rows-*.so"))) == 1


def test_the_readmes_python_runs_elsewhere(installed):
    [block] = python("README.md")
    where = "\nimport sys\nassert ling3.__file__.startswith(sys.prefix)"
    assert installed.run("python", "-c", block + where).stdout.splitlines() == SHOWN.findall(block)


def test_it_serves_and_has_its_page(installed):
    first = f"cd {installed.home} && unset PYTHONPATH"
    with http_server.process(first=first, ling3=[str(installed.bin / "ling3")]) as server:
        with urllib.request.urlopen(f"{server.url}/") as answer:
            assert b"<title>Chat</title>" in answer.read()
        asked = {"model": "nano", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{server.url}/v1/chat/completions", json.dumps(asked).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            assert json.load(answer)["choices"][0]["message"]["content"] == ANSWER


def test_it_writes_the_look_page(installed):
    installed.run("ling3", "look", "nano", "--chat", "-p", QUESTION, "--out", "look.html")
    assert re.search(r'"Content-Security-Policy" content="default', (installed.home / "look.html").read_text())
