"""The operators of AFD in plain loops over numpy arrays, straight from their specification, and random cases for them.

Nothing of ling3.afd is used. Areas and outputs are dicts of arrays under the names of their fields.
"""

from typing import Any

import ml_dtypes
import numpy as np

EMPTY = 2**31 - 1
DTYPES = (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.int8))


def ffn_worker_scheduler(area, group=None) -> dict[str, Any]:
    area = {name: np.array(value) for name, value in area.items()}
    info, out_num = area["token_info"], 0
    sessions, micro_batches, _ = info.shape
    group = group or sessions
    for first in range(0, sessions, group):
        every = range(first, first + group)
        if group == sessions:
            polling = int(area["polling_index"])
            asked = [polling] if 0 <= polling < micro_batches else []
        else:
            asked = range(micro_batches)
        for m in asked:
            if any(info[a, m, 0] != 1 for a in every):
                continue
            for a in every:
                area["layer_ids"][out_num] = info[a, m, 1]
                area["session_ids"][out_num] = a
                area["micro_batch_ids"][out_num] = m
                area["expert_ids"][out_num] = info[a, m, 2:].reshape(area["expert_ids"].shape[1:])
                info[a, m, 2:] = EMPTY
                info[a, m, 0] = 0
                out_num += 1
            if group == sessions:
                area["polling_index"] = np.array((m + 1) % micro_batches, np.int32)
            break
    area["out_num"] = np.array(out_num, np.int32)
    return area


def ffn_worker_batching(
    area, expert_num, max_out_shape, token_dtype=0, need_schedule=0, layer_num=0, long: Any = np.int32
):
    if need_schedule:
        area = ffn_worker_scheduler(area)
    sessions, micro_batches, tokens, slots, _ = area["token_data"].shape
    rows, hidden = int(np.prod(max_out_shape[:3])), max_out_shape[3]
    per_layer = expert_num // layer_num if layer_num else expert_num
    kept = []
    for o in range(min(int(area["out_num"]), sessions)):
        s, m, layer = (int(area[name][o]) for name in ("session_ids", "micro_batch_ids", "layer_ids"))
        if not (0 <= s < sessions and 0 <= m < micro_batches) or (layer_num and not 0 <= layer < layer_num):
            continue
        for t in range(tokens):
            for k in range(slots):
                expert = int(area["expert_ids"][o, t, k])
                if 0 <= expert < per_layer:
                    expert += layer * per_layer if layer_num else 0
                    kept.append((expert, (o * tokens + t) * slots + k, s, m, t, k))
    kept.sort()
    dtype = DTYPES[token_dtype]
    out = {
        "y": np.zeros((rows, hidden), dtype),
        **{
            name: np.full(rows, -1, np.int32)
            for name in ("session_ids", "micro_batch_ids", "token_ids", "expert_offsets", "topk_slots")
        },
        "dynamic_scale": np.zeros(rows if token_dtype == 2 else 0, np.float32),
        "group_list": np.zeros((expert_num, 2), long),
        "actual_token_num": np.array(len(kept), long),
    }
    counts = {}
    for j, (expert, _, s, m, t, k) in enumerate(kept):
        slot = area["token_data"][s, m, t, k].tobytes()
        width = hidden * dtype.itemsize
        out["y"].view(np.uint8)[j] = np.frombuffer(slot[:width], np.uint8)
        if token_dtype == 2:
            out["dynamic_scale"].view(np.uint8)[4 * j : 4 * j + 4] = np.frombuffer(slot[width : width + 4], np.uint8)
        offset = counts.get(expert, 0)
        counts[expert] = offset + 1
        for name, value in (("session_ids", s), ("micro_batch_ids", m), ("token_ids", t), ("topk_slots", k)):
            out[name][j] = value
        out["expert_offsets"][j] = offset
    for i, expert in enumerate(sorted(counts)):
        out["group_list"][i] = expert, counts[expert]
    return out, area


def destinations(session, expert_ids, table, moe_expert_num, slots, active):
    """The card and the id there of each slot that goes to a card."""
    tokens, top_k = expert_ids.shape
    found = {}
    for t in range(tokens):
        for k in range(slots):
            expert = int(expert_ids[t, k]) if k < top_k else moe_expert_num + k - top_k
            if not active[t] or (k < top_k and not 0 <= expert < moe_expert_num):
                continue
            count = int(table[expert, 0])
            if count > 0:
                replica = session % count
                found[t, k] = int(table[expert, 1 + 2 * replica]), int(table[expert, 2 + 2 * replica])
    return found


def flushed(x):
    """What a CPU computes with in XLA's programs: 0 for subnormal numbers."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)


def quantized(x):
    """int8 numbers and scale of a token."""
    with np.errstate(all="ignore"):
        x = flushed(x.astype(np.float32))
        if np.isnan(x).any() or np.isinf(x).any():
            return np.zeros(len(x), np.int8), np.float32(np.nan if np.isnan(x).any() else np.inf)
        scale = np.float32(flushed(np.max(np.abs(x)) / np.float32(127)))
        if scale == 0:
            return np.zeros(len(x), np.int8), scale
        return np.round(x / scale).astype(np.int8), scale


def attention_to_ffn(
    area, x, session, micro_batch, layer, expert_ids, table, rank, moe_expert_num, token_dtype, sync_flag, active
):
    area = {name: np.array(value) for name, value in area.items()}
    info, data = area["token_info"][session, micro_batch], area["token_data"][session, micro_batch]
    if info[0] == 1:
        return area, False
    slots = data.shape[1]
    received = False
    for (t, k), (card, name) in destinations(session, expert_ids, table, moe_expert_num, slots, active).items():
        if card != rank:
            continue
        if token_dtype == 2:
            q, scale = quantized(x[t])
            payload = q.tobytes() + scale.tobytes()
        else:
            payload = x[t].tobytes()
        data[t, k, : len(payload)] = np.frombuffer(payload, np.uint8)
        info[2 + t * slots + k] = name
        received = True
    if received or not sync_flag:
        info[1] = layer
        info[0] = 1
    return area, True


def ffn_to_attention(attn, x, out, session):
    attn = {name: np.array(value) for name, value in attn.items()}
    for j in range(int(out["actual_token_num"])):
        if out["session_ids"][j] == session:
            place = tuple(int(out[name][j]) for name in ("micro_batch_ids", "token_ids", "topk_slots"))
            payload = np.frombuffer(x[j].tobytes(), np.uint8)
            attn["token_data"][place][: len(payload)] = payload
            attn["token_info"][place] = 1
    return attn


def attention_worker_scheduler(attn):
    attn = {name: np.array(value) for name, value in attn.items()}
    m = (int(attn["micro_batch_id"]) + 1) % len(attn["token_info"])
    if not (attn["token_info"][m] == 1).all():
        return attn, False
    attn["token_info"][m] = 0
    attn["micro_batch_id"] = np.array(m, np.int32)
    return attn, True


def attention_worker_combine(attn, scales, layer, hidden, dtype, need_schedule=0):
    _, tokens, slots, _ = attn["token_data"].shape
    if need_schedule:
        attn, ready = attention_worker_scheduler(attn)
        if not ready:
            return np.zeros((tokens, hidden), dtype), layer, attn
    y = np.zeros((tokens, hidden), np.float32)
    with np.errstate(all="ignore"):
        for t in range(tokens):
            for k in range(slots):
                slot = attn["token_data"][int(attn["micro_batch_id"]), t, k].tobytes()
                token = np.frombuffer(slot[: hidden * dtype.itemsize], dtype).astype(np.float32)
                y[t] = y[t] + (np.float32(scales[t, k]) * token if k < scales.shape[1] else token)
        return y.astype(dtype), layer + 1, attn


def random_ffn_area(rng, shape, experts, layers=0) -> dict[str, Any]:
    """An area of random contents, with everything that an operator drops among them; polled or not, full or not."""
    sessions, micro_batches, tokens, slots, _ = shape

    def ids(most, size, stray):
        return np.where(rng.random(size) < stray, rng.choice([-1, most, EMPTY]), rng.integers(0, most, size))

    stray = rng.choice([0.0, 0.1, 0.5, 1.0])
    # Few experts of many: duplicates, and experts without rows.
    many = experts if rng.random() < 0.7 else 1 + experts // 3
    info = np.zeros((sessions, micro_batches, 2 + tokens * slots), np.int32)
    info[:, :, 0] = rng.random((sessions, micro_batches)) < rng.choice([0.0, 0.5, 0.9, 1.0, 1.0])
    info[:, :, 0] *= 1 + (rng.random((sessions, micro_batches)) < rng.choice([0.0, 0.0, 0.1]))
    info[:, :, 1] = ids(layers or 3, (sessions, micro_batches), stray / 2)
    info[:, :, 2:] = ids(many, info[:, :, 2:].shape, stray)
    whole = {
        "token_info": info,
        "token_data": rng.integers(0, 256, shape),
        "polling_index": rng.integers(-1, micro_batches + 1) if rng.random() < 0.3 else rng.integers(micro_batches),
        "layer_ids": ids(layers or 3, sessions, stray / 4),
        "session_ids": np.where(rng.random(sessions) < stray / 4, -1, rng.permutation(sessions)),
        "micro_batch_ids": ids(micro_batches, sessions, stray / 4),
        "expert_ids": ids(many, (sessions, tokens, slots), stray),
        "out_num": rng.integers(-1, sessions + 2) if rng.random() < 0.5 else sessions,
    }
    return {name: np.asarray(x, np.uint8 if name == "token_data" else np.int32) for name, x in whole.items()}


def random_table(rng, experts, cards, replicas):
    """An expert_rank_table, with an expert on no card now and then."""
    table = np.zeros((experts, 1 + 2 * replicas), np.int32)
    table[:, 0] = np.where(rng.random(experts) < 0.1, 0, rng.integers(1, replicas + 1, experts))
    table[:, 1::2] = rng.integers(0, cards, (experts, replicas))
    table[:, 2::2] = rng.integers(0, experts, (experts, replicas))
    return table
