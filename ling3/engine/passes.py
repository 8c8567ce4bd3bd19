"""The forward passes of an engine over the rows of its pool: also those for prompts' scores, snapshots and captures."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32

from ling3.cache import Span, map_slots
from ling3.engine import pool as pools
from ling3.engine.pool import Pool, Rows, everywhere
from ling3.engine.sampling import NOT_A_NUMBER, Choice, choose_active, log_sum_exp, scored
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


@functools.partial(jax.jit, donate_argnames="pool", static_argnames="execution")
def prompt_end(
    model: CausalLM,
    rows: Rows,
    tokens: Int32[Array, "rows seq"],
    lengths: Int32[Array, " rows"],
    pool: Pool,
    execution: Execution,
) -> tuple[tuple[Choice, Float32[Array, "rows vocab"]], Pool]:
    """`prefill` of the last tokens of prompts, with the logits after them and no token: -1, or NOT_A_NUMBER."""
    view = pool.take(rows, execution.lowering)
    logits, cache = model.step(tokens, view.cache(rows.table), lengths, last=True, execution=execution)
    after = view.after(cache, view.token, jnp.zeros_like(view.done))
    logits = logits[:, 0]
    choice = Choice.none(lengths.shape, logits.shape[-1])
    token = jnp.where(jnp.isfinite(log_sum_exp(logits)), choice.token, NOT_A_NUMBER)
    return (eqx.tree_at(lambda c: c.token, choice, token), logits), pool.put(rows, after)


@functools.partial(jax.jit, donate_argnames="pool", static_argnames="execution")
def first_token(
    rows: Rows, logits: Float32[Array, "rows vocab"], pool: Pool, execution: Execution
) -> tuple[Choice, Pool]:
    """The token that `prefill` would choose from such logits for rows whose prompt's are these."""
    view = pool.take(rows, execution.lowering)
    assert rows.slots is not None, "an engine's rows say their slots"
    chosen = rows.slots < pool.length.shape[0]
    choice = choose_active(logits, view.sampling, view.length, chosen, execution.lowering)
    return choice, pool.put(rows, view.after(view.cache(rows.table), choice.token, chosen))


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

    Without `constrained` an engine takes no grammars, without `score` it gives no log-probabilities of prompts,
    without `prompt_end` and `first_token` it keeps no snapshots, and without `watch` it captures nothing and takes no
    interventions.
    """

    prefill: Callable[..., tuple[Choice, Pool]] = pools.prefill
    decode: Callable[..., tuple[Choice, Pool]] = pools.decode
    constrained: Callable[..., tuple[Choice, Pool]] | None = pools.constrained
    score: Callable[..., tuple[Choice, Pool]] | None = score
    prompt_end: Callable[..., tuple[tuple[Choice, Array], Pool]] | None = prompt_end
    first_token: Callable[..., tuple[Choice, Pool]] | None = first_token
    watch: Callable[..., tuple[dict[str, Any], Pool]] | None = watch
