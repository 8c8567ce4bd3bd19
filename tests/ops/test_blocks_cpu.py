"""The kernels for ggml's block types: numbers bit for bit, products, experts, and bits that are a row's own."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_matrices import drawn
from exhaustive_cases import exhaustively
from expert_cases import by_hand
from native_kernels import installed, needs_compiler

from ling3.formats.gguf_blocks import BLOCKS
from ling3.ops.cpu import products
from ling3.ops.cpu.experts import experts as native_experts
from ling3.ops.cpu.matmul import arrays_of, product
from ling3.ops.matmul import product as plain
from ling3.runtime import native

pytestmark = [needs_compiler, pytest.mark.thorough]
KERNEL = jax.jit(product)
EXPERTS = jax.jit(native_experts)
SOME = exhaustively(BLOCKS, but=["Q4_0", "Q4_1", "Q4_K", "Q6_K"])


@pytest.fixture(scope="module", autouse=True)
def on_the_kernel():
    with installed():
        assert native.missing(products.SOURCE, "BLOCKS") is None
        yield


def test_the_kernels_read_every_type():
    assert set(products.LAYOUTS) == {"channels", *BLOCKS}


def blocks_of(block, columns):
    return columns // BLOCKS[block].columns


@pytest.mark.parametrize("block", BLOCKS)
def test_the_numbers_are_the_plain_forms_bit_for_bit(block):
    """They are the products with the rows of the identity; neither strips nor parts of a row end with the matrix."""
    matrix = drawn(block, 135, blocks_of(block, 2304))
    expected = np.asarray(matrix.decoded())
    np.testing.assert_array_equal(KERNEL(jnp.eye(2304), matrix).T, expected)
    for column in (0, 31, 2303):  # the form for few rows
        one = KERNEL(jnp.zeros((1, 2304)).at[0, column].set(1), matrix)
        np.testing.assert_array_equal(one[0], expected[:, column])


@pytest.mark.parametrize("block", BLOCKS)
def test_extreme_scales(block):
    """Subnormal scales, infinities and NaN: W's numbers wherever nothing else of W's row is infinite or NaN."""
    matrix = drawn(block, 512, blocks_of(block, 256), extreme=True)
    x = np.eye(256, dtype=np.float32)[::37]
    weight = np.asarray(matrix.decoded())
    weight = np.where(np.abs(weight) < 2**-126, 0, weight)  # inside XLA processors take subnormal numbers for zeros
    with np.errstate(invalid="ignore"):
        expected = np.stack([np.sum(np.where(row == 0, weight * 0, weight), axis=1) for row in x])
    for rows in (x, x[:1]):
        seen = np.asarray(KERNEL(jnp.asarray(rows), matrix))
        np.testing.assert_array_equal(np.where(np.abs(seen) < 2**-126, 0, seen), expected[: len(rows)])


@pytest.mark.parametrize("columns", [256, 1536, 2816])
def test_it_is_the_product_summed_in_float32(columns):
    for block, rows in itertools.product(("Q5_0", "Q4_K"), (3, 13)):
        matrix = drawn(block, 53, blocks_of(block, columns))
        weight = np.asarray(matrix.decoded(), np.float64)
        x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, columns)), jnp.float32)
        assert "ling3_product_" in KERNEL.lower(x, matrix).as_text()
        y, wide = np.asarray(KERNEL(x, matrix), np.float64), np.asarray(x, np.float64)
        assert np.all(np.abs(y - wide @ weight.T) <= columns * 2**-24 * (np.abs(wide) @ np.abs(weight.T)))


def test_rows_in_bfloat16_are_widened():
    for columns in (544, 576):
        matrix = drawn("Q8_0", 53, blocks_of("Q8_0", columns))
        x = jax.random.normal(jax.random.key(0), (5, columns)).astype(jnp.bfloat16)
        y = KERNEL(x, matrix)
        assert y.dtype == jnp.float32
        np.testing.assert_array_equal(y, KERNEL(x.astype(jnp.float32), matrix))
        np.testing.assert_allclose(y, plain(x, matrix), atol=1e-5)


@pytest.mark.parametrize("block", SOME)
def test_a_rows_bits_are_its_own(block):
    """They do not depend on its neighbours, nor on how many these are."""
    matrix = drawn(block, 139, blocks_of(block, 2304))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((70, 2304)), jnp.float32)
    whole = np.asarray(KERNEL(x, matrix))
    for rows in (1, 2, 3, 4):
        np.testing.assert_array_equal(KERNEL(x[-rows:], matrix), whole[-rows:])
    y = np.asarray(KERNEL(jnp.full_like(x, jnp.nan).at[3].set(x[0]).at[5].set(0), matrix))
    np.testing.assert_array_equal(y[3], whole[0])
    assert not y[5].any() and np.all(np.isnan(np.delete(y, (3, 5), axis=0)))


@pytest.mark.parametrize("rows", [1, 2, 13])
def test_a_stack_is_one_call_with_the_bits_of_each_matrix(rows):
    """Also beside matrices whose rows are all or in part zeros."""
    for block, outer in (("Q5_0", 139), ("Q4_K", 37)):
        stack = drawn(block, outer, blocks_of(block, 256), 5)
        x = jnp.asarray(np.random.default_rng(rows).standard_normal((5, rows, 256)), jnp.float32)
        x = x.at[1].set(0).at[3, 0].set(0)
        assert KERNEL.lower(x, stack).as_text().count("ling3_product_") == 1
        y = np.asarray(KERNEL(x, stack))
        for i in range(5):
            np.testing.assert_array_equal(y[i], KERNEL(x[i], stack.at(i)))
        assert not y[1].any() and not y[3, 0].any()


def test_its_derivative_is_the_plain_forms():
    matrix, x = drawn("Q4_K", 9, 1), jax.random.normal(jax.random.key(0), (3, 256))
    seen, expected = (jax.grad(lambda x, f=f: jnp.sum(jnp.tanh(f(x, matrix))))(x) for f in (KERNEL, plain))
    np.testing.assert_allclose(seen, expected, atol=1e-5)


def test_the_matrix_is_never_decoded_as_a_whole():
    memory = KERNEL.lower(jnp.ones((4, 1024)), drawn("Q6_K", 512, 4)).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 1024 / 4


@pytest.mark.parametrize("blocks", [("Q4_0", "Q4_0", "Q4_0"), ("Q4_K", "Q5_K", "Q6_K")])
def test_it_is_the_sum_over_chosen_experts(blocks):
    """Stacks may be of several types, as in files that keep more bits for some."""
    draw = np.random.default_rng(1)
    stacks = [
        drawn(block, outer, blocks_of(block, inner), 4, seed=i)
        for i, (block, outer, inner) in enumerate(zip(blocks, (256, 256, 512), (512, 512, 256), strict=True))
    ]
    numbers = [np.asarray(stack.decoded()) for stack in stacks]
    for tokens in (1, 150):
        x = jnp.asarray(draw.standard_normal((tokens, 512)), jnp.float32)
        chosen = jnp.asarray(np.stack([draw.permutation(4)[:2] for _ in range(tokens)]), jnp.int32)
        arguments = (x, chosen, jnp.asarray(draw.random((tokens, 2)), jnp.float32))
        assert "ling3_experts_" in EXPERTS.lower(*arguments, *stacks).as_text()
        expected, terms = (by_hand(*arguments, *numbers, 0.0, absolute=absolute) for absolute in (False, True))
        y = np.asarray(EXPERTS(*arguments, *stacks))
        assert np.all(np.abs(y - expected) <= 3e-6 * terms.max() + 1e-6)
        alone = EXPERTS(x, chosen.at[1:].set(-1), arguments[2], *stacks)
        np.testing.assert_array_equal(alone[0], y[0])


def test_where_it_does_not_suit():
    matrix, x = arrays_of(drawn("Q4_0", 8, 2)), jnp.ones((2, 64))
    assert products.unsuited(x, matrix, 64, 0) is None
    assert products.unsuited(x, matrix._replace(layout="Q2_K"), 64, 0) == "the kernel does not read Q2_K"
    assert products.unsuited(x.astype(jnp.float16), matrix, 64, 0).startswith("x is float16")
    assert "bytes" in products.unsuited(x, matrix, 64, 2**18)
