"""What an FFN worker (a card) does with its window: schedule messages, batch their rows by expert, return the outputs.

The operators are CANN's FfnWorkerScheduler and FfnWorkerBatching, and the sending of an FFN worker's results. They are
pure functions: an area goes in and a new one comes out, eagerly and under `jax.jit` with the same bits.
"""

import dataclasses
import functools
from typing import Any, no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Int32, Shaped, UInt8

from ling3.afd import limits
from ling3.afd.windows import (
    EMPTY,
    SCALE,
    TOKEN_DTYPES,
    AttentionArea,
    FfnArea,
    check_holds,
    checked_attention_area,
    checked_ffn_area,
    from_bytes,
    to_bytes,
    token_bytes,
)
from ling3.ops.experts import Groups


@no_type_check
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FfnBatch:
    """A card's rows sorted by expert. Rows j >= n, with n = actual_token_num, are 0 in `y` and -1 in the ids."""

    y: jax.Array
    """float16, bfloat16 or int8 [Y, H]: the bits of the rows."""
    session_ids: jax.Array
    """int32 [Y]: the session that a row came from."""
    micro_batch_ids: jax.Array
    """int32 [Y]: its micro-batch."""
    token_ids: jax.Array
    """int32 [Y]: its token within the micro-batch."""
    expert_offsets: jax.Array
    """int32 [Y]: its place among the rows of its expert, from 0."""
    topk_slots: jax.Array
    """int32 [Y]: its slot among those of the token."""
    dynamic_scale: jax.Array
    """float32 [Y]: the scale of int8 rows; [0] for other dtypes."""
    group_list: jax.Array
    """int32 [expert_num, 2], int64 in 64-bit mode: [expert, rows] for each expert with rows, ascending; then [0, 0]."""
    actual_token_num: jax.Array
    """int32, int64 in 64-bit mode: n, how many rows there are."""


@no_type_check
def ffn_worker_batching(
    area: FfnArea,
    *,
    expert_num: int,
    max_out_shape: tuple[int, int, int, int],
    token_dtype: int = 0,
    need_schedule: int = 0,
    layer_num: int = 0,
) -> tuple[FfnBatch, FfnArea]:
    """The rows of the messages that were scheduled, sorted by expert, and the area.

    The rows are the slots (o, t, k) of o < min(out_num, A) whose expert id, session and micro-batch, and with layers
    the layer id, are in range; all others are dropped. They are sorted by expert, then by (o·BS + t)·K1 + k. With
    layer_num = 0 an id is the expert; otherwise the expert is layer·E + id, with E = expert_num / layer_num.

    `expert_num` counts this card's experts of all layers. `max_out_shape` is (A, BS, K1, H): upper bounds for the
    area's sizes, whose product Y is the number of rows of the output, and the hidden size. With need_schedule = 1
    `ffn_worker_scheduler` runs first; otherwise the area is returned as it is. Keywords are static.

    Raises a ValueError that names the argument or the field for whatever is outside of the limits.
    """
    checked = checked_ffn_area(area)
    expert_num = limits.integer("expert_num", expert_num, 1, limits.EXPERTS)
    layer_num = limits.integer("layer_num", layer_num, 0)
    if layer_num and expert_num % layer_num:
        raise ValueError(f"layer_num is {layer_num}, expected a divisor of expert_num, which is {expert_num}")
    token_dtype = limits.integer("token_dtype", token_dtype, 0, len(TOKEN_DTYPES) - 1)
    rows, hidden = _checked_max_out_shape(max_out_shape, checked)
    check_holds(checked, token_bytes(hidden, token_dtype), f"max_out_shape[3] = {hidden} and token_dtype {token_dtype}")
    if limits.integer("need_schedule", need_schedule, 0, 1):
        area = checked = ffn_worker_scheduler(checked)
    fields = ("token_data", "layer_ids", "session_ids", "micro_batch_ids", "expert_ids", "out_num")
    arrays = (getattr(checked, name) for name in fields)
    return _batched(*arrays, expert_num, layer_num, token_dtype, rows, hidden), area


@no_type_check
def ffn_worker_scheduler(area: FfnArea, sync_group_size: int | None = None) -> FfnArea:
    """Takes the messages that are complete, for groups of `sync_group_size` consecutive sessions (None: all A).

    One group takes micro-batch m = polling_index if the flags of all its sessions are 1, and polling_index becomes
    (m+1) % M. Of several groups each takes the lowest micro-batch for which its flags are all 1, and polling_index
    stays. A message (a, m) that was taken, in the order of a, is the next entry of layer_ids, session_ids,
    micro_batch_ids and expert_ids; then its expert ids become EMPTY and its flag 0. `out_num` is how many were taken.
    Nothing waits: if nothing is complete, out_num is 0.

    Raises a ValueError that names the argument or the field for whatever is outside of the limits.
    """
    area = checked_ffn_area(area)
    sessions = area.token_data.shape[0]
    group = sessions if sync_group_size is None else limits.integer("sync_group_size", sync_group_size, 1)
    if sessions % group:
        raise ValueError(f"sync_group_size is {group}, expected a divisor of the number of sessions, {sessions}")
    fields = ("token_info", "polling_index", "layer_ids", "session_ids", "micro_batch_ids", "expert_ids")
    taken = _scheduled(*(getattr(area, name) for name in fields), group)
    return dataclasses.replace(area, **dict(zip((*fields, "out_num"), taken, strict=True)))


@no_type_check
def ffn_to_attention(attn: AttentionArea, x: jax.Array, out: FfnBatch, *, session_id: Any) -> AttentionArea:
    """Writes the rows of one session into its window: x[j] to token_data[m, t, k], then flag 1.

    `x` [Y, H] of any floating dtype are the experts' outputs for the rows of `out`, and j counts the first
    `actual_token_num` rows whose session id is `session_id`; m, t, k are micro_batch_ids, token_ids and topk_slots.
    Rows whose place is not in the window are dropped.

    Raises a ValueError that names the argument or the field for whatever is outside of the limits.
    """
    attn = checked_attention_area(attn)
    x = limits.floats("x", x, ("Y", "H"))
    limits.size("x", "channels", x.shape[1], limits.LARGEST)
    check_holds(attn, x.shape[1] * x.dtype.itemsize, f"x of shape {x.shape} and dtype {x.dtype}")
    session_id = limits.scalar("session_id", session_id, 0, limits.SESSIONS - 1)
    ids = []
    for name in ("session_ids", "micro_batch_ids", "token_ids", "topk_slots"):
        if not hasattr(out, name):
            raise ValueError(f"out is a {type(out).__name__}, expected what ffn_worker_batching returns, with {name}")
        ids.append(limits.array(name, getattr(out, name), jnp.int32, x.shape[:1], f" with x of shape {x.shape}"))
    if not hasattr(out, "actual_token_num"):
        raise ValueError(f"out is a {type(out).__name__}, expected what ffn_worker_batching returns")
    number = limits.array("actual_token_num", out.actual_token_num, (jnp.int32, jnp.int64), ())
    flags, data = _returned(attn.token_info, attn.token_data, x, *ids, number, session_id)
    return dataclasses.replace(attn, token_info=flags, token_data=data)


@no_type_check
def _checked_max_out_shape(shape, area) -> tuple[int, int]:
    """Y and H."""
    if not isinstance(shape, tuple | list) or len(shape) != 4:
        raise ValueError(f"max_out_shape is {shape!r}, expected (A, BS, K1, H)")
    most = (limits.SESSIONS, limits.LARGEST, limits.SLOTS, limits.LARGEST)
    *bounds, hidden = (
        limits.integer(f"max_out_shape[{i}]", bound, 1, limit) for i, (bound, limit) in enumerate(zip(shape, most))
    )
    sessions, _, tokens, slots, _ = area.token_data.shape
    if any(bound < size for bound, size in zip(bounds, (sessions, tokens, slots))):
        expected = f"at least ({sessions}, {tokens}, {slots}) with token_data of shape {area.token_data.shape}"
        raise ValueError(f"max_out_shape is {tuple(shape)}, expected {expected}")
    rows = bounds[0] * bounds[1] * bounds[2]
    if rows > limits.LARGEST:
        raise ValueError(f"max_out_shape is {tuple(shape)}, for {rows} rows, expected less than 2^31")
    return rows, hidden


# The operators' bodies are programs of their own, so that they run as one program eagerly too.


@functools.partial(jax.jit, static_argnames=("expert_num", "layer_num", "token_dtype", "rows", "hidden"))
def _batched(
    token_data: UInt8[Array, "sessions micro_batches tokens slots bytes"],
    layer_ids: Int32[Array, " sessions"],
    session_ids: Int32[Array, " sessions"],
    micro_batch_ids: Int32[Array, " sessions"],
    expert_ids: Int32[Array, "sessions tokens slots"],
    out_num: Int32[Array, ""],
    expert_num: int,
    layer_num: int,
    token_dtype: int,
    rows: int,
    hidden: int,
) -> FfnBatch:
    sessions, micro_batches, tokens, slots, _ = token_data.shape
    counted = jnp.arange(sessions, dtype=jnp.int32) < out_num
    counted &= _within(session_ids, sessions) & _within(micro_batch_ids, micro_batches)
    experts, per_layer = expert_ids, expert_num
    if layer_num:
        per_layer = expert_num // layer_num
        counted &= _within(layer_ids, layer_num)
        experts = layer_ids[:, None, None] * per_layer + expert_ids
    chosen = jnp.where(counted[:, None, None] & _within(expert_ids, per_layer), experts, expert_num)
    groups = Groups.of(chosen.reshape(-1, slots), expert_num)

    row, number = groups.order, jnp.sum(groups.counts, dtype=jnp.int32)
    place = jnp.arange(row.shape[0], dtype=jnp.int32)
    entry, token, slot = row // (tokens * slots), row // slots % tokens, row % slots
    session, micro_batch = session_ids[entry], micro_batch_ids[entry]
    offset = place - groups.starts.at[chosen.reshape(-1)[row]].get(mode="clip")
    size = token_bytes(hidden, token_dtype)
    where = jnp.stack([session, micro_batch, token, slot], axis=1)
    data = lax.gather(token_data, where, _SLOTS_READ, (1, 1, 1, 1, size), mode="clip")
    extra = rows - row.shape[0]
    data = jnp.pad(jnp.where((place < number)[:, None], data, 0), ((0, extra), (0, 0)))

    def of_rows(ids):
        return jnp.pad(jnp.where(place < number, ids, -1), (0, extra), constant_values=-1)

    dtype, long = TOKEN_DTYPES[token_dtype], jax.dtypes.canonicalize_dtype(jnp.int64)
    numbers, scale = data[:, : hidden * dtype.itemsize], data[:, hidden * dtype.itemsize :]
    return FfnBatch(
        y=from_bytes(numbers, dtype),
        session_ids=of_rows(session),
        micro_batch_ids=of_rows(micro_batch),
        token_ids=of_rows(token),
        expert_offsets=of_rows(offset),
        topk_slots=of_rows(slot),
        dynamic_scale=lax.bitcast_convert_type(scale.reshape(-1, SCALE), jnp.float32),
        group_list=_group_list(groups.counts).astype(long),
        actual_token_num=number.astype(long),
    )


# Of the first four dimensions one, and of a slot's bytes the first ones.
_SLOTS_READ = lax.GatherDimensionNumbers((1,), (0, 1, 2, 3), (0, 1, 2, 3))


def _within(ids: Int32[Array, "*shape"], number: int) -> Bool[Array, "*shape"]:
    return (ids >= 0) & (ids < number)


def _group_list(counts: Int32[Array, " experts"]) -> Int32[Array, "experts 2"]:
    experts = jnp.arange(counts.shape[0], dtype=jnp.int32)
    used = counts > 0
    place = jnp.where(used, jnp.cumsum(used, dtype=jnp.int32) - 1, counts.shape[0])
    pairs = jnp.stack([experts, counts], axis=1)
    return jnp.zeros_like(pairs).at[place].set(pairs, mode="drop")


@functools.partial(jax.jit, static_argnames="group")
def _scheduled(
    token_info: Int32[Array, "sessions micro_batches info"],
    polling_index: Int32[Array, ""],
    layer_ids: Int32[Array, " sessions"],
    session_ids: Int32[Array, " sessions"],
    micro_batch_ids: Int32[Array, " sessions"],
    expert_ids: Int32[Array, "sessions tokens slots"],
    group: int,
) -> tuple[
    Int32[Array, "sessions micro_batches info"],
    Int32[Array, ""],
    Int32[Array, " sessions"],
    Int32[Array, " sessions"],
    Int32[Array, " sessions"],
    Int32[Array, "sessions tokens slots"],
    Int32[Array, ""],
]:
    """The fields of the same names after a turn of the scheduler, and out_num."""
    sessions, micro_batches, _ = token_info.shape
    complete = jnp.all((token_info[:, :, 0] == 1).reshape(-1, group, micro_batches), axis=1)
    if group == sessions:
        complete &= (jnp.arange(micro_batches, dtype=jnp.int32) == polling_index)[None]
    found, first = jnp.any(complete, axis=1), jnp.argmax(complete, axis=1).astype(jnp.int32)
    if group == sessions:
        polling_index = jnp.where(found[0], (first[0] + 1) % micro_batches, polling_index)
    taken, micro_batch = jnp.repeat(found, group), jnp.repeat(first, group)
    session = jnp.arange(sessions, dtype=jnp.int32)
    message = token_info[session, micro_batch]
    # Out of range, and so dropped, for a message that is not taken.
    entry = jnp.where(taken, jnp.cumsum(taken, dtype=jnp.int32) - 1, sessions)
    source = jnp.where(taken, micro_batch, micro_batches)
    read = message.at[:, 2:].set(EMPTY).at[:, 0].set(0)
    return (
        token_info.at[session, source].set(read, mode="drop"),
        polling_index,
        layer_ids.at[entry].set(message[:, 1], mode="drop"),
        session_ids.at[entry].set(session, mode="drop"),
        micro_batch_ids.at[entry].set(micro_batch, mode="drop"),
        expert_ids.at[entry].set(message[:, 2:].reshape(expert_ids.shape), mode="drop"),
        jnp.sum(taken, dtype=jnp.int32),
    )


@jax.jit
def _returned(
    flags: Int32[Array, "micro_batches tokens slots"],
    token_data: UInt8[Array, "micro_batches tokens slots bytes"],
    x: Shaped[Array, "rows hidden"],
    session_ids: Int32[Array, " rows"],
    micro_batch_ids: Int32[Array, " rows"],
    token_ids: Int32[Array, " rows"],
    topk_slots: Int32[Array, " rows"],
    number: Int[Array, ""],
    session_id: Int32[Array, ""],
) -> tuple[Int32[Array, "micro_batches tokens slots"], UInt8[Array, "micro_batches tokens slots bytes"]]:
    rows = jnp.arange(len(x), dtype=jnp.int32)
    own = (rows < number.astype(jnp.int32)) & (session_ids == session_id)
    where = jnp.stack([micro_batch_ids, token_ids, topk_slots], axis=1)
    where = jnp.where(own[:, None], where, -1)  # out of range here, unlike in `jnp.ndarray.at`
    # The row of each slot, -1 for none, and the last one of several.
    row = lax.scatter_max(jnp.full_like(flags, -1), where, rows, _ROWS_WRITTEN, mode="drop")
    written, data = row >= 0, to_bytes(x)
    data = jnp.where(written[..., None], data.at[row].get(mode="clip"), token_data[..., : data.shape[1]])
    return jnp.where(written, 1, flags), token_data.at[..., : data.shape[-1]].set(data)


_ROWS_WRITTEN = lax.ScatterDimensionNumbers((), (0, 1, 2), (0, 1, 2))
