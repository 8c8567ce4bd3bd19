"""The kernel for a CPU is attention over pages: values, bits that are a row's own, and nothing read that is not its."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_transformers
from exhaustive_cases import exhaustively
from family_laws import answers_in_company_and_alone, prompts
from native_kernels import installed, needs_compiler

import ling3
from ling3.execution import Execution
from ling3.ops.attention import Expansion, PerHead, paged_attention
from ling3.ops.cpu import attention
from ling3.runtime import native

pytestmark = [needs_compiler, pytest.mark.thorough]
CALL = "ling3_attention_"


@pytest.fixture(scope="module", autouse=True)
def on_the_kernel():
    with installed():
        yield


def case(*, lengths, heads=2, rows=3, width=20, page=16, latent=False, dtype=jnp.float32, ahead=0):
    """Queries of rows whose newest positions lie `ahead` apart, and their pages anywhere in a pool of NaN."""
    draw, batch, columns = np.random.default_rng(0), len(lengths), max(1, -(-max(lengths) // page))
    entry, heads = (width, 1) if latent else (2 * heads * width, heads)
    places = draw.permutation(2 * batch * columns)[: batch * columns].reshape(batch, columns)
    pool = np.full((2 * batch * columns, page, entry), np.nan, np.float32)
    for row, length in enumerate(lengths):
        at = np.arange(length)
        numbers = jnp.asarray(draw.normal(size=(length, entry)), dtype)
        pool[places[row, at // page], at % page] = np.asarray(numbers, np.float32)
    q = jnp.asarray(draw.normal(size=(batch, heads, rows, width)) / width**0.5, dtype)
    behind = ahead * np.arange(rows)[::-1][None]
    positions = jnp.asarray(np.maximum(np.asarray(lengths)[:, None] - 1 - behind, 0), jnp.int32)
    how = None if latent else PerHead(heads, width)
    return (q, positions, jnp.asarray(pool), jnp.asarray(places, jnp.int32), jnp.asarray(lengths, jnp.int32)), how


@functools.cache
def kernel(how, window=None):
    return jax.jit(lambda *x: attention.paged_attention(*x, how, window))


def in_float64(x, how, window=None):
    with jax.enable_x64(True):
        q, positions, pool, table, length = x
        wide = [jnp.asarray(np.asarray(a, np.float64)) for a in (q, pool)]
        return np.asarray(jax.jit(lambda q, p: paged_attention(q, positions, p, table, length, how, window))(*wide))


# Sizes at, below and beside registers, tiles, groups and blocks of queries, blocks of scores, and parts.
@pytest.mark.parametrize("window", [None, 1, 20, 300])
@pytest.mark.parametrize(
    "sizes",
    [
        {"lengths": [1], "rows": 1, "width": 1, "heads": 1},
        {"lengths": [5, 0, 40, 16], "rows": 4, "width": 16},
        {"lengths": [64, 65, 300], "rows": 5, "width": 67, "ahead": 7},
        {"lengths": [2500, 7, 513], "rows": 2, "width": 33, "page": 256},
        {"lengths": [90, 31], "rows": 64, "width": 80, "page": 7, "ahead": 1},
        {"lengths": [400, 3], "rows": 130, "width": 24, "ahead": 2},
        {"lengths": [600, 0, 3], "rows": 16, "width": 72, "latent": True},
    ],
    ids=["least", "even", "odd", "long", "many", "blocks", "latents"],
)
def test_it_is_attention_over_pages(sizes, window):
    x, how = case(**sizes)
    assert CALL in kernel(how, window).lower(*x).as_text()
    o = kernel(how, window)(*x)
    # Means of up to 2,500 numbers near 1, whose weights are rounded and off by a last bit or two.
    np.testing.assert_allclose(o, in_float64(x, how, window), atol=2e-6)
    assert o.dtype == jnp.float32
    np.testing.assert_array_equal(o[np.asarray(x[-1]) == 0], 0)


def test_queries_in_bfloat16_are_computed_in_float32():
    x, how = case(lengths=[40, 300], rows=4, width=64, dtype=jnp.bfloat16)
    np.testing.assert_allclose(kernel(how)(*x), in_float64(x, how), atol=2e-6)


@pytest.mark.parametrize("window", [None, 40])
def test_a_rows_bits_are_its_own(window):
    """Alone, in another place, and with others of any length; whatever the table says of what it does not see."""
    lengths = [700, 0, 33, 2100, 256]
    x, how = case(lengths=lengths, rows=4, width=64)
    q, positions, pool, table, length = x
    together = np.asarray(kernel(how, window)(*x))
    columns = jnp.arange(table.shape[1], dtype=jnp.int32)[None] * pool.shape[1]
    unseen = columns >= length[:, None]
    if window is not None:
        unseen |= columns + pool.shape[1] <= (length - window)[:, None]
    for stale in (jnp.roll(table, 1, axis=0), table + pool.shape[0], -table - 1):
        other = jnp.where(unseen, stale, table)
        np.testing.assert_array_equal(kernel(how, window)(q, positions, pool, other, length), together)
    for row in range(len(lengths)):
        own = [a[row : row + 1] if a is not pool else a for a in x]
        np.testing.assert_array_equal(kernel(how, window)(*own)[0], together[row])
    order = jnp.asarray([3, 0, 4, 2, 1])
    turned = kernel(how, window)(*(a[order] if a is not pool else a for a in x))
    np.testing.assert_array_equal(turned, together[order])


def test_what_is_not_finite_stays_in_its_row():
    x, how = case(lengths=[30, 50, 40], rows=2)
    q, positions, pool, table, length = x
    expected = np.asarray(kernel(how)(*x))
    spoilt = np.array(kernel(how)(q.at[1, 0, 1, 3].set(jnp.nan), *x[1:]))
    assert np.all(np.isnan(spoilt[1, 0, 1]))
    spoilt[1, 0, 1] = expected[1, 0, 1]
    np.testing.assert_array_equal(spoilt, expected)
    spoilt = np.asarray(kernel(how)(q, positions, pool.at[table[2, 0], 0, 0].set(jnp.nan), table, length))
    assert np.all(np.isnan(spoilt[2, 0]))
    np.testing.assert_array_equal(spoilt[:2], expected[:2])


def test_it_maps_over_batches():
    x, how = case(lengths=[30, 50, 40, 7])
    q, positions, pool, table, length = x
    halves = [a.reshape(2, 2, *a.shape[1:]) for a in (q, positions, table, length)]
    mapped = jax.jit(jax.vmap(lambda q, at, table, length: attention.paged_attention(q, at, pool, table, length, how)))(
        *halves
    )
    np.testing.assert_array_equal(mapped.reshape(q.shape), kernel(how)(*x))


class TestWhereItDoesNotSuit:
    def test_latents_that_are_expanded(self):
        (q, *rest), _ = case(lengths=[9], heads=1, rows=2, width=8)
        how = Expansion(jnp.ones((12, 12)), 1, 4)
        assert CALL not in jax.jit(lambda *x: attention.paged_attention(*x, how)).lower(q, *rest).as_text()

    @pytest.mark.parametrize(
        "sizes",
        [{"rows": attention.MOST + 1, "latent": True, "dtype": jnp.bfloat16}, {"dtype": jnp.float16}],
        ids=["many queries of a latent", "another dtype"],
    )
    def test_what_xla_is_faster_with(self, sizes):
        x, how = case(lengths=[9], **sizes)
        assert CALL not in kernel(how).lower(*x).as_text()

    def test_a_cache_of_bfloat16(self):
        (q, at, pool, *rest), how = case(lengths=[9])
        assert CALL not in kernel(how).lower(q, at, pool.astype(jnp.bfloat16), *rest).as_text()

    def test_toys_are_not_worth_a_compiler(self, monkeypatch):
        monkeypatch.setattr(attention, "LEAST", 512)
        x, how = case(lengths=[9])
        assert CALL not in jax.jit(lambda *x: attention.paged_attention(*x, how)).lower(*x).as_text()

    def test_without_a_compiler(self, monkeypatch):
        monkeypatch.setattr(native, "missing", lambda *_: "there is no compiler")
        x, _ = case(lengths=[9], rows=4, latent=True)
        q, *rest = x
        assert CALL not in jax.jit(attention.latent_attention).lower(q[:, 0], *rest).as_text()


MODELS = {"llama": lambda: tiny_transformers.open_model("llama"), "ling3": tiny.open_model}


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustively(MODELS, but=["ling3"]))
def test_a_models_decode_steps_are_the_plain_forms(name):
    """What the engine and `generate` run, through the model's own caches."""
    model = MODELS[name]()
    tokens = np.random.default_rng(0).integers(3, model.config.vocab_size, size=(3, 20))
    _, cache = model.step(jnp.asarray(tokens, jnp.int32), model.init_cache(3, 64))
    token = jnp.full((3, 1), 5, jnp.int32)
    step = jax.jit(lambda cache, execution: model.step(token, cache, execution=execution)[0], static_argnums=1)
    native_form, plain = Execution.default("cpu"), Execution()
    assert CALL in step.lower(cache, native_form).as_text() and CALL not in step.lower(cache, plain).as_text()
    np.testing.assert_allclose(step(cache, native_form), step(cache, plain), atol=2e-5)


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("name", MODELS)
def test_the_engines_promise(name):
    """Alone, and among others, preempted and resumed: the same bits."""
    params = [ling3.SamplingParams(max_tokens=12, temperature=t % 2, seed=t, logprobs=0) for t in range(6)]
    company, alone = answers_in_company_and_alone(MODELS[name](), prompts(20, 3, 28, 9, 16, 25), params)
    assert company == alone
