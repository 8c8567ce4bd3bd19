"""The kernel for a CPU is the short convolution: values, the tail in place, padding, and calls of any length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_kernels import installed, needs_compiler

from ling3.ops import conv as plain
from ling3.ops.cpu import conv as kernel

pytestmark = [needs_compiler, pytest.mark.thorough]
run = jax.jit(kernel.short_conv, static_argnums=4)
FLOATS = (jnp.float32, jnp.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def on_the_kernel():
    with installed():
        yield


def inputs(batch, seq, channels, taps=4, others=0, dtype=jnp.float32, kept=jnp.float32):
    """x, the weight and the tail of a convolution, behind the tails of others."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.float32)  # noqa: E731
    return (
        draw(batch, seq, channels).astype(dtype),
        draw(channels, taps),
        draw(batch, taps - 1, others + channels + 3).astype(kept),
    )


def lengths(*numbers):
    return jnp.asarray(numbers, jnp.int32)


# Less than a register, registers and a rest, more than a task, and one of several threads.
@pytest.mark.parametrize(("seq", "channels", "taps"), [(1, 3, 4), (5, 67, 2), (40, 600, 4), (70, 1024, 3), (2, 5, 1)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kept", FLOATS)
def test_it_is_the_plain_form(seq, channels, taps, dtype, kept):
    x, weight, tail = inputs(3, seq, channels, taps, others=7, dtype=dtype, kept=kept)
    length = lengths(seq, 0, max(1, seq // 2))
    assert kernel.unsuited(x, tail) is None
    y, after = run(x, weight, tail, length, 7)
    expected, moved = plain.short_conv(x, weight, tail, length, 7)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(after, moved)
    np.testing.assert_array_equal(after[1], tail[1])
    for row, count in enumerate(length):
        # A few roundings of sums of up to four products.
        np.testing.assert_allclose(y[row, :count], expected[row, :count], rtol=0, atol=4e-6)
        assert not np.any(y[row, count:])


def test_silu_of_any_number():
    """To two units in the last place, from -∞ to NaN, and 0 below -87; a convolution of one tap that is 1 shows it."""
    numbers = np.concatenate([np.linspace(-100, 100, 4001), [0.0, -0.0, 1e30, -1e30, np.inf, -np.inf, np.nan]])
    x = jnp.asarray(numbers, jnp.float32)[None, None]
    y, _ = run(x, jnp.ones((x.shape[2], 1)), jnp.zeros((1, 0, x.shape[2])), lengths(1), 0)
    exact = np.asarray(x[0, 0], np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = exact / (1 + np.exp(-exact))
    np.testing.assert_allclose(y[0, 0], exact, rtol=2**-22, atol=88 * np.exp(-87))


def test_bits_do_not_depend_on_the_split_or_on_company():
    x, weight, tail = inputs(3, 50, 600)
    whole, after = run(x, weight, tail, lengths(50, 50, 50), 0)
    first, middle = run(x[:, :33], weight, tail, lengths(33, 33, 33), 0)
    last, end = run(x[:, 33:], weight, middle, lengths(17, 17, 17), 0)
    np.testing.assert_array_equal(whole, jnp.concatenate([first, last], axis=1))
    np.testing.assert_array_equal(after, end)
    alone, own = run(x[1:2], weight, tail[1:2], lengths(50), 0)
    np.testing.assert_array_equal(alone[0], whole[1])
    np.testing.assert_array_equal(own[0], after[1])


def test_the_tail_moves_where_it_lies():
    x, weight, tail = inputs(2, 1, 512, others=512)
    step = jax.jit(kernel.short_conv, static_argnums=4, donate_argnums=2)
    assert "copy(" not in step.lower(x, weight, tail, lengths(1, 1), 0).compile().as_text()


def test_gradients_are_the_plain_forms():
    x, weight, tail = inputs(2, 6, 24, others=2)

    def loss(form):
        def of(x, weight, tail):
            y, after = form(x, weight, tail, lengths(6, 4), 2)
            return jnp.sum(y[0] ** 2) + jnp.sum(y[1, :4] ** 3) + jnp.sum(after**2)

        return jax.jit(jax.grad(of, argnums=(0, 1, 2)))(x, weight, tail)

    for own, expected in zip(loss(kernel.short_conv), loss(plain.short_conv), strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5)


def test_inputs_that_do_not_suit():
    x, _, tail = inputs(1, 2, 600)
    assert "float16" in kernel.unsuited(x.astype(jnp.float16), tail)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "LEAST", 512)
        assert kernel.unsuited(x, tail) is None
        assert "several texts" in kernel.unsuited(x, tail, jnp.zeros((1, 2), jnp.int32))
        assert "less than 512 channels" in kernel.unsuited(x[..., :511], tail)
