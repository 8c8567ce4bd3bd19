"""The messages between workers: pytrees of arrays whose shapes the plan fixes, so that any transport can carry them."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

GONE = -1
"""The epoch in a sender's last message."""


class Routed(NamedTuple):
    """A session's micro-batch on its way to an FFN worker, with each token's experts; padding has no expert."""

    header: Int32[np.ndarray | Array, " 4"]  # session, epoch (passes abandoned), micro-batch, sparse layer
    x: Float[Array, "tokens width"]
    expert_ids: Int32[Array, "tokens top_k"]

    @property
    def epoch(self) -> int:
        """How many passes the session has abandoned, or `GONE`; as in `Computed`."""
        return int(np.asarray(self.header)[1])


class Computed(NamedTuple):
    """The rows of a session's micro-batch that an FFN worker has computed, as `ffn_to_attention` reads them."""

    epoch: Int32[np.ndarray | Array, ""]
    y: Float32[Array, "rows hidden"]
    session_ids: Int32[Array, " rows"]
    micro_batch_ids: Int32[Array, " rows"]
    token_ids: Int32[Array, " rows"]
    topk_slots: Int32[Array, " rows"]
    actual_token_num: Int[Array, ""]


class Failed(NamedTuple):
    """Tells a worker that another one has failed or is gone."""

    worker: str
    error: BaseException


class WorkerError(RuntimeError):
    """A worker of a disaggregated model has failed; the text names it."""


class ProtocolError(RuntimeError):
    """A message that the handshake forbids: it would overwrite data that has not been read."""
