"""New weights for a running engine: the programs that are compiled for the old ones must accept them."""

import dataclasses
from typing import Any

import jax

from ling3.engine.forward import Programs
from ling3.engine.runner import Runner
from ling3.mesh.sharded import Sharded
from ling3.runtime.quoting import shown


def check_update(runner: Runner, model: Any) -> None:
    """Raises ValueError if the runner cannot take the weights of `model`; it names the first difference."""
    if isinstance(runner.model, Sharded):
        raise ValueError("the engine's model is on a mesh, where weights cannot be replaced: make a new engine")
    if runner.forward != Programs():
        raise ValueError("this engine has its own forward programs, which may hold weights: make a new engine")
    if (problem := difference(runner.model, model)) is not None:
        raise ValueError(f"the new weights do not fit the engine's programs: {problem}; make a new engine")


def difference(old: Any, new: Any, path: str = "model") -> str | None:
    """The first place where a model would run other programs than `old`; None if it would not.

    That is where a module's type, an array's shape, dtype or device, or a static field differs.
    """
    if isinstance(old, jax.Array) and isinstance(new, jax.Array):
        here, there = _kind(new), _kind(old)
        return None if here == there else f"{path} is {here}, expected {there}"
    if type(old) is not type(new):
        expected = "an array of JAX" if isinstance(old, jax.Array) else f"a {type(old).__name__}"
        found = type(new).__name__ if dataclasses.is_dataclass(new) else shown(new)
        return f"{path} is {found}, expected {expected}"
    if isinstance(old, (tuple, list)):
        if len(old) != len(new):
            return f"{path} has {len(new)} parts, expected {len(old)}"
        parts = [(one, other, f"{path}[{i}]", False) for i, (one, other) in enumerate(zip(old, new, strict=True))]
    elif dataclasses.is_dataclass(old):
        fields = dataclasses.fields(old)
        parts = [
            (getattr(old, f.name), getattr(new, f.name), f"{path}.{f.name}", f.metadata.get("static", False))
            for f in fields
        ]
    else:
        return None if old == new else f"{path} is {shown(new)}, expected {shown(old)}"
    for one, other, place, static in parts:
        if static and one == other:
            continue
        if (problem := difference(one, other, place)) is not None:
            return problem
    return None


def _kind(x: jax.Array) -> str:
    """Everything about an array on which a compiled program depends, in words."""
    weak, how = "weakly typed " if x.weak_type else "", "committed to" if x.committed else "on"
    return f"{weak}{x.dtype}{list(x.shape)} {how} {', '.join(sorted(map(str, x.devices())))}"
