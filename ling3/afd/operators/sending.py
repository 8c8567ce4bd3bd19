"""A session's micro-batch on its way to the cards: `attention_to_ffn` sends it to a card, and `complete_unrouted`
completes the slots that go to no card."""

import dataclasses
import functools
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int8, Int32, UInt8

from ling3.afd.operators import limits
from ling3.afd.operators.windows import (
    TOKEN_DTYPES,
    AttentionArea,
    FfnArea,
    check_holds,
    checked,
    to_bytes,
    token_bytes,
    within,
)

QUANTIZED = 127.0
"""The int8 value to which a token's largest |x| is scaled."""


@no_type_check
def attention_to_ffn(
    area: FfnArea,
    x: jax.Array,
    *,
    session_id: Any,
    micro_batch_id: Any,
    layer_id: Any,
    expert_ids: jax.Array,
    expert_rank_table: jax.Array,
    rank: Any,
    moe_expert_num: int,
    token_dtype: int = 0,
    sync_flag: int = 0,
    active_mask: jax.Array | None = None,
) -> tuple[FfnArea, jax.Array]:
    """Writes one micro-batch of a session into the window of card `rank`. Returns the area, and whether it was written.

    Slot k < K of token t is for expert expert_ids[t, k], of [BS, K]; an id outside of [0, moe_expert_num) goes to no
    card. Slot K + i is for the shared expert moe_expert_num + i. Row e of `expert_rank_table` is
    [count, rank_0, id_0, rank_1, id_1, …]: expert e has `count` replicas, of which this session uses number
    r = session_id % count, on card rank_r under id_r. An expert with an invalid count or rank is on no card.

    Each slot of an active token that goes to `rank` gets the bits of x[t], of x [BS, H], and the id. Last, the message
    gets the layer id and flag 1; with sync_flag = 1 only if a slot goes to this card. While the flag of the previous
    message is 1, nothing is written and the second result is False. It is also False for a traced session_id or
    micro_batch_id out of range; otherwise it is True.

    x is float16 for token_dtype 0 and bfloat16 for 1. For 2 it has any floating dtype and is quantized in float32:
    scale = max|x|/127 and q = round(x/scale), ties to even. A token of zeros has scale 0; one with NaN or infinity has
    that as its scale and q = 0. A CPU flushes numbers below 2^-126 to 0.

    The True values of `active_mask`, bool [BS], must come first; None means that all tokens are active.
    """
    area = checked(area, FfnArea, "area")
    sessions, micro_batches, tokens, slots, _ = area.token_data.shape
    token_dtype = limits.integer("token_dtype", token_dtype, 0, len(TOKEN_DTYPES) - 1)
    x = limits.array("x", x, None, (tokens, "H"), f" with token_data of shape {area.token_data.shape}")
    if token_dtype < 2 and x.dtype != TOKEN_DTYPES[token_dtype]:
        raise ValueError(
            f"x has the dtype {x.dtype}, expected {TOKEN_DTYPES[token_dtype]} for token_dtype {token_dtype}"
        )
    limits.integer("x: channels", x.shape[1], 1)
    check_holds(area, token_bytes(x.shape[1], token_dtype), f"x of shape {x.shape} and token_dtype {token_dtype}")
    session_id = limits.scalar("session_id", session_id, 0, sessions - 1)
    micro_batch_id = limits.scalar("micro_batch_id", micro_batch_id, 0, micro_batches - 1)
    route = _routed(session_id, tokens, slots, expert_ids, expert_rank_table, moe_expert_num, active_mask)
    rank = limits.scalar("rank", rank, 0)
    layer_id = limits.scalar("layer_id", layer_id)
    sync_flag = limits.integer("sync_flag", sync_flag, 0, 1)
    return _sent(area, x, session_id, micro_batch_id, layer_id, rank, route, token_dtype, sync_flag)


@no_type_check
def complete_unrouted(
    attn: AttentionArea,
    *,
    session_id: Any,
    micro_batch_id: Any,
    expert_ids: jax.Array,
    expert_rank_table: jax.Array,
    moe_expert_num: int,
    active_mask: jax.Array | None = None,
) -> AttentionArea:
    """Sets the slots of a micro-batch that `attention_to_ffn` sends to no card to 0, and their flags to 1.

    No card answers them, so the session would wait for them forever. The arguments are those of `attention_to_ffn`. A
    traced micro_batch_id out of range changes nothing.
    """
    attn = checked(attn, AttentionArea, "attn")
    micro_batches, tokens, slots, _ = attn.token_data.shape
    session_id = limits.scalar("session_id", session_id, 0, limits.SESSIONS - 1)
    micro_batch_id = limits.scalar("micro_batch_id", micro_batch_id, 0, micro_batches - 1)
    ranks, _ = _routed(session_id, tokens, slots, expert_ids, expert_rank_table, moe_expert_num, active_mask)
    return _completed(attn, micro_batch_id, ranks)


@no_type_check
def check_top_k(name, top_k, slots) -> None:
    """Raises ValueError unless `slots` have room for `top_k` experts."""
    most = min(slots, limits.TOP_K)
    if top_k > most:
        raise ValueError(
            f"{name} has {top_k} columns, expected the top-k, at most {most} with {slots} slots of a token"
        )


@no_type_check
def _routed(session_id, tokens, slots, expert_ids, expert_rank_table, moe_expert_num, active_mask):
    """The card of each slot of a micro-batch, -1 for none, and the expert's id there; checks the arguments."""
    expert_ids = limits.array("expert_ids", expert_ids, jnp.int32, (tokens, "K"), f" with {tokens} tokens")
    top_k = expert_ids.shape[1]
    check_top_k("expert_ids", top_k, slots)
    moe_expert_num = limits.integer("moe_expert_num", moe_expert_num, min(top_k, 1))
    table = limits.array("expert_rank_table", expert_rank_table, jnp.int32, ("experts", "1 + 2·replicas"))
    experts = moe_expert_num + slots - top_k
    if table.shape[0] < experts or table.shape[1] < 3 or table.shape[1] % 2 == 0:
        expected = f"at least {experts} rows of a count and one or more pairs of rank and id"
        raise ValueError(f"expert_rank_table has the shape {table.shape}, expected {expected}")
    if active_mask is None:
        active_mask = np.ones(tokens, bool)
    active = limits.array("active_mask", active_mask, jnp.bool_, (tokens,))
    if not isinstance(active_mask, jax.core.Tracer):
        found = np.asarray(active_mask)
        if found[found.sum() :].any():
            raise ValueError(f"active_mask is {found.tolist()}, expected the True ones first")
    return _routes(session_id, expert_ids, table, active, moe_expert_num, slots)


# The operators' bodies are jitted, so that each runs as one program eagerly too.


@functools.partial(jax.jit, static_argnames=("token_dtype", "sync_flag"))
def _sent(
    area: FfnArea,
    x: Float[Array, "tokens hidden"],
    session_id: Int32[Array, ""],
    micro_batch_id: Int32[Array, ""],
    layer_id: Int32[Array, ""],
    rank: Int32[Array, ""],
    route: tuple[Int32[Array, "tokens slots"], Int32[Array, "tokens slots"]],
    token_dtype: int,
    sync_flag: int,
) -> tuple[FfnArea, Bool[Array, ""]]:
    sessions, micro_batches, tokens, slots, _ = area.token_data.shape
    ranks, ids = route
    goes = (ranks == rank) & (ranks >= 0)
    payload = _payload(x, token_dtype)
    zero = jnp.zeros((), jnp.int32)

    place = (session_id, micro_batch_id, zero)
    old = lax.dynamic_slice(area.token_info, place, (1, 1, area.token_info.shape[2])).reshape(-1)
    sent = within(session_id, sessions) & within(micro_batch_id, micro_batches) & (old[0] != 1)
    raised = sent & jnp.any(goes) if sync_flag else sent
    head = jnp.where(raised, jnp.stack([jnp.ones_like(layer_id), layer_id]), old[:2])
    written = jnp.where(sent & goes.reshape(-1), ids.reshape(-1), old[2:])
    info = jnp.concatenate([head, written])[None, None]

    place = (session_id, micro_batch_id, zero, zero, zero)
    old = lax.dynamic_slice(area.token_data, place, (1, 1, tokens, slots, payload.shape[1]))[0, 0]
    data = jnp.where(sent & goes[:, :, None], payload[:, None], old)[None, None]
    info = lax.dynamic_update_slice(area.token_info, info, place[:3])
    data = lax.dynamic_update_slice(area.token_data, data, place)
    return dataclasses.replace(area, token_info=info, token_data=data), sent


@jax.jit
def _completed(
    attn: AttentionArea, micro_batch_id: Int32[Array, ""], ranks: Int32[Array, "tokens slots"]
) -> AttentionArea:
    micro_batches = attn.token_info.shape[0]
    unrouted = (ranks < 0) & within(micro_batch_id, micro_batches)
    flags = jnp.where(unrouted, 1, lax.dynamic_index_in_dim(attn.token_info, micro_batch_id, keepdims=False))
    data = lax.dynamic_index_in_dim(attn.token_data, micro_batch_id, keepdims=False)
    data = jnp.where(unrouted[:, :, None], 0, data)
    return dataclasses.replace(
        attn,
        token_info=lax.dynamic_update_index_in_dim(attn.token_info, flags, micro_batch_id, 0),
        token_data=lax.dynamic_update_index_in_dim(attn.token_data, data, micro_batch_id, 0),
    )


@functools.partial(jax.jit, static_argnames=("moe_expert_num", "slots"))
def _routes(
    session_id: Int32[Array, ""],
    expert_ids: Int32[Array, "tokens top_k"],
    table: Int32[Array, "experts columns"],
    active: Bool[Array, " tokens"],
    moe_expert_num: int,
    slots: int,
) -> tuple[Int32[Array, "tokens slots"], Int32[Array, "tokens slots"]]:
    tokens, top_k = expert_ids.shape
    shared = moe_expert_num + jnp.arange(slots - top_k, dtype=jnp.int32)
    experts = jnp.concatenate([expert_ids, jnp.broadcast_to(shared, (tokens, slots - top_k))], axis=1)
    known = jnp.arange(slots, dtype=jnp.int32)[None] >= top_k
    known |= within(experts, moe_expert_num)
    experts = jnp.where(known, experts, 0)
    count = table[experts, 0]
    column = 1 + 2 * (session_id % jnp.maximum(count, 1))
    known &= active[:, None] & (count > 0) & (column < table.shape[1])
    ranks, ids = (table.at[experts, column + i].get(mode="clip") for i in range(2))
    return jnp.where(known & (ranks >= 0), ranks, -1), ids


def _payload(x: Float[Array, "tokens hidden"], token_dtype: int) -> UInt8[Array, "tokens payload"]:
    """The bytes that go into a token's slots."""
    if token_dtype < 2:
        return to_bytes(x)
    q, scale = _quantized(x.astype(jnp.float32))
    return jnp.concatenate([to_bytes(q), to_bytes(scale)], axis=1)


def _quantized(x: Float32[Array, "tokens hidden"]) -> tuple[Int8[Array, "tokens hidden"], Float32[Array, "tokens 1"]]:
    # As integers, the bits of |x| are ordered as |x|, with NaN above all; `jnp.max` may lose a NaN on a CPU.
    bits = lax.bitcast_convert_type(x, jnp.uint32) & 0x7FFFFFFF
    top = lax.bitcast_convert_type(jnp.max(bits, axis=1, keepdims=True), jnp.float32)
    # XLA would multiply by the reciprocal of a constant or of a broadcast divisor, which rounds twice. Adding 0·x makes
    # the divisor neither of the two, and changes no finite number's quotient.
    scale = top / (QUANTIZED + 0.0 * jnp.where(jnp.isfinite(top), top, 0.0))
    scale = jnp.where(jnp.isnan(scale), jnp.nan, scale)
    q = jnp.round(x / (jnp.where(scale == 0, 1.0, scale) + 0.0 * x))
    return jnp.where((scale == 0) | jnp.isnan(q), 0.0, q).astype(jnp.int8), scale
