"""A product with a weight is x Wᵀ in every form, with sums in float32, and no copy of the weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3.ops.cpu.matmul import FEW_ROWS, xla_product
from ling3.ops.matmul import product

TIMES = jax.jit(xla_product)
ROWS = (1, 2, 5, FEW_ROWS, FEW_ROWS + 1)


def case(rows, stack=(), inner=48, outer=40, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal((*stack, rows, inner)), rng.standard_normal((*stack, outer, inner))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


@pytest.mark.parametrize("stack", [(), (3,)], ids=["one", "stack"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", ROWS)
def test_it_is_the_product_summed_in_float32(rows, dtype, stack):
    x, weight = case(rows, stack, dtype=dtype)
    y = TIMES(x, weight)
    wide = [np.asarray(a, np.float64) for a in (x, weight)]
    expected = wide[0] @ np.swapaxes(wide[1], -1, -2)
    # 48 products and sums, each rounded by at most 2^-24 of the sum of magnitudes.
    bound = 48 * 2**-24 * (np.abs(wide[0]) @ np.swapaxes(np.abs(wide[1]), -1, -2))
    assert y.dtype == jnp.float32
    assert np.all(np.abs(np.asarray(y) - expected) <= bound)


@pytest.mark.parametrize("rows", ROWS)
def test_every_form_gives_the_same_numbers(rows):
    x, weight = case(rows)
    np.testing.assert_allclose(TIMES(x, weight), product(x, weight), atol=1e-5)


@pytest.mark.parametrize("rows", ROWS)
def test_its_gradients_are_the_products(rows):
    x, weight = case(rows)
    towards = jnp.asarray(np.random.default_rng(1).standard_normal((rows, 40)), jnp.float32)
    dx, dweight = jax.jit(jax.grad(lambda x, w: jnp.sum(TIMES(x, w) * towards), argnums=(0, 1)))(x, weight)
    # Sums of at most 48 terms of magnitude 10.
    np.testing.assert_allclose(dx, np.asarray(towards) @ np.asarray(weight), atol=1e-4)
    np.testing.assert_allclose(dweight, np.asarray(towards).T @ np.asarray(x), atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", ROWS[1:])
def test_a_row_knows_nothing_of_its_neighbours(rows, dtype):
    x, weight = case(rows, inner=1536, outer=512, dtype=dtype)
    alone = jnp.full_like(x, jnp.nan).at[rows // 2].set(x[0])
    np.testing.assert_array_equal(TIMES(alone, weight)[rows // 2], TIMES(x, weight)[0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 8])
def test_the_weight_is_neither_copied_nor_converted(rows, dtype):
    x, weight = case(rows, inner=512, outer=512, dtype=dtype)
    memory = TIMES.lower(x, weight).compile().memory_analysis()
    assert memory.temp_size_in_bytes < weight.nbytes / 4
