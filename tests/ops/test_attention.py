"""Attention by blocks and attention over pages are plain attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3.ops.attention import BLOCK, GROUP, Expansion, attention, block_attention, paged_attention

HEADS, NOPE, ROPE, VALUE, LATENT = 2, 6, 2, 4, 10
WIDTH = NOPE + ROPE
WEIGHT = np.random.default_rng(1).normal(size=(HEADS, NOPE + VALUE, LATENT)) / LATENT**0.5


def case(dtype, *, rows, start, blocks=3, page=BLOCK, seed=0):
    """Random queries, and entries [latent | rope]."""
    draw, batch = np.random.default_rng(seed), len(start)
    q = jnp.asarray(draw.normal(size=(batch, HEADS, rows, WIDTH)), dtype)
    entries = jnp.asarray(draw.normal(size=(batch, blocks * page, LATENT + ROPE)), dtype)
    row_positions = jnp.asarray(start, jnp.int32)[:, None] + jnp.arange(rows, dtype=jnp.int32)[None]
    return q, entries, row_positions, jnp.asarray(start, jnp.int32) + rows


def expansion(dtype):
    return Expansion(jnp.asarray(WEIGHT.reshape(-1, LATENT), dtype), HEADS, NOPE)


def expand(entries):
    """Keys and values of every head, one einsum each."""
    latent, rope = entries[..., :LATENT], entries[..., LATENT:]
    both = jnp.einsum("bpl,hdl->bhpd", latent, jnp.asarray(WEIGHT, entries.dtype), precision="highest")
    shared = jnp.broadcast_to(rope[:, None], (*both.shape[:3], ROPE))
    return jnp.concatenate([both[..., :NOPE], shared], axis=-1), both[..., NOPE:]


@jax.jit
def plain(q, entries, row_positions, length):
    positions = jnp.arange(entries.shape[1], dtype=jnp.int32)[None, None]
    mask = (positions <= row_positions[..., None]) & (positions < length[:, None, None])
    return attention(q, *expand(entries), mask)


@jax.jit
def by_blocks(q, entries, row_positions, length):
    return block_attention(q, row_positions, entries, length, expansion(q.dtype))


@jax.jit
def by_pages(q, pages, table, row_positions, length):
    return paged_attention(q, row_positions, pages, table, length, expansion(q.dtype))


def paged(entries, page, seed=0):
    """The same entries in pages that lie anywhere in a larger pool whose other pages are NaN."""
    batch, positions, width = entries.shape
    columns = positions // page
    places = np.random.default_rng(seed).permutation(2 * batch * columns)[: batch * columns]
    pool = np.full((2 * batch * columns, page, width), np.nan, entries.dtype)
    pool[places] = np.asarray(entries).reshape(batch * columns, page, width)
    return jnp.asarray(pool), jnp.asarray(places.reshape(batch, columns), jnp.int32)


@pytest.mark.parametrize("start", [(0, 0), (1, 300), (255, 256), (500, 0)])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_blocks_are_plain_attention(start, rows):
    with jax.enable_x64(True):
        x = case(jnp.float64, rows=rows, start=start)
        np.testing.assert_allclose(by_blocks(*x), plain(*x), atol=1e-13)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("batch", [1, 2, GROUP, GROUP + 1, 3 * GROUP])
def test_pages_are_plain_attention(batch, rows):
    """Any number of rows of unequal lengths, some of them empty; pages anywhere, NaN in all that is not in use."""
    page = 16
    start = np.random.default_rng(batch).integers(0, 5 * page - rows, size=batch)
    with jax.enable_x64(True):
        q, entries, row_positions, length = case(jnp.float64, rows=rows, start=start, blocks=5, page=page)
        length = length.at[batch // 2].set(0)
        pool, table = paged(entries, page)
        unused = jnp.arange(5, dtype=jnp.int32)[None] >= -(-length // page)[:, None]
        table = jnp.where(unused, pool.shape[0], table)
        o = by_pages(q, pool, table, row_positions, length)
        np.testing.assert_allclose(o, plain(q, entries, row_positions, length), atol=1e-13)
        np.testing.assert_array_equal(o[batch // 2], 0)


def test_a_row_does_not_depend_on_its_neighbours():
    """Bit for bit, wherever it stands and however long the others are."""
    page, batch = 16, 2 * GROUP
    q, entries, row_positions, _ = case(jnp.float32, rows=1, start=[37] * batch, blocks=5, page=page)
    pool, table = paged(entries, page)
    alone = np.asarray(by_pages(q, pool, table, row_positions, jnp.zeros(batch, jnp.int32).at[3].set(38))[3])
    draw = np.random.default_rng(0)
    for _ in range(5):
        lengths = jnp.asarray(draw.integers(0, 80, size=batch), jnp.int32).at[3].set(38)
        order = draw.permutation(batch)
        shuffled = by_pages(*(x[order] if x is not pool else x for x in (q, pool, table, row_positions, lengths)))
        np.testing.assert_array_equal(shuffled[int(np.flatnonzero(order == 3)[0])], alone)


def test_gradients_agree():
    with jax.enable_x64(True):
        q, entries, row_positions, length = case(jnp.float64, rows=40, start=(240, 500))
        gradients = [
            jax.grad(lambda *x, form=form: jnp.sum(jnp.sin(form(*x, row_positions, length))), argnums=(0, 1))(
                q, entries
            )
            for form in (by_blocks, plain)
        ]
        for a, b in zip(*gradients, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-12)


def test_a_row_that_sees_nothing_is_zero_and_not_nan():
    q, entries, row_positions, _ = case(jnp.float32, rows=3, start=(0, 0))
    nothing = jnp.zeros(2, jnp.int32)
    for form in (by_blocks, plain):
        np.testing.assert_array_equal(form(q, entries, row_positions, nothing), 0)
