"""Each operator's form on a platform, held against the plain form: values, repetition, and independence of company.

A probe is an operator on random arrays of Ling-3.0-tiny's sizes, or of toy sizes. A form passes if its numbers are the
plain form's up to rounding, if a second call gives the same bits, and if each row has the same bits in another place
and beside other rows.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from benchmarks import operators
from benchmarks.oracles import BFLOAT16, FLOAT32, close
from benchmarks.registry import Setting, Wrong
from ling3.execution import PLAIN, Execution
from ling3.ops.attention import Expansion
from ling3.ops.kda import recurrent_kda
from ling3.ops.swiglu import SWIGLU

PAGE = operators.PAGE


@dataclasses.dataclass(frozen=True)
class Probe:
    """An operator and the arrays to call it with."""

    operator: str
    """The name of its field in `Execution`."""
    call: Callable[..., Any]
    """Calls a form, its first argument, with `rows` and `shared`. The results have the rows on their first axis."""
    rows: tuple[Array, ...]
    """Arrays with a row for each row of the batch, on the first axis."""
    shared: tuple[Array, ...] = ()
    """Arrays that all rows share."""
    oracle: Callable[..., Any] | None = None
    """The form with the right values; None for the plain form."""


def examine(probe: Probe, execution: Execution) -> dict[str, Any]:
    """The findings on `execution`'s form, as plain values: `form`, `values`, `same_again`, `in_any_company`.

    For a form that refuses, only `form` and `refused`, its reason.
    """
    form, plain = getattr(execution, probe.operator), probe.oracle or getattr(PLAIN, probe.operator)
    run, name = jax.jit(lambda rows, shared: probe.call(form, *rows, *shared)), f"{form.__module__}.{form.__qualname__}"
    try:
        found = run(probe.rows, probe.shared)
    except ValueError as error:
        return {"form": name.removeprefix("ling3.ops."), "refused": str(error)}
    # Every row in another place; then the first row in its place, beside other rows.
    moved = run(tuple(jnp.roll(x, 1, 0) for x in probe.rows), probe.shared)
    strange = run(tuple(_only_first(x) for x in probe.rows), probe.shared)
    told: dict[str, Any] = {
        "form": name.removeprefix("ling3.ops."),
        "same_again": _equal(found, run(probe.rows, probe.shared)),
        "in_any_company": _equal(jax.tree.map(lambda x: jnp.roll(x, 1, 0), found), moved)
        and _equal(jax.tree.map(lambda x: x[:1], found), jax.tree.map(lambda x: x[:1], strange)),
    }
    if form is plain:
        return told | {"values": "it is the plain form"}
    narrow = any(x.dtype == jnp.bfloat16 for x in (*probe.rows, *probe.shared))
    expected = jax.jit(lambda rows, shared: probe.call(plain, *rows, *shared))
    try:
        values = close(lambda: found, lambda: expected(probe.rows, probe.shared), BFLOAT16 if narrow else FLOAT32)()
    except Wrong as error:
        return told | {"wrong": str(error)}
    return told | {"values": values}


def passed(told: dict[str, Any]) -> bool:
    """True if a form has the right values, the same bits again, and the same bits in any company, or if it refuses."""
    return "refused" in told or ("values" in told and told["same_again"] and told["in_any_company"])


def probes(setting: Setting) -> Iterator[Probe]:
    """A probe of every operator, decode's first."""
    rng = np.random.default_rng(0)
    batch, seq, heads, width = setting.size(full=(8, 256, 16, 128), toy=(3, 32, 2, 32))

    def normal(*shape: int, dtype: Any = jnp.bfloat16) -> Array:
        return operators.normal(rng, shape, dtype, std=shape[-1] ** -0.5)

    kda = operators.kda_inputs(batch, seq, heads, width, rounded=False)
    *token, state = (x[:, 0] if name != "state" else x for name, x in kda.items())
    yield Probe("kda_step", lambda form, *x: form(*x), (*token, state))
    chunks = {"lower_bound": operators.LOWER_BOUND, "chunk_size": Execution.default("gpu").chunk_size}
    few = tuple(x if name == "state" else x[:, :4] for name, x in kda.items())
    yield Probe("kda_in_turn", lambda form, *x: form(*x), few, oracle=recurrent_kda)
    yield Probe("kda_look", lambda form, *x: form(*x), few, oracle=lambda *x: recurrent_kda(*x)[0])
    yield Probe("chunk_kda", lambda form, *x: form(*x, **chunks), tuple(kda.values()))

    hidden, latent, rope, context = setting.size(full=(1536, 512, 64, 2048), toy=(64, 32, 16, 300))
    entry, columns = latent + rope, -(-context // PAGE)
    pages = normal(batch * columns, PAGE, entry)
    table = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
    length = jnp.asarray(rng.integers(1, context, batch), jnp.int32)
    heads = max(heads, 16)  # fewer rows do not fill a tile of a matrix unit
    last = jnp.broadcast_to(length[:, None] - 1, (batch, heads))
    yield Probe(
        "latent_attention",
        lambda form, q, last, table, length, pages: form(q, last, pages, table, length),
        (normal(batch, heads, entry), last, table, length),
        (pages,),
    )
    matrix = normal(2 * heads * width, latent)
    expansion = lambda weight: Expansion(weight, heads, width, PLAIN.times)  # noqa: E731
    newest = last[:, :1] - jnp.arange(16, dtype=jnp.int32)[None, ::-1]
    yield Probe(
        "paged_attention",
        lambda form, q, places, table, length, pages, w: form(q, places, pages, table, length, expansion(w)),
        (normal(batch, heads, 16, width + rope), jnp.maximum(newest, 0), table, length),
        (pages, matrix),
    )
    whole = jnp.broadcast_to(jnp.arange(PAGE, dtype=jnp.int32), (batch, PAGE))
    yield Probe(
        "block_attention",
        lambda form, q, places, entries, length, w: form(q, places, entries, length, expansion(w)),
        (normal(batch, heads, PAGE, width + rope), whole, normal(batch, PAGE, entry), jnp.minimum(length, PAGE)),
        (matrix,),
    )
    yield Probe("latent_queries", lambda form, q, w: form(q, w, "float32"), (normal(batch, heads, width),), (matrix,))
    yield Probe(
        "latent_values", lambda form, x, w: form(x, w, width, "float32"), (normal(batch, heads, latent),), (matrix,)
    )
    yield Probe(
        "product", lambda form, x, w: form(x, w, "float32"), (normal(batch, hidden),), (normal(4 * hidden, hidden),)
    )

    count, top_k, inner = setting.size(full=(128, 8, 512), toy=(8, 2, 64))
    chosen = jnp.asarray(np.argsort(rng.random((batch, count)), axis=1)[:, :top_k], jnp.int32)
    weights = jnp.asarray(rng.dirichlet(np.ones(top_k), batch), jnp.float32)
    stacks = normal(count, inner, hidden), normal(count, inner, hidden), normal(count, hidden, inner)
    yield Probe(
        "experts",
        lambda form, *x: form(*x, SWIGLU, PLAIN.times),
        (normal(batch, hidden), chosen, weights),
        stacks,
    )
    places = jnp.asarray(rng.permutation(batch), jnp.int32)
    yield Probe("take_rows", lambda form, rows, x: form(x, rows), (places,), (state,))
    logits = jnp.asarray(2 * rng.normal(size=(batch, setting.size(full=157_184, toy=700))), jnp.float32)
    yield Probe("likeliest", lambda form, active, x: form(x, active), (jnp.ones(batch, bool), logits))
    seeds = jnp.asarray(rng.integers(0, 2**32, (batch, 2)), jnp.uint32)
    filters = (jnp.full(batch, 0.6), jnp.full(batch, 20, jnp.int32), jnp.full(batch, 0.95), jnp.zeros(batch))
    yield Probe(
        "draw",
        lambda form, x, active, seeds, *filters: form(x, active, jax.random.wrap_key_data(seeds), *filters),
        (logits, jnp.ones(batch, bool), seeds, *filters),
    )
    inputs, taps = normal(batch, 1, hidden), normal(hidden, 4, dtype=jnp.float32)
    tails = normal(batch, 3, 3 * hidden, dtype=jnp.float32)
    yield Probe(
        "short_conv",
        lambda form, x, tail, length, w: form(x, w, tail, length, hidden),
        (inputs, tails, jnp.ones(batch, jnp.int32)),
        (taps,),
    )
    yield Probe("read", lambda form, rows, x: form(lambda: x[rows], x.dtype, rows[0] >= 0), (places,), (state,))


def _only_first(x: Array) -> Array:
    """The array with its first row, and in place of every other row the one before it."""
    return jnp.concatenate([x[:1], x[:-1]])


def _equal(found: Any, expected: Any) -> bool:
    """True if two trees have the same arrays, bit for bit."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)
