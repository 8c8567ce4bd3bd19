"""The forward passes of an engine over the rows of its pool, and those that score a prompt and watch what passes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from ling3.cache import Span, map_slots
from ling3.engine import pool as pools
from ling3.engine.pool import Pool, Rows, everywhere
from ling3.engine.sampling import Choice, log_sum_exp, scored
from ling3.execution import Execution
from ling3.intervention import Intervention, recorder
from ling3.model import CausalLM

SCORED = 16
"""Tokens whose logits exist at once while a prompt is scored: those of a whole chunk would be gigabytes."""


@functools.partial(jax.jit, donate_argnames="pool", static_argnames="execution")
def score(
    model: CausalLM,
    rows: Rows,
    tokens: Int32[Array, "rows seq"],
    lengths: Int32[Array, " rows"],
    targets: Int32[Array, "rows seq"],
    alternatives: Bool[Array, " rows"],
    pool: Pool,
    execution: Execution,
    interventions: tuple[Intervention, ...] = (),
) -> tuple[Choice, Pool]:
    """How likely each of `targets` is after the token at its place, `[rows, seq]`, and the likeliest tokens there.

    `tokens` are each row's next `lengths` of its prompt, as for `prefill`, which adds them to the caches afterwards: a
    pass of its own, so that an answer has the same bits with the prompt's scores and without. It leaves all slots as
    they are, and writes into no entries of the pages but those that `prefill` then overwrites.
    """
    run, axes = functools.partial(_score, execution=execution, interventions=interventions), (pool.axis,) * 4
    return everywhere(run, model, pool, rows, (tokens, lengths, targets, alternatives), axes)


def _score(
    model: CausalLM,
    pool: Pool,
    rows: Rows,
    tokens: Int32[Array, "rows seq"],
    lengths: Int32[Array, " rows"],
    targets: Int32[Array, "rows seq"],
    alternatives: Bool[Array, " rows"],
    execution: Execution,
    interventions: tuple[Intervention, ...],
) -> tuple[Choice, Pool]:
    view = pool.take(rows, execution.lowering)
    span = Span(view.length, lengths, rows.table, execution, recorder(interventions))
    hidden, after = model.model(tokens, view.layers, span)
    layers = map_slots(lambda new, old: old, after, view.layers)
    choice = scores(model, hidden, targets, alternatives, execution)
    return choice, pool.put(rows, Pool(layers, view.length, view.token, view.until, view.done, view.sampling))


def scores(
    model: CausalLM,
    hidden: Float[Array, "rows seq hidden"],
    targets: Int32[Array, "rows seq"],
    alternatives: Bool[Array, " rows"],
    execution: Execution,
) -> Choice:
    """log softmax(z)_target of each token's logits z, and the likeliest tokens if any row wants `alternatives`."""
    batch, seq = targets.shape
    block = min(SCORED, seq)
    padding = ((0, 0), (0, -seq % block))
    hidden = jnp.pad(hidden, (*padding, (0, 0)))
    blocks = hidden.reshape(batch, -1, block, hidden.shape[-1])
    own = jnp.pad(targets, padding).reshape(batch, -1, block)

    def of(some: tuple[Float[Array, "rows block hidden"], Int32[Array, "rows block"]]) -> Choice:
        x, token = some
        logits = model.logits(x, execution).reshape(batch * block, -1)
        total = log_sum_exp(logits)
        return scored(logits, total, token.reshape(-1), jnp.any(alternatives))

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x.reshape(x.shape[0], batch, block, *x.shape[2:]), 0, 1)
        return x.reshape(batch, -1, *x.shape[3:])[:, :seq]

    return jax.tree.map(joined, lax.map(of, (jnp.moveaxis(blocks, 1, 0), jnp.moveaxis(own, 1, 0))))


@functools.partial(jax.jit, donate_argnames="pool", static_argnames=("paths", "execution"))
def watch(
    model: CausalLM,
    rows: Rows,
    tokens: Int32[Array, "rows seq"],
    lengths: Int32[Array, " rows"],
    paths: tuple[str, ...],
    pool: Pool,
    execution: Execution,
    interventions: tuple[Intervention, ...] = (),
) -> tuple[dict[str, Any], Pool]:
    """Adds each row's next `lengths` tokens to the caches; what a recorder saw of them at `paths`, `[rows, seq, …]`."""
    view, watcher = pool.take(rows, execution.lowering), recorder(interventions, watch=True)
    span = Span(view.length, lengths, rows.table, execution, watcher)
    _, layers = model.model(tokens, view.layers, span)
    after = Pool(layers, view.length + lengths, view.token, view.until, view.done, view.sampling)

    def by_row(path: str) -> Any:
        if ".mlp." in path:  # experts take the tokens of all rows together
            return jax.tree.map(lambda x: x.reshape(*tokens.shape, *x.shape[1:]), watcher.values[path])
        return watcher.values[path]

    return {path: by_row(path) for path in paths}, pool.put(rows, after)


class Passes(NamedTuple):
    """An engine's forward passes: these programs, or what takes their place.

    Without `constrained` an engine takes no grammars, without `score` it gives no log-probabilities of prompts, and
    without `watch` it captures nothing and takes no interventions.
    """

    prefill: Callable[..., tuple[Choice, Pool]] = pools.prefill
    decode: Callable[..., tuple[Choice, Pool]] = pools.decode
    constrained: Callable[..., tuple[Choice, Pool]] | None = pools.constrained
    score: Callable[..., tuple[Choice, Pool]] | None = score
    watch: Callable[..., tuple[dict[str, Any], Pool]] | None = watch
