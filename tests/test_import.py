import ast
import os
import pathlib
import subprocess
import sys
import zipfile

import jax
import jaxtyping
import pytest

import ling3
from ling3.runtime import checks

# What only some of a user's commands need, and what takes long to import.
LATER = ("huggingface_hub", "matplotlib", "optax", "ray", "rich", "torch", "transformers", "tyro")
# What takes long to import and is not needed for `ling3 --help`.
ARRAYS = ("beartype", "equinox", "jax", "jaxtyping", "numpy", "tokenizers")

FACE = f"""
import sys, ling3, ling3.cli.generate, ling3.cli.bench, ling3.cli.eval
assert not [name for name in {ARRAYS!r} if name in sys.modules]
import ling3.interpret.trace, ling3.generate
for name in ling3.__all__:
    assert getattr(ling3, name) is not None and name in dir(ling3)
assert callable(ling3.generate) and callable(ling3.trace) and ling3.ops.kda.recurrent_kda
for name in ("nonesuch", "_nonesuch"):
    try:
        getattr(ling3, name)
    except AttributeError:
        pass
    else:
        raise AssertionError(name)
"""


@pytest.mark.thorough
def test_public_names_are_imported_when_they_are_used():
    """The functions `generate` and `trace` stay functions, although submodules have the same names."""
    done = subprocess.run([sys.executable, "-c", FACE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_importing_the_package_leaves_for_later_what_not_everyone_needs():
    program = f"import sys; from ling3 import *; print([name for name in {LATER!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


SERVED = f"""
import sys
from ling3 import cli
from ling3.server import run
run.run = lambda *given: print([name for name in {LATER!r} if name in sys.modules])
assert cli.main(["serve", "nano", "--port", "0", "--max-running-requests", "1", "--max-model-len", "64"]) == 0
"""


@pytest.mark.thorough
def test_a_server_imports_nothing_that_only_other_commands_need():
    """Once its model is loaded and its programs are compiled."""
    pytest.importorskip("starlette")
    programs = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    run = {"capture_output": True, "text": True, "env": os.environ | programs}
    done = subprocess.run([sys.executable, "-c", SERVED], check=True, **run)
    assert done.stdout == "['rich', 'tyro']\n"  # of the command line


BUILD = "import sys, setuptools.build_meta as build; print(build.build_editable(sys.argv[1]))"
BESIDE = """
import site, sys
site.addsitedir(sys.argv[1])
import ling3
print(ling3.name)
"""


def test_a_script_beside_the_clone_finds_the_package(tmp_path):
    """Not the clone's directory, which has the package's name and is first on the path."""
    clone, installed = tmp_path / "ling3", tmp_path / "site-packages"
    (clone / "ling3").mkdir(parents=True)
    root = pathlib.Path(ling3.__file__).parents[1]
    for name in ("pyproject.toml", "README.md", "LICENSE", "ling3/version.py"):
        (clone / name).write_bytes((root / name).read_bytes())
    (clone / "ling3" / "__init__.py").write_text("name = 'the package'")
    run = {"capture_output": True, "text": True}
    built = subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=clone, check=True, **run).stdout.split()[
        -1
    ]
    with zipfile.ZipFile(tmp_path / built) as wheel:
        wheel.extractall(installed)
    (tmp_path / "script.py").write_text(BESIDE)
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = [sys.executable, "-S", str(tmp_path / "script.py"), str(installed)]  # without what is really installed
    found = subprocess.run(script, env=bare, check=True, **run)
    assert found.stdout == "the package\n"


def test_type_checkers_see_the_names_that_are_imported():
    """The imports for type checkers, `__all__` and the table of modules agree."""
    tree = ast.parse(pathlib.Path(ling3.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and isinstance(node.body[0], ast.ImportFrom))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen.pop("ablate") == "ling3.interpret"
    assert seen == {name: f"ling3.{module}" for name, module in ling3._MODULE_OF.items()}
    # `finetune` needs the extra `train`, and `from ling3 import *` none.
    assert {*seen, "ablate", "__version__"} == {*ling3.__all__, "finetune"} and "finetune" not in ling3.__all__


@pytest.mark.thorough
def test_what_the_package_builds_on_is_not_compiled_for_it_alone():
    """Beneath a module with the hook, Python would look for its own bytecode of jax and find none."""
    program = (
        "import sys, ling3.serve; print([m.__cached__ for m in map(sys.modules.get, ('jax', 'beartype', 'equinox'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "jaxtyping" not in done.stdout and done.stdout.count(".pyc") == 3


@pytest.mark.thorough
@pytest.mark.parametrize(("variable", "told"), [("0", "argument 'chunk_size' is 'x'"), ("1", "not supported between")])
def test_jaxtypings_variable_leaves_types_unchecked(variable, told):
    program = "from ling3.ops.kda_chunks import check_chunk_size; check_chunk_size('x')"
    environment = os.environ | {"JAXTYPING_DISABLE": variable}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert told in done.stderr.splitlines()[-1]


def test_a_check_is_written_at_the_first_call(monkeypatch):
    written = []
    monkeypatch.setattr(checks, "WRITTEN", lambda function: written.append(function) or function)

    @jaxtyping.jaxtyped(typechecker=checks.checked)
    def double(x: float) -> float:
        return 2 * x

    assert not written
    assert double(1.0) == 2.0
    number = len(written)
    assert number > 0
    assert double(2.0) == 4.0
    assert len(written) == number


def test_an_int_is_a_fine_float_and_a_text_is_none():
    @jaxtyping.jaxtyped(typechecker=checks.checked)
    def double(x: float) -> float:
        return 2 * x

    assert double(1) == 2
    with pytest.raises(jaxtyping.TypeCheckError, match="'x'"):
        double("1")
