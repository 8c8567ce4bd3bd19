"""What is outside of the specification is a ValueError that names the argument or field, eagerly and under jit."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3 import afd

A, M, BS, K, K1, HS, H = 2, 3, 4, 2, 3, 512, 8
INT32, INT64 = np.dtype(np.int32), np.dtype(np.int64)


def ffn_fields(sessions=A, micro_batches=M, tokens=BS, slots=K1, size=HS) -> dict[str, Any]:
    ids = np.zeros(sessions, np.int32)
    return {
        "token_info": np.zeros((sessions, micro_batches, 2 + tokens * slots), np.int32),
        "token_data": np.zeros((sessions, micro_batches, tokens, slots, size), np.uint8),
        "polling_index": np.zeros((), np.int32),
        "layer_ids": ids,
        "session_ids": ids,
        "micro_batch_ids": ids,
        "expert_ids": np.zeros((sessions, tokens, slots), np.int32),
        "out_num": np.zeros((), np.int32),
    }


def attention_fields(micro_batches=M, tokens=BS, slots=K1, size=HS) -> dict[str, Any]:
    return {
        "token_info": np.zeros((micro_batches, tokens, slots), np.int32),
        "token_data": np.zeros((micro_batches, tokens, slots, size), np.uint8),
        "micro_batch_id": np.zeros((), np.int32),
    }


def refused(name, call, *arrays):
    """The arrays are arguments of the program under jit."""
    with pytest.raises(ValueError, match=name):
        call(*arrays)
    with pytest.raises(ValueError, match=name):
        jax.jit(call)(*arrays)


BATCHING = {"expert_num": 6, "max_out_shape": (A, BS, K1, H)}


def batching(area, **changes):
    return afd.ffn_worker_batching(area, **BATCHING | changes)


IDS = ("session_ids", "micro_batch_ids", "token_ids", "expert_offsets", "topk_slots")
ROWS: dict[str, Any] = {
    "y": np.zeros((A * BS * K1, H), np.float16),
    **dict.fromkeys(IDS, np.zeros(A * BS * K1, np.int32)),
    "dynamic_scale": np.zeros(0, np.float32),
    "group_list": np.zeros((6, 2), np.int32),
    "actual_token_num": np.zeros((), np.int32),
}
OUT = afd.FfnBatch(**ROWS)
MESSAGE = {
    "x": np.zeros((BS, H), np.float16),
    "session_id": 0,
    "micro_batch_id": 0,
    "layer_id": 0,
    "expert_ids": np.zeros((BS, K), np.int32),
    "expert_rank_table": np.ones((6, 3), np.int32),
    "rank": 0,
    "moe_expert_num": 5,
}


def send(area, **changes):
    return afd.attention_to_ffn(area, **MESSAGE | changes)


def combine(attn, scales=None, layer_id=0, **changes):
    statics = {"hidden_size": H, "dtype": jnp.float16} | changes
    return afd.attention_worker_combine(
        attn, np.zeros((BS, K), np.float32) if scales is None else scales, layer_id, **statics
    )


FFN_OPERATORS = {"batching": batching, "scheduler": afd.ffn_worker_scheduler, "send": send}
ATTENTION_OPERATORS = {
    "scheduler": afd.attention_worker_scheduler,
    "combine": combine,
    "return": lambda attn: afd.ffn_to_attention(attn, OUT.y, OUT, session_id=0),
    "complete": lambda attn: afd.complete_unrouted(
        attn,
        **{key: MESSAGE[key] for key in ("session_id", "micro_batch_id", "expert_ids", "expert_rank_table")},
        moe_expert_num=5,
    ),
}


@pytest.mark.parametrize("operator", FFN_OPERATORS)
def test_within_the_limits_nothing_is_refused(operator):
    jax.eval_shape(FFN_OPERATORS[operator], afd.FfnArea(**ffn_fields()))


@pytest.mark.parametrize("operator", ATTENTION_OPERATORS)
def test_nor_of_a_session(operator):
    jax.eval_shape(ATTENTION_OPERATORS[operator], afd.AttentionArea(**attention_fields()))


def wrong_arrays(value):
    """Arrays of other dtypes and shapes in the place of a field."""
    other = np.int16 if value.dtype == np.uint8 else np.float32
    yield value.astype(other)
    yield value.astype(np.int8)
    yield np.zeros((*value.shape, 1), value.dtype)
    for axis in range(value.ndim):
        # Of the slots, more bytes are no error, but must be a multiple of 512.
        grown = list(value.shape)
        grown[axis] += 1
        yield np.zeros(grown, value.dtype)
    if value.ndim:
        yield value[0]


@pytest.mark.parametrize("operator", FFN_OPERATORS)
@pytest.mark.parametrize("field", ffn_fields())
def test_a_wrong_field_of_a_card_is_named(operator, field):
    area = afd.FfnArea(**ffn_fields())
    # All operators share the check of an area.
    for wrong in itertools.islice(wrong_arrays(getattr(area, field)), None if operator == "batching" else 1):
        refused(field, FFN_OPERATORS[operator], dataclasses.replace(area, **{field: wrong}))
    for wrong in (None, "x", np.zeros(getattr(area, field).shape, np.int64), 2**31, [1.5], np.int64(0)):
        with pytest.raises(ValueError, match=field):
            FFN_OPERATORS[operator](dataclasses.replace(area, **{field: wrong}))


@pytest.mark.parametrize("operator", ATTENTION_OPERATORS)
@pytest.mark.parametrize("field", attention_fields())
def test_a_wrong_field_of_a_session_is_named(operator, field):
    attn = afd.AttentionArea(**attention_fields())
    for wrong in itertools.islice(wrong_arrays(getattr(attn, field)), None if operator == "combine" else 1):
        refused(field, ATTENTION_OPERATORS[operator], dataclasses.replace(attn, **{field: wrong}))
    for wrong in (None, "x", np.zeros(getattr(attn, field).shape, np.int64), 2**31):
        with pytest.raises(ValueError, match=field):
            ATTENTION_OPERATORS[operator](dataclasses.replace(attn, **{field: wrong}))


@pytest.mark.parametrize(
    "sizes",
    [
        {"sessions": 1025, "tokens": 1, "micro_batches": 1, "slots": 1},
        {"sessions": 0},
        {"micro_batches": 65, "tokens": 1},
        {"micro_batches": 0},
        {"tokens": 0},
        {"slots": 66, "tokens": 1},
        {"slots": 0},
        {"size": 0},
        {"size": 511},
        {"size": 768},
    ],
    ids=str,
)
def test_areas_beyond_the_limits(sizes):
    refused("token_data", batching, afd.FfnArea(**ffn_fields(**sizes)))
    whole: dict[str, Any] = {"sessions": 1, "micro_batches": 1, "tokens": 1, "slots": 1, "slot_bytes": 512}
    changed: dict[str, Any] = {"slot_bytes" if name == "size" else name: value for name, value in sizes.items()}
    worst = next(iter(changed))
    with pytest.raises(ValueError, match=worst):
        afd.FfnArea.empty(**whole | changed)
    if worst == "sessions":
        return
    del whole["sessions"]
    with pytest.raises(ValueError, match=worst):
        afd.AttentionArea.empty(**whole | changed)
    refused("token_data", combine, afd.AttentionArea(**attention_fields(**sizes)))


@pytest.mark.parametrize(
    "sizes",
    [
        {"sessions": 1024, "micro_batches": 1, "tokens": 1, "slots": 1},
        {"micro_batches": 64},
        {"slots": 65},
        {"size": 1024},
    ],
    ids=str,
)
def test_the_limits_themselves_are_within(sizes):
    area = afd.FfnArea(**ffn_fields(**sizes))
    shape = area.token_data.shape
    out, _ = jax.eval_shape(
        lambda area: batching(area, expert_num=8192, max_out_shape=(1024, shape[2], 65, H), need_schedule=1), area
    )
    assert out.y.shape == (1024 * shape[2] * 65, H) and out.group_list.shape == (8192, 2)


NO_INTS = (None, "1", 1.0, True, (1,), np.float32(1))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("expert_num", (0, -1, 8193, 2**40, *NO_INTS)),
        ("layer_num", (-1, 4, 7, *NO_INTS)),  # of 6 experts
        ("token_dtype", (-1, 3, *NO_INTS)),
        ("need_schedule", (-1, 2, *NO_INTS)),
        (
            "max_out_shape",
            (
                (A - 1, BS, K1, H),
                (A, BS - 1, K1, H),
                (A, BS, K1 - 1, H),
                (A, BS, K1, 0),
                (A, BS, K1, -1),
                (A, BS, K1, 257),  # 514 bytes in slots of 512
                (1025, BS, K1, H),
                (A, BS, 66, H),
                (1024, 2**15, 64, H),  # 2^31 rows
                (2**40, BS, K1, H),
                (A, BS, K1),
                (A, BS, K1, H, 1),
                (A, BS, K1, 8.0),
                (A, BS, True, H),
                "2438",
                None,
                24,
            ),
        ),
    ],
)
def test_a_wrong_keyword_of_batching_is_named(name, values):
    for value in values:
        refused(name, lambda area, value=value: batching(area, **{name: value}), afd.FfnArea(**ffn_fields()))


def test_slots_hold_int8_numbers_and_their_scale():
    area = afd.FfnArea(**ffn_fields())
    for hidden, token_dtype in ((508, 2), (256, 1), (256, 0), (1, 2)):
        shape = (A, BS, K1, hidden)
        jax.eval_shape(lambda x, s=shape, t=token_dtype: batching(x, max_out_shape=s, token_dtype=t), area)
    for hidden, token_dtype in ((509, 2), (257, 1), (257, 0)):
        shape = (A, BS, K1, hidden)
        refused("token_data", lambda x, s=shape, t=token_dtype: batching(x, max_out_shape=s, token_dtype=t), area)


def test_a_traced_static_is_named():
    area = afd.FfnArea(**ffn_fields())
    for name in ("expert_num", "layer_num", "token_dtype", "need_schedule"):
        with pytest.raises(ValueError, match=f"{name} is traced"):
            jax.jit(lambda x, name=name: batching(area, **{name: x}))(1)
    with pytest.raises(ValueError, match=r"max_out_shape\[3\] is traced"):
        jax.jit(lambda x: batching(area, max_out_shape=(A, BS, K1, x)))(1)


@pytest.mark.parametrize("group", [0, -1, 3, 4, 1.0, "1", True])
def test_a_group_divides_the_sessions(group):
    call = lambda area: afd.ffn_worker_scheduler(area, sync_group_size=group)  # noqa: E731
    refused("sync_group_size", call, afd.FfnArea(**ffn_fields()))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("x", (np.zeros((BS + 1, H), np.float16), np.zeros(H, np.float16), np.zeros((BS, 0), np.float16))),
        ("x", (np.zeros((BS, H), np.float32), MESSAGE["x"].astype(np.int8), np.zeros((BS, 257), np.float16))),
        ("session_id", (np.zeros(1, np.int32), np.float32(0), np.int8(0) == 0)),
        ("micro_batch_id", (np.zeros(1, np.int32), np.float32(0))),
        ("layer_id", (np.zeros(1, np.int32), np.float32(0))),
        ("rank", (np.zeros(1, np.int32), np.float32(0))),
        ("expert_ids", (np.zeros((BS, K1 + 1), np.int32), np.zeros((BS + 1, K), np.int32), np.zeros(BS, np.int32))),
        ("expert_ids", (np.zeros((BS, K), np.float32), np.zeros((BS, K), np.int16))),
        ("expert_rank_table", (np.ones((5, 3), np.int32), np.ones((6, 1), np.int32), np.ones((6, 4), np.int32))),
        ("expert_rank_table", (np.ones((6, 3), np.float32), np.ones(6, np.int32))),
        ("active_mask", (np.ones(BS + 1, bool), np.ones(BS, np.int32), np.ones((BS, 1), bool))),
    ],
)
def test_a_wrong_array_of_a_message_is_named(name, values):
    for value in values:
        refused(name, lambda area, value: send(area, **{name: value}), afd.FfnArea(**ffn_fields()), value)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("session_id", (-1, A, 2**31, 0.0, None, True, "0", np.int32(-1))),
        ("micro_batch_id", (-1, M, 2**40, 0.0, None)),
        ("layer_id", (2**31, -(2**31) - 1, 0.5, None)),
        ("rank", (-1, 2**31, 0.0, None)),
        ("moe_expert_num", (0, -1, 6, 1.0, None, True)),  # the table has rows for 5 and a shared one
        ("token_dtype", (-1, 3, 1.0, None, True)),
        ("sync_flag", (-1, 2, 1.0, None, True)),
        ("active_mask", (np.array([False, True, True, False]), np.array([True, False, True, False]), "x", [True] * BS)),
        ("expert_ids", (None, [[0] * K] * BS)),
        ("x", (None, 1.0)),
    ],
)
def test_a_wrong_value_of_a_message_is_named(name, values):
    expected = "expert_rank_table|moe_expert_num" if name == "moe_expert_num" else name
    for value in values:
        refused(expected, lambda area, value=value: send(area, **{name: value}), afd.FfnArea(**ffn_fields()))


def test_the_dtype_of_a_message_is_that_of_its_tokens():
    area = afd.FfnArea(**ffn_fields())
    for token_dtype, dtype in ((0, jnp.bfloat16), (1, jnp.float16), (1, jnp.float32), (2, jnp.int8)):
        x = jnp.zeros((BS, H), dtype)
        refused("x", lambda area, x, t=token_dtype: send(area, x=x, token_dtype=t), area, x)
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
        jax.eval_shape(lambda area, x: send(area, x=x, token_dtype=2), area, jnp.zeros((BS, H), dtype))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("x", (np.zeros((23, H), np.float16), np.zeros(24, np.float16), np.zeros((24, H), np.int8))),
        ("x", (np.zeros((24, 0), np.float16), np.zeros((24, 129), np.float32))),
        ("session_id", (np.zeros(1, np.int32), np.float32(0))),
        *(
            (field, (np.zeros(23, np.int32), np.zeros(24, np.float32), np.zeros((24, 1), np.int32)))
            for field in ("session_ids", "micro_batch_ids", "token_ids", "topk_slots")
        ),
        ("actual_token_num", (np.zeros(1, np.int32), np.zeros((), np.float32))),
    ],
)
def test_a_wrong_array_of_what_returns_is_named(name, values):
    def call(attn, value):
        x, session, out = OUT.y, 0, OUT
        if name in vars(OUT):
            out = dataclasses.replace(OUT, **{name: value})
        elif name == "x":
            x = value
        else:
            session = value
        return afd.ffn_to_attention(attn, x, out, session_id=session)

    for value in values:
        refused(name, call, afd.AttentionArea(**attention_fields()), value)


def test_a_wrong_value_of_what_returns_is_named():
    attn = afd.AttentionArea(**attention_fields())
    for session in (-1, 1024, 0.0, None, True):
        refused("session_id", lambda attn, s=session: afd.ffn_to_attention(attn, OUT.y, OUT, session_id=s), attn)
    for out in (None, 3, attn):
        refused("out", lambda attn, out=out: afd.ffn_to_attention(attn, OUT.y, out, session_id=0), attn)


def test_a_wrong_argument_of_combine_is_named():
    attn = afd.AttentionArea(**attention_fields())
    for shape in ((BS, K1 + 1), (BS + 1, K), (BS,)):
        refused("expert_scales", combine, attn, np.zeros(shape, np.float32))
    refused("expert_scales", combine, attn, np.zeros((BS, K), np.int32))
    for layer in (np.zeros(1, np.int32), np.float32(0)):
        refused("layer_id", lambda attn, layer: combine(attn, layer_id=layer), attn, layer)
    for name, values in {
        "hidden_size": (0, -1, 1.0, None, True),
        "dtype": (jnp.int32, jnp.float64, "no dtype", None, jnp.complex64, jnp.float4_e2m1fn),
        "need_schedule": (-1, 2, True, None),
        "layer_id": (2**31, 0.5, None),
    }.items():
        for value in values:
            refused(name, lambda attn, name=name, value=value: combine(attn, **{name: value}), attn)
    refused("token_data", lambda attn: combine(attn, hidden_size=257), attn)
    refused("token_data", lambda attn: combine(attn, hidden_size=129, dtype=jnp.float32), attn)


def test_another_type_is_no_area():
    area, attn = afd.FfnArea(**ffn_fields()), afd.AttentionArea(**attention_fields())
    for wrong in (attn, None, dict(vars(area))):
        for operator in FFN_OPERATORS.values():
            refused("area", operator, wrong) if wrong is attn else None
            with pytest.raises(ValueError, match="area"):
                operator(wrong)
    for wrong in (area, None):
        for operator in ATTENTION_OPERATORS.values():
            with pytest.raises(ValueError, match="attn"):
                operator(wrong)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hidden", lambda: afd.slot_bytes(0, 0)),
        ("token_dtype", lambda: afd.slot_bytes(1, 3)),
    ],
)
def test_the_size_of_a_slot_has_limits(name, call):
    with pytest.raises(ValueError, match=name):
        call()
