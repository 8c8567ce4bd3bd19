import subprocess
import sys

import jaxtyping
import pytest

from ling3 import checks

# What only some of a user's commands need, and what takes long to import.
LATER = ("huggingface_hub", "matplotlib", "optax", "rich", "torch", "transformers", "tyro")


def test_importing_the_package_leaves_for_later_what_not_everyone_needs():
    program = f"import sys, ling3; print([name for name in {LATER!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_what_the_package_builds_on_is_not_compiled_for_it_alone():
    """Beneath a module with the hook, Python would look for its own bytecode of jax and find none."""
    program = "import sys, ling3; print([m.__cached__ for m in map(sys.modules.get, ('jax', 'beartype', 'equinox'))])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "jaxtyping" not in done.stdout and done.stdout.count(".pyc") == 3


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
