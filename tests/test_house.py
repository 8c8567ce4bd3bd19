"""The shape of the house: imports run one way, and a wrong array is named at the door."""

import ast
import collections
import pathlib
import re
from collections.abc import Sequence

import jax.numpy as jnp
import jaxtyping
import pytest
from jaxtyping import Array, Float
from tiny import TINY, open_model

import ling3
from ling3.cache import Span
from ling3.runtime import checks

ROOT = pathlib.Path(ling3.__file__).parent
# A module may import what stands in an earlier row, or beside it in its own row.
FLOORS = (
    {"version"},
    {"runtime"},
    {"ops"},
    {"execution"},
    {"cache"},
    {"intervention"},
    {"layers"},
    {"formats"},
    {"model"},
    {"leaves"},
    {"mesh"},
    {"mtp"},
    {"families"},
    {"adapters"},
    {"checkpoint"},
    {"text"},
    {"engine"},
    {"generate"},
    {"score"},
    {"serve"},
    {"server"},
    {"afd"},
    {"interpret"},
    {"train"},
    {"bench"},
    {"evals"},
    {"fleet"},
    {"cli", "__main__"},
)


def room(path):
    """The name by which the house knows a file: its module, or its package."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _exists(room):
    return (ROOT / f"{room}.py").exists() or (ROOT / room / "__init__.py").exists()


def imported(path):
    """The rooms of ling3 that a file imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "ling3":
            found |= {alias.name for alias in node.names if _exists(alias.name)}
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
    for path in (ROOT / "ops").rglob("*.py"):
        assert "equinox" not in path.read_text() and imported(path) <= {"ops", "runtime"}, path.name
    assert imported(ROOT / "cache.py") == {"execution", "ops", "runtime"}


def test_the_engine_names_no_layer():
    """Pool, scheduler, runner and loop work on what a state says of itself, so that a new layer is a new file alone."""
    for path in [*(ROOT / "engine").glob("*.py"), ROOT / "generate.py", ROOT / "serve.py", ROOT / "cache.py"]:
        tree = ast.parse(path.read_text())
        modules = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not [module for module in modules if module.startswith(("ling3.layers", "ling3.families"))], path.name
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert not names & {"KDA", "MLA", "MoE"} and (path.name == "cache.py" or "KDAState" not in names), path.name


def test_no_layer_and_no_operator_asks_for_the_platform():
    for path in [*(ROOT / "ops").rglob("*.py"), *(ROOT / "layers").glob("*.py"), ROOT / "model.py"]:
        assert "default_backend" not in path.read_text(), path.name


# Public CamelCase names of modules that mean several things. The list only shrinks.
SHARED_NAMES = {
    # A command's class is its name on the command line, and a body's class its name in OpenAPI.
    *("Chat", "Look", "Completion", "Text"),
    # A public export, beside a name inside the engine.
    "Choice",
    # Names of the server, the engine and the command line's options.
    *("Model", "Options", "Sampling"),
    # What a step of training takes, a public export, and what a forward program takes.
    "Batch",
}


def test_a_public_class_has_a_name_of_its_own():
    files = collections.defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            names = [node.name] if isinstance(node, ast.ClassDef) else [getattr(x, "id", "") for x in targets]
            for name in names:
                if re.match(r"[A-Z].*[a-z]", name):
                    files[name].add(str(path.relative_to(ROOT)))
    shared = {name: sorted(where) for name, where in files.items() if len(where) > 1}
    assert shared.keys() == SHARED_NAMES, {name: shared.get(name) for name in shared.keys() ^ SHARED_NAMES}


# Files of more than 400 lines, functions of more than 60, and how many functions of a file have more than 6 parameters:
# what is listed may not grow, and what is no longer there must be taken off the list.
LONG_FILES = {}
LONG_FUNCTIONS = {
    # Long docstrings of public entries.
    **{
        "checkpoint/loading.py load": 68,
        "evals/ablations.py ablations": 76,
    },
    # One pass over all tensors, and one over all blocks of rows.
    **{"ops/experts.py blocks_of_experts": 71},
}
MANY_PARAMETERS = {
    # Public entries, whose options are keywords.
    **{
        "afd/cost/simulation.py": 1,
        "afd/processes.py": 1,
        "afd/system.py": 1,
        "bench/measure.py": 1,
    },
    **{"bench/remote.py": 1, "evals/harness.py": 1, "evals/run.py": 1, "fleet/fleet.py": 1, "generate.py": 1},
    **{"evals/ablations.py": 1, "interpret/plan.py": 1, "checkpoint/quantizing.py": 1, "checkpoint/saving.py": 1},
    # Operators: the arrays of a formula, and how it runs.
    **{"ops/attention.py": 3, "ops/compressed_attention.py": 2, "ops/experts.py": 7, "ops/few_token_experts.py": 1},
    **{"ops/drawing.py": 2, "ops/cpu/drawing.py": 2},
    **{
        "ops/kda.py": 1,
        "ops/kda_chunks.py": 1,
        "ops/cpu/attention.py": 2,
        "ops/cpu/experts.py": 1,
        "ops/cpu/kda.py": 2,
    },
    **{"ops/cpu/products.py": 1, "ops/gpu/attention.py": 1, "ops/gpu/experts.py": 2, "ops/gpu/kda.py": 2},
    **{"afd/operators/sending.py": 4, "afd/operators/returning.py": 1, "interpret/collectives.py": 1},
    # The public engine, and a session's worker.
    **{"serve.py": 2, "afd/attention_worker.py": 1},
    # The sizes of an array or a layer, or the parts of a file or config.
    **{"checkpoint/loading.py": 2, "families/config_fields.py": 1, "intervention.py": 1},
    **{"layers/mlp.py": 1, "formats/integers.py": 1},
}


def _parameters(function):
    """How many parameters a function has, without `self`."""
    own = function.args
    every = [*own.posonlyargs, *own.args, *own.kwonlyargs, *filter(None, (own.vararg, own.kwarg))]
    return len(every) - (every[:1] != [] and every[0].arg in ("self", "cls"))


def test_files_and_functions_are_short():
    files, functions, parameters = {}, {}, collections.Counter()
    for path in ROOT.rglob("*.py"):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        files[name] = len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                key, lines = f"{name} {node.name}", node.end_lineno - node.lineno + 1
                functions[key] = max(lines, functions.get(key, 0))
                parameters[name] += _parameters(node) > 6
    for found, listed, most in (
        (files, LONG_FILES, 400),
        (functions, LONG_FUNCTIONS, 60),
        (parameters, MANY_PARAMETERS, 0),
    ):
        beyond = {name: size for name, size in found.items() if size > most}
        assert beyond.keys() == listed.keys(), sorted(beyond.keys() ^ listed.keys())
        assert not {name: size for name, size in beyond.items() if size > listed[name]}


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
        (lambda m: m.lm_head(jnp.zeros((1, 2, 33))), r"\*batch \{self.in_features\}"),
        (lambda m: m.model.layers[0](jnp.zeros((1, 32)), None, span(1)), r"batch seq \*streams hidden"),
        (lambda m: m.model.layers[0].attention(jnp.zeros((1, 2, 31)), None, span(1)), r"f32\[1,2,31\]"),
    ],
)
def test_a_wrong_shape_names_its_axis(call, message):
    with pytest.raises(jaxtyping.TypeCheckError, match=message):
        call(open_model(TINY))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: ling3.trace(m, jnp.arange(5)),
            "ling3.interpret.trace.trace: argument 'tokens' is i32[5]; expected Int[Array, 'batch seq']; a single "
            "sequence is a batch of one: tokens[None]",
        ),
        (
            lambda m: m.step(jnp.zeros((2, 3), jnp.int32), m.init_cache(2, 8), jnp.zeros(3, jnp.int32)),
            "ling3.model.CausalLM.step: argument 'lengths' is i32[3]; expected Int32[Array, 'batch'] | None, "
            "where batch = 2",
        ),
        (
            lambda m: m.lm_head(jnp.zeros((1, 2, 33))),
            "ling3.layers.linear.Matrix.__call__: argument 'x' is f32[1,2,33]; expected Float[Array, '*batch "
            "{self.in_features}'], where self.in_features = 32",
        ),
        (
            lambda m: m.step(jnp.zeros((2, 3), jnp.int32), m),
            "ling3.model.CausalLM.step: argument 'cache' is CausalLM; expected Cache",
        ),
    ],
)
def test_a_wrong_type_is_told_in_one_line(call, message):
    with pytest.raises(jaxtyping.TypeCheckError) as raised:
        call(open_model(TINY))
    assert str(raised.value) == message
    assert raised.value.__cause__ is None and raised.value.__suppress_context__


def test_a_wrong_result_is_told_in_one_line():
    @jaxtyping.jaxtyped(typechecker=checks.checked)
    def turned(x: Float[Array, "rows columns"]) -> Float[Array, "columns rows"]:
        return x

    message = r"turned: the result is f32\[2,3\]; expected .*'columns rows'\], where rows = 2, columns = 3$"
    with pytest.raises(jaxtyping.TypeCheckError, match=message):
        turned(jnp.zeros((2, 3)))


def test_one_wrong_item_of_many_is_told_too():
    @jaxtyping.jaxtyped(typechecker=checks.checked)
    def total(numbers: Sequence[int], *more: int) -> int:
        return sum(numbers) + sum(more)

    for _ in range(20):  # beartype looks at one item, and each time at another
        try:
            total([0, 1, "x", 3])
        except jaxtyping.TypeCheckError as error:
            assert "total" in str(error) and "numbers" in str(error)
        except TypeError as error:
            assert "unsupported operand" in str(error)
    with pytest.raises(jaxtyping.TypeCheckError, match=r"argument '\*more\[1\]' is 'x'; expected int"):
        total([0], 1, "x")


def span(batch):
    return Span(jnp.zeros(batch, jnp.int32), jnp.full(batch, 2, jnp.int32))
