"""The operators against their oracle, bit by bit, and what it means that they are pure and compiled once."""

import dataclasses
import functools
import itertools

import afd_oracle as oracle
import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exhaustive_cases import exhaustively

from ling3 import afd

pytestmark = pytest.mark.thorough

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
CONTENTS = 40


def assert_same(found, expected, case: object = ""):
    """Equal dtypes, shapes and bits of all fields."""
    for name, value in expected.items():
        own = np.asarray(getattr(found, name))
        assert (own.dtype, own.shape) == (value.dtype, value.shape), (name, case)
        assert own.tobytes() == value.tobytes(), f"{name} {case}: {own} is not {value}"


def compiled_once(function, **statics):
    return jax.jit(eqx.debug.assert_max_traces(functools.partial(function, **statics), max_traces=1))


def avals(tree):
    return [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in jax.tree.leaves(tree)]


# (A, M, BS, K1, HS), then the statics of ffn_worker_batching.
CASES = {
    "float16": ((2, 3, 3, 3, 512), {"expert_num": 4, "max_out_shape": (2, 3, 3, 5), "token_dtype": 0}),
    "one slot": ((3, 1, 4, 1, 512), {"expert_num": 6, "max_out_shape": (4, 5, 2, 7), "token_dtype": 1, "layer_num": 3}),
    "one session": (
        (1, 3, 4, 2, 512),
        {"expert_num": 5, "max_out_shape": (1, 4, 2, 6), "token_dtype": 2, "layer_num": 1},
    ),
    "layers": ((4, 2, 2, 3, 1024), {"expert_num": 8, "max_out_shape": (4, 2, 5, 3), "token_dtype": 2, "layer_num": 2}),
    "few experts": ((5, 2, 1, 4, 512), {"expert_num": 1, "max_out_shape": (6, 1, 4, 256), "token_dtype": 0}),
    "65 slots": ((2, 2, 1, 65, 512), {"expert_num": 70, "max_out_shape": (2, 1, 65, 1), "token_dtype": 1}),
}


@functools.cache
def jitted_batching(**statics):
    return compiled_once(afd.ffn_worker_batching, **statics)


def contents(name, number, first=0):
    shape, statics = CASES[name]
    layers = statics.get("layer_num", 0)
    experts = statics["expert_num"] // max(layers, 1)
    for seed in range(first, first + number):
        yield seed, oracle.random_ffn_area(np.random.default_rng(seed), shape, experts, layers)


def some_slow(cases, slow):
    return [pytest.param(*case, marks=pytest.mark.slow) if slow(*case) else case for case in cases]


@pytest.mark.parametrize(
    ("name", "need_schedule"),
    some_slow(itertools.product(CASES, (0, 1)), lambda name, schedule: schedule and CASES[name][1]["token_dtype"] < 2),
)
def test_batching_is_the_oracles(name, need_schedule):
    """480 cases in all, scheduled ones followed by one on the area that came back, with one trace for each shape."""
    statics = {**CASES[name][1], "need_schedule": need_schedule}
    operator = jitted_batching(**statics)
    numbers = set()
    for seed, fields in contents(name, CONTENTS, 1000 * need_schedule):
        given = afd.FfnArea(**fields)
        out, area = operator(given)
        expected, after = oracle.ffn_worker_batching(fields, **statics)
        assert_same(out, expected, seed)
        assert_same(area, after, seed)
        assert avals(area) == avals(given)
        numbers.add(int(expected["actual_token_num"]))
        if need_schedule:
            expected, after = oracle.ffn_worker_batching(after, **statics)
            out, area = operator(area)
            assert_same(out, expected, seed)
            assert_same(area, after, seed)
    assert 0 in numbers and len(numbers) > 3


@pytest.mark.parametrize("name", ["float16", *exhaustively(["layers"])])
def test_eagerly_the_bits_are_the_same(name):
    statics = CASES[name][1]
    for seed, fields in contents(name, 5, 5000):
        for need_schedule in (0, 1):
            given = afd.FfnArea(**fields)
            out, area = afd.ffn_worker_batching(given, **statics, need_schedule=need_schedule)
            expected, after = oracle.ffn_worker_batching(fields, **statics, need_schedule=need_schedule)
            assert_same(out, expected, seed)
            assert_same(area, after, seed)
            assert_same(given, fields)  # a new area is returned, the old one stays
            if not need_schedule:
                assert area is given


@pytest.mark.parametrize("name", CASES)
def test_rows_are_a_permutation_of_the_counted_slots(name):
    _, statics = CASES[name]
    for seed, fields in contents(name, 10, 9000):
        out, area = jitted_batching(**statics, need_schedule=1)(afd.FfnArea(**fields))
        n, taken = int(out.actual_token_num), int(area.out_num)
        layers = statics.get("layer_num", 0)
        per_layer = statics["expert_num"] // max(layers, 1)
        ids, layer = np.asarray(area.expert_ids)[:taken], np.asarray(area.layer_ids)[:taken, None, None]
        counted = (ids >= 0) & (ids < per_layer) & ((layers == 0) | ((layer >= 0) & (layer < layers)))
        session, micro_batch = np.asarray(area.session_ids), np.asarray(area.micro_batch_ids)
        slots = {(session[o], micro_batch[o], t, k) for o, t, k in np.argwhere(counted)}
        columns = (out.session_ids, out.micro_batch_ids, out.token_ids, out.topk_slots)
        rows = list(zip(*(np.asarray(x)[:n] for x in columns)))
        assert len(rows) == n == len(slots) and set(rows) == slots, seed
        groups = np.asarray(out.group_list)
        assert groups[:, 1].sum() == n and (np.diff(groups[groups[:, 1] > 0, 0]) > 0).all()
        # The rows of an expert follow each other, as the experts' own kernel takes them.
        offsets = np.concatenate([np.arange(count) for count in groups[:, 1]])
        assert (np.asarray(out.expert_offsets)[:n] == offsets).all()


@pytest.mark.parametrize(
    ("name", "groups"),
    some_slow(
        [("layers", (None, 1, 2)), ("layers", (4,)), ("one session", (None, 1))], lambda _, groups: len(groups) < 3
    ),
)
def test_the_scheduler_is_the_oracles(name, groups):
    for group in groups:
        operator = compiled_once(afd.ffn_worker_scheduler, sync_group_size=group)
        taken = set()
        for seed, fields in contents(name, 20, 2000):
            area, after = afd.FfnArea(**fields), fields
            for _ in range(3):
                area, after = operator(area), oracle.ffn_worker_scheduler(after, group)
                assert_same(area, after, (group, seed))
                assert avals(area) == avals(afd.FfnArea(**fields))
                taken.add(int(area.out_num))
        sessions = CASES[name][0][0]
        assert taken == set(range(0, sessions + 1, group or sessions)), group


def test_numpy_arrays_are_taken():
    _, statics = CASES["float16"]
    fields = next(contents("float16", 1, 11))[1]
    out, area = afd.ffn_worker_batching(afd.FfnArea(**fields), **statics, need_schedule=1)
    expected, after = oracle.ffn_worker_batching(fields, **statics, need_schedule=1)
    assert_same(out, expected)
    assert_same(area, after)


def test_polling_goes_around():
    """Each turn takes the next micro-batch of all sessions, and an area comes back as it was at first."""
    area = afd.FfnArea.empty(2, 3, 1, 1, 512)
    flags = lambda area: dataclasses.replace(area, token_info=area.token_info.at[:, :, 0].set(1))  # noqa: E731
    assert int(afd.ffn_worker_scheduler(area).out_num) == 0
    area, seen = flags(area), []
    for turn in range(7):
        area = afd.ffn_worker_scheduler(area)
        seen.append((int(area.out_num), int(area.micro_batch_ids[0]), int(area.polling_index)))
        area = flags(area) if turn == 3 else area
    assert seen == [(2, 0, 1), (2, 1, 2), (2, 2, 0), (0, 2, 0), (2, 0, 1), (2, 1, 2), (2, 2, 0)]


def test_64_bit_mode_has_long_counts():
    _, statics = CASES["float16"]
    fields = next(contents("float16", 1, 1))[1]
    with jax.enable_x64(True):
        out, area = jax.jit(lambda area: afd.ffn_worker_batching(area, **statics, need_schedule=1))(
            afd.FfnArea(**fields)
        )
        expected, after = oracle.ffn_worker_batching(fields, **statics, need_schedule=1, long="int64")
        assert_same(out, expected)
        assert_same(area, after)


# (A, M, BS, K, K1, HS, H), token_dtype, the dtype of x.
SENT = {
    "float16": ((3, 2, 4, 2, 3, 512, 5), 0, np.dtype(np.float16)),
    "bfloat16": ((1, 2, 3, 1, 1, 512, 256), 1, BFLOAT16),
    "int8": ((2, 2, 4, 2, 4, 512, 7), 2, np.dtype(np.float32)),
    "int8 of bfloat16": ((2, 1, 5, 3, 4, 1024, 33), 2, BFLOAT16),
}


FAST_SENT = (("float16", 0), ("bfloat16", 1), ("int8", 1))


def random_tokens(rng, shape, dtype):
    if dtype.itemsize == 2 and rng.random() < 0.3:
        return rng.integers(0, 2**16, shape).astype(np.uint16).view(dtype)  # any bits, NaNs among them
    x = rng.standard_normal(shape) * rng.choice([1e-4, 1.0, 100.0])
    x[rng.random(shape[0]) < 0.2] = 0.0
    x = x.astype(dtype)
    if rng.random() < 0.1:
        x[0, 0] = rng.choice([np.nan, np.inf])
    return x


def random_message(rng, shape, dtype):
    """Arguments of attention_to_ffn, in the order of the oracle."""
    sessions, micro_batches, tokens, top_k, slots, _, hidden = shape
    experts = 4
    ids = rng.integers(-1, experts + 1, (tokens, top_k))
    active = np.arange(tokens) < rng.choice([0, 1, tokens // 2, tokens, tokens])
    return {
        "x": random_tokens(rng, (tokens, hidden), dtype),
        "session_id": np.int32(rng.integers(sessions)),
        "micro_batch_id": np.int32(rng.integers(micro_batches)),
        "layer_id": np.int32(rng.integers(5)),
        "expert_ids": ids.astype(np.int32),
        "expert_rank_table": oracle.random_table(rng, experts + slots - top_k, 2, 3),
        "rank": np.int32(rng.integers(2)),
        "active_mask": active,
    }


@pytest.mark.parametrize(
    ("name", "sync_flag"),
    some_slow(itertools.product(SENT, (0, 1)), lambda name, flag: (name, flag) not in FAST_SENT),
)
def test_sending_is_the_oracles(name, sync_flag):
    shape, token_dtype, dtype = SENT[name]
    sessions, micro_batches, tokens, _, slots, size, _ = shape
    statics = {"moe_expert_num": 4, "token_dtype": token_dtype, "sync_flag": sync_flag}
    operator = compiled_once(afd.attention_to_ffn, **statics)
    refused = 0
    rng = np.random.default_rng(sync_flag)
    for case in range(40):
        area_shape = (sessions, micro_batches, tokens, slots, size)
        fields = oracle.random_ffn_area(rng, area_shape, 4)
        message = random_message(rng, shape, dtype)
        given = afd.FfnArea(**fields)
        area, sent = operator(given, **message)
        x, session, micro_batch, layer, ids, table, rank, active = message.values()
        expected, written = oracle.attention_to_ffn(
            fields, x, session, micro_batch, layer, ids, table, rank, 4, token_dtype, sync_flag, active
        )
        assert bool(sent) == written, case
        assert_same(area, expected, case)
        assert avals(area) == avals(given)
        if not written:
            assert_same(area, fields)
        refused += not written
        if case < 3:  # eagerly, with Python numbers
            message |= {key: int(message[key]) for key in ("session_id", "micro_batch_id", "layer_id", "rank")}
            area, sent = afd.attention_to_ffn(given, **message, **statics)
            assert bool(sent) == written
            assert_same(area, expected, case)
    assert 0 < refused < 40


@pytest.mark.slow
def test_a_traced_number_out_of_range_sends_nothing():
    shape, token_dtype, dtype = SENT["float16"]
    message = random_message(np.random.default_rng(0), shape, dtype)
    area = afd.FfnArea.empty(3, 2, 4, 3, 512)
    operator = jax.jit(functools.partial(afd.attention_to_ffn, moe_expert_num=4, token_dtype=token_dtype))
    for wrong in ({"session_id": 3}, {"session_id": -1}, {"micro_batch_id": 2}, {"micro_batch_id": -1}):
        after, sent = operator(area, **message | wrong)
        assert not sent
        assert_same(after, {name: np.asarray(value) for name, value in vars(area).items()})


@pytest.mark.slow
def test_float32_goes_unrounded_as_float16():
    x = np.random.default_rng(0).integers(0, 2**32, (2, 3), dtype=np.uint32).view(np.float32)
    area = afd.FfnArea.empty(1, 1, 2, 1, afd.slot_bytes(6, 0))
    halves = jax.lax.bitcast_convert_type(jnp.asarray(x), jnp.float16).reshape(2, 6)
    ids, table = np.zeros((2, 1), np.int32), np.array([[1, 0, 0]], np.int32)
    routed = {"expert_ids": ids, "expert_rank_table": table, "rank": 0, "moe_expert_num": 1}
    area, _ = afd.attention_to_ffn(area, halves, session_id=0, micro_batch_id=0, layer_id=0, **routed)
    out, _ = afd.ffn_worker_batching(area, expert_num=1, max_out_shape=(1, 2, 1, 6), need_schedule=1)
    assert np.asarray(out.y).tobytes() == x.tobytes()


@pytest.mark.parametrize(
    "dtype",
    [
        np.dtype(np.float16),
        *exhaustively([BFLOAT16, np.dtype(np.float32)]),
    ],
    ids=str,
)
def test_returning_is_the_oracles(dtype):
    shape, statics = CASES["layers"]
    operator = compiled_once(afd.ffn_to_attention)
    rng = np.random.default_rng(0)
    sessions, micro_batches, tokens, slots, size = shape
    for case, fields in contents("layers", 100, 7000):
        fields["session_ids"] = rng.integers(0, sessions, sessions).astype(
            np.int32
        )  # of several rows the last one stays
        out, _ = oracle.ffn_worker_batching(fields, **statics)
        x = random_tokens(rng, (len(out["y"]), 9), dtype)
        attn = {
            "token_info": rng.integers(0, 2, (micro_batches, tokens, slots)).astype(np.int32),
            "token_data": rng.integers(0, 256, (micro_batches, tokens, slots, size)).astype(np.uint8),
            "micro_batch_id": np.int32(1),
        }
        session = np.int32(rng.integers(sessions))
        found = operator(afd.AttentionArea(**attn), x, afd.FfnBatch(**out), session_id=session)
        assert_same(found, oracle.ffn_to_attention(attn, x, out, session), case)
        if case == 7000:
            found = afd.ffn_to_attention(afd.AttentionArea(**attn), x, afd.FfnBatch(**out), session_id=int(session))
            assert_same(found, oracle.ffn_to_attention(attn, x, out, session))
        assert avals(found) == avals(afd.AttentionArea(**attn))


# (M, BS, K, K1, HS, H)
COMBINED = {
    "float16": ((2, 3, 2, 3, 512, 5), np.dtype(np.float16)),
    "bfloat16": ((3, 2, 1, 1, 512, 8), BFLOAT16),
    "only shared": ((1, 2, 0, 2, 512, 3), BFLOAT16),
    "float32": ((2, 4, 4, 5, 1024, 200), np.dtype(np.float32)),
}


def random_attention_area(rng, shape, dtype):
    micro_batches, tokens, _, slots, size, hidden = shape
    data = rng.integers(0, 256, (micro_batches, tokens, slots, size)).astype(np.uint8)
    x = (rng.standard_normal((micro_batches, tokens, slots, hidden)) * 3).astype(dtype)
    data[..., : hidden * dtype.itemsize] = x.view(np.uint8)
    flags = np.ones((micro_batches, tokens, slots), np.int32)
    for m in range(micro_batches):
        if rng.random() < 0.4:
            flags[m, rng.integers(tokens), rng.integers(slots)] = rng.choice([0, 2])
    return {"token_info": flags, "token_data": data, "micro_batch_id": np.int32(rng.integers(micro_batches))}


def assert_combining_is_the_oracles(name, need_schedule, operator, cases):
    shape, dtype = COMBINED[name]
    scheduled = set()
    for case in range(cases):
        rng = np.random.default_rng(case)
        fields = random_attention_area(rng, shape, dtype)
        scales = rng.standard_normal((shape[1], shape[2])).astype(np.float32)
        given, layer = afd.AttentionArea(**fields), np.int32(case)
        y, next_layer, attn = operator(given, scales, layer)
        own, following, after = oracle.attention_worker_combine(fields, scales, layer, shape[-1], dtype, need_schedule)
        assert (y.dtype, y.shape, next_layer.dtype) == (own.dtype, own.shape, np.int32)
        assert np.asarray(y).tobytes() == own.tobytes(), case
        assert int(next_layer) == following
        assert_same(attn, after, case)
        assert avals(attn) == avals(given)
        scheduled.add(following != layer)
    assert scheduled == {True, not need_schedule}


@pytest.mark.parametrize("need_schedule", [0, 1])
@pytest.mark.parametrize("name", COMBINED)
def test_combining_is_the_oracles(name, need_schedule):
    shape, dtype = COMBINED[name]
    statics = {"hidden_size": shape[-1], "dtype": dtype, "need_schedule": need_schedule}
    operator = compiled_once(afd.attention_worker_combine, **statics)
    assert_combining_is_the_oracles(name, need_schedule, operator, 40)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("hidden", exhaustively([1, 8, 250, 512], but=[8, 250]))
def test_products_are_rounded_with_all_optimizations(hidden, monkeypatch):
    """XLA would contract a product and a sum to one operation, which rounds once; eagerly there is no such choice."""
    for name, dtype in {"f16": np.dtype(np.float16), "b16": BFLOAT16, "f32": np.dtype(np.float32)}.items():
        for top_k, slots in ((1, 1), (1, 2), (2, 2), (8, 9)):
            monkeypatch.setitem(COMBINED, name, ((2, 3, top_k, slots, 2048, hidden), dtype))
            statics = {"hidden_size": hidden, "dtype": dtype}
            operator = functools.partial(afd.attention_worker_combine, **statics)
            assert_combining_is_the_oracles(name, 0, jax.jit(operator), 10)
            assert_combining_is_the_oracles(name, 0, operator, 2)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("hidden", exhaustively([1, 7, 64, 500], but=[7, 500]))
def test_quotients_are_rounded_with_all_optimizations(hidden):
    rng, tokens = np.random.default_rng(hidden), 16
    table, ids = np.array([[1, 0, 0]], np.int32), np.zeros((tokens, 1), np.int32)
    area = afd.FfnArea.empty(1, 1, tokens, 1, afd.slot_bytes(hidden, 2))
    statics = {"session_id": 0, "micro_batch_id": 0, "layer_id": 0, "rank": 0, "moe_expert_num": 1, "token_dtype": 2}
    send = functools.partial(afd.attention_to_ffn, expert_ids=ids, expert_rank_table=table, **statics)
    fields = {name: np.asarray(value) for name, value in vars(area).items()}
    for operator in (send, jax.jit(send)):
        for dtype in (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16):
            for _ in range(10):
                x = random_tokens(rng, (tokens, hidden), dtype)
                expected, _ = oracle.attention_to_ffn(fields, x, 0, 0, 0, ids, table, 0, 1, 2, 0, [True] * tokens)
                assert_same(operator(area, x)[0], expected)


def test_the_schedulers_poll_as_the_oracle_does():
    """Around several times, from any micro_batch_id."""
    operator = compiled_once(afd.attention_worker_scheduler)
    for case in range(30):
        rng = np.random.default_rng(case)
        fields = random_attention_area(rng, (3, 2, 1, 2, 512, 3), np.dtype(np.float16))
        fields["micro_batch_id"] = np.int32(rng.choice([0, 1, 2, 2**31 - 1, -1]))
        attn = afd.AttentionArea(**fields)
        for _ in range(4):
            attn, ready = operator(attn)
            fields, expected = oracle.attention_worker_scheduler(fields)
            assert bool(ready) == expected
            assert_same(attn, fields, case)


def test_slots_for_no_card_are_complete_and_zero():
    rng, (sessions, micro_batches, tokens, _, slots, size, _) = np.random.default_rng(0), SENT["float16"][0]
    operator = jax.jit(functools.partial(afd.complete_unrouted, moe_expert_num=4))
    for _ in range(20):
        message = random_message(rng, SENT["float16"][0], np.dtype(np.float16))
        fields = random_attention_area(rng, (micro_batches, tokens, 2, slots, size, 5), np.dtype(np.float16))
        fields["token_info"][:] = 0
        del message["x"], message["layer_id"], message["rank"]
        attn = operator(afd.AttentionArea(**fields), **message)
        session, m, ids, table, active = message.values()
        routed = oracle.destinations(session, ids, table, 4, slots, active)
        for t, k in np.ndindex(tokens, slots):
            if (t, k) not in routed:
                fields["token_info"][m, t, k] = 1
                fields["token_data"][m, t, k] = 0
        assert_same(attn, fields)
    assert sessions == 3


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_64_bit_mode_changes_no_other_integer(wrap):
    rng, (shape, _, dtype) = np.random.default_rng(0), SENT["float16"]
    with jax.enable_x64(True):
        message = random_message(rng, shape, dtype)
        area, _ = wrap(lambda area, a: afd.attention_to_ffn(area, **message | {"session_id": a}, moe_expert_num=4))(
            afd.FfnArea.empty(3, 2, 4, 3, 512), 1
        )
        out, area = wrap(lambda area: afd.ffn_worker_batching(area, expert_num=5, max_out_shape=(3, 4, 3, 5)))(area)
        area = wrap(lambda area: afd.ffn_worker_scheduler(area, 1))(area)
        attn = afd.AttentionArea.empty(2, 4, 3, 512)
        y = out.y.astype(jnp.float64)
        attn = wrap(lambda attn, a: afd.ffn_to_attention(attn, y, out, session_id=a))(attn, 1)
        statics = {"hidden_size": 5, "dtype": np.float64, "need_schedule": 1}
        scales = np.ones((4, 2))
        y, layer, attn = wrap(lambda attn: afd.attention_worker_combine(attn, scales, 3, **statics))(attn)
        assert (y.dtype, layer.dtype) == (np.float64, np.int32)
        assert avals(area) == avals(afd.FfnArea.empty(3, 2, 4, 3, 512))
        assert avals(attn) == avals(afd.AttentionArea.empty(2, 4, 3, 512))


def test_areas_at_first():
    area = jax.device_get(afd.FfnArea.empty(2, 3, 4, 5, 1024))
    assert area.token_info.shape == (2, 3, 22) and area.token_data.shape == (2, 3, 4, 5, 1024)
    assert not area.token_info[:, :, 0].any() and (area.token_info[:, :, 1:] == 2**31 - 1).all()
    assert (area.expert_ids == 2**31 - 1).all() and int(area.polling_index) == int(area.out_num) == 0
    attn = jax.device_get(afd.AttentionArea.empty(3, 4, 5, 512))
    assert attn.token_info.shape == (3, 4, 5) and not attn.token_info.any() and int(attn.micro_batch_id) == 2
    for one in (area, attn):
        assert dataclasses.replace(one, token_info=1).token_data is one.token_data
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(one, "token_info", one.token_info)  # noqa: B010
    assert [afd.slot_bytes(*x) for x in ((256, 0), (257, 1), (508, 2), (509, 2), (1, 2))] == [512, 1024, 512, 1024, 512]
