"""An attention worker: the forward passes of an engine whose experts are elsewhere.

A pass goes through the layers with up to `micro_batches` pieces of its rows or tokens under way: while the FFN workers
run the experts of one piece, this worker runs attention on the next.

    for each layer, for each piece:   combine what came back of the layer before;  attend;  route and send

A decode call's rows are cut into pieces of equal size, a prompt's chunk into pieces of `tokens` tokens. A piece's bits
depend on nothing but its own rows, so that answers have the same bits in any company.
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

from ling3.afd.attention_worker import attention_worker_combine, attention_worker_scheduler, complete_unrouted
from ling3.afd.ffn_worker import ffn_to_attention
from ling3.afd.messages import DATA, DRAIN, LEAVE, Computed, Failed, Routed, WorkerError
from ling3.afd.plan import Plan, is_sparse, settled
from ling3.afd.stats import Counts
from ling3.afd.windows import AttentionArea
from ling3.cache import Cache, Span, State, map_slots
from ling3.engine.passes import Passes
from ling3.engine.pool import Pool, Rows
from ling3.engine.sampling import Choice, choose_active
from ling3.engine.settings import DECODE_STEPS
from ling3.execution import Execution
from ling3.layers.hyper import Mixing, mixed
from ling3.layers.moe import NOBODY, MoE
from ling3.model import CausalLM, DecoderLayer


class Piece(NamedTuple):
    """Some rows of a pass: the tokens of each, and the slot of the first."""

    tokens: Int[Array, "rows seq"]
    start: Int32[Array, " rows"]
    length: Int32[Array, " rows"]
    table: Int32[Array, "rows columns"]
    first: Int32[Array, ""]

    def cut(self, first: int, size: int) -> "Piece":
        """So many rows of a pass over all slots, from `first` on."""
        tokens, start, length, table = (part[first : first + size] for part in self[:-1])
        return Piece(tokens, start, length, table, jnp.asarray(first, jnp.int32))

    def span(self, execution: Execution) -> Span:
        """What the layers are told of it."""
        return Span(self.start, self.length, self.table, execution, tokens=self.tokens)


class Away(NamedTuple):
    """What stays of a piece while its tokens are with the experts."""

    x: Float[Array, "rows seq *streams hidden"]
    shared: Float[Array, "rows seq hidden"] | None
    mixing: Mixing | None
    weights: Float32[Array, "tokens top_k"]


class AttentionWorker:
    """One session: takes part in a plan with the forward passes that it lends an engine.

    `send[w]` sends FFN worker w a message; what comes back is put into `inbox`, and a `Failed` if a worker is gone.
    """

    def __init__(
        self, session: int, model: CausalLM, plan: Plan, send: Sequence[Callable[[Routed], object]], counts: Counts
    ):
        self.session, self.model, self.plan, self.counts = session, model, plan, counts
        self.inbox: queue.SimpleQueue[Computed | Failed] = queue.SimpleQueue()
        self._send, self._epoch = send, 0
        self._failed: Failed | None = None
        layers = model.model.layers
        self._head = dataclasses.replace(model, model=dataclasses.replace(model.model, layers=()))
        ranks, memories = np.cumsum([is_sparse(layer) for layer in layers]), 0
        self._steps: list[tuple[DecoderLayer, int, int]] = []  # each layer, its memory's number, its sparse number
        for layer, rank in zip(layers, ranks.tolist(), strict=True):
            self._steps.append((layer, memories, rank - 1))
            memories += layer.attention is not None
        self._window = settled(plan.attention_area(), model)
        self._next = 0  # the micro-batch to send next: they take turns, whichever piece is in them
        self._under_way = 0  # micro-batches sent and not combined
        self._blank = plan.blank_tokens()

    @property
    def passes(self) -> Passes:
        """What an engine runs instead of its own programs: no grammars, scores of prompts, snapshots or captures."""
        return Passes(
            self.prefill, self.decode, constrained=None, score=None, prompt_end=None, first_token=None, watch=None
        )

    def prefill(
        self,
        model: CausalLM,
        rows: Rows,
        tokens: Int32[Array, "1 seq"],
        lengths: Int32[Array, " 1"],
        end: Bool[Array, " 1"],
        pool: Pool,
        execution: Execution,
    ) -> tuple[Choice, Pool]:
        """`engine.pool.prefill` in pieces; the model is the one of this worker."""
        small, layers = _split(settled(pool, model))
        length, size = int(lengths[0]), self.plan.tokens
        count = max(1, -(-length // size))
        padded = np.zeros((count, 1, size), np.int32)
        padded.reshape(-1)[:length] = np.asarray(tokens)[0, :length]
        start, first = begin_prefill(small, rows)
        own = [jnp.asarray([min(size, length - i * size)], jnp.int32) for i in range(count)]
        pieces = [Piece(padded[i], start + i * size, own[i], rows.table, first) for i in range(count)]
        hidden = list(self._through(pieces, layers, execution))
        choice, small = end_prefill(self._head, hidden[-1], own[-1], rows, lengths, end, small, execution)
        return choice, dataclasses.replace(small, layers=tuple(layers))

    def decode(
        self, model: CausalLM, rows: Rows, steps: Int32[Array, ""], pool: Pool, execution: Execution
    ) -> tuple[Choice, Pool]:
        """`engine.pool.decode` in pieces; the model is the one of this worker."""
        small, layers = _split(settled(pool, model))
        count = rows.table.shape[0]
        size = count // self.plan.micro_batches
        out = settled(Choice.none((count, DECODE_STEPS), self.model.config.vocab_size), model)
        for i in range(max(1, int(steps))):
            tokens, start, length, unfinished = begin_decode(small, rows)
            if int(steps) and not bool(unfinished):
                break
            whole = Piece(tokens, start, length, rows.table, jnp.zeros((), jnp.int32))
            cut = [whole.cut(first, size) for first in range(0, count, size)]
            hidden = tuple(self._through(cut, layers, execution))
            out, small = end_decode(self._head, hidden, rows, np.int32(i), out, small, execution)
        return out, dataclasses.replace(small, layers=tuple(layers))

    def leave(self) -> None:
        """Tells the FFN workers that this session sends no more."""
        self._control(LEAVE)

    def _through(
        self, pieces: Sequence[Piece], layers: list[State], execution: Execution
    ) -> Iterator[Float[Array, "rows seq *streams hidden"]]:
        """The residual of each piece after the last layer; `layers` are replaced by the memories after the pieces."""
        try:
            for begin in range(0, len(pieces), self.plan.micro_batches):
                yield from self._together(pieces[begin : begin + self.plan.micro_batches], layers, execution)
        except BaseException:
            self._begin_anew()
            raise

    def _together(
        self, pieces: Sequence[Piece], layers: list[State], execution: Execution
    ) -> list[Float[Array, "rows seq *streams hidden"]]:
        """The same for so many pieces as may be under way at once."""
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
                        self._send_out(sparse, *jax.block_until_ready(routed))
        return [self._received(own) for own in x]

    def _send_out(
        self, sparse: int, payload: Float[Array, "tokens width"], chosen: Int32[Array, "tokens top_k"]
    ) -> None:
        """Sends a micro-batch to every FFN worker, and raises the flags of the slots that go to none."""
        micro_batch, self._next = self._next, (self._next + 1) % self.plan.micro_batches
        place = (np.int32(self.session), np.int32(micro_batch))
        self._window = completed(self._window, chosen, *place, self.plan)
        header = np.asarray([DATA, self.session, self._epoch, micro_batch, sparse], np.int32)
        self._under_way += 1
        self.counts.in_flight[self.session] = max(self.counts.in_flight[self.session], self._under_way)
        for send in self._send:
            send(Routed(header, payload, chosen))

    def _received(self, x: Away | Array) -> Float[Array, "rows seq *streams hidden"]:
        """A piece's residual, with its experts' results if it is away: then waits for all of them."""
        if not isinstance(x, Away):
            return x
        while True:
            self._window, ready = polled(self._window)
            if bool(ready):
                break
            self._take(self.inbox.get() if self._failed is None else self._failed)
        self._under_way -= 1
        with self.counts.working("attention", self.session):
            y, self._window = combined(x, self._window, self.plan)
            return y

    def _take(self, message: Computed | Failed) -> None:
        """Writes results into the window, flags last; drops those of a pass that was given up."""
        if isinstance(message, Failed):
            self._failed = message
            raise WorkerError(f"{message.worker} failed: {message.error!r}") from message.error
        if int(message.epoch) == self._epoch:
            self._window = returned(self._window, message, np.int32(self.session))

    def _begin_anew(self) -> None:
        """Gives up what is under way, here and at the FFN workers."""
        self._window, self._next, self._under_way = settled(self.plan.attention_area(), self.model), 0, 0
        self._epoch += 1
        self._control(DRAIN)

    def _control(self, kind: int) -> None:
        header = np.asarray([kind, self.session, self._epoch, 0, 0], np.int32)
        for send in self._send:
            send(self._blank._replace(header=header))


def _split(pool: Pool) -> tuple[Pool, list[State]]:
    """A pool without its layers, and these."""
    return dataclasses.replace(pool, layers=()), list(pool.layers)


@functools.partial(jax.jit, static_argnames="execution")
def embed(
    head: CausalLM, tokens: Int[Array, "rows seq"], execution: Execution
) -> Float[Array, "rows seq *streams hidden"]:
    """The residual before the first layer."""
    return head.model.spread(head.model.word_embeddings.embed(tokens, execution))


@functools.partial(jax.jit, donate_argnames="state", static_argnames=("plan", "execution"))
def attend(
    layer: DecoderLayer,
    x: Float[Array, "rows seq *streams hidden"],
    state: State | None,
    piece: Piece,
    plan: Plan,
    execution: Execution,
) -> tuple[
    Any,
    tuple[Float[Array, "{plan.tokens} {plan.width}"], Int32[Array, "{plan.tokens} {plan.top_k}"]] | None,
    State | None,
]:
    """A layer of a piece: its residual, or what is `Away` with the tokens to send and their experts; and the memory."""
    rows, seq, span = *x.shape[:2], piece.span(execution)
    own = map_slots(lambda old: lax.dynamic_slice_in_dim(old, piece.first, rows), state)
    x, new = layer.attend(x, own, span)
    if state is not None:
        state = map_slots(
            lambda new, old: lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), piece.first, 0), new, state
        )
    normed, mixing = layer.read(x)
    if not isinstance(layer.mlp, MoE):
        return mixed(x, layer.mlp(normed, span), mixing), None, state
    flat = normed.reshape(rows * seq, -1)
    chosen, weights = layer.mlp.route(flat, span, seq)
    shared = None if layer.mlp.shared_experts is None else layer.mlp.shared(normed, span)
    idle = ((0, plan.tokens - rows * seq), (0, 0))
    chosen = jnp.pad(chosen, idle, constant_values=NOBODY)
    away = Away(x, shared, mixing, jnp.pad(weights.astype(jnp.float32), idle))
    return away, (plan.packed(jnp.pad(flat, idle)), chosen), state


@functools.partial(jax.jit, donate_argnames="window", static_argnames="plan")
def completed(
    window: AttentionArea,
    chosen: Int32[Array, "tokens top_k"],
    session: Int32[Array, ""],
    micro_batch: Int32[Array, ""],
    plan: Plan,
) -> AttentionArea:
    """The window with the slots of a micro-batch complete that go to no FFN worker."""
    return complete_unrouted(
        window,
        session_id=session,
        micro_batch_id=micro_batch,
        expert_ids=chosen,
        expert_rank_table=plan.rank_table(),
        moe_expert_num=plan.experts,
    )


@functools.partial(jax.jit, donate_argnames="window")
def returned(window: AttentionArea, results: Computed, session: Int32[Array, ""]) -> AttentionArea:
    """The window with an FFN worker's results in it."""
    return ffn_to_attention(window, results.y, results, session_id=session)


polled = jax.jit(attention_worker_scheduler, donate_argnums=0)


@functools.partial(jax.jit, donate_argnames="window", static_argnames="plan")
def combined(
    away: Away, window: AttentionArea, plan: Plan
) -> tuple[Float[Array, "rows seq *streams hidden"], AttentionArea]:
    """The residual with the weighted results of the micro-batch that has come back whole, and the shared expert's."""
    y, _, window = attention_worker_combine(
        window, away.weights, np.int32(0), hidden_size=plan.hidden, dtype=jnp.float32
    )
    rows, seq = away.x.shape[:2]
    added = y[: rows * seq].reshape(rows, seq, plan.hidden).astype(away.x.dtype)
    added = added if away.shared is None else added + away.shared
    return mixed(away.x, added, away.mixing), window


@jax.jit
def begin_prefill(pool: Pool, rows: Rows) -> tuple[Int32[Array, " 1"], Int32[Array, ""]]:
    """How many tokens the row has in its caches, and its slot."""
    assert rows.slots is not None, "the engine's rows have slots"
    return pool.take(rows).length[:1], rows.slots[0]


@functools.partial(jax.jit, static_argnames="execution")
def end_prefill(
    head: CausalLM,
    x: Float[Array, "1 seq *streams hidden"],
    length: Int32[Array, " 1"],
    rows: Rows,
    lengths: Int32[Array, " 1"],
    end: Bool[Array, " 1"],
    pool: Pool,
    execution: Execution,
) -> tuple[Choice, Pool]:
    """The token after the last piece of a chunk, of which it has `length` tokens, and the pool with the chunk in it."""
    view = pool.take(rows)
    last = lax.dynamic_slice_in_dim(head.model.normed(x), jnp.maximum(length[0] - 1, 0), 1, axis=1)
    choice, cache = _chosen(head, last, view, rows, lengths, execution)
    return choice, pool.put(rows, view.after(cache, choice.token, end))


@jax.jit
def begin_decode(
    pool: Pool, rows: Rows
) -> tuple[Int32[Array, "rows 1"], Int32[Array, " rows"], Int32[Array, " rows"], Bool[Array, ""]]:
    """Each row's newest token, its position, 1 or 0 for a row that is done, and whether any row is not."""
    view = pool.take(rows)
    active = ~view.done
    return view.token[:, None], view.length, active.astype(jnp.int32), jnp.any(active)


@functools.partial(jax.jit, static_argnames="execution")
def end_decode(
    head: CausalLM,
    x: tuple[Float[Array, "_rows 1 *streams hidden"], ...],
    rows: Rows,
    step: Int32[Array, ""],
    out: Choice,
    pool: Pool,
    execution: Execution,
) -> tuple[Choice, Pool]:
    """The choices with those of a step in their column, and the pool after it."""
    view = pool.take(rows)
    active = ~view.done
    hidden = head.model.normed(jnp.concatenate(x))
    choice, cache = _chosen(head, hidden, view, rows, active.astype(jnp.int32), execution)
    view = view.after(cache, choice.token, active)
    choice = eqx.tree_at(lambda c: c.token, choice, jnp.where(active, choice.token, -1))
    return jax.tree.map(lambda x, y: x.at[:, step].set(y), out, choice), pool.put(rows, view)


def _chosen(
    head: CausalLM,
    hidden: Float[Array, "rows 1 hidden"],
    view: Pool,
    rows: Rows,
    lengths: Int32[Array, " rows"],
    execution: Execution,
) -> tuple[Choice, Cache]:
    """The token after each row's next `lengths` tokens, and the cache without layers that has counted these."""
    cache = Cache((), view.length + lengths, rows.table)
    logits = head.logits(hidden, execution)[:, 0]
    return choose_active(logits, view.sampling, cache.length, lengths > 0, execution.lowering), cache
