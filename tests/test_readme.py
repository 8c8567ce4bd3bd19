"""The README's Python runs as it stands there."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import pytest

README = pathlib.Path(__file__).parent.parent / "README.md"


def python():
    """The blocks of Python: ten lines, the engine, an ablation, a look inside, snapshots, AFD."""
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_the_python_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    ten_lines, engine, cut, looked, branch, _ = python()
    scope = {}
    exec(ten_lines, scope)
    answer = capsys.readouterr().out.strip()
    assert answer == "16 - 12 = 4. 4 + 18 = 22. The answer is 22." and f"  # {answer}\n" in ten_lines
    assert scope["logits"].shape == (1, len(scope["ids"]), scope["model"].config.vocab_size)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    exec(engine, scope)
    chat, text, stream = capsys.readouterr().out.strip().split("\n")
    assert chat.startswith(f"{answer} stop") and stream == answer
    assert text.startswith(" 7 + 5 = 12. The answer is 12. stop")
    exec(branch, scope)
    printed = capsys.readouterr().out.strip()
    assert printed == f"93 {scope['one'].snapshot.held}" and f"# {printed}:" in branch
    exec(cut, scope)
    assert scope["cut"].config.at(0).kda_output_gate == "none" and scope["seen"].kda[0].decay.shape[:2] == (
        1,
        len(scope["ids"]),
    )
    exec(looked, scope)
    plain, steered = scope["plain"], scope["steered"]
    assert plain.text == answer and steered.captured.router.keys() == {0, 1, 2, 3}
    assert plain.captured.residual[1].shape[0] == len(scope["ids"]) + len(plain.token_ids)


@pytest.mark.slow
def test_the_sites_first_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = README.parent / "docs" / "index.md"
    [first] = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    scope = {}
    exec(first, scope)
    answer = capsys.readouterr().out.strip()
    assert answer == "3 + 4 = 7. The answer is 7." and f"  # {answer}\n" in first
    assert f"{answer}<|role_end|>" in "".join(token["text"] for token in _looked_into(tmp_path / "look.html"))


def _looked_into(page):
    """The tokens that a page of `ling3.look` shows."""
    found = re.search(r'"tokens": ?(\[.*?\])', page.read_text(encoding="utf-8"), re.DOTALL)
    return json.loads(found.group(1))


@pytest.mark.slow
def test_the_python_of_attention_and_experts_apart_runs(capsys):
    jax.config.update("jax_disable_most_optimizations", True)  # the devices' programs compile in half the time
    exec(python()[-1], {})
    jax.config.update("jax_disable_most_optimizations", "JAX_DISABLE_MOST_OPTIMIZATIONS" in os.environ)
    assert "max_in_flight=2" in capsys.readouterr().out


def test_the_map_names_every_file():
    root = README.parent / "ling3"
    text = README.read_text(encoding="utf-8")
    for path in root.iterdir():
        if path.name not in ("__pycache__", "py.typed", "version.py"):
            name = f"{path.name}/" if path.is_dir() else path.name
            assert name in text, f"{name} is not on the README's map"


@pytest.mark.slow
def test_a_command_needs_what_everyone_installs_or_names_its_extra():
    lines = README.read_text(encoding="utf-8").splitlines()
    found = {name for line in lines if "extra" not in line for name in re.findall(r"python -m ([a-z0-9_.]+)", line)}
    assert {"benchmarks.soak", "ling3.evals.nano_files"} <= found
    mains = {name: pathlib.Path(*name.split("."), "__main__.py") for name in found}
    modules = [f"{name}.__main__" if (README.parent / main).is_file() else name for name, main in mains.items()]
    blocked = dict.fromkeys(("optax", "lm_eval", "torch", "transformers", "pytest"))
    program = f"import importlib, sys; sys.modules |= {blocked}; [importlib.import_module(name) for name in {modules}]"
    subprocess.run([sys.executable, "-c", program], cwd=README.parent, check=True)


def test_plots_need_no_extra():
    with (README.parent / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["project"]["dependencies"]
    assert any(name.startswith("matplotlib") for name in needed)
