"""An attention worker: the forward passes of an engine whose routed experts are on FFN workers.

Up to `plan.micro_batches` micro-batches are in flight: while the FFN workers run the experts of one, this worker runs
attention on the next.

    for each layer, for each micro-batch:   combine the results of the previous layer;  attend;  route and send

A decode call's rows are split into micro-batches of equal size, a prompt's chunk into ones of `plan.tokens` tokens.
The bits of a micro-batch depend on its rows only, so answers do not depend on other requests.
"""

import dataclasses
import functools
import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from ling3.afd.messages import Computed, Failed, Routed, WorkerError
from ling3.afd.operators.returning import attention_worker_combine, attention_worker_scheduler, ffn_to_attention
from ling3.afd.operators.sending import complete_unrouted
from ling3.afd.operators.windows import AttentionArea
from ling3.afd.plan import AfdPlan, committed
from ling3.afd.stats import Counts
from ling3.cache import Cache, Span, State, map_slots
from ling3.engine.arrays import AnyArray
from ling3.engine.forward import Batch, Extension, Programs
from ling3.engine.pool import Pool, Rows
from ling3.engine.sampling import Choice, choose_active
from ling3.engine.settings import DECODE_STEPS, EngineSettings
from ling3.execution import Execution
from ling3.layers.hyper import Streams
from ling3.layers.moe import NO_EXPERT, MoE
from ling3.model import CausalLM, DecoderLayer
from ling3.serve import Engine
from ling3.text.tokenizer import Tokenizer


class MicroBatch(NamedTuple):
    """Some rows of a pass: their new tokens, positions and block table, and the slot of the first row."""

    tokens: Int[Array, "rows seq"]
    start: Int32[Array, " rows"]
    length: Int32[AnyArray, " rows"]
    table: Int32[Array, "rows columns"]
    first: Int32[Array, ""]

    def span(self, execution: Execution) -> Span:
        """The span of the micro-batch's tokens, as layers take it."""
        return Span(self.start, self.length, self.table, execution, tokens=self.tokens)


class Away(NamedTuple):
    """The data of a micro-batch that stays on this worker while its tokens are at the experts."""

    residual: Float[Array, "rows seq hidden"] | Streams
    shared: Float[Array, "rows seq hidden"] | None
    weights: Float32[Array, "tokens top_k"]


class AttentionWorker:
    """One session: it runs the forward passes of an engine.

    `send[w]` sends a message to FFN worker w. Results arrive in `inbox`, and a `Failed` if a worker is gone.
    """

    def __init__(
        self, session: int, model: CausalLM, plan: AfdPlan, send: Sequence[Callable[[Routed], object]], counts: Counts
    ):
        self.session, self.model, self.plan, self.counts = session, model, plan, counts
        self.inbox: queue.SimpleQueue[Computed | Failed] = queue.SimpleQueue()
        self._send, self._epoch = send, 0
        self._failed: Failed | None = None
        layers = model.model.layers
        self._head = dataclasses.replace(model, model=dataclasses.replace(model.model, layers=()))
        ranks, memories = np.cumsum([isinstance(layer.mlp, MoE) for layer in layers]), 0
        self._steps: list[tuple[DecoderLayer, int, int]] = []  # layer, index of its state, index among sparse ones
        for layer, rank in zip(layers, ranks.tolist(), strict=True):
            self._steps.append((layer, memories, rank - 1))
            memories += layer.attention is not None
        self._window = committed(plan.attention_area(), model)
        self._next = 0  # the micro-batch to send next, in turn
        self._in_flight = 0  # micro-batches sent and not yet combined
        # Experts for the padding of an empty batch: spread evenly, so that all FFN workers get tokens.
        spread = np.arange(plan.tokens * plan.top_k) * plan.experts // (plan.tokens * plan.top_k)
        self._everywhere = committed(jnp.asarray(spread.reshape(plan.tokens, plan.top_k), jnp.int32), model)

    def engine(self, tokenizer: Tokenizer | None, settings: EngineSettings, execution: Execution) -> Engine:
        """An engine whose `extend` and `decode` are this worker's, which take no optional parts of a batch.

        A decode call has a row for each request that may run, in micro-batches of equal size.
        """
        requests = -(-settings.max_running_requests // self.plan.micro_batches) * self.plan.micro_batches
        changes = {"max_running_requests": requests, "decode_rows": requests, "batch_invariant": True}
        programs = Programs(self.extend, self.decode, frozenset(), snapshots=False)
        return Engine(self.model, tokenizer, settings, execution=execution, programs=programs, **changes)

    def extend(self, model: CausalLM, batch: Batch, pool: Pool, execution: Execution) -> tuple[Extension, Pool]:
        """`engine.forward.extend` in micro-batches, for a batch of one row; `model` is this worker's."""
        small, layers = _split(committed(pool, model))
        length, size = int(batch.lengths[0]), self.plan.tokens
        count = max(1, -(-length // size))
        padded = np.zeros((count, 1, size), np.int32)
        padded.reshape(-1)[:length] = np.asarray(batch.tokens)[0, :length]
        start, first = begin_extend(small, batch.rows)
        lengths = np.clip(length - size * np.arange(count, dtype=np.int32), 0, size)
        pieces = [
            MicroBatch(padded[i], start + i * size, lengths[i : i + 1], batch.rows.table, first) for i in range(count)
        ]
        for _ in self._through(pieces, layers, execution, empty=not length):
            pass
        extension, small = end_extend(batch.rows, batch.lengths, small)
        return extension, dataclasses.replace(small, layers=tuple(layers))

    def decode(self, model: CausalLM, batch: Batch, pool: Pool, execution: Execution) -> tuple[Choice, Pool]:
        """`engine.forward.decode` in micro-batches; `model` is this worker's."""
        small, layers = _split(committed(pool, model))
        count = batch.lengths.shape[0]
        size = count // self.plan.micro_batches
        out = committed(Choice.none((count, DECODE_STEPS), self.model.config.vocab_size), model)
        empty = not np.asarray(batch.lengths).any()
        for i in range(DECODE_STEPS):
            step = np.int32(i)
            pieces, unfinished = begin_decode(batch, step, small, size)
            if not bool(unfinished) and (i or not empty):  # an empty batch, of a warm-up, runs one step
                break
            hidden = tuple(self._through(pieces, layers, execution, empty))
            out, small = end_decode(self._head, hidden, batch, step, out, small, execution)
        return out, dataclasses.replace(small, layers=tuple(layers))

    def leave(self) -> None:
        """Tells the FFN workers that this session sends no more."""
        for send in self._send:
            send(self.plan.last_routed(self.session))

    def _through(
        self, pieces: Sequence[MicroBatch], layers: list[State], execution: Execution, empty: bool
    ) -> Iterator[Float[Array, "rows seq *streams hidden"]]:
        """The residual of each piece after the last layer; updates the layers' states in the list `layers`.

        The pieces of an `empty` batch, which a warm-up runs, send their padding to experts: so the FFN workers compile
        their programs too, and the warm-up waits for their answers. No state depends on padding.
        """
        try:
            for begin in range(0, len(pieces), self.plan.micro_batches):
                some = pieces[begin : begin + self.plan.micro_batches]
                yield from self._together(some, layers, execution, empty)
        except BaseException:
            # A new epoch: messages in flight are dropped, results by this worker and tokens by the FFN workers.
            self._window, self._next, self._in_flight = committed(self.plan.attention_area(), self.model), 0, 0
            self._epoch += 1
            raise

    def _together(
        self, pieces: Sequence[MicroBatch], layers: list[State], execution: Execution, empty: bool
    ) -> list[Float[Array, "rows seq *streams hidden"]]:
        """`_through` for pieces that are in flight at the same time."""
        with self.counts.working("attention", self.session):
            x: list[Any] = [embed(self._head, piece.tokens, execution) for piece in pieces]
        for layer, memory, sparse in self._steps:
            for i, piece in enumerate(pieces):
                x[i] = self._received(x[i])
                with self.counts.working("attention", self.session):
                    state = layers[memory] if layer.attention is not None else None
                    x[i], routed, state = attend(layer, x[i], state, piece, self.plan, execution)
                    if layer.attention is not None:
                        layers[memory] = state
                    if routed is not None:
                        payload, chosen = jax.block_until_ready(routed)
                        self._send_out(sparse, payload, self._everywhere if empty else chosen)
        return [self._received(own) for own in x]

    def _send_out(
        self, sparse: int, payload: Float[Array, "tokens width"], chosen: Int32[Array, "tokens top_k"]
    ) -> None:
        """Sends a micro-batch to every FFN worker, and completes its slots that go to no worker."""
        micro_batch, self._next = self._next, (self._next + 1) % self.plan.micro_batches
        self._window = completed(
            self._window,
            session_id=np.int32(self.session),
            micro_batch_id=np.int32(micro_batch),
            expert_ids=chosen,
            expert_rank_table=self.plan.rank_table,
            moe_expert_num=self.plan.experts,
        )
        header = np.asarray([self.session, self._epoch, micro_batch, sparse], np.int32)
        self._in_flight += 1
        self.counts.in_flight[self.session] = max(self.counts.in_flight[self.session], self._in_flight)
        for send in self._send:
            send(Routed(header, payload, chosen))

    def _received(self, x: Away | Array) -> Float[Array, "rows seq *streams hidden"]:
        """A piece's residual; if the piece is `Away`, waits for its experts' results and adds them."""
        if not isinstance(x, Away):
            return x
        while True:
            self._window, ready = polled(self._window)
            if bool(ready):
                break
            self._take(self.inbox.get() if self._failed is None else self._failed)
        self._in_flight -= 1
        with self.counts.working("attention", self.session):
            y, self._window = combined(x, self._window, self.plan)
            return y

    def _take(self, message: Computed | Failed) -> None:
        """Writes results into the window, flags last; drops those of abandoned passes. Raises for a `Failed`."""
        if isinstance(message, Failed):
            self._failed = message
            raise WorkerError(f"{message.worker} failed: {message.error!r}") from message.error
        if int(message.epoch) == self._epoch:
            self._window = returned(self._window, message.y, message, session_id=np.int32(self.session))


def _split(pool: Pool) -> tuple[Pool, list[State]]:
    """The pool without its layers' states, and these states."""
    return dataclasses.replace(pool, layers=()), list(pool.layers)


@functools.partial(jax.jit, static_argnames="execution")
def embed(
    head: CausalLM, tokens: Int[Array, "rows seq"], execution: Execution
) -> Float[Array, "rows seq *streams hidden"]:
    """The residual stream before the first layer."""
    return head.model.spread(head.model.word_embeddings.embed(tokens, execution))


@functools.partial(jax.jit, donate_argnames="state", static_argnames=("plan", "execution"))
def attend(
    layer: DecoderLayer,
    x: Float[Array, "rows seq *streams hidden"],
    state: State | None,
    piece: MicroBatch,
    plan: AfdPlan,
    execution: Execution,
) -> tuple[
    Any,
    tuple[Float[Array, "{plan.tokens} {plan.width}"], Int32[Array, "{plan.tokens} {plan.top_k}"]] | None,
    State | None,
]:
    """A piece's residual after a dense layer, or before experts an `Away` and (tokens, experts); and the new state."""
    rows, seq, span = *x.shape[:2], piece.span(execution)
    own = map_slots(lambda old: lax.dynamic_slice_in_dim(old, piece.first, rows), state)
    x, new = layer.attend(x, own, span)
    if state is not None:
        state = map_slots(
            lambda new, old: lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), piece.first, 0), new, state
        )
    normed, residual = layer.read(x)
    if not isinstance(layer.mlp, MoE):
        return residual + layer.mlp(normed, span), None, state
    flat = normed.reshape(rows * seq, -1)
    chosen, weights = layer.mlp.route(flat, span, seq)
    shared = None if layer.mlp.shared_experts is None else layer.mlp.shared(normed, span)
    idle = ((0, plan.tokens - rows * seq), (0, 0))
    chosen = jnp.pad(chosen, idle, constant_values=NO_EXPERT)
    away = Away(residual, shared, jnp.pad(weights.astype(jnp.float32), idle))
    return away, (plan.packed(jnp.pad(flat, idle)), chosen), state


completed = jax.jit(complete_unrouted, donate_argnames="attn", static_argnames="moe_expert_num")
returned = jax.jit(ffn_to_attention, donate_argnames="attn")
polled = jax.jit(attention_worker_scheduler, donate_argnames="attn")


@functools.partial(jax.jit, donate_argnames="window", static_argnames="plan")
def combined(
    away: Away, window: AttentionArea, plan: AfdPlan
) -> tuple[Float[Array, "rows seq *streams hidden"], AttentionArea]:
    """The residual plus the shared expert's output and the weighted results of the complete micro-batch."""
    y, _, window = attention_worker_combine(
        window, away.weights, np.int32(0), hidden_size=plan.hidden, dtype=jnp.float32
    )
    x = away.residual.x if isinstance(away.residual, Streams) else away.residual
    rows, seq = x.shape[:2]
    added = y[: rows * seq].reshape(rows, seq, plan.hidden).astype(x.dtype)
    added = added if away.shared is None else added + away.shared
    return away.residual + added, window


@jax.jit
def begin_extend(pool: Pool, rows: Rows) -> tuple[Int32[Array, " 1"], Int32[Array, ""]]:
    """How many tokens of the row are cached, and its slot."""
    assert rows.slots is not None, "the engine's rows have slots"
    return pool.take(rows).length[:1], rows.slots[0]


@jax.jit
def end_extend(rows: Rows, lengths: Int32[Array, " 1"], pool: Pool) -> tuple[Extension, Pool]:
    """The results of `extend`, and the pool with the chunk's tokens counted."""
    view = pool.take(rows)
    after = dataclasses.replace(view, length=view.length + lengths)
    return Extension(after.length, None, {}), pool.put(rows, after)


@functools.partial(jax.jit, static_argnames="size")
def begin_decode(
    batch: Batch, step: Int32[Array, ""], pool: Pool, size: int
) -> tuple[tuple[MicroBatch, ...], Bool[Array, ""]]:
    """Micro-batches of `size` rows, with one token for active rows and none for others; and whether any is active."""
    view = pool.take(batch.rows)
    active = ~view.done & (step < batch.lengths)
    rows = (view.token[:, None], view.length, active.astype(jnp.int32), batch.rows.table)
    pieces = [
        MicroBatch._make((*(part[first : first + size] for part in rows), jnp.asarray(first, jnp.int32)))
        for first in range(0, active.shape[0], size)
    ]
    return tuple(pieces), jnp.any(active)


@functools.partial(jax.jit, static_argnames="execution")
def end_decode(
    head: CausalLM,
    x: tuple[Float[Array, "_rows 1 *streams hidden"], ...],
    batch: Batch,
    step: Int32[Array, ""],
    out: Choice,
    pool: Pool,
    execution: Execution,
) -> tuple[Choice, Pool]:
    """Samples a step's tokens: `out` with these choices in column `step`, and the pool after the step."""
    view = pool.take(batch.rows)
    active = ~view.done & (step < batch.lengths)
    cache = Cache((), view.length + active.astype(jnp.int32), batch.rows.table)
    logits = head.logits(head.model.normed(jnp.concatenate(x)), execution)[:, 0]
    choice = choose_active(logits, view.sampling, cache.length, active, execution)
    view = view.after(cache, choice.token, active)
    choice = eqx.tree_at(lambda c: c.token, choice, jnp.where(active, choice.token, -1))
    return jax.tree.map(lambda x, y: x.at[:, step].set(y), out, choice), pool.put(batch.rows, view)
