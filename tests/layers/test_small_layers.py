"""Linear, embedding, norms, rope, short convolution: each against its formula in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3.cache import Span
from ling3.layers.conv import ShortConv
from ling3.layers.linear import Linear
from ling3.layers.norm import GatedRMSNorm, RMSNorm
from ling3.layers.rope import Rope, angles


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_linear_sums_in_float32(rows, dtype):
    x, weight = jnp.asarray(draw(rows, 256), dtype), jnp.asarray(draw(8, 256, seed=1), dtype)
    expected = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    y = Linear(weight)(x, dtype=jnp.float32)
    np.testing.assert_allclose(y, expected, atol=5e-5)
    assert Linear(weight)(x).dtype == dtype


def test_embedding_reads_rows():
    table = jnp.asarray(draw(7, 3), jnp.float32)
    np.testing.assert_array_equal(Linear(table).embed(jnp.asarray([[6, 0]], jnp.int32))[0], table[jnp.asarray([6, 0])])


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm_has_its_epsilon_on_the_mean(scale):
    x, weight = scale * draw(2, 3, 16), draw(16, seed=1)
    expected = weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    y = RMSNorm(jnp.asarray(weight, jnp.float32), 1e-6)(jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(y, expected, rtol=2e-6, atol=1e-7)


def test_norms_of_bfloat16_are_computed_in_float32():
    x = jnp.asarray(draw(1, 1, 2, 64), jnp.bfloat16)
    weight, gate = jnp.asarray(draw(64, seed=1), jnp.bfloat16), jnp.asarray(draw(1, 1, 2, 64, seed=2), jnp.float32)
    wide = np.asarray(x, np.float64)
    expected = np.asarray(weight, np.float64) * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    assert RMSNorm(weight, 1e-6)(x).dtype == jnp.bfloat16
    gated = GatedRMSNorm(weight, 1e-6)(x, gate)
    assert gated.dtype == jnp.float32
    np.testing.assert_allclose(gated, expected * np.asarray(gate, np.float64), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(GatedRMSNorm(weight, 1e-6)(x, None), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("theta", [10000.0, 6000000.0])
def test_rope_turns_neighbouring_pairs(theta):
    x, positions = draw(2, 5, 3, 8), np.asarray([[0, 1, 2, 3, 4], [100, 101, 102, 103, 104]])
    angle = positions[..., None] * theta ** (-np.arange(0, 8, 2) / 8)
    turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angle)[:, :, None]
    turn = Rope.plain(theta, 8, interleaved=True)
    y = np.asarray(turn(jnp.asarray(x, jnp.float32), jnp.asarray(positions, jnp.int32)))
    np.testing.assert_allclose(y[..., 0::2] + 1j * y[..., 1::2], turned, atol=2e-6)


def test_rope_stays_exact_far_out():
    """At position 131,071 a float32 product of position and frequency would be off by 8e-3 radians."""
    positions = np.asarray([[1, 257, 8191, 131071, 262143]])
    frequencies = Rope.plain(6e6, 64).frequencies
    exact = np.angle(np.exp(1j * positions[..., None] * 6e6 ** (-np.arange(0, 64, 2) / 64)))
    found = np.asarray(angles(jnp.asarray(positions, jnp.int32), frequencies), np.float64)
    difference = np.abs(np.angle(np.exp(1j * (found - exact)))).max(axis=-1)[0]
    assert np.all(difference < [3e-7, 6e-7, 7e-6, 1e-4, 2e-4])


def test_two_thetas_give_two_rotations():
    x, positions = jnp.ones((1, 2, 1, 4), jnp.float32), jnp.asarray([[5, 9]], jnp.int32)
    slow, fast = (Rope.plain(theta, 4, interleaved=True) for theta in (6e6, 1e4))
    first = fast(x, positions)
    assert float(jnp.max(jnp.abs(first - slow(x, positions)))) > 1e-2
    np.testing.assert_array_equal(first, fast(x, positions))


@pytest.mark.parametrize("lengths", [(9, 9), (4, 0), (1, 2)])
def test_short_conv_is_causal_and_keeps_its_last_inputs(lengths):
    x, tail, weight = draw(2, 9, 5), draw(2, 3, 5, seed=1), draw(5, 4, seed=2)
    span = Span(jnp.zeros(2, jnp.int32), jnp.asarray(lengths, jnp.int32))
    y, after = ShortConv(jnp.asarray(weight, jnp.float32))(
        jnp.asarray(x, jnp.float32), jnp.asarray(tail, jnp.float32), span
    )
    inputs = np.concatenate([tail, x], axis=1)
    for row, length in enumerate(lengths):
        for t in range(length):
            pre = (inputs[row, t : t + 4] * weight.T).sum(axis=0)
            np.testing.assert_allclose(y[row, t], pre / (1 + np.exp(-pre)), atol=2e-6)
        np.testing.assert_array_equal(after[row], np.float32(inputs[row, length : length + 3]))


def test_the_first_output_does_not_see_later_inputs():
    conv, span = ShortConv(jnp.ones((1, 4))), Span(jnp.zeros(1, jnp.int32), jnp.full(1, 6, jnp.int32))
    gradient = jax.grad(lambda x: conv(x, jnp.zeros((1, 3, 1)), span)[0][0, 3, 0])(jnp.ones((1, 6, 1)))
    assert np.flatnonzero(np.asarray(gradient[0, :, 0])).tolist() == [0, 1, 2, 3]
