"""The two forward programs of an engine: `extend` puts prompt tokens into the caches, `decode` samples new ones.

`extend` never samples: it stops one token before a prompt's end, and `decode` begins with that token. So the state of a
sequence does not depend on how its next token is chosen, and prompts whose states are kept, scored or captured go
through `extend` like any other. The input of a call is one `Batch`, whose absent parts are None; each combination of
parts is compiled as a program of its own.

Both use `jax.jit`: Equinox's `filter_jit` would wait for each call's end before the next is dispatched.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int32, UInt32

from ling3.adapters.by_row import for_rows
from ling3.cache import Span
from ling3.engine.arrays import AnyArray
from ling3.engine.masks import masks_of_steps
from ling3.engine.pool import Pool, Rows
from ling3.engine.sampling import Choice, choose_active, scored
from ling3.engine.settings import DECODE_STEPS
from ling3.engine.verification import AllowedTokens, Drafts, Passes, Verified, verified
from ling3.execution import Execution
from ling3.intervention import Intervention, recorder
from ling3.mesh.placement import everyones
from ling3.mesh.sharded import Sharded
from ling3.model import CausalLM
from ling3.mtp import predicted

SCORED = 16
"""Tokens of each row whose logits are computed at once to score a prompt: those of a chunk would take gigabytes."""


class Batch(eqx.Module):
    """The input of one call: a row for each sequence, and unused rows, whose slots are out of range.

    `extend` puts the first `lengths[b]` of `tokens[b]` into row b's caches; the rest is padding. `decode` gives row b
    at most `lengths[b]` new tokens. It samples them freely, or with `masks`: then step i gives `tokens[b, i]` if that
    is not -1, and otherwise samples among the tokens that row b's mask allows.
    """

    rows: Rows
    tokens: Int32[AnyArray, "rows seq"]
    lengths: Int32[AnyArray, " rows"]
    masks: UInt32[AnyArray, "rows words"] | None = None
    targets: Int32[AnyArray, "rows seq"] | None = None  # `extend` only: the tokens to score, each follows its place
    following: Int32[AnyArray, "rows seq"] | None = None  # `extend` only: the same, for a multi-token-prediction layer
    drafts: Drafts | None = None  # `decode` only
    interventions: tuple[Intervention, ...] = ()  # those of each row, `stacked`
    want: tuple[str, ...] = eqx.field(static=True, default=())  # `extend` only: recorder paths to return
    adapter: Int32[AnyArray, " rows"] | None = None  # the index of each row's adapter; out of range for none


class Extension(eqx.Module):
    """The results of `extend`, with a row for each sequence."""

    length: Int32[Array, " rows"]  # tokens in the row's caches
    scores: Choice | None  # of `Batch.targets`, [rows, seq]
    seen: dict[str, Any]  # the arrays of `Batch.want`, by path, [rows, seq, …]


@functools.partial(jax.jit, donate_argnames="pool", static_argnames="execution")
def extend(model: CausalLM, batch: Batch, pool: Pool, execution: Execution) -> tuple[Extension, Pool]:
    """Puts each row's next `lengths` prompt tokens into its caches, and samples nothing.

    With `targets` it also returns log softmax(z)_target of the logits z after each token, and the likeliest tokens if
    any row's sampling reports alternatives. Scoring does not change the caches' bits.
    """
    return _on_every_device(functools.partial(_extend, execution=execution), model, batch, pool)


def _extend(model: CausalLM, batch: Batch, pool: Pool, execution: Execution) -> tuple[Extension, Pool]:
    view = pool.take(batch.rows, execution.take_rows)
    watcher = recorder(batch.interventions, watch=bool(batch.want))
    span = Span(view.length, batch.lengths, batch.rows.table, execution, watcher)
    hidden, layers = model.model(batch.tokens, view.layers, span)
    if batch.following is not None:
        own = Span(span.start, span.length, span.table, execution, tokens=batch.following)
        _, state = predicted(model, model.mtp[0], hidden, layers[-1], own)
        layers = (*layers[:-1], state)
    after = dataclasses.replace(view, layers=layers, length=view.length + batch.lengths)
    scores = None
    if batch.targets is not None:
        scores = score(model, hidden, batch.targets, jnp.any(view.sampling.alternatives), execution)

    def by_row(path: str) -> Any:
        if ".mlp." in path:  # recorded as [rows·seq, …], since experts take the tokens of all rows together
            return jax.tree.map(lambda x: x.reshape(*batch.tokens.shape, *x.shape[1:]), watcher.values[path])
        return watcher.values[path]

    seen = {path: by_row(path) for path in batch.want}
    return Extension(after.length, scores, seen), pool.put(batch.rows, after)


def score(
    model: CausalLM,
    hidden: Float[Array, "rows seq hidden"],
    targets: Int32[Array, "rows seq"],
    alternatives: Bool[Array, ""],
    execution: Execution,
) -> Choice:
    """log softmax(z)_target of each token's logits z, and with `alternatives` the likeliest tokens."""
    batch, seq = targets.shape
    block = min(SCORED, seq)
    padding = ((0, 0), (0, -seq % block))
    hidden = jnp.pad(hidden, (*padding, (0, 0)))
    blocks = hidden.reshape(batch, -1, block, hidden.shape[-1])
    targets = jnp.pad(targets, padding).reshape(batch, -1, block)

    def of_block(block: tuple[Float[Array, "rows block hidden"], Int32[Array, "rows block"]]) -> Choice:
        x, token = block
        logits = model.logits(x, execution).reshape(token.size, -1)
        _, total = execution.likeliest(logits, jnp.ones(token.size, bool))
        return scored(logits, total, token.reshape(-1), alternatives)

    def joined(x: Array) -> Array:
        x = jnp.moveaxis(x.reshape(x.shape[0], batch, block, *x.shape[2:]), 0, 1)
        return x.reshape(batch, -1, *x.shape[3:])[:, :seq]

    return jax.tree.map(joined, lax.map(of_block, (jnp.moveaxis(blocks, 1, 0), jnp.moveaxis(targets, 1, 0))))


@functools.partial(jax.jit, donate_argnames="pool", static_argnames="execution")
def decode(model: CausalLM, batch: Batch, pool: Pool, execution: Execution) -> tuple[Choice | Verified, Pool]:
    """Samples up to `lengths` tokens for each row that is not done, `[rows, DECODE_STEPS]`; -1 where a row got none.

    A row's first step puts its newest token into the caches: the last one of its prompt, or the last one sampled.

    With `drafts` the same tokens, with the same bits, come from passes that take several at once (`verification.py`).
    """
    run = _decode if batch.drafts is None else _verify
    return _on_every_device(functools.partial(run, execution=execution), model, batch, pool)


Carry = tuple[Int32[Array, ""], Bool[Array, ""], Choice, Pool]
"""The number of steps so far, whether any row is still active, the tokens so far, and the pool of the call's rows."""


def _decode(model: CausalLM, batch: Batch, pool: Pool, execution: Execution) -> tuple[Choice, Pool]:
    rows, view = batch.rows, pool.take(batch.rows, execution.take_rows)
    how = {"interventions": batch.interventions} if batch.interventions else {}

    def active(step: Int32[Array, ""], view: Pool) -> Bool[Array, " rows"]:
        return ~view.done & (step < batch.lengths)

    def any_active(step: Int32[Array, ""], view: Pool) -> Bool[Array, ""]:
        left = jnp.any(active(step, view))
        # Devices that share experts must do the same number of steps, even if all rows of one have ended.
        return left if rows.beside is None else lax.psum(left.astype(jnp.int32), rows.beside) > 0

    def one_step(carry: Carry) -> Carry:
        i, _, out, view = carry
        chosen = active(i, view)
        lengths, allowed = chosen.astype(jnp.int32), None
        if batch.masks is not None:
            allowed = masks_of_steps(batch.tokens, batch.masks, jnp.full((len(chosen), 1), i))[:, 0]
        logits, cache = model.step(view.token[:, None], view.cache(rows.table), lengths, execution=execution, **how)
        choice = choose_active(logits[:, 0], view.sampling, cache.length, chosen, execution, allowed)
        view = view.after(cache, choice.token, chosen)
        choice = eqx.tree_at(lambda c: c.token, choice, jnp.where(chosen, choice.token, -1))
        out = jax.tree.map(lambda x, y: x.at[:, i].set(y), out, choice)
        return i + 1, any_active(i + 1, view), out, view

    out = Choice.none((view.token.shape[0], DECODE_STEPS), model.config.vocab_size)
    first = jnp.zeros((), jnp.int32)
    *_, out, view = lax.while_loop(lambda carry: carry[1], one_step, (first, any_active(first, view), out, view))
    return out, pool.put(rows, view)


def _verify(model: CausalLM, batch: Batch, pool: Pool, execution: Execution) -> tuple[Verified, Pool]:
    assert batch.drafts is not None, "decoded without drafts"
    allowed = None if batch.masks is None else AllowedTokens(jnp.asarray(batch.tokens), jnp.asarray(batch.masks))
    passes = Passes(model, batch.rows, jnp.asarray(batch.lengths), batch.drafts, allowed, execution)
    return verified(passes, pool)


def _on_every_device(
    run: Callable[..., tuple[Any, Pool]], model: CausalLM, batch: Batch, pool: Pool
) -> tuple[Any, Pool]:
    """Runs a forward pass on every device of the pool's mesh, each with its own rows, and all-gathers the results."""
    if not isinstance(model, Sharded):
        return run(_adapted(batch, model), batch, pool)
    axis = pool.axis

    def on_a_device(part: CausalLM, batch: Batch, pool: Pool) -> tuple[Any, Pool]:
        batch = dataclasses.replace(batch, rows=batch.rows.here(pool, axis))
        results, pool = run(_adapted(batch, part), batch, pool)
        return jax.tree.map(lambda x: everyones(x, axis), results), pool

    where, out = (PartitionSpec(axis), pool.specs), (PartitionSpec(), pool.specs)
    results, after = model.placement.run(on_a_device, (batch, pool.part), where, out, model.part)
    return results, dataclasses.replace(after, placement=model.placement)


def _adapted(batch: Batch, model: CausalLM) -> CausalLM:
    """The model, or a device's part of it, with the adapters of a call's rows if they have any."""
    return model if batch.adapter is None else for_rows(model, jnp.asarray(batch.adapter))


class Programs(NamedTuple):
    """The two forward programs of an engine, which can be replaced, and the features that they support."""

    extend: Callable[[CausalLM, Batch, Pool, Execution], tuple[Extension, Pool]] = extend
    decode: Callable[[CausalLM, Batch, Pool, Execution], tuple[Choice | Verified, Pool]] = decode
    parts: frozenset[str] = frozenset({"masks", "targets", "interventions", "want", "drafts", "adapter"})
    """The optional parts of a `Batch` that the programs accept."""
    snapshots: bool = True
    """False if a sequence's memory in the pool cannot be taken as a `Snapshot`."""
