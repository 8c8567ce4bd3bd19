"""The shape of the house: imports run one way, and a wrong array is named at the door."""

import ast
import pathlib

import jax.numpy as jnp
import jaxtyping
import pytest
from tiny import TINY, open_model

import ling3
from ling3.cache import Span

ROOT = pathlib.Path(ling3.__file__).parent
# A module may import what stands in an earlier row, or beside it in its own row.
FLOORS = (
    {"user_cache", "compilation_cache", "native"},
    {"checks", "version", "strict_json", "progress", "hub", "interrupts", "outputs", "params"},
    {"config", "config_fields", "config_reader"},
    {"cache", "ops"},
    {"layers"},
    {"model"},
    {"sandbox", "safetensors_file"},
    {"chat_template", "copying", "streaming", "weights"},
    {"tokenizer", "sampling", "shards", "trace"},
    {"ablate"},
    {"pool"},
    {"checkpoint", "export", "generate", "inspect"},
    {"request"},
    {"runner", "scheduler", "guard", "intake"},
    {"loop"},
    {"serve"},
    {"problems", "train"},
    {"bench", "bench_report", "evals"},
    {"cli", "__main__"},
)


def room(path):
    """The name by which the house knows a file: its module, or its package."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path):
    """The rooms of ling3 that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "ling3":
            found |= {alias.name for alias in node.names if (ROOT / f"{alias.name}.py").exists()}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("ling3."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("ling3.")}
    return found


def test_every_room_has_a_floor():
    rooms = {room(path) for path in ROOT.rglob("*.py")} - {"__init__"}
    assert rooms == set().union(*FLOORS)


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_one_way(path):
    if room(path) == "__init__":
        return
    floor = next(i for i, rooms in enumerate(FLOORS) if room(path) in rooms)
    allowed = set().union(*FLOORS[: floor + 1])
    assert imported(path) <= allowed, f"{path.name} reaches up"


def test_operators_know_no_module_and_caches_no_layer():
    for path in (ROOT / "ops").glob("*.py"):
        assert "equinox" not in path.read_text() and imported(path) <= {"ops", "native"}, path.name
    assert imported(ROOT / "cache.py") == set()


def test_the_package_needs_no_torch():
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] in ("torch", "transformers", "pickle")], path


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m(jnp.zeros(3, jnp.int32)), "batch seq"),
        (lambda m: m(jnp.zeros((1, 3), jnp.float32)), "tokens"),
        (lambda m: m.lm_head(jnp.zeros((1, 2, 33))), r"\*batch \{self.weight.shape\[1\]\}"),
        (lambda m: m.model.layers[0](jnp.zeros((1, 32)), None, span(1)), "batch seq hidden"),
        (lambda m: m.model.layers[0].attention(jnp.zeros((1, 2, 31)), None, span(1)), r"f32\[1,2,31\]"),
        (lambda m: m.step(jnp.zeros((2, 3), jnp.int32), m.init_cache(3, 8)), "batch"),
    ],
)
def test_a_wrong_shape_names_its_axis(call, message):
    with pytest.raises(jaxtyping.TypeCheckError, match=message):
        call(open_model(TINY))


def span(batch):
    return Span(jnp.zeros(batch, jnp.int32), jnp.full(batch, 2, jnp.int32))
