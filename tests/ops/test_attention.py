"""Attention by blocks and attention over pages are plain attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import thoroughly

from ling3.ops.attention import BLOCK, GROUP, Expansion, PerHead, attention, block_attention, paged_attention

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


@functools.partial(jax.jit, static_argnames="window")
def in_a_window(q, pages, table, row_positions, length, window):
    return paged_attention(q, row_positions, pages, table, length, PerHead(HEADS, WIDTH), window)


@jax.jit
def plain_in_a_window(q, entries, row_positions, length, window):
    positions = jnp.arange(entries.shape[1], dtype=jnp.int32)[None, None]
    mask = (positions <= row_positions[..., None]) & (positions < length[:, None, None])
    mask &= positions > row_positions[..., None] - window
    return attention(q, *PerHead(HEADS, WIDTH).keys_and_values(entries, q.dtype), mask)


def windowed_case(dtype, *, rows, batch, page, columns=5):
    """Rows at any positions, one of them empty, with the keys and values of every head in pages."""
    start = np.random.default_rng(batch).integers(0, columns * page - rows, size=batch)
    q, _, row_positions, length = case(dtype, rows=rows, start=start)
    entries = np.random.default_rng(2).normal(size=(batch, columns * page, 2 * HEADS * WIDTH))
    length = length.at[batch // 2].set(0)
    return q, jnp.asarray(entries, dtype), row_positions, length


@pytest.mark.parametrize("window", [1, 20, 100])
@pytest.mark.parametrize(
    ("batch", "rows"),
    thoroughly([(2, 7), (GROUP, 1), (2 * GROUP + 1, 1), (GROUP + 1, 7)], but=[(2, 7), (2 * GROUP + 1, 1)]),
)
def test_pages_in_a_window_are_plain_attention(batch, rows, window):
    """Windows within a page, over several and over all; NaN in every page that no query of its row looks back to."""
    page = 16
    with jax.enable_x64(True):
        q, entries, row_positions, length = windowed_case(jnp.float64, rows=rows, batch=batch, page=page)
        pool, table = paged(entries, page)
        behind = jnp.maximum(row_positions[:, :1] - window + 1, 0) // page
        pool = pool.at[jnp.where(jnp.arange(5, dtype=jnp.int32)[None] < behind, table, pool.shape[0])].set(jnp.nan)
        o = in_a_window(q, pool, table, row_positions, length, window)
        np.testing.assert_allclose(o, plain_in_a_window(q, entries, row_positions, length, window), atol=1e-13)
        np.testing.assert_array_equal(o[batch // 2], 0)


@pytest.mark.parametrize(("dtype", "batch"), [(jnp.float32, GROUP), (jnp.float32, 2 * GROUP), (jnp.bfloat16, GROUP)])
def test_freed_columns_change_no_bit(dtype, batch):
    """Whatever the table says of them: another row's pages, a page of NaN or of infinities, or none."""
    page, window = 16, 20
    q, entries, row_positions, length = windowed_case(dtype, rows=1, batch=batch, page=page)
    pool, table = paged(entries, page)
    freed = jnp.arange(5, dtype=jnp.int32)[None] < jnp.maximum(row_positions - window + 1, 0) // page
    assert jnp.sum(freed) > batch // 2
    spoilt = [page for page in range(pool.shape[0]) if page not in np.asarray(table)]
    pool = pool.at[spoilt[0]].set(jnp.inf)
    expected = np.asarray(in_a_window(q, pool, table, row_positions, length, window))
    others = jnp.roll(table, 1, axis=0)
    for stale in (others, jnp.full_like(table, spoilt[0]), jnp.full_like(table, spoilt[1]), table + pool.shape[0]):
        o = in_a_window(q, pool, jnp.where(freed, stale, table), row_positions, length, window)
        np.testing.assert_array_equal(o, expected)


def test_a_row_in_a_window_does_not_depend_on_its_neighbours():
    """Bit for bit, though a shorter row has no page behind its window and a longer one has several."""
    page, batch, window = 16, 2 * GROUP, 20
    q, entries, row_positions, length = windowed_case(jnp.float32, rows=1, batch=batch, page=page)
    pool, table = paged(entries, page)
    together = in_a_window(q, pool, table, row_positions, length, window)
    for row in (0, 3, batch - 1):
        alone = jnp.zeros(batch, jnp.int32).at[row].set(length[row])
        o = in_a_window(q, pool, table, row_positions, alone, window)
        np.testing.assert_array_equal(o[row], together[row])


@pytest.mark.parametrize("start", [(0, 0), (1, 300), (255, 256), (500, 0)])
@pytest.mark.parametrize("rows", [1, 7, 200])
def test_blocks_are_plain_attention(start, rows):
    with jax.enable_x64(True):
        x = case(jnp.float64, rows=rows, start=start)
        np.testing.assert_allclose(by_blocks(*x), plain(*x), atol=1e-13)


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("batch", thoroughly([1, 2, GROUP, GROUP + 1, 3 * GROUP], but=[1, GROUP + 1]))
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
