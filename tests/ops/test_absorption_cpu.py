"""The kernels for a CPU are each head's product with its part of `kv_b_proj`, and a row's bits are its own."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_matrices import drawn
from native_kernels import installed, needs_compiler

from ling3.execution import CPU, PLAIN
from ling3.ops.absorption import LatentHalves
from ling3.ops.cpu import attention

pytestmark = [needs_compiler, pytest.mark.thorough]
HANDLERS = ("absorb_keys", "expand_values")
# Heads, nope, value and latent: at, below and beside registers, blocks of rows and tiles.
SIZES = [(1, 1, 1, 1), (2, 8, 6, 16), (3, 7, 5, 37), (2, 24, 48, 128), (1, 17, 3, 530)]


@pytest.fixture(scope="module", autouse=True)
def on_the_kernel():
    with installed():
        yield


def case(handler, batch, heads, nope, value, latent, dtype=jnp.float32):
    draw = np.random.default_rng(0)
    inner = nope if handler == "absorb_keys" else latent
    x = jnp.asarray(draw.normal(size=(batch, heads, inner)) / inner**0.5, dtype)
    return x, jnp.asarray(draw.normal(size=(heads * (nope + value), latent)), dtype)


def product(handler, value, execution=CPU):
    if handler == "absorb_keys":
        return functools.partial(execution.latent_queries)
    return functools.partial(execution.latent_values, value=value)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_each_heads_product(sizes, handler, dtype):
    x, weight = case(handler, 7, *sizes, dtype)
    call = jax.jit(product(handler, sizes[2]))
    assert f"ling3_{handler}" in call.lower(x, weight).as_text()
    with jax.enable_x64(True):
        wide = (jnp.asarray(np.asarray(a, np.float64)) for a in (x, weight))
        exact = np.asarray(product(handler, sizes[2], PLAIN)(*wide))
    # Sums of up to 530 products of numbers near 1 and 1/sqrt(inner), in float32.
    np.testing.assert_allclose(call(x, weight), exact, atol=2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_rows_bits_are_its_own(sizes, handler, dtype):
    """Whatever the number of rows, and beside rows of zeros and of NaN."""
    x, weight = case(handler, 7, *sizes, dtype)
    call = jax.jit(product(handler, sizes[2]))
    whole = np.asarray(call(x, weight))
    for rows in (1, 2, 3, 4):
        np.testing.assert_array_equal(call(x[:rows], weight), whole[:rows])
    beside = np.asarray(call(x.at[1:3].set(0).at[4].set(jnp.nan), weight))
    assert not np.any(beside[1:3]) and np.all(np.isnan(beside[4]))
    for row in (0, 3, 5, 6):
        np.testing.assert_array_equal(beside[row], whole[row])


@pytest.mark.parametrize("handler", HANDLERS)
def test_its_gradient_is_the_plain_forms(handler):
    x, weight = case(handler, 3, *SIZES[2])

    def gradients(execution):
        own = product(handler, SIZES[2][2], execution)
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(own(x, w))), argnums=(0, 1))(x, weight)

    for mine, plain in zip(gradients(CPU), gradients(PLAIN), strict=True):
        np.testing.assert_allclose(mine, plain, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("handler", HANDLERS)
@pytest.mark.parametrize("execution", [CPU, PLAIN], ids=["cpu", "plain"])
def test_halves_in_blocks_are_the_joined_matrix(execution, handler):
    """Each in its block type, stored apart; the rows of a batch have the same bits alone."""
    heads, nope, value, latent = 3, 64, 48, 256
    halves = LatentHalves(drawn("Q5_0", latent, nope // 32, heads), drawn("Q4_K", value, 1, heads, seed=1))
    rows = jnp.concatenate([jnp.swapaxes(halves.keys.decoded(), 1, 2), halves.values.decoded()], axis=1)
    x, _ = case(handler, 7, heads, nope, value, latent)
    call = jax.jit(product(handler, value, execution))
    found = call(x, halves)
    expected = product(handler, value, PLAIN)(x, rows.reshape(-1, latent))
    # Sums of up to 256 products of numbers near 0.02 and 1/sqrt(inner), in float32.
    np.testing.assert_allclose(found, expected, atol=1e-6)
    if execution is CPU:
        assert call.lower(x, halves).as_text().count("ling3_product_") == 1
        for count in (1, 2, 4):
            np.testing.assert_array_equal(call(x[:count], halves), found[:count])


class TestWhereItDoesNotSuit:
    @pytest.mark.parametrize("dtype", ["float64", "float16"])
    @pytest.mark.parametrize("handler", HANDLERS)
    def test_other_dtypes(self, handler, dtype):
        with jax.enable_x64(True):
            x, weight = case(handler, 3, *SIZES[1], dtype=dtype)
            assert handler not in jax.jit(product(handler, SIZES[1][2])).lower(x, weight).as_text()

    @pytest.mark.parametrize("handler", HANDLERS)
    def test_toys_are_not_worth_a_compiler(self, handler, monkeypatch):
        monkeypatch.setattr(attention, "LEAST", 256)
        x, weight = case(handler, 3, *SIZES[1])
        assert handler not in jax.jit(product(handler, SIZES[1][2])).lower(x, weight).as_text()
