"""The sampler: what the filters keep, what the draws follow, and what is done to logits before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import thoroughly
from native_kernels import installed, needs_compiler

from ling3.engine import sampling
from ling3.engine.sampling import NOT_A_NUMBER, Adjustments, Sampling
from ling3.engine.sampling_params import SamplingParams
from ling3.execution import CPU, PLAIN, XLA_CPU
from ling3.ops import drawing
from ling3.ops.logits import largest, log_sum_exp

# Compiled whole, as in the engine: each of their operations would be a program of its own.
ends = jax.jit(sampling.ends)
choose_active = jax.jit(sampling.choose_active, static_argnums=4)


@jax.jit
def sample(logits, drawing, positions):
    return sampling.sample(logits, largest(logits), drawing, positions, jnp.ones(len(logits), bool), PLAIN)


@jax.jit
def narrowed(logits, rows):
    return drawing.narrowed(logits, rows.temperature, rows.top_k, rows.top_p, rows.min_p)


@jax.jit
def choose(logits, rows, positions):
    return sampling.choose(logits, log_sum_exp(logits), rows, positions, PLAIN)


PROBABILITIES = [0.1, 0.3, 0.15, 0.4, 0.05]


def rows(batch, vocab=5, seed=0, **values):
    params = SamplingParams(**{"temperature": 1.0, **values})
    return Sampling.build([(params, seed + b, 0, params.check(vocab)) for b in range(batch)], vocab, 4)


def logits_of(probabilities):
    return jnp.log(jnp.asarray([probabilities], jnp.float32))


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 10**30}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.4}, [3]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 1e-6}, [3]),
        ({"top_p": 1e-300}, [3]),
        ({"min_p": 0.5}, [1, 3]),
        ({"min_p": 1.0}, [3]),
        ({"min_p": 1e-300}, [0, 1, 2, 3, 4]),
        ({"top_k": 3, "top_p": 0.8}, [1, 3]),
    ],
)
def test_filters_keep_what_they_say(values, kept):
    logits = logits_of(PROBABILITIES)
    left = narrowed(logits, rows(1, **values))[0]
    assert np.flatnonzero(np.isfinite(left)).tolist() == kept
    np.testing.assert_array_equal(left[jnp.asarray(kept)], logits[0, jnp.asarray(kept)])


def test_top_p_of_one_keeps_all_of_a_real_vocabulary():
    logits = jnp.asarray(3 * np.random.default_rng(0).normal(size=(1, 157184)), jnp.float32)
    np.testing.assert_array_equal(narrowed(logits, rows(1, 157184)), logits)


def test_draws_follow_the_softmax():
    probabilities, n = np.asarray(PROBABILITIES), 20000
    logits = jnp.broadcast_to(logits_of(probabilities) * 0.5, (n, 5))
    drawn = np.asarray(sample(logits, rows(n, temperature=0.5), jnp.zeros(n, jnp.int32)))
    # Five standard deviations of a binomial share of n = 20,000 draws.
    error = 5 * np.sqrt(probabilities * (1 - probabilities) / n)
    assert np.all(np.abs(np.bincount(drawn, minlength=5) / n - probabilities) < error)


def test_a_draw_is_keyed_by_seed_and_position():
    logits = jnp.zeros((4, 5000), jnp.float32)
    drawing = rows(4, 5000, seed=3)
    drawn = np.asarray(sample(logits, drawing, jnp.asarray([7, 7, 7, 7], jnp.int32))).tolist()
    assert len(set(drawn)) == 4
    later = np.asarray(sample(logits, drawing, jnp.asarray([8, 7, 8, 7], jnp.int32))).tolist()
    assert [a == b for a, b in zip(drawn, later, strict=True)] == [False, True, False, True]
    alone = sample(logits[:1], rows(1, 5000, seed=5), jnp.asarray([7], jnp.int32))
    assert int(alone[0]) == drawn[2]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 2e-38, 1e-40, 1e-300])
def test_a_temperature_near_zero_is_nearly_greedy(temperature):
    """Logits over it overflow float32, and two infinities would tie."""
    logits = jnp.asarray([[3.0, 39.0, 40.0, -1e5]], jnp.float32)
    params = SamplingParams(temperature=temperature)
    drawn = [
        int(sample(logits, Sampling.build([(params, seed, 0, ())], 4, 4), jnp.zeros(1, jnp.int32))[0])
        for seed in range(8)
    ]
    assert drawn == [2] * 8


def test_a_temperature_as_large_as_allowed_is_nearly_uniform():
    n = 5000
    logits = jnp.broadcast_to(jnp.asarray([[3.0, 40.0, -39.0, -1e5]], jnp.float32), (n, 4))
    drawn = np.asarray(sample(logits, rows(n, 4, temperature=1e9), jnp.zeros(n, jnp.int32)))
    # Five standard deviations of a binomial share of a quarter.
    assert np.all(np.abs(np.bincount(drawn, minlength=4) / n - 0.25) < 5 * np.sqrt(0.25 * 0.75 / n))


def test_what_leaves_nothing_is_no_token():
    """Row by row: NaN, +inf, -inf everywhere, and a row beside them that is well."""
    bad = jnp.asarray(
        [[0.0, jnp.nan, 1.0], [0.0, jnp.inf, 1.0], [-jnp.inf] * 3, [0.0, 2.0, 1.0], [-jnp.inf, 2.0, 1.0]], jnp.float32
    )
    for temperature in (0.0, 1.0):
        drawing = rows(5, 3, temperature=temperature, top_k=1)
        choice = choose(bad, drawing, jnp.zeros(5, jnp.int32))
        assert choice.token.tolist() == [NOT_A_NUMBER] * 3 + [1, 1]
        assert ends(choice.token, drawing, jnp.zeros(5, jnp.int32)).tolist() == [True] * 3 + [False] * 2


def test_stop_ids_are_struck_out_until_min_tokens():
    logits = logits_of(PROBABILITIES)
    params = SamplingParams(min_tokens=2, stop_token_ids=[3, 1])
    drawing = Sampling.build([(params, 0, 10, params.check(5))], 5, 4)
    chosen = [choose(logits, drawing, jnp.asarray([position], jnp.int32)) for position in (10, 11, 12)]
    assert [int(choice.token[0]) for choice in chosen] == [2, 2, 3]
    assert [bool(ends(c.token, drawing, jnp.asarray([10 + i], jnp.int32))[0]) for i, c in enumerate(chosen)] == [
        False,
        False,
        True,
    ]
    # The log-probability is the model's own, whatever was struck out.
    np.testing.assert_allclose(chosen[0].logprob[0], np.log(0.15), rtol=1e-6)  # one rounding of log and sum


@pytest.mark.parametrize("vocab", thoroughly([61, 64, 128], but=[61]))
def test_rows_are_chosen_one_by_one_with_the_same_bits(vocab, monkeypatch):
    """Greedy and drawn, with filters, penalties and alternatives; a row that is not active gets no token."""
    kinds = [{}, {"temperature": 0.0}, {"top_p": 0.7}, {"logprobs": 3}, {"min_p": 0.2, "top_k": 9}]
    params = [SamplingParams(**{"temperature": 1.0, **kind}) for kind in kinds]
    mixed = Sampling.build([(p, 7 + i, 0, p.check(vocab)) for i, p in enumerate(params)], vocab, 4)
    logits = jnp.asarray(2 * np.random.default_rng(0).normal(size=(len(kinds), vocab)), jnp.float32)
    logits = logits.at[4].set(jnp.nan)
    positions = jnp.arange(len(kinds), dtype=jnp.int32)
    active = jnp.asarray([True, True, True, True, False])
    monkeypatch.setattr(sampling, "MANY", vocab)
    found = choose_active(logits, mixed, positions, active, XLA_CPU)
    expected = choose(logits, mixed, positions)
    np.testing.assert_array_equal(found.token[:4], expected.token[:4])
    np.testing.assert_array_equal(found.logprob[:4], expected.logprob[:4])
    np.testing.assert_array_equal(found.top_ids[3], expected.top_ids[3])  # of the row that asks for them
    np.testing.assert_array_equal(found.top_logprobs[3], expected.top_logprobs[3])
    assert int(found.token[4]) == -1 and int(expected.token[4]) == NOT_A_NUMBER


def test_a_greedy_row_has_the_same_bits_beside_rows_that_ask_for_more(monkeypatch):
    """Where all rows are greedy nothing is filtered or copied; a neighbour's filter or stop ids change that."""
    vocab = 300
    monkeypatch.setattr(sampling, "MANY", vocab)
    logits = jnp.asarray(2 * np.random.default_rng(0).normal(size=(4, vocab)), jnp.float32)
    logits = logits.at[2, 5].set(jnp.nan).at[3].set(-jnp.inf)
    positions = jnp.arange(4, dtype=jnp.int32)
    greedy, expected = rows(4, vocab, temperature=0.0), None
    early = {"min_tokens": 9, "stop_token_ids": [int(jnp.argmax(logits[0]))]}
    for neighbour in ({}, {"temperature": 1.0}, {"logprobs": 2}, early):
        params = SamplingParams(**{"temperature": 0.0, **neighbour})
        asks = Sampling.build([(params, 0, 0, params.check(vocab))], vocab, 4)
        mixed = jax.tree.map(lambda a, b: a.at[0].set(b[0]), greedy, asks)
        found = choose_active(logits, mixed, positions, jnp.ones(4, bool), XLA_CPU)
        expected = found if expected is None else expected
        assert found.token[1:].tolist() == [int(jnp.argmax(logits[1])), NOT_A_NUMBER, NOT_A_NUMBER]
        np.testing.assert_array_equal(found.logprob[1], expected.logprob[1])
        if neighbour is early:
            assert found.token[0] != expected.token[0] == jnp.argmax(logits[0])


@pytest.mark.thorough
@needs_compiler
def test_a_drawn_row_has_the_same_token_beside_rows_that_ask_for_more(monkeypatch):
    """On the kernels: rows that are only drawn are drawn at once, and one by one beside a row with a penalty."""
    vocab = 700
    monkeypatch.setattr(sampling, "MANY", vocab)
    kinds = [{}, {"temperature": 0.0}, {"top_p": 0.7}, {"top_k": 9, "temperature": 0.6}, {"min_p": 0.1}]
    logits = jnp.asarray(2 * np.random.default_rng(0).normal(size=(6, vocab)), jnp.float32)
    positions = jnp.arange(6, dtype=jnp.int32)

    def drawing(**first):
        params = [SamplingParams(**{"temperature": 1.0, **kind}) for kind in (first, *kinds)]
        adjustments = Adjustments.build([(p, (), (3, 4)) for p in params], vocab)
        return Sampling.build([(p, i, 0, p.check(vocab)) for i, p in enumerate(params)], vocab, 4, adjustments)

    expected = choose(logits, drawing(), positions).token
    with installed():
        first = choose_active(logits, drawing(), positions, jnp.ones(6, bool), CPU)
        for asks in ({"logprobs": 2}, {"repetition_penalty": 1.5}, {"logit_bias": {5: 3.0}}):
            found = choose_active(logits, drawing(**asks), positions, jnp.ones(6, bool), CPU)
            np.testing.assert_array_equal(found.token[1:], expected[1:])
            np.testing.assert_array_equal(found.logprob[1:], first.logprob[1:])
    np.testing.assert_array_equal(first.token, expected)
