"""A matrix with an adapter: y = x Wᵀ + bias + scale · (x Aᵀ) Bᵀ, over any kind of matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3.execution import PLAIN, Execution
from ling3.formats import Fp8, GgufBlocks, Mxfp4, PackedIntegers
from ling3.layers.adapted import AdaptedMatrix
from ling3.layers.linear import Linear

OUT, IN, RANK = 64, 32, 3


def drawn(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def base(dtype=jnp.float32):
    return Linear(weight=drawn(OUT, IN, dtype=dtype), bias=drawn(OUT, seed=1, dtype=dtype), axes=("heads", "hidden"))


def adapted(matrix, scale=0.5, b=1.0):
    return AdaptedMatrix(matrix, drawn(RANK, IN, seed=2), b * drawn(OUT, RANK, seed=3), scale=scale, axes=matrix.axes)


def test_it_is_the_formula():
    matrix, x = adapted(base()), drawn(5, IN, seed=4)
    w, bias, a, b, rows = (
        np.asarray(array, np.float64)
        for array in (matrix.base.weight, matrix.base.bias, matrix.lora_A, matrix.lora_B, x)
    )
    np.testing.assert_allclose(matrix(x), rows @ w.T + bias + 0.5 * (rows @ a.T) @ b.T, atol=1e-4)
    np.testing.assert_allclose(matrix.dense(), w + 0.5 * b @ a, atol=1e-5)
    np.testing.assert_array_equal(matrix.operand, matrix.dense())
    np.testing.assert_allclose(matrix.embed(jnp.asarray([[3, 0]])), (w + 0.5 * b @ a)[[[3, 0]]], atol=1e-5)
    assert (matrix.shape, matrix.dtype, matrix.axes) == ((OUT, IN), jnp.float32, ("heads", "hidden"))


@pytest.mark.parametrize("execution", [PLAIN, Execution.default()])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_b_of_zeros_changes_no_bit(dtype, execution):
    matrix, x = adapted(base(dtype), b=0.0), drawn(5, IN, seed=4, dtype=dtype)
    np.testing.assert_array_equal(matrix(x, execution), matrix.base(x, execution))
    np.testing.assert_array_equal(matrix.dense(), matrix.base.dense())


@pytest.mark.parametrize("kind", [Fp8, Mxfp4, "int4", "int8", "Q4_K"])
def test_over_a_quantized_matrix_it_is_that_of_its_numbers(kind):
    """Both sum the same products; the largest of these numbers is about 30, of which 1e-4 is 50 roundings."""
    like, options = base(), {"key": jax.random.key(5), "std": 1.0}
    if kind in ("int4", "int8"):
        matrix = PackedIntegers.init(like, bits=int(kind[3]), group=32, **options)
    elif kind == "Q4_K":
        like = Linear(weight=drawn(OUT, 256))
        matrix = GgufBlocks.init(like, block=kind, **options)
    else:
        matrix = kind.init(like, **options)
    inner = matrix.shape[1]
    update = (drawn(RANK, inner, seed=2), drawn(OUT, RANK, seed=3))
    dense = Linear(weight=matrix.dense(), bias=matrix.bias)
    x = drawn(5, inner, seed=4)
    found, expected = (AdaptedMatrix(own, *update, scale=0.5) for own in (matrix, dense))
    assert not np.array_equal(found(x), matrix(x))
    np.testing.assert_allclose(found(x), expected(x), atol=1e-4)
    np.testing.assert_array_equal(found.dense(), expected.dense())


def test_it_is_rounded_once_to_the_dtype_of_the_base():
    """Also in bfloat16, where the adapter's products are float32."""
    matrix, x = adapted(base(jnp.bfloat16), scale=0.01), drawn(5, IN, seed=4, dtype=jnp.bfloat16)
    w, a, b = (np.asarray(array, np.float32) for array in (matrix.base.weight, matrix.lora_A, matrix.lora_B))
    np.testing.assert_array_equal(matrix.dense(), (w + np.float32(0.01) * (b @ a)).astype(jnp.bfloat16))
    wide = AdaptedMatrix(base(jnp.bfloat16), matrix.lora_A, matrix.lora_B, scale=0.01)(x, PLAIN, jnp.float32)
    rows = np.asarray(x, np.float64)
    expected = rows @ w.T + np.asarray(matrix.base.bias, np.float64) + 0.01 * (rows @ a.T) @ b.T
    np.testing.assert_allclose(wide, expected, atol=1e-4)
    assert matrix(x).dtype == jnp.bfloat16


def test_in_float64_all_of_it_is():
    with jax.enable_x64(True):
        execution = Execution(accumulation="float64")
        matrix = jax.tree.map(lambda array: array.astype(jnp.float64), adapted(base()))
        x = drawn(5, IN, seed=4).astype(jnp.float64)
        found = matrix(x, execution)
        assert found.dtype == jnp.float64
        weight = np.asarray(matrix.base.weight) + 0.5 * np.asarray(matrix.lora_B) @ np.asarray(matrix.lora_A)
        np.testing.assert_allclose(found, np.asarray(x) @ weight.T + np.asarray(matrix.base.bias), atol=1e-12)


def test_a_row_has_its_bits_in_any_batch():
    matrix, x = adapted(base()), drawn(7, IN, seed=4)
    execution = Execution.default()
    padded = jnp.concatenate([x[:3], jnp.full((4, IN), jnp.nan)])
    np.testing.assert_array_equal(matrix(padded, execution)[:3], matrix(x, execution)[:3])
