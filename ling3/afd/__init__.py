"""Attention-FFN disaggregation: attention and experts run on separate workers, which exchange tokens through windows.

An attention worker (a *session*) writes its tokens into windows of the FFN workers (*cards*). A card sorts them by
expert, runs the experts and writes each row back; the session computes the weighted sums. The operators are those of
CANN, Huawei's library for its accelerators, as pure functions over arrays.
"""

from ling3.afd.messages import WorkerError
from ling3.afd.operators.batching import FfnBatch, ffn_worker_batching, ffn_worker_scheduler
from ling3.afd.operators.returning import attention_worker_combine, attention_worker_scheduler, ffn_to_attention
from ling3.afd.operators.schedule_context import (
    AttentionContext,
    CommonArea,
    ControlArea,
    FfnContext,
    ScheduleContext,
)
from ling3.afd.operators.sending import attention_to_ffn, complete_unrouted
from ling3.afd.operators.windows import EMPTY, AttentionArea, FfnArea, slot_bytes
from ling3.afd.processes import AttentionProcess, FfnProcess, join
from ling3.afd.stats import AfdStats
from ling3.afd.system import System, disaggregate

__all__ = [
    "EMPTY",
    "AfdStats",
    "AttentionArea",
    "AttentionContext",
    "AttentionProcess",
    "CommonArea",
    "ControlArea",
    "FfnArea",
    "FfnBatch",
    "FfnContext",
    "FfnProcess",
    "ScheduleContext",
    "System",
    "WorkerError",
    "attention_to_ffn",
    "attention_worker_combine",
    "attention_worker_scheduler",
    "complete_unrouted",
    "disaggregate",
    "ffn_to_attention",
    "ffn_worker_batching",
    "ffn_worker_scheduler",
    "join",
    "slot_bytes",
]
