"""The kernel for a CPU draws the plain form's token from each row of logits, whatever the filters."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_kernels import installed, needs_compiler

from ling3.ops import drawing as plain
from ling3.ops.cpu import drawing as kernel
from ling3.ops.cpu import logits as likeliest

pytestmark = [needs_compiler, pytest.mark.thorough]
draw, expected, by_xla = jax.jit(kernel.draw), jax.jit(plain.draw), jax.jit(kernel.xla_draw)


@pytest.fixture(scope="module", autouse=True)
def on_the_kernel():
    with installed():
        yield


def inputs(rows, vocab, spread=3.0, **columns):
    """Logits, all rows active, a key for each, and the same filters for all but where a column says otherwise."""
    logits = jnp.asarray(spread * np.random.default_rng(0).normal(size=(rows, vocab)), jnp.float32)
    every = {"temperature": 1.0, "top_k": vocab, "top_p": 1.0, "min_p": 0.0} | columns
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    columns = (jnp.asarray(own, dtype) for own, dtype in zip(every.values(), dtypes, strict=True))
    keys = jax.vmap(jax.random.key)(jnp.arange(rows, dtype=jnp.int32))
    return logits, jnp.ones(rows, bool), keys, *(jnp.broadcast_to(column, rows) for column in columns)


FILTERS = [
    {},
    {"temperature": 0.2},
    {"temperature": 40.0},
    {"top_k": 1},
    {"top_k": 20, "temperature": 0.6, "top_p": 0.95},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 5.0},
    {"top_p": 1e-6},
    {"min_p": 0.05, "temperature": 1.5},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "temperature": 0.8},
]


# Less than a register, registers and a rest, a published vocabulary; nearly flat to peaked.
@pytest.mark.parametrize("vocab", [1, 3, 100, 4_099, 50_257])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_ids_are_the_plain_forms(vocab, spread):
    for filters in FILTERS:
        given = inputs(12, vocab, spread, **filters | {"top_k": min(filters.get("top_k", vocab), vocab)})
        np.testing.assert_array_equal(draw(*given), expected(*given), str(filters))


def test_ids_are_the_plain_forms_in_ling_3s_vocabulary():
    for filters in FILTERS[:6]:
        given = inputs(3, 157_184, **{"top_k": 157_184} | filters)
        np.testing.assert_array_equal(draw(*given), expected(*given), str(filters))


def test_nearly_all_of_a_vocabulary():
    """Filters that leave out a few, so that every token is ordered."""
    for filters in ({"top_k": 4_999}, {"top_p": 0.9999}, {"top_k": 4_000, "top_p": 0.999}):
        given = inputs(6, 5_000, 1.0, **filters)
        np.testing.assert_array_equal(draw(*given), expected(*given), str(filters))


def test_ties_go_to_the_first():
    """Of equal logits at the border of top-k and of top-p the first stay; others are never drawn."""
    logits, active, *_ = inputs(400, 5_000)
    logits = jnp.full_like(logits, -4.0).at[:, 2_500:2_600].set(2.0).at[:, 77].set(3.0)
    for chosen in ({"top_k": 9}, {"top_p": 0.2}):
        _, _, keys, *filters = inputs(400, 5_000, **chosen)
        found = draw(logits, active, keys, *filters)
        np.testing.assert_array_equal(found, expected(logits, active, keys, *filters))
        drawn = set(np.asarray(found).tolist())
        assert drawn <= {77, *range(2_500, 2_600)} and len(drawn) > 5
        assert "top_k" not in chosen or drawn == {77, *range(2_500, 2_508)}


def test_masked_logits_and_extreme_temperatures():
    logits, active, keys, *_ = inputs(8, 20_000)
    masked = logits.at[:, 5:].set(-jnp.inf)
    for filters in ({}, {"top_k": 100}, {"top_p": 0.99}, {"min_p": 0.1}):
        how = inputs(8, 20_000, **filters)[3:]
        np.testing.assert_array_equal(
            draw(masked, active, keys, *how), expected(masked, active, keys, *how), str(filters)
        )
    for temperature, top_p in itertools.product((1e-30, 1e-3, 1e9), (1.0, 0.9)):
        how = inputs(8, 20_000, temperature=temperature, top_p=top_p)[3:]
        np.testing.assert_array_equal(
            draw(logits, active, keys, *how), expected(logits, active, keys, *how), f"{temperature} {top_p}"
        )


def test_rows_that_no_token_can_be_drawn_from():
    """Any id of the vocabulary, at once; the caller sees by the logits' sum that it means nothing."""
    logits, active, keys, *_ = inputs(6, 9_000)
    logits = logits.at[0, 8_999].set(jnp.nan).at[1].set(jnp.nan).at[2, 5_000].set(jnp.inf).at[3].set(-jnp.inf)
    for filters in ({}, {"top_k": 7}, {"top_p": 0.5}, {"min_p": 0.5}):
        how = inputs(6, 9_000, **filters)[3:]
        found = np.asarray(draw(logits, active, keys, *how))
        assert np.all((found >= 0) & (found < 9_000))
        np.testing.assert_array_equal(found[4:], expected(logits, active, keys, *how)[4:])


def test_a_row_does_not_depend_on_its_company():
    """Alone, beside rows that are not active, and by XLA, row by row."""
    rows = 7
    columns = {"top_k": [30_000, 5, 30_000, 9, 30_000, 30_000, 1], "top_p": [1, 1, 0.9, 0.5, 1, 1, 1], "min_p": 0.001}
    logits, active, keys, *filters = inputs(rows, 30_000, **columns)
    together = draw(logits, active, keys, *filters)
    for r in range(rows):
        own = slice(r, r + 1)
        alone = draw(logits[own], active[own], keys[own], *(x[own] for x in filters))
        assert int(alone[0]) == int(together[r])
    some = jnp.arange(rows) % 2 == 0
    np.testing.assert_array_equal(draw(logits, some, keys, *filters)[::2], together[::2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likeliest, "LEAST", 2**14)
        np.testing.assert_array_equal(by_xla(logits, some, keys, *filters)[::2], together[::2])


def test_inputs_that_do_not_suit():
    logits, _, keys, *_ = inputs(2, 20_000)
    assert kernel.unsuited(logits, keys) is None
    others = jax.vmap(lambda seed: jax.random.key(seed, impl="rbg"))(jnp.arange(2))
    assert "threefry2x32" in kernel.unsuited(logits, others)
    with jax.threefry_partitionable(False):
        assert "threefry2x32" in kernel.unsuited(logits, keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "LEAST", 2**14)
        assert "less than 16,384 tokens" in kernel.unsuited(logits[:, :16_383], keys)
