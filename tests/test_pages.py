"""The README and the site's pages: their Python runs as it stands there and prints what they show."""

import ast
import asyncio
import contextlib
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import pytest
from native_kernels import HAS_COMPILER, installed

import ling3

ROOT = pathlib.Path(__file__).parent.parent
README, DOCS = ROOT / "README.md", ROOT / "docs"
RUN = ["README.md", *(f"docs/{name}.md" for name in ("start", "engine", "apart", "how_to/hidden_states"))]
RUN += [f"docs/how_to/{name}.md" for name in ("ablate_and_serve", "fine_tune", "inspect", "quantize", "web_handler")]
RUN += [f"docs/how_to/{name}.md" for name in ("predict_further", "speculate", "adapters")]
LONG = "docs/how_to/swap_a_mixer.md"
"""A page that compiles two training steps, for `make exhaustive`."""
ELSEWHERE = {"docs/how_to/chat_front_end.md", "docs/reference/fleet.md"}
"""Pages whose Python needs a server or Ray, which other tests have."""
SHOWN = re.compile(r"^(?:\s*print\(.*\)  )?# (.*)$", re.MULTILINE)
"""The output in a block: after a print on its line, or on lines of its own."""


def python(page):
    """A page's blocks of Python."""
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("page", [*RUN, pytest.param(LONG, marks=pytest.mark.exhaustive)])
def test_the_python_prints_what_the_page_shows(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if page.endswith("web_handler.md"):
        pytest.importorskip("starlette")
    if page.endswith("apart.md"):  # its devices' programs compile in half the time
        jax.config.update("jax_disable_most_optimizations", True)
    needs_kernels = page.endswith("speculate.md")
    if needs_kernels and not HAS_COMPILER:
        pytest.skip("there is no C++ compiler")
    scope = {}
    with installed() if needs_kernels else contextlib.nullcontext():
        for block in python(page):
            exec(block, scope)
            assert [line.strip() for line in capsys.readouterr().out.splitlines()] == SHOWN.findall(block)
    jax.config.update("jax_disable_most_optimizations", "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ)
    if page.endswith("web_handler.md"):
        assert asyncio.run(asked(scope["app"])) == "3 + 4 = 7. The answer is 7."


async def asked(app):
    """The answer of an ASGI app to the page's question."""
    question = {"question": "Sam has 3 pens. He gets 4 more pens. How many pens does Sam have?"}
    given, got = [{"type": "http.request", "body": json.dumps(question).encode()}], []

    async def receive():
        return given.pop() if given else await asyncio.Event().wait()

    async def send(message):
        got.append(message.get("body", b""))

    scope = {"type": "http", "method": "POST", "path": "/ask", "query_string": b"", "headers": []}
    await app(scope, receive, send)
    return b"".join(got).decode()


def test_every_page_with_python_is_run():
    pages = {"README.md", *(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md"))}
    having = {page for page in pages if python(page) and not page.startswith("docs/reference/")}
    assert having - ELSEWHERE == {*RUN, LONG}


@pytest.mark.slow
def test_the_demo_answers_what_the_readme_shows():
    [question] = re.findall(r'ling3 generate nano --chat -p "(.*)"', (ROOT / "Makefile").read_text(encoding="utf-8"))
    engine = ling3.Engine.from_pretrained("nano", dtype=jnp.float32)
    answer = engine.generate([{"role": "user", "content": question}])[0].text
    assert f"```\n{answer}\n```" in README.read_text(encoding="utf-8")


def test_the_readme_is_short_and_counts_lines():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    counted = re.findall(r"\((ling3/[\w/]+\.py)\)[^|]*\| (\d+) \|", text)
    assert len(counted) >= 8
    for path, lines in counted:
        assert int(lines) == pytest.approx(len((ROOT / path).read_text(encoding="utf-8").splitlines()), rel=0.1), path


def test_the_map_has_every_module():
    found = runpy.run_path(str(DOCS / "map_of_files.py"))["the_map"]()
    for path in (ROOT / "ling3").rglob("*.py"):
        if path.name == "__init__.py":
            assert f"## {path.parent.relative_to(ROOT)}/\n\n" in found
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
    assert "|  |" not in found, "a module without a docstring"


@pytest.mark.slow
def test_a_command_needs_what_everyone_installs_or_names_its_extra():
    pages = (README, DOCS / "command_line.md", DOCS / "benchmarks.md")
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    found = {name for line in lines if "extra" not in line for name in re.findall(r"python -m ([a-z0-9_.]+)", line)}
    assert {"benchmarks.soak", "ling3.evals.nano_files"} <= found
    mains = {name: pathlib.Path(*name.split("."), "__main__.py") for name in found}
    modules = [f"{name}.__main__" if (ROOT / main).is_file() else name for name, main in mains.items()]
    blocked = dict.fromkeys(("optax", "lm_eval", "torch", "transformers", "pytest"))
    program = f"import importlib, sys; sys.modules |= {blocked}; [importlib.import_module(name) for name in {modules}]"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_plots_need_no_extra():
    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    assert any(name.startswith("matplotlib") for name in needed)
