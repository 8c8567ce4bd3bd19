"""The chunk form is the recurrence: values, gradients, any length, any start, any gate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively
from hypothesis import given, settings
from hypothesis import strategies as st

from ling3.ops.kda import kda_gate, kda_step, l2_normalize, recurrent_kda
from ling3.ops.kda_chunks import chunk_kda, unit_lower_inverse

BOUNDS = (-5.0, -1.0, -20.0, None)
CHUNKED = jax.jit(chunk_kda, static_argnames=("lower_bound", "chunk_size"))
RECURRENT = jax.jit(recurrent_kda)


def inputs(seq, *, bound, dtype, batch=2, heads=2, width=8, spread=3.0, seed=0, even=False):
    """Unit keys and queries, gates spread over their range (`spread` large: at both extremes), a non-zero state.

    With `even`, a head has one decay.
    """
    draw = np.random.default_rng(seed)
    q, k, v = draw.normal(size=(3, batch, seq, heads, width))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    f = spread * draw.normal(size=(batch, seq, heads, 1 if even else width))
    g = -np.logaddexp(0, f) if bound is None else bound / (1 + np.exp(-f))
    beta = 1 / (1 + np.exp(-spread * draw.normal(size=(batch, seq, heads))))
    state = draw.normal(size=(batch, heads, width, width))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, g, beta, state))


def largest(a, b):
    return max(
        float(np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)))) for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize("bound", [-5.0, -20.0, None])
@pytest.mark.parametrize("chunk_size", [16, *exhaustively([64])])
def test_chunk_form_is_the_recurrence_in_float64(bound, chunk_size):
    with jax.enable_x64(True):
        for seq in (1, 15, 17, 65, 130):
            for spread in (1.0, 3.0, 30.0):
                x = inputs(seq, bound=bound, dtype=jnp.float64, spread=spread)
                fast = CHUNKED(*x, lower_bound=bound, chunk_size=chunk_size)
                assert largest(fast, RECURRENT(*x)) < 1e-10


@pytest.mark.thorough
@pytest.mark.parametrize("chunk_size", [32, *exhaustively([16, 64])])
def test_one_decay_per_head_is_the_same_decay_of_each_channel(chunk_size):
    """In values and gradients, in float64; and in float32 no further from it than with a decay per channel."""

    def scalar(form, *x):
        o, state = form(*x)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))

    def chunked(*x):
        return chunk_kda(*x, lower_bound=None, chunk_size=chunk_size)

    fast, slow = (jax.jit(jax.grad(scalar, argnums=tuple(range(1, 7))), static_argnums=0) for _ in range(2))
    for spread in (3.0, 30.0):
        with jax.enable_x64(True):
            x = inputs(65, bound=None, dtype=jnp.float64, spread=spread, even=True)
            each = (*x[:3], jnp.broadcast_to(x[3], x[1].shape), *x[4:])
            truth = RECURRENT(*each)
            assert largest(CHUNKED(*x, lower_bound=None, chunk_size=chunk_size), truth) < 1e-10
            assert largest(RECURRENT(*x), truth) < 1e-12
            assert largest(fast(chunked, *x), slow(recurrent_kda, *x)) < 1e-8
        narrow = [tuple(jnp.asarray(y, jnp.float32) for y in own) for own in (x, each)]
        even, uneven = (largest(CHUNKED(*own, lower_bound=None, chunk_size=chunk_size), truth) for own in narrow)
        assert even <= 1.5 * uneven + 1e-6


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("chunk_size", [16, *exhaustively([64])])
def test_gradients_are_the_recurrences_in_float64(bound, chunk_size):
    def scalar(form, *x):
        o, state = form(*x)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state))

    def chunked(*x):
        return chunk_kda(*x, lower_bound=bound, chunk_size=chunk_size)

    fast = jax.jit(jax.grad(lambda *x: scalar(chunked, *x), argnums=tuple(range(6))))
    slow = jax.jit(jax.grad(lambda *x: scalar(recurrent_kda, *x), argnums=tuple(range(6))))
    with jax.enable_x64(True):
        for spread in (3.0, 30.0):
            x = inputs(70, bound=bound, dtype=jnp.float64, spread=spread)
            assert largest(fast(*x), slow(*x)) < 1e-8


@settings(max_examples=15)
@given(
    seq=st.integers(1, 100),
    batch=st.integers(1, 3),
    heads=st.integers(1, 3),
    width=st.sampled_from([1, 4, 16]),
    bound=st.sampled_from(BOUNDS),
    seed=st.integers(0, 2**16),
)
def test_any_size_in_float32(seq, batch, heads, width, bound, seed):
    x = inputs(seq, bound=bound, dtype=jnp.float32, batch=batch, heads=heads, width=width, seed=seed)
    # Factors of e^±40 round at 40·2^-24 = 2.4e-6 relative; outputs here are of size 1 to 10.
    assert largest(CHUNKED(*x, lower_bound=bound), RECURRENT(*x)) < 5e-5


@pytest.mark.parametrize("bound", [-5.0, None])
def test_a_closed_gate_over_a_long_text_stays_finite(bound):
    """Every gate at its strongest: 64 tokens span 320 nats, more than float32 can hold in one factor."""
    q, k, v, g, beta, state = inputs(256, bound=bound, dtype=jnp.float32)
    g = jnp.full_like(g, -5.0 if bound is not None else -1e4)
    for chunk_size in (16, 64):
        o, after = CHUNKED(q, k, v, g, beta, state, lower_bound=bound, chunk_size=chunk_size)
        assert bool(jnp.all(jnp.isfinite(o))) and bool(jnp.all(jnp.isfinite(after)))
        assert largest((o, after), RECURRENT(q, k, v, g, beta, state)) < 1e-5


@pytest.mark.parametrize("bound", [-5.0, *exhaustively([-20.0, None])])
def test_a_decay_of_minus_infinity_resets_the_chunk_form_as_the_recurrence(bound):
    """Values and gradients, with resets anywhere in a chunk, one after another, and closed gates between them."""

    def scalar(form, *x):
        o, state = form(*x)
        return jnp.sum(jnp.sin(o)) + jnp.sum(jnp.cos(state)), (o, state)

    chunked = functools.partial(chunk_kda, lower_bound=bound, chunk_size=32, resets=True)
    fast, slow = (
        jax.jit(jax.grad(functools.partial(scalar, form), argnums=tuple(range(6)), has_aux=True))
        for form in (chunked, recurrent_kda)
    )
    with jax.enable_x64(True):
        q, k, v, g, beta, state = inputs(70, bound=bound, dtype=jnp.float64)
        closed = jnp.full_like(g, -1e4 if bound is None else bound)
        for resets in ([0], [1], [15], [16], [9, 40], [3, 4, 5, 31, 32, 33, 69], range(70)):
            at = jnp.zeros(70, bool).at[jnp.asarray(resets)].set(True)[None, :, None, None]
            for decays in (g, closed):
                x = q, k, v, jnp.where(at, -jnp.inf, decays), beta, state
                (gradients, found), (expected_gradients, expected) = fast(*x), slow(*x)
                assert largest(found, expected) < 1e-12 and largest(gradients, expected_gradients) < 1e-12


def test_padding_leaves_the_state_alone():
    q, k, v, g, beta, state = inputs(40, bound=-5.0, dtype=jnp.float32)
    pad = jnp.arange(40)[None, :, None] >= 23
    g, beta = jnp.where(pad[..., None], 0.0, g), jnp.where(pad, 0.0, beta)
    _, padded = CHUNKED(q, k, v, g, beta, state, lower_bound=-5.0)
    _, cut = CHUNKED(*(x[:, :23] for x in (q, k, v, g, beta)), state, lower_bound=-5.0)
    assert largest((padded,), (cut,)) < 2e-6


def test_one_step_is_the_equations():
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in inputs(1, bound=-5.0, dtype=jnp.float32))
    decayed = np.exp(g[:, 0])[..., None] * state
    u = beta[:, 0, :, None] * (v[:, 0] - np.einsum("bhkv,bhk->bhv", decayed, k[:, 0]))
    expected = decayed + k[:, 0, :, :, None] * u[..., None, :]
    with jax.enable_x64(True):
        o, after = kda_step(*(jnp.asarray(x[:, 0]) for x in (q, k, v, g, beta)), jnp.asarray(state))
    np.testing.assert_allclose(after, expected, atol=1e-12)
    np.testing.assert_allclose(o, np.einsum("bhkv,bhk->bhv", expected, q[:, 0]), atol=1e-12)


@pytest.mark.parametrize("bound", [-5.0, -1.0, None])
def test_the_gate_is_its_formula_and_keeps_its_bound(bound):
    f = jnp.linspace(-60, 60, 2 * 3 * 2 * 4, dtype=jnp.float32).reshape(2, 3, 2, 4)
    a_log, dt_bias = jnp.asarray([0.0, 1.0]), jnp.linspace(-1, 1, 8, dtype=jnp.float32).reshape(2, 4)
    g = np.asarray(kda_gate(f, a_log, dt_bias, bound), np.float64)
    rate = np.exp(np.asarray(a_log, np.float64))[:, None]
    shifted = np.asarray(f, np.float64) + np.asarray(dt_bias, np.float64)
    expected = -rate * np.logaddexp(0, shifted) if bound is None else bound / (1 + np.exp(-rate * shifted))
    np.testing.assert_allclose(g, expected, rtol=1e-5, atol=1e-30)
    assert g.max() <= 0 and (bound is None or g.min() >= bound)


def test_l2_epsilon_is_on_the_sum():
    x = jnp.full((1, 1, 1, 4), 1e-3, jnp.float32)
    np.testing.assert_allclose(l2_normalize(x), 1e-3 / np.sqrt(4e-6 + 1e-6), rtol=1e-6)


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_inverse_of_a_unit_triangle_with_equal_keys(size):
    """Equal keys and full writes make A all ones, whose powers reach 1e18 at size 64: the inverse stays exact."""
    strict = jnp.tril(jnp.ones((2, size, size), jnp.float32), -1)
    product = np.asarray(unit_lower_inverse(strict)) @ (np.eye(size) + np.asarray(strict))
    np.testing.assert_array_equal(product, np.broadcast_to(np.eye(size), product.shape))
