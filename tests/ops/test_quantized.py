"""Quantized matrices against a restatement in numpy: every code, odd sizes, stacks, and products row by row."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exhaustive_cases import exhaustively, thoroughly
from packed import packed_integers

from ling3.formats import Fp8, Mxfp4
from ling3.formats.matrix import power_of_two
from ling3.ops import matmul
from ling3.ops.cpu.matmul import xla_product

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
SHAPES = {"fp8": (300, 140), "fp8-bfloat16": (130, 260), "fp8-powers": (129, 257)}
SHAPES |= {"int4": (5, 256), "int8": (7, 96), "mxfp4": (6, 64)}
SHAPES |= {"int8-rows": (9, 35), "int4-float16": (3, 64), "int4-float32": (4, 128)}
KINDS = list(SHAPES)


def drawn(kind, *stack, shape=None, seed=0):
    """A matrix of random codes, and its numbers by numpy alone."""
    draw, (outer, inner) = np.random.default_rng(seed), shape or SHAPES[kind]
    if kind.startswith("fp8"):
        codes = draw.integers(0, 256, size=(*stack, outer, inner)).astype(np.uint8)
        codes[codes & 127 == 127] = 1  # NaN
        weight = codes.view(ml_dtypes.float8_e4m3fn)
        blocks = (*stack, -(-outer // 128), -(-inner // 128))
        if kind != "fp8-powers":
            dtype = ml_dtypes.bfloat16 if kind == "fp8-bfloat16" else np.float32
            scale = draw.uniform(1e-4, 1e-2, size=blocks).astype(dtype)
        else:
            scale = draw.integers(100, 140, size=blocks).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
        numbers = np.empty(weight.shape, np.float32)
        for row in range(outer):
            for column in range(inner):
                block = scale[..., row // 128, column // 128].astype(np.float32)
                numbers[..., row, column] = weight[..., row, column].astype(np.float32) * block
        return Fp8(jnp.asarray(weight), jnp.asarray(scale)), numbers
    if kind == "mxfp4":
        packed = draw.integers(0, 256, size=(*stack, outer, inner // 2)).astype(np.uint8)
        scale = draw.integers(90, 150, size=(*stack, outer, inner // 32)).astype(np.uint8)
        numbers = np.empty((*stack, outer, inner), np.float32)
        numbers[..., 0::2], numbers[..., 1::2] = E2M1[packed % 16], E2M1[packed // 16]
        numbers *= np.repeat(np.ldexp(np.float32(1), scale.astype(int) - 127), 32, axis=-1).astype(np.float32)
        return Mxfp4(jnp.asarray(packed), jnp.asarray(scale)), numbers
    bits, per = int(kind[3]), 32 // int(kind[3])
    groups = 1 if kind == "int8-rows" else inner // 32
    dtype = {"float16": np.float16, "float32": np.float32}.get(kind[5:], ml_dtypes.bfloat16)
    q = draw.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), size=(*stack, outer, inner))
    scale = draw.uniform(-1e-4 if dtype == np.float16 else 1e-4, 1e-2, size=(*stack, outer, groups)).astype(dtype)
    words = np.zeros((*stack, outer, -(-inner // per)), np.uint32)
    for column in range(inner):
        code = (q[..., column] + 2 ** (bits - 1)).astype(np.uint32)
        words[..., column // per] |= code << np.uint32(bits * (column % per))
    numbers = (q.astype(np.float32) * np.repeat(scale.astype(np.float32), inner // groups, axis=-1)).astype(dtype)
    padding = words.shape[-1] * per - inner
    return packed_integers(jnp.asarray(words.view(np.int32)), jnp.asarray(scale), bits, padding), numbers


@pytest.mark.parametrize("stack", [(), (3,)], ids=["one", "stack"])
@pytest.mark.parametrize("kind", KINDS)
def test_decoded_numbers_are_bit_for_bit_those_of_numpy(kind, stack):
    matrix, numbers = drawn(kind, *stack)
    assert matrix.shape == numbers.shape and matrix.ndim == numbers.ndim
    dense, decoded = jax.jit(lambda m: (m.dense(), m.decoded()))(matrix)
    assert dense.dtype == matrix.dtype
    np.testing.assert_array_equal(np.asarray(dense, np.float32), numbers.astype(np.float32))
    np.testing.assert_array_equal(decoded, numbers.astype(np.float32))
    if stack:
        one = jax.jit(lambda m, i: m.at(i).decoded())(matrix, 2)
        np.testing.assert_array_equal(one, numbers[2].astype(np.float32))
        return
    index = jnp.asarray([[2, 0], [numbers.shape[0] - 1, 2]], jnp.int32)
    np.testing.assert_array_equal(jax.jit(lambda m, i: m.rows(i))(matrix, index), numbers[index].astype(np.float32))
    start, size = (128, 1) if kind.startswith("fp8") else (1, 2)
    part = jax.jit(lambda m, i: m.cut(i, size).decoded())(matrix, jnp.asarray(start, jnp.int32))
    np.testing.assert_array_equal(part, numbers[start : start + size].astype(np.float32))


def test_every_code_of_every_format():
    every = np.arange(256, dtype=np.uint8)
    fp8 = every.view(ml_dtypes.float8_e4m3fn)
    found = Fp8(jnp.asarray(fp8.reshape(2, 128)), jnp.ones((1, 1), jnp.float32)).decoded()
    np.testing.assert_array_equal(found, fp8.astype(np.float32).reshape(2, 128))
    exponents = np.asarray(power_of_two(jnp.asarray(every)))
    np.testing.assert_array_equal(exponents[:255], np.ldexp(1.0, np.arange(255) - 127).astype(np.float32))
    assert np.isnan(exponents[255])
    nibbles = np.repeat((every % 16 + 16 * (every // 16))[:, None], 16, axis=1)  # each byte 16 times: a group of 32
    mxfp4 = np.asarray(Mxfp4(jnp.asarray(nibbles), jnp.full((256, 1), 128, jnp.uint8)).decoded())
    np.testing.assert_array_equal(mxfp4[:, 0], 2 * E2M1[every % 16])
    np.testing.assert_array_equal(mxfp4[:, 31], 2 * E2M1[every // 16])
    assert np.array_equal(np.signbit(mxfp4[:, 0]), np.signbit(E2M1[every % 16]))
    for bits in (4, 8):
        codes = np.arange(2**bits, dtype=np.uint32).reshape(-1, 32 // bits)
        words = np.bitwise_or.reduce(codes << np.arange(0, 32, bits, dtype=np.uint32), axis=1).view(np.int32)
        integers = packed_integers(jnp.asarray(words[None]), jnp.ones((1, 1), jnp.bfloat16), bits)
        np.testing.assert_array_equal(integers.decoded()[0], np.arange(2**bits) - 2 ** (bits - 1))


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float32, *exhaustively([jnp.bfloat16])], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_those_with_the_decoded_numbers(kind, dtype, monkeypatch):
    matrix, numbers = drawn(kind)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((19, numbers.shape[1])), dtype)
    exact = np.asarray(x, np.float64) @ numbers.astype(np.float64).T
    most = np.abs(np.asarray(x, np.float64)) @ np.abs(numbers.astype(np.float64)).T
    bound = most * numbers.shape[1] * 2**-24 + 1e-30  # of sums in float32, in any order
    y = jax.jit(lambda m, x: matmul.product(x, m))(matrix, x)
    assert y.dtype == jnp.float32
    assert (np.abs(y - exact) <= bound).all()
    monkeypatch.setattr(matmul, "DECODED", 2 * numbers.shape[1])  # two rows of W at a time, or a block of them
    parts = jax.jit(lambda m, x: matmul.product(x, m))(matrix, x)
    assert (np.abs(parts - exact) <= bound).all()


def test_products_of_a_stack():
    matrix, numbers = drawn("int4", 3)
    x = np.random.default_rng(1).standard_normal((3, 2, 256)).astype(np.float32)
    expected = x @ np.swapaxes(numbers, 1, 2).astype(np.float32)
    np.testing.assert_allclose(matmul.product(jnp.asarray(x), matrix), expected, atol=1e-4)


@pytest.mark.thorough
@pytest.mark.parametrize("form", [matmul.product, xla_product], ids=["xla", "cpu"])
@pytest.mark.parametrize("kind", thoroughly(["fp8", "int4", "mxfp4"], but=["int4"]))
def test_a_rows_bits_do_not_depend_on_its_company_or_its_place(kind, form):
    matrix, _ = drawn(kind, shape=(256, 640))
    x = jnp.asarray(np.random.default_rng(2).standard_normal((70, 640)), jnp.float32)
    product = jax.jit(lambda m, x: form(x, m))
    whole = product(matrix, x)
    for rows in (1, 2, 15, 16, 17, 33):
        np.testing.assert_array_equal(product(matrix, x[:rows]), whole[:rows])
        np.testing.assert_array_equal(product(matrix, x[70 - rows :]), whole[70 - rows :])


@pytest.mark.slow
def test_gradients_are_those_of_activations_alone():
    for kind in ("fp8", "int8", "mxfp4"):
        matrix, numbers = drawn(kind)
        x = jnp.asarray(np.random.default_rng(3).standard_normal((3, numbers.shape[1])), jnp.float32)
        found = jax.grad(lambda x, m: jnp.sum(matmul.product(x, m)[:, 1]))(x, matrix)
        np.testing.assert_allclose(found, np.broadcast_to(numbers[1].astype(np.float32), x.shape), rtol=1e-6)
        if kind != "mxfp4":  # whose arrays are integers, which nothing differentiates by
            with pytest.raises(TypeError, match=r"respect to a quantized weight.* dequantize=True to train it"):
                jax.grad(lambda m, x: jnp.sum(matmul.product(x, m)), allow_int=True)(matrix, x)
