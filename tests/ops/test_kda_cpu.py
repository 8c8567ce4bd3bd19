"""The kernel for a CPU is the recurrence: values, derivatives, states in place, rows that cost nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_kernels import installed, needs_compiler

from ling3.ops.cpu import kda
from ling3.ops.kda import kda_step, recurrent_kda
from ling3.ops.kda_chunks import chunk_kda

pytestmark = [needs_compiler, pytest.mark.thorough]
KERNEL = jax.jit(kda.kda_step)
RUN = jax.jit(lambda *tokens: kda.chunk_kda(*tokens, lower_bound=-5.0))
CALL = "ling3_kda_run_"


@pytest.fixture(scope="module", autouse=True)
def on_the_kernel():
    with installed():
        yield


def tokens(batch, seq, heads, key, value, dtype=np.float32):
    """q, k, v, g, beta and a state."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((batch, seq, heads, key)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, g = rng.standard_normal((batch, seq, heads, value)), -5 * rng.random((batch, seq, heads, key))
    beta, state = rng.random((batch, seq, heads)), rng.standard_normal((batch, heads, key, value))
    return [jnp.asarray(x, dtype) for x in (q, k, v, g, beta, state)]


def token(batch, heads, key, value, dtype=np.float32):
    """One."""
    *inputs, state = tokens(batch, 1, heads, key, value, dtype)
    return [*(x[:, 0] for x in inputs), state]


def cut(inputs, *places):
    """The tokens of `inputs` in parts."""
    *inputs, _ = inputs
    return zip(*(jnp.split(x, places, axis=1) for x in inputs))


def off(found, plain, exact):
    """Asserts that errors are those of the plain form: both round each number about as often, and luck differs."""
    for own, other, expected in zip(found, plain, exact, strict=True):
        assert own.dtype == jnp.float32
        error, usual = (np.abs(np.asarray(x, np.float64) - np.asarray(expected)).max() for x in (own, other))
        assert error <= max(2 * usual, 2**-22)


# Sizes at, below and beside the kernel's registers.
@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (2, 3, 5, 33), (3, 2, 128, 128), (2, 1, 16, 67)])
def test_it_is_the_step(sizes):
    inputs = token(*sizes)
    assert CALL in KERNEL.lower(*inputs).as_text()
    with jax.enable_x64(True):
        exact = kda_step(*token(*sizes, np.float64))
    off(KERNEL(*inputs), kda_step(*inputs), exact)


@pytest.mark.parametrize("sizes", [(1, 2, 1, 1, 1), (2, 31, 3, 5, 33), (1, 100, 2, 128, 128), (2, 65, 1, 16, 67)])
def test_it_is_the_recurrence(sizes):
    inputs = tokens(*sizes)
    assert CALL in RUN.lower(*inputs).as_text()
    with jax.enable_x64(True):
        exact = recurrent_kda(*tokens(*sizes, np.float64))
    off(RUN(*inputs), recurrent_kda(*inputs), exact)


def test_bits_do_not_depend_on_how_tokens_are_cut():
    """Into chunks of a prompt, and into decode steps."""
    inputs = tokens(2, 75, 2, 24, 40)
    whole, after = RUN(*inputs)
    for places in ((32, 64), (1, 50), tuple(range(1, 75))):
        state, parts = inputs[-1], []
        for part in cut(inputs, *places):
            o, state = RUN(*part, state)
            parts.append(o)
        np.testing.assert_array_equal(jnp.concatenate(parts, axis=1), whole)
        np.testing.assert_array_equal(state, after)


def test_padding_changes_nothing():
    """Wherever it stands: tokens of 0 between others, and at the end."""
    inputs = tokens(1, 40, 2, 16, 24)
    q, k, v, g, beta, state = inputs
    for idle in (slice(33, 40), slice(0, 3), slice(10, 36)):
        q0, g0, beta0 = (x.at[:, idle].set(0) for x in (q, g, beta))
        o, after = RUN(q0, k, v, g0, beta0, state)
        assert not np.asarray(o[:, idle]).any()
        kept = np.setdiff1d(np.arange(40), np.arange(40)[idle])
        expected, state_after = RUN(*(x[:, kept] for x in (q, k, v, g, beta)), state)
        np.testing.assert_array_equal(o[:, kept], expected)
        np.testing.assert_array_equal(after, state_after)


def test_a_rows_bits_are_its_own():
    inputs = token(9, 2, 24, 40)
    whole = KERNEL(*inputs)
    for rows in ([0], [8, 3], [5, 5, 1]):
        for found, expected in zip(KERNEL(*(x[jnp.asarray(rows)] for x in inputs)), whole, strict=True):
            np.testing.assert_array_equal(found, expected[jnp.asarray(rows)])


def test_a_row_without_a_token_changes_nothing():
    """Not even where its state is NaN: nothing of it is read."""
    q, k, v, g, beta, state = token(3, 2, 16, 16)
    q, g, beta = (x.at[1].set(0) for x in (q, g, beta))
    o, after = KERNEL(q, k, v, g, beta, state.at[1].set(jnp.nan))
    assert not np.asarray(o[1]).any() and np.isnan(np.asarray(after[1])).all()
    others = jnp.asarray([0, 2])
    for found, expected in zip((o, after), KERNEL(q, k, v, g, beta, state), strict=True):
        np.testing.assert_array_equal(found[others], expected[others])


def test_a_head_that_only_reads_keeps_its_state():
    q, k, v, g, beta, state = token(2, 2, 16, 24)
    o, after = KERNEL(q, k, v, 0 * g, 0 * beta, state)
    np.testing.assert_array_equal(after, state)
    np.testing.assert_allclose(o, jnp.einsum("bhkv,bhk->bhv", state, q), atol=1e-5)


def test_the_state_is_updated_in_place():
    """In a loop too, as in a decode call."""
    q, k, v, g, beta, state = token(4, 4, 64, 64)

    def several(state):
        return jax.lax.fori_loop(0, 3, lambda _, s: kda.kda_step(q, k, v, g, beta, s)[1], state)

    compiled = jax.jit(several, donate_argnums=0).lower(state).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < state.nbytes / 2
    expected = state
    for _ in range(3):
        expected = kda_step(q, k, v, g, beta, expected)[1]
    np.testing.assert_allclose(compiled(state), expected, atol=1e-5)


@pytest.mark.slow
def test_its_derivatives_are_those_of_the_plain_forms():
    inputs = token(2, 2, 8, 8)

    def loss(step):
        return lambda *inputs: sum(jnp.sum(jnp.tanh(x)) for x in step(*inputs))

    found, expected = (jax.grad(loss(step), argnums=tuple(range(6)))(*inputs) for step in (KERNEL, kda_step))
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)
    inputs = tokens(2, 20, 2, 8, 8)
    chunks = functools.partial(chunk_kda, lower_bound=-5.0)
    found, expected = (jax.grad(loss(run), argnums=tuple(range(6)))(*inputs) for run in (RUN, chunks))
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


def test_a_decay_of_minus_infinity_resets_the_state():
    q, k, v, g, beta, state = tokens(2, 40, 2, 8, 8)
    inputs = q, k, v, g.at[:, jnp.asarray([0, 7, 8, 16, 30])].set(-jnp.inf), beta, state
    forms = jax.jit(functools.partial(kda.chunk_kda, lower_bound=-5.0, resets=True)), recurrent_kda
    for own, expected in zip(*(form(*inputs) for form in forms), strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)

    def loss(form):
        return lambda *inputs: sum(jnp.sum(jnp.tanh(x)) for x in form(*inputs))

    for own, expected in zip(*(jax.grad(loss(form), argnums=tuple(range(6)))(*inputs) for form in forms), strict=True):
        np.testing.assert_allclose(own, expected, atol=1e-5)


def test_where_it_does_not_suit(monkeypatch):
    inputs = token(1, 1, 8, 8)
    monkeypatch.setattr(kda, "LEAST", 2**18)
    jax.clear_caches()
    assert CALL not in KERNEL.lower(*inputs).as_text()
    with jax.enable_x64(True):
        wide = token(1, 1, 8, 8, np.float64)
        assert CALL not in jax.jit(kda.kda_step).lower(*wide).as_text()
