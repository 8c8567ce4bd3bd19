"""Making random models one array at a time."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var
from jaxtyping import PRNGKeyArray


def one_by_one(
    function: Callable[[PRNGKeyArray], list[Any]], key: PRNGKeyArray, take: Callable[[int, Any], None]
) -> None:
    """Evaluates `function(key)`, calling `take(i, result)` for result i as soon as it is computed.

    Operators run one at a time, as without `jax.jit`: within one program XLA would round some numbers differently.
    Operators that no result depends on are skipped, and arrays are freed after their last use.
    """
    traced = jax.make_jaxpr(function)(key)
    program = traced.jaxpr
    steps = _needed(program)
    last = {var: n for n, step in enumerate(steps) for var in step.invars if isinstance(var, Var)}
    results: dict[Any, list[int]] = defaultdict(list)
    for i, var in enumerate(program.outvars):
        results[var].append(i)
    known = dict(zip([*program.constvars, *program.invars], [*traced.consts, key], strict=True))
    for var, value in known.items():
        for i in results.get(var, ()):
            take(i, value)
    for n, step in enumerate(steps):
        inputs = [var.val if isinstance(var, Literal) else known[var] for var in step.invars]
        found = step.primitive.bind(*inputs, **step.params)
        for var, value in zip(step.outvars, found if step.primitive.multiple_results else [found], strict=True):
            for i in results.get(var, ()):
                take(i, value)
            if last.get(var, n) > n:
                known[var] = value
        for var in [var for var in step.invars if isinstance(var, Var) and last[var] == n]:
            known.pop(var, None)


def _needed(program: Jaxpr) -> list[Any]:
    """The operators of a program that some result depends on, in program order."""
    used, steps = set(program.outvars), []
    for step in reversed(program.eqns):
        if not used.isdisjoint(step.outvars):
            used.update(var for var in step.invars if isinstance(var, Var))
            steps.append(step)
    return steps[::-1]
