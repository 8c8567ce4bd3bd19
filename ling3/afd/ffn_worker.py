"""An FFN worker: a window into which sessions write tokens, and the experts that it runs on them.

Messages are accepted as they arrive: while the experts run, more come in, and the next batch has the tokens of every
session that is ready. The worker keeps no state of a sequence.
"""

import dataclasses
import functools
import queue
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from ling3.afd.messages import GONE, Computed, Failed, ProtocolError, Routed, WorkerError
from ling3.afd.operators.batching import FfnBatch, ffn_worker_batching, ffn_worker_scheduler
from ling3.afd.operators.sending import attention_to_ffn
from ling3.afd.operators.windows import EMPTY, FfnArea
from ling3.afd.plan import AfdPlan, ExpertShard, committed
from ling3.afd.stats import Counts
from ling3.execution import Execution


class FfnWorker:
    """Serves a plan's sessions, whose `Routed` messages arrive in `inbox`; `deliver[s]` sends results to session s."""

    def __init__(
        self,
        rank: int,
        share: ExpertShard,
        plan: AfdPlan,
        deliver: Sequence[Callable[[Computed], object]],
        counts: Counts,
        execution: Execution,
    ):
        self.rank, self.share, self.plan, self.counts, self.execution = rank, share, plan, counts, execution
        self.inbox: queue.SimpleQueue[Routed | Failed | None] = queue.SimpleQueue()
        self._deliver = deliver
        self._area = committed(plan.ffn_area(), share)
        self._epochs = [0] * plan.attention_workers
        self._left: set[int] = set()

    def serve(self) -> None:
        """Runs until every session has left or None is in the inbox. Raises WorkerError if another worker failed."""
        while len(self._left) < self.plan.attention_workers:
            message = self.inbox.get()
            while message is not None:
                self._take(message)
                if self.inbox.empty():
                    break
                message = self.inbox.get()
            if message is None:
                return
            with self.counts.working("ffn", self.rank):
                self._compute()

    def _take(self, message: Routed | Failed) -> None:
        """Writes a message into the window, flag last; with a new epoch, drops the session's old messages first."""
        if isinstance(message, Failed):
            raise WorkerError(f"{message.worker} failed: {message.error!r}") from message.error
        session, epoch, micro_batch, layer = np.asarray(message.header).tolist()
        if epoch != self._epochs[session]:
            self._area, self._epochs[session] = drained(self._area, np.int32(session)), epoch
        if epoch == GONE:
            self._left.add(session)
            self._deliver[session](self.plan.last_computed())
            return
        # A session does not wait for a card that got no row of a micro-batch, so its message for the next layer may
        # arrive before the card has read the previous one.
        for _ in range(2):
            self._area, sent = arrived(
                self._area,
                message.x,
                session_id=np.int32(session),
                micro_batch_id=np.int32(micro_batch),
                layer_id=np.int32(layer),
                expert_ids=message.expert_ids,
                expert_rank_table=self.plan.rank_table,
                rank=np.int32(self.rank),
                moe_expert_num=self.plan.experts,
                token_dtype=self.plan.token_dtype,
                # A single session is one group, whose micro-batches are taken in turn: flag them without rows too.
                sync_flag=int(self.plan.attention_workers > 1),
            )
            if sent:
                return
            self._compute()
        raise ProtocolError(f"session {session} sent micro-batch {micro_batch} again before it was read")

    def _compute(self) -> None:
        """Runs the experts on one micro-batch of each session that is ready, until no session is."""
        while True:
            self._area = scheduled(self._area)
            ready = int(self._area.out_num)
            if not ready:
                return
            sessions = np.asarray(self._area.session_ids)[:ready].tolist()
            y, batch = computed(self._area, self.share, self.plan, self.execution)
            self.counts.rows[self.rank] += int(batch.actual_token_num)
            for session in sessions:
                epoch = np.int32(self._epochs[session])
                self._deliver[session](of_session(y, batch, np.int32(session), epoch, self.plan))


arrived = jax.jit(
    attention_to_ffn, donate_argnames="area", static_argnames=("moe_expert_num", "token_dtype", "sync_flag")
)
# Groups of one session, so that no session waits for another.
scheduled = jax.jit(functools.partial(ffn_worker_scheduler, sync_group_size=1), donate_argnames="area")


@functools.partial(jax.jit, static_argnames=("plan", "execution"))
def computed(
    area: FfnArea, share: ExpertShard, plan: AfdPlan, execution: Execution
) -> tuple[Float32[Array, "rows hidden"], FfnBatch]:
    """The experts' outputs for the scheduled micro-batches' rows, sorted by expert, and the batch of these rows."""
    batch, _ = ffn_worker_batching(
        area,
        expert_num=share.places.shape[1],
        max_out_shape=(plan.attention_workers, plan.tokens, plan.top_k, plan.width),
        token_dtype=plan.token_dtype,
        layer_num=plan.layers,
    )
    rows = jnp.arange(batch.y.shape[0], dtype=jnp.int32)
    groups, ends = batch.group_list[:, 0], jnp.cumsum(batch.group_list[:, 1])
    group = jnp.minimum(jnp.searchsorted(ends, rows, side="right"), groups.shape[0] - 1)
    expert = jnp.where(rows < batch.actual_token_num, groups[group], -1).astype(jnp.int32)
    return share(plan.unpacked(batch.y, batch.dynamic_scale), expert, execution), batch


@functools.partial(jax.jit, static_argnames="plan")
def of_session(
    y: Float32[Array, "all hidden"],
    batch: FfnBatch,
    session: Int32[Array, ""],
    epoch: Int32[Array, ""],
    plan: AfdPlan,
) -> Computed:
    """One session's rows, which are all of the same micro-batch, as a message."""
    own = batch.session_ids == session
    [order] = jnp.nonzero(own, size=plan.tokens * plan.top_k, fill_value=0)
    ids = (batch.session_ids, batch.micro_batch_ids, batch.token_ids, batch.topk_slots)
    session_ids, micro_batch_ids, token_ids, topk_slots = (part[order] for part in ids)
    number = jnp.sum(own, dtype=jnp.int32)
    return Computed(epoch, y[order], session_ids, micro_batch_ids, token_ids, topk_slots, number)


@functools.partial(jax.jit, donate_argnames="area")
def drained(area: FfnArea, session: Int32[Array, ""]) -> FfnArea:
    """The window without a session's messages; the session starts again at micro-batch 0."""
    info = area.token_info.at[session, :, 2:].set(EMPTY).at[session, :, 0].set(0)
    return dataclasses.replace(area, token_info=info, polling_index=jnp.zeros_like(area.polling_index))
