"""The kernel for a CPU is the product: values, derivatives, and bits that are a row's own for every number of rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_kernels import installed, needs_compiler

from ling3.execution import XLA_CPU
from ling3.ops.cpu import products
from ling3.ops.cpu.matmul import product
from ling3.ops.matmul import product as plain
from ling3.runtime import native

pytestmark = [needs_compiler, pytest.mark.thorough]
KERNEL = jax.jit(product)
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
CALL = "ling3_product_"


@pytest.fixture(scope="module", autouse=True)
def on_the_kernel():
    with installed():
        yield


def case(rows, inner, outer, dtype):
    rng = np.random.default_rng(0)
    return (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((rows, inner), (outer, inner)))


# Sizes at, below and beside the kernel's registers, tiles, chunks, tasks and blocks.
@DTYPES
@pytest.mark.parametrize(
    ("rows", "inner", "outer"),
    [(1, 1, 1), (1, 2100, 167), (2, 33, 5), (5, 16, 6), (6, 512, 80), (11, 1041, 81), (64, 100, 7), (25, 600, 33)],
)
def test_it_is_the_product_summed_in_float32(rows, inner, outer, dtype):
    x, weight = case(rows, inner, outer, dtype)
    assert CALL in KERNEL.lower(x, weight).as_text()
    y = KERNEL(x, weight)
    wide = [np.asarray(a, np.float64) for a in (x, weight)]
    bound = inner * 2**-24 * (np.abs(wide[0]) @ np.abs(wide[1].T))
    assert y.dtype == jnp.float32
    assert np.all(np.abs(np.asarray(y, np.float64) - wide[0] @ wide[1].T) <= bound)


@DTYPES
def test_a_rows_bits_are_its_own(dtype):
    """Whoever its neighbours are, and however many."""
    x, weight = case(701, 1541, 93, dtype)  # two blocks of rows
    whole = KERNEL(x, weight)
    for rows in (1, 2, 4, 5, 6, 16, 33, 512):
        np.testing.assert_array_equal(KERNEL(x[-rows:], weight), whole[-rows:])
    among = jnp.full_like(x, jnp.nan).at[3].set(x[0])
    y = np.asarray(KERNEL(among, weight))
    np.testing.assert_array_equal(y[3], whole[0])
    assert np.all(np.isnan(np.delete(y, 3, axis=0)))


@DTYPES
def test_rows_of_zeros_change_no_other_row(dtype):
    """They have zeros; ±0 is zero, and NaN is not."""
    x, weight = case(40, 300, 70, dtype)
    empty = jnp.arange(40) % 3 != 0
    y = KERNEL(jnp.where(empty[:, None], jnp.asarray(-0.0, dtype), x), weight)
    assert not np.asarray(y[empty]).any()
    np.testing.assert_array_equal(y[~empty], KERNEL(x, weight)[~empty])
    assert np.isnan(KERNEL(jnp.zeros_like(x).at[5, -1].set(jnp.nan), weight)[5]).all()
    assert not np.asarray(KERNEL(jnp.zeros_like(x), weight)).any()


@pytest.mark.parametrize("outer", [16_384, 20_001])
def test_many_zeros_are_written_past_the_caches(outer):
    """A megabyte of them, from any place in a line of the cache on, and the row among them is what it is alone."""
    draw = np.random.default_rng(0)
    weight, row = (jnp.asarray(draw.normal(size=(rows, 12)), jnp.float32) for rows in (outer, 1))
    y = np.asarray(KERNEL(jnp.zeros((20, 12), jnp.float32).at[7].set(row[0]), weight))
    np.testing.assert_array_equal(y[7], np.asarray(KERNEL(row, weight))[0])
    assert not np.delete(y, 7, axis=0).any()


@DTYPES
def test_its_derivatives_are_the_plain_products(dtype):
    x, weight = case(3, 40, 9, dtype)
    dx, dweight = case(3, 40, 9, dtype)
    for wrt in ((0, 1), (0,), (1,)):
        seen, expected = (
            jax.jit(jax.grad(lambda x, w, f=f: jnp.sum(jnp.tanh(f(x, w))), argnums=wrt))(x, weight)
            for f in (KERNEL, plain)
        )
        assert [a.dtype for a in seen] == [x.dtype] * len(wrt)
        for own, other in zip(seen, expected, strict=True):
            # In bfloat16 the result is rounded by 2^-9 of itself, and the cotangents before it.
            scale = 1e-5 if dtype == jnp.float32 else 0.1
            np.testing.assert_allclose(own.astype(jnp.float32), other.astype(jnp.float32), atol=scale)
    forward = [jax.jvp(f, (x, weight), (dx, dweight))[1] for f in (KERNEL, plain)]
    np.testing.assert_allclose(*forward, atol=1e-4 if dtype == jnp.float32 else 0.1)


def test_it_maps_over_batches():
    x, weight = case(6, 40, 9, jnp.float32)
    mapped = jax.jit(jax.vmap(lambda x: KERNEL(x, weight)))(x.reshape(2, 3, 40))
    np.testing.assert_array_equal(mapped.reshape(6, 9), KERNEL(x, weight))


@DTYPES
def test_the_weight_is_neither_copied_nor_converted(dtype):
    x, weight = case(8, 512, 512, dtype)
    memory = KERNEL.lower(x, weight).compile().memory_analysis()
    assert memory.temp_size_in_bytes < weight.nbytes / 4


class TestWhereItDoesNotSuit:
    def test_a_stack(self):
        assert CALL not in KERNEL.lower(jnp.ones((3, 2, 8)), jnp.ones((3, 4, 8))).as_text()

    @pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
    def test_other_dtypes(self, dtype):
        assert CALL not in KERNEL.lower(jnp.ones((2, 8), dtype), jnp.ones((4, 8), jnp.float16)).as_text()

    def test_small_weights_are_not_worth_a_call(self, monkeypatch):
        monkeypatch.setitem(products.LEAST, "dense", 2**21)
        jax.clear_caches()
        assert CALL not in KERNEL.lower(*case(2, 64, 64, jnp.float32)).as_text()

    def test_sums_in_float64(self):
        program = jax.jit(functools.partial(product, sums="float64"))
        with jax.enable_x64(True):
            assert CALL not in program.lower(*case(2, 64, 64, jnp.float32)).as_text()

    def test_the_forms_without_kernels(self):
        for form in (plain, XLA_CPU.times):
            assert CALL not in jax.jit(form).lower(*case(2, 64, 64, jnp.float32)).as_text()

    def test_without_a_compiler(self, monkeypatch):
        monkeypatch.setattr(native, "missing", lambda *_: "there is no compiler")
        jax.clear_caches()
        assert CALL not in KERNEL.lower(*case(2, 64, 64, jnp.float32)).as_text()
