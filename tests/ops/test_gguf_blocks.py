"""Matrices in ggml's block types: blocks made by hand, gguf's decoder as the reference, and their parts."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_matrices import drawn

from ling3.execution import PLAIN
from ling3.formats import GgufBlocks, in_model, weights_per_element
from ling3.formats.gguf_blocks import BLOCKS
from ling3.layers.linear import Linear

pytestmark = pytest.mark.thorough


def halves(*numbers):
    return np.asarray(numbers, np.float16).view(np.uint8)


def matrix_of(block, *parts):
    row = np.concatenate([np.asarray(part, np.uint8).reshape(-1) for part in parts])
    return GgufBlocks(jnp.asarray(row[None]), block)


@pytest.mark.parametrize("block", BLOCKS)
def test_any_bytes_decode_as_in_gguf(block):
    """Bit for bit, but for the bits of NaN."""
    gguf = pytest.importorskip("gguf")
    matrix = drawn(block, 4096 // BLOCKS[block].columns, 8, extreme=True)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(np.asarray(matrix.weight), gguf.GGMLQuantizationType[block])
    found = np.asarray(jax.jit(lambda m: m.decoded())(matrix))
    assert matrix.shape == found.shape == expected.shape
    assert (gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[block]]) == (BLOCKS[block].columns, BLOCKS[block].bytes)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(*(np.nan_to_num(own).view(np.uint32) for own in (found, expected)))


def test_blocks_made_by_hand():
    codes, rest = np.arange(16), np.arange(16)[::-1]
    pairs, both = codes | rest << 4, np.concatenate([codes, rest])
    np.testing.assert_array_equal(matrix_of("Q4_0", halves(0.5), pairs).decoded()[0], 0.5 * (both - 8))
    np.testing.assert_array_equal(matrix_of("Q4_1", halves(2, -3), pairs).decoded()[0], 2 * both - 3)
    fifths = [0, 0, 255, 255]  # those of the second half are set
    fives = both + np.repeat([0, 16], 16)
    np.testing.assert_array_equal(matrix_of("Q5_0", halves(-1), fifths, pairs).decoded()[0], 16 - fives)
    np.testing.assert_array_equal(matrix_of("Q5_1", halves(1, 4), fifths, pairs).decoded()[0], fives + 4)
    signed = np.arange(-16, 16)
    np.testing.assert_array_equal(matrix_of("Q8_0", halves(3), signed % 256).decoded()[0], 3 * signed)
    doubled = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])
    np.testing.assert_array_equal(matrix_of("MXFP4", [128], pairs).decoded()[0], doubled[both])


def test_scales_of_six_bits():
    """Units 4 to 7 of Q4_K have the two upper bits of their scales beside the scales of units 0 to 3."""
    scales, minima = np.array([1, 2, 3, 63, 17, 34, 51, 63]), np.array([0, 5, 6, 7, 16, 33, 50, 62])
    packed = [
        *(scales[:4] | scales[4:] >> 4 << 6),
        *(minima[:4] | minima[4:] >> 4 << 6),
        *(scales[4:] & 15 | (minima[4:] & 15) << 4),
    ]
    found = matrix_of("Q4_K", halves(1, 2), packed, [0x21] * 128).decoded()[0].reshape(8, 32)
    codes = np.array([1, 2] * 4)
    np.testing.assert_array_equal(found, np.repeat((scales * codes - 2 * minima)[:, None], 32, axis=1))


def test_stacks_rows_and_cuts():
    matrix = drawn("Q5_0", 6, 2, 3)
    numbers = np.asarray(matrix.decoded())
    assert matrix.shape == numbers.shape == (3, 6, 64) and matrix.step == 1 and matrix.layout == "Q5_0"
    one = matrix.at(2)
    np.testing.assert_array_equal(one.decoded(), numbers[2])
    np.testing.assert_array_equal(one.rows(jnp.asarray([[5, 0]], jnp.int32)), numbers[2][[[5, 0]]])
    np.testing.assert_array_equal(one.cut(jnp.asarray(1, jnp.int32), 4).decoded(), numbers[2, 1:5])
    assert weights_per_element(one) == [Fraction(64, 44)]


def test_a_narrow_matrix_rounds_rows_and_not_products():
    like = Linear.init(8, 64, key=jax.random.key(0), dtype=jnp.bfloat16, std=1.0)
    matrix = GgufBlocks.init(like, key=jax.random.key(1), std=0.1, block="Q8_0")
    assert matrix.dtype == matrix.dense().dtype == matrix.row(jnp.asarray(1), PLAIN).dtype == jnp.bfloat16
    wide = in_model(matrix, jnp.float32)
    assert wide.dtype == wide.dense().dtype == jnp.float32
    np.testing.assert_allclose(matrix(jnp.eye(64)), matrix.decoded().T, rtol=1e-6)


@pytest.mark.parametrize("block", BLOCKS)
def test_random_matrices_have_about_the_deviation(block):
    like = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    matrix = GgufBlocks.init(Linear(jnp.zeros(like.shape)), key=jax.random.key(0), std=0.02, block=block)
    numbers = np.asarray(matrix.decoded())
    assert matrix.shape == like.shape and 0.013 < numbers.std() < 0.03 and abs(numbers.mean()) < 0.005


def test_columns_that_are_no_blocks():
    with pytest.raises(ValueError, match="found 300 columns; expected a multiple of the block of Q4_K, 256"):
        GgufBlocks.init(Linear(jnp.zeros((2, 300))), key=jax.random.key(0), std=1.0, block="Q4_K")


def test_nothing_is_written_in_these_types():
    with pytest.raises(TypeError, match="does not quantize to Q4_0"):
        drawn("Q4_0", 1, 1).encode(np.zeros((1, 32), np.float32), np.dtype(np.float32))
