"""Attention by blocks is plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3.ops.attention import BLOCK, attention, block_attention


def case(dtype, *, rows, start, heads=2, width=8, value=4, blocks=3, seed=0):
    draw = np.random.default_rng(seed)
    positions = blocks * BLOCK
    q = jnp.asarray(draw.normal(size=(2, heads, rows, width)), dtype)
    k = jnp.asarray(draw.normal(size=(2, positions, heads, width)), dtype)
    v = jnp.asarray(draw.normal(size=(2, positions, heads, value)), dtype)
    row_positions = jnp.asarray(start, jnp.int32)[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    length = jnp.asarray(start, jnp.int32) + rows
    return q, k, v, row_positions, length


def by_blocks(q, k, v, row_positions, length, blocks):
    def read(i):
        return tuple(jax.lax.dynamic_slice_in_dim(x, i * BLOCK, BLOCK, axis=1) for x in (k, v))

    return block_attention(q, row_positions, read, length, blocks, v.shape[-1])


def plain(q, k, v, row_positions, length):
    positions = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None]
    return attention(q, k, v, (positions <= row_positions[..., None]) & (positions < length[:, None, None]))


@pytest.mark.parametrize("start", [(0, 0), (1, 300), (255, 256), (500, 0)])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_blocks_are_plain_attention(start, rows):
    with jax.enable_x64(True):
        q, k, v, row_positions, length = case(jnp.float64, rows=rows, start=start)
        used = -(-int(length.max()) // BLOCK)
        expected = plain(q, k, v, row_positions, length)
        for blocks in (used, jnp.asarray(used, jnp.int32), 3):
            np.testing.assert_allclose(by_blocks(q, k, v, row_positions, length, blocks), expected, atol=1e-13)


def test_gradients_agree():
    with jax.enable_x64(True):
        q, k, v, row_positions, length = case(jnp.float64, rows=40, start=(240, 500))

        def scalar(form, *x):
            return jnp.sum(jnp.sin(form(*x)))

        fast = jax.grad(lambda *x: scalar(lambda *y: by_blocks(*y, row_positions, length, 3), *x), argnums=(0, 1, 2))
        slow = jax.grad(lambda *x: scalar(lambda *y: plain(*y, row_positions, length), *x), argnums=(0, 1, 2))
        for a, b in zip(fast(q, k, v), slow(q, k, v), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


def test_a_row_that_sees_nothing_is_zero_and_not_nan():
    q, k, v, row_positions, _ = case(jnp.float32, rows=3, start=(0, 0))
    nothing = jnp.zeros(2, jnp.int32)
    assert not np.any(by_blocks(q, k, v, row_positions, nothing, 3))
    assert not np.any(plain(q, k, v, row_positions, nothing))
