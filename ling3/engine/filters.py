"""Logits filters that a user gives to an engine or to `generate`, checked to be pure functions of one row."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from ling3.runtime.parameters import ParameterError
from ling3.runtime.quoting import printable, shown

Filter = Callable[..., Any]
"""`filter(logits, so_far)` gets the logits [vocab] of one row and a `SoFar`, and returns the logits to use instead."""

ROWS = 4
"""The number of random rows that a filter is tried with."""


class SoFar(eqx.Module):
    """The tokens of one row so far, as counts over the vocabulary."""

    length: Int32[Array, "*rows"]
    """The number of tokens so far, prompt and output together."""
    counts: Int32[Array, "*rows vocab"]
    """How often each token occurs in the output; their sum is the number of new tokens."""
    in_prompt: Bool[Array, "*rows vocab"]
    """True for each token that occurs in the prompt."""


def checked(filters: Any, vocab: int) -> tuple[Filter, ...]:
    """Returns the filters after trying each with random rows.

    Raises ParameterError for a filter that cannot be traced, that changes the shape or the dtype, whose result for a
    row depends on the other rows of the batch, or that gives another result when it is called again.
    """
    if not isinstance(filters, (list, tuple)):
        raise ParameterError("filters", f"filters are {shown(filters)}, expected a list of functions f(logits, so_far)")
    for i, each in enumerate(filters):
        if (problem := _problem(each, vocab)) is not None:
            name = printable(getattr(each, "__name__", type(each).__name__), 80)
            raise ParameterError("filters", f"filters[{i}] ({name}) {problem}")
    return tuple(filters)


def _problem(each: Any, vocab: int) -> str | None:
    """The reason why a filter is refused; None if it is not."""
    rows = _rows(0, vocab)
    try:
        hash(each)  # filters are static arguments of compiled programs
        found = jax.eval_shape(each, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows))
        if getattr(found, "shape", None) != (vocab,) or found.dtype != jnp.float32:
            what = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", found)
            return f"gives {shown(what)} for one row's logits, expected float32[{vocab}]"
        # Two separate functions, so that the second call traces the filter again.
        first, second = (jax.jit(jax.vmap(lambda *row: each(*row))) for _ in range(2))  # noqa: PLW0108
        expected, repeated = np.asarray(first(*rows)), np.asarray(second(*rows))
        poison = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan if x.dtype == jnp.float32 else 1), rows)
        # All comparisons run one program, as another number of rows may round differently.
        beside = [
            (row, np.asarray(first(*jax.tree.map(lambda x, y: y.at[row].set(x[row]), rows, others)))[row])  # noqa: B023
            for others in (_rows(1, vocab), poison)
            for row in range(ROWS)
        ]
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"fails with the logits [vocab] of one row: {printable(lines[0], 300)}"
    if expected.tobytes() != repeated.tobytes():
        return "has another result when it is called again: it may depend on its arguments alone"
    if any(found.tobytes() != expected[row].tobytes() for row, found in beside):
        return "has another result for a row beside other rows: it may depend on its own row alone"
    return None


def _rows(seed: int, vocab: int) -> tuple[Float32[Array, "rows vocab"], SoFar]:
    """Random arguments of a filter, for `ROWS` rows."""
    draw = np.random.default_rng(seed)
    counts, in_prompt = draw.poisson(0.2, (ROWS, vocab)).astype(np.int32), draw.random((ROWS, vocab)) < 0.1
    length = (counts.sum(axis=1) + in_prompt.sum(axis=1)).astype(np.int32)
    logits = draw.normal(0, 3, (ROWS, vocab)).astype(np.float32)
    return jnp.asarray(logits), SoFar(*map(jnp.asarray, (length, counts, in_prompt)))
