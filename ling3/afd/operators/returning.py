"""Experts' outputs on their way back: `ffn_to_attention` writes them into a session's window; the session polls until a
micro-batch is complete (`attention_worker_scheduler`, CANN's AttentionWorkerScheduler) and sums its slots
(`attention_worker_combine`, CANN's AttentionWorkerCombine)."""

import dataclasses
import functools
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Int32, Shaped

from ling3.afd.operators import limits
from ling3.afd.operators.batching import FfnBatch
from ling3.afd.operators.sending import check_top_k
from ling3.afd.operators.windows import AttentionArea, check_holds, checked, from_bytes, to_bytes


@no_type_check
def ffn_to_attention(attn: AttentionArea, x: jax.Array, out: FfnBatch, *, session_id: Any) -> AttentionArea:
    """Writes the rows of one session into its window: x[j] to token_data[m, t, k], then flag 1.

    `x` [Y, H], of any floating dtype, has the experts' outputs for the rows of `out`. j runs over the rows below
    `actual_token_num` whose session id is `session_id`; m, t and k are row j's micro_batch_ids, token_ids and
    topk_slots. Rows with indices outside the window are dropped.
    """
    attn = checked(attn, AttentionArea, "attn")
    x = limits.array("x", x, None, ("Y", "H"))
    limits.integer("x: channels", x.shape[1], 1)
    check_holds(attn, x.shape[1] * x.dtype.itemsize, f"x of shape {x.shape} and dtype {x.dtype}")
    session_id = limits.scalar("session_id", session_id, 0, limits.SESSIONS - 1)
    read = {}
    for name in ("session_ids", "micro_batch_ids", "token_ids", "topk_slots", "actual_token_num"):
        if not hasattr(out, name):
            raise ValueError(f"out is a {type(out).__name__}, expected what ffn_worker_batching returns, with {name}")
        number = name == "actual_token_num"
        kind = ((jnp.int32, jnp.int64), ()) if number else (jnp.int32, x.shape[:1])
        read[name] = limits.array(name, getattr(out, name), *kind, f" with x of shape {x.shape}")
    return _returned(attn, x, *read.values(), session_id)


@no_type_check
def attention_worker_scheduler(attn: AttentionArea) -> tuple[AttentionArea, jax.Array]:
    """Takes the next micro-batch, m = (micro_batch_id+1) % M, if complete; returns the area and whether it was.

    It is complete if all its BS·K1 flags are 1. Then they become 0 and micro_batch_id becomes m.
    """
    return _completed_next(checked(attn, AttentionArea, "attn"))


@no_type_check
def attention_worker_combine(
    attn: AttentionArea,
    expert_scales: jax.Array,
    layer_id: Any,
    *,
    hidden_size: int,
    dtype: DTypeLike,
    need_schedule: int = 0,
) -> tuple[jax.Array, jax.Array, AttentionArea]:
    """Combines micro-batch m = micro_batch_id. Returns y [BS, hidden_size], the next layer's id and the area.

        y[t] = Σ_{k<K} expert_scales[t, k]·token[m, t, k] + Σ_{K<=k<K1} token[m, t, k]

    The slots hold numbers of `dtype`, and expert_scales has the shape [BS, K]. The sum is in float32, from 0 in the
    order of the slots with each product rounded, and then cast to `dtype`. With need_schedule = 1 the scheduler
    runs first; if nothing is complete, y is 0, and layer_id and the area are unchanged. A CPU flushes numbers below
    2^-126 to 0.
    """
    attn = checked(attn, AttentionArea, "attn")
    _, tokens, slots, _ = attn.token_data.shape
    expert_scales = limits.array("expert_scales", expert_scales, None, (tokens, "K"))
    check_top_k("expert_scales", expert_scales.shape[1], slots)
    layer_id = limits.scalar("layer_id", layer_id)
    hidden_size = limits.integer("hidden_size", hidden_size, 1)
    dtype = limits.float_dtype("dtype", dtype)
    check_holds(attn, hidden_size * dtype.itemsize, f"hidden_size {hidden_size} of dtype {dtype}")
    ready = np.bool_(True)
    if limits.integer("need_schedule", need_schedule, 0, 1):
        attn, ready = attention_worker_scheduler(attn)
    y, layer_id = _combined(attn, expert_scales, layer_id, ready, hidden_size, dtype)
    return y, layer_id, attn


@jax.jit
def _returned(
    attn: AttentionArea,
    x: Shaped[Array, "rows hidden"],
    session_ids: Int32[Array, " rows"],
    micro_batch_ids: Int32[Array, " rows"],
    token_ids: Int32[Array, " rows"],
    topk_slots: Int32[Array, " rows"],
    number: Int[Array, ""],
    session_id: Int32[Array, ""],
) -> AttentionArea:
    rows = jnp.arange(len(x), dtype=jnp.int32)
    own = (rows < number.astype(jnp.int32)) & (session_ids == session_id)
    where = jnp.stack([micro_batch_ids, token_ids, topk_slots], axis=1)
    where = jnp.where(own[:, None], where, -1)  # here -1 is out of range, unlike in `jnp.ndarray.at`
    # The row for each slot: -1 if there is none, the last one if there are several.
    row = lax.scatter_max(jnp.full_like(attn.token_info, -1), where, rows, _ROWS_WRITTEN, mode="drop")
    written, data = row >= 0, to_bytes(x)
    data = jnp.where(written[..., None], data.at[row].get(mode="clip"), attn.token_data[..., : data.shape[1]])
    return dataclasses.replace(
        attn,
        token_info=jnp.where(written, 1, attn.token_info),
        token_data=attn.token_data.at[..., : data.shape[-1]].set(data),
    )


_ROWS_WRITTEN = lax.ScatterDimensionNumbers((), (0, 1, 2), (0, 1, 2))


@jax.jit
def _completed_next(attn: AttentionArea) -> tuple[AttentionArea, Bool[Array, ""]]:
    micro_batches = attn.token_info.shape[0]
    following = (attn.micro_batch_id % micro_batches + 1) % micro_batches  # the first % prevents an overflow at 2^31-1
    own = lax.dynamic_index_in_dim(attn.token_info, following, keepdims=False)
    ready = jnp.all(own == 1)
    flags = lax.dynamic_update_index_in_dim(attn.token_info, jnp.where(ready, 0, own), following, 0)
    micro_batch_id = jnp.where(ready, following, attn.micro_batch_id)
    return dataclasses.replace(attn, token_info=flags, micro_batch_id=micro_batch_id), ready


@functools.partial(jax.jit, static_argnames=("hidden", "dtype"))
def _combined(
    attn: AttentionArea,
    scales: Float[Array, "tokens top_k"],
    layer_id: Int32[Array, ""],
    ready: Bool[Array, ""],
    hidden: int,
    dtype: np.dtype,
) -> tuple[Float[Array, "tokens {hidden}"], Int32[Array, ""]]:
    data = lax.dynamic_index_in_dim(attn.token_data, attn.micro_batch_id, keepdims=False)
    data = data[..., : hidden * dtype.itemsize]
    token = jnp.moveaxis(from_bytes(data, dtype).astype(jnp.float32), 1, 0)
    scale = jnp.pad(scales.astype(jnp.float32), ((0, 0), (0, token.shape[0] - scales.shape[1])), constant_values=1.0)
    zeros = jnp.zeros_like(token[0])

    # A product is added one iteration later: within one, XLA would contract both to a fused multiply-add.
    def add(sums, slot):
        total, product = sums
        return (total + product, slot[0] * slot[1]), None

    (total, product), _ = lax.scan(add, (zeros, zeros), (scale.T[:, :, None], token))
    return jnp.where(ready, total + product, 0.0).astype(dtype), jnp.where(ready, layer_id + 1, layer_id)
