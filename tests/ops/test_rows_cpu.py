"""The kernels for a CPU take rows out of an array by their indices, whatever it holds, and sum rows times weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_kernels import installed, needs_compiler

from ling3.ops.cpu import rows as kernel

pytestmark = [needs_compiler, pytest.mark.thorough]


@pytest.fixture(scope="module", autouse=True)
def on_the_kernel():
    with installed():
        yield


# Below a task's bytes, and beside two tasks'.
@pytest.mark.parametrize("rest", [(), (3, 5), (70_001,)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool", "uint8"])
def test_it_takes_the_rows_in_use(rest, dtype):
    x = jnp.asarray(np.random.default_rng(0).integers(0, 2**8, size=(9, *rest)), jnp.dtype(dtype))
    rows = jnp.asarray([4, 9, 0, 4, -1, 8, 2**31 - 1], jnp.int32)
    assert kernel.unsuited(x, rows) is None
    taken = jax.jit(kernel.take_rows)(x, rows)
    assert taken.shape == (7, *rest) and taken.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(taken)[[0, 2, 3, 5]], np.asarray(x)[[4, 0, 4, 8]])


def test_few_bytes_and_no_rows_are_left_to_xla(monkeypatch):
    rows = jnp.zeros(4, jnp.int32)
    for empty in (jnp.zeros((0, 5)), jnp.zeros((5, 0))):
        assert "the rows are empty" in kernel.unsuited(empty, rows)
    monkeypatch.setattr(kernel, "LEAST", 4 * 5 * 4 + 1)
    assert "less than 81 bytes" in kernel.unsuited(jnp.zeros((9, 5)), rows)


# Below a task's bytes, and beside several tasks'; the last piece of a row fills no register.
@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(1, 1, 1), (5, 3, 33), (70, 8, 1_000)])
def test_sums_are_rounded_product_by_product(tokens, top_k, hidden):
    draw = np.random.default_rng(0).normal
    weights, rows = (np.float32(draw(size=shape)) for shape in ((tokens, top_k), (tokens * top_k, hidden)))
    found = jax.jit(lambda *args: kernel.weighted(*args) + 1)(jnp.asarray(weights), jnp.asarray(rows))
    parts = weights[..., None] * rows.reshape(tokens, top_k, hidden)
    expected = parts[:, 0]
    for j in range(1, top_k):
        expected = expected + parts[:, j]
    np.testing.assert_array_equal(np.asarray(found), expected + np.float32(1))


def test_other_dtypes_are_summed_by_xla():
    weights, rows = jnp.ones((2, 2), jnp.float32), jnp.ones((4, 3), jnp.bfloat16)
    assert kernel.weighted(weights, rows).tolist() == [[2] * 3] * 2
