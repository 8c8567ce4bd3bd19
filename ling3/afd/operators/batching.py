"""A card's window: `ffn_worker_scheduler` takes the complete messages (CANN's FfnWorkerScheduler), and
`ffn_worker_batching` sorts their rows by expert (CANN's FfnWorkerBatching)."""

import dataclasses
import functools
from typing import no_type_check

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from ling3.afd.operators import limits
from ling3.afd.operators.windows import (
    EMPTY,
    SCALE,
    TOKEN_DTYPES,
    FfnArea,
    check_holds,
    checked,
    from_bytes,
    token_bytes,
    within,
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
    """int32 [Y]: its index among the rows of its expert."""
    topk_slots: jax.Array
    """int32 [Y]: its slot among the token's K1."""
    dynamic_scale: jax.Array
    """float32 [Y]: the scale of int8 rows; [0] for other dtypes."""
    group_list: jax.Array
    """int32 [expert_num, 2], int64 in 64-bit mode: [expert, rows] for each expert with rows, ascending; then [0, 0]."""
    actual_token_num: jax.Array
    """int32, int64 in 64-bit mode: n, the number of rows."""


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
    """Sorts the rows of the scheduled messages by expert. Returns the batch and the area.

    A row is a slot (o, t, k) of message o < min(out_num, A) whose expert id, session and micro-batch, and with layers
    the layer id, are in range; other slots are dropped. Rows are sorted by expert, then by (o·BS + t)·K1 + k. With
    layer_num = 0 an id is the expert; otherwise the expert is layer·E + id, with E = expert_num / layer_num.

    `expert_num` counts this card's experts of all layers. `max_out_shape` is (A, BS, K1, H): upper bounds for the
    area's sizes, whose product Y is the number of output rows, and the hidden size. With need_schedule = 1
    `ffn_worker_scheduler` runs first; otherwise the area is returned unchanged. Keywords are static.
    """
    window = checked(area, FfnArea, "area")
    expert_num = limits.integer("expert_num", expert_num, 1, limits.EXPERTS)
    layer_num = limits.integer("layer_num", layer_num, 0)
    if layer_num and expert_num % layer_num:
        raise ValueError(f"layer_num is {layer_num}, expected a divisor of expert_num, which is {expert_num}")
    token_dtype = limits.integer("token_dtype", token_dtype, 0, len(TOKEN_DTYPES) - 1)
    rows, hidden = _checked_max_out_shape(max_out_shape, window)
    check_holds(window, token_bytes(hidden, token_dtype), f"max_out_shape[3] = {hidden} and token_dtype {token_dtype}")
    if limits.integer("need_schedule", need_schedule, 0, 1):
        area = window = ffn_worker_scheduler(window)
    return _batched(window, expert_num, layer_num, token_dtype, rows, hidden), area


@no_type_check
def ffn_worker_scheduler(area: FfnArea, sync_group_size: int | None = None) -> FfnArea:
    """Takes the messages that are complete, in groups of `sync_group_size` consecutive sessions (None: all A).

    A single group takes micro-batch m = polling_index if the flags of all its sessions are 1; polling_index then
    becomes (m+1) % M. With several groups, each takes the lowest micro-batch for which its flags are all 1, and
    polling_index stays. Each message (a, m) that is taken, in the order of a, becomes the next entry of layer_ids,
    session_ids, micro_batch_ids and expert_ids; in the window its expert ids become EMPTY and its flag 0. `out_num` is
    the number of messages taken, 0 if none is complete: the function does not wait.
    """
    area = checked(area, FfnArea, "area")
    sessions = area.token_data.shape[0]
    group = sessions if sync_group_size is None else limits.integer("sync_group_size", sync_group_size, 1)
    if sessions % group:
        raise ValueError(f"sync_group_size is {group}, expected a divisor of the number of sessions, {sessions}")
    return _scheduled(area, group)


@no_type_check
def _checked_max_out_shape(shape, area) -> tuple[int, int]:
    """Y and H of `max_out_shape`, checked against the limits and the area."""
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


@functools.partial(jax.jit, static_argnames=("expert_num", "layer_num", "token_dtype", "rows", "hidden"))
def _batched(area: FfnArea, expert_num: int, layer_num: int, token_dtype: int, rows: int, hidden: int) -> FfnBatch:
    sessions, micro_batches, tokens, slots, _ = area.token_data.shape
    counted = jnp.arange(sessions, dtype=jnp.int32) < area.out_num
    counted &= within(area.session_ids, sessions) & within(area.micro_batch_ids, micro_batches)
    experts, per_layer = area.expert_ids, expert_num
    if layer_num:
        per_layer = expert_num // layer_num
        counted &= within(area.layer_ids, layer_num)
        experts = area.layer_ids[:, None, None] * per_layer + area.expert_ids
    chosen = jnp.where(counted[:, None, None] & within(area.expert_ids, per_layer), experts, expert_num)
    groups = Groups.of(chosen.reshape(-1, slots), expert_num)

    row, number = groups.order, jnp.sum(groups.counts, dtype=jnp.int32)
    place = jnp.arange(row.shape[0], dtype=jnp.int32)
    entry, token, slot = row // (tokens * slots), row // slots % tokens, row % slots
    session, micro_batch = area.session_ids[entry], area.micro_batch_ids[entry]
    offset = place - groups.starts.at[chosen.reshape(-1)[row]].get(mode="clip")
    size = token_bytes(hidden, token_dtype)
    where = jnp.stack([session, micro_batch, token, slot], axis=1)
    data = lax.gather(area.token_data, where, _SLOTS_READ, (1, 1, 1, 1, size), mode="clip")
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


# Gathers one index of each of the first four dimensions, and the first bytes of a slot.
_SLOTS_READ = lax.GatherDimensionNumbers((1,), (0, 1, 2, 3), (0, 1, 2, 3))


def _group_list(counts: Int32[Array, " experts"]) -> Int32[Array, "experts 2"]:
    experts = jnp.arange(counts.shape[0], dtype=jnp.int32)
    used = counts > 0
    place = jnp.where(used, jnp.cumsum(used, dtype=jnp.int32) - 1, counts.shape[0])
    pairs = jnp.stack([experts, counts], axis=1)
    return jnp.zeros_like(pairs).at[place].set(pairs, mode="drop")


@functools.partial(jax.jit, static_argnames="group")
def _scheduled(area: FfnArea, group: int) -> FfnArea:
    sessions, micro_batches, _ = area.token_info.shape
    complete = jnp.all((area.token_info[:, :, 0] == 1).reshape(-1, group, micro_batches), axis=1)
    if group == sessions:
        complete &= (jnp.arange(micro_batches, dtype=jnp.int32) == area.polling_index)[None]
    found, first = jnp.any(complete, axis=1), jnp.argmax(complete, axis=1).astype(jnp.int32)
    polling_index = area.polling_index
    if group == sessions:
        polling_index = jnp.where(found[0], (first[0] + 1) % micro_batches, polling_index)
    taken, micro_batch = jnp.repeat(found, group), jnp.repeat(first, group)
    session = jnp.arange(sessions, dtype=jnp.int32)
    message = area.token_info[session, micro_batch]
    # Messages that are not taken get an index that is out of range, which is dropped.
    entry = jnp.where(taken, jnp.cumsum(taken, dtype=jnp.int32) - 1, sessions)
    source = jnp.where(taken, micro_batch, micro_batches)
    read = message.at[:, 2:].set(EMPTY).at[:, 0].set(0)
    return dataclasses.replace(
        area,
        token_info=area.token_info.at[session, source].set(read, mode="drop"),
        polling_index=polling_index,
        layer_ids=area.layer_ids.at[entry].set(message[:, 1], mode="drop"),
        session_ids=area.session_ids.at[entry].set(session, mode="drop"),
        micro_batch_ids=area.micro_batch_ids.at[entry].set(micro_batch, mode="drop"),
        expert_ids=area.expert_ids.at[entry].set(message[:, 2:].reshape(area.expert_ids.shape), mode="drop"),
        out_num=jnp.sum(taken, dtype=jnp.int32),
    )
