"""The 1,024 bytes of CANN's structure: each field at its offset, and no byte lost."""

import dataclasses
import random

import numpy as np
import pytest

from ling3.afd import ScheduleContext

# offset, size, signed
FIELDS = {
    "common": {
        "session_num": (0, 4),
        "micro_batch_num": (4, 4),
        "micro_batch_size": (8, 4),
        "selected_expert_num": (12, 4),
        "expert_num": (16, 4),
        "attn_to_ffn_token_size": (20, 4),
        "ffn_to_attn_token_size": (24, 4),
        "schedule_mode": (28, 4),
    },
    "control": {"run_flag": (128, 4)},
    "attention": {
        "token_info_buf": (256, 8),
        "token_info_buf_size": (264, 8),
        "token_data_buf": (272, 8),
        "token_data_buf_size": (280, 8),
        "micro_batch_id": (288, 4),
    },
    "ffn": {
        "token_info_buf": (384, 8),
        "token_info_buf_size": (392, 8),
        "token_data_buf": (400, 8),
        "token_data_buf_size": (408, 8),
        "polling_index": (416, 8),
        "layer_ids_buf": (512, 8),
        "layer_ids_buf_size": (520, 8),
        "session_ids_buf": (528, 8),
        "session_ids_buf_size": (536, 8),
        "micro_batch_ids_buf": (544, 8),
        "micro_batch_ids_buf_size": (552, 8),
        "expert_ids_buf": (560, 8),
        "expert_ids_buf_size": (568, 8),
        "out_num": (576, 4),
    },
}
SIGNED = ("schedule_mode", "run_flag")
PLACES = [(part, name, *place) for part, fields in FIELDS.items() for name, place in fields.items()]
BYTES = random.Random(0).randbytes(1024)


def changed(context, part, **fields):
    return dataclasses.replace(context, **{part: dataclasses.replace(getattr(context, part), **fields)})


@pytest.mark.parametrize(("part", "name", "offset", "size"), PLACES, ids=str)
def test_a_field_is_at_its_offset(part, name, offset, size):
    signed = name in SIGNED
    found = getattr(getattr(ScheduleContext.from_bytes(BYTES), part), name)
    assert type(found) is int and found == int.from_bytes(BYTES[offset : offset + size], "little", signed=signed)
    bits = 8 * size
    least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    for value in (least, most, 3):
        other = changed(ScheduleContext.from_bytes(BYTES), part, **{name: value}).to_bytes()
        expected = BYTES[:offset] + value.to_bytes(size, "little", signed=signed) + BYTES[offset + size :]
        assert other == expected
    for value in (least - 1, most + 1, 1.0, "1", None, True):
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            changed(ScheduleContext.from_bytes(BYTES), part, **{name: value})


def test_every_byte_survives():
    rng = random.Random(1)
    for data in (bytes(1024), b"\xff" * 1024, *(rng.randbytes(1024) for _ in range(50))):
        context = ScheduleContext.from_bytes(data)
        assert context.to_bytes() == data
        assert context == ScheduleContext.from_bytes(data) and hash(context) == hash(ScheduleContext.from_bytes(data))
        assert dataclasses.replace(context).to_bytes() == changed(context, "ffn").to_bytes() == data


@pytest.mark.parametrize("kind", [bytearray, memoryview, lambda b: np.frombuffer(b, np.int8)])
def test_bytes_come_as_any_buffer(kind):
    assert ScheduleContext.from_bytes(kind(BYTES)).to_bytes() == BYTES


def test_of_nothing_it_is_zeros():
    assert ScheduleContext().to_bytes() == bytes(1024)
    assert changed(ScheduleContext(), "common", session_num=np.int64(7)).common.session_num == 7


@pytest.mark.parametrize("size", [0, 1023, 1025, 2048])
def test_another_length_is_refused(size):
    with pytest.raises(ValueError, match="1024"):
        ScheduleContext.from_bytes(bytes(size))


@pytest.mark.parametrize("data", [1024, None, "x" * 1024])
def test_what_is_not_bytes_is_refused(data):
    with pytest.raises(ValueError, match="1024 bytes"):
        ScheduleContext.from_bytes(data)


def test_wrong_parts_are_refused():
    context = ScheduleContext()
    with pytest.raises(ValueError, match="ffn"):
        dataclasses.replace(context, ffn=context.common)
    for part, name, value in (("common", "reserve0", bytes(95)), ("ffn", "reserve4", 0), ("ffn", "reserve3", "x" * 88)):
        with pytest.raises(ValueError, match=name):
            changed(context, part, **{name: value})
    with pytest.raises(ValueError, match="reserve6"):
        dataclasses.replace(context, reserve6=bytes(383))


def test_it_is_frozen():
    context = ScheduleContext()
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.common.session_num = 1  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(dataclasses.FrozenInstanceError):
        context.common = context.common  # pyright: ignore[reportAttributeAccessIssue]
