"""The kernels for matrices in 8 and 4 bits: numbers bit for bit, products, experts, and bits that are a row's own."""

import dataclasses
import functools
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exhaustive_cases import exhaustively
from expert_cases import by_hand
from native_kernels import installed, needs_compiler
from packed import packed_integers

from ling3.formats import Fp8, Fp8Channels, Int8Channels, Mxfp4
from ling3.ops.cpu import products
from ling3.ops.cpu.experts import experts as native_experts
from ling3.ops.cpu.matmul import arrays_of, product
from ling3.ops.matmul import product as plain
from ling3.ops.swiglu import SwiGLU
from ling3.runtime import native

pytestmark = [needs_compiler, pytest.mark.thorough]
KERNEL = jax.jit(product)
PLAIN = jax.jit(plain)
EXPERTS = jax.jit(native_experts, static_argnums=6)
CALL = "ling3_product_"
SCALES = {"bfloat16": jnp.bfloat16, "float16": jnp.float16, "float32": jnp.float32}
FORMATS = [
    *(f"int{bits}-{group}-{dtype}" for bits in (4, 8) for group in (32, 128) for dtype in SCALES),
    *("int8-row-bfloat16", "int4-row-float32", "fp8-float32", "fp8-bfloat16", "fp8-powers", "mxfp4"),
    *(f"zero{bits}-{group}-{dtype}" for bits in (4, 8) for group in (64, "row") for dtype in SCALES),
    *(f"{kind}-channels-{dtype}" for kind in ("int8", "fp8") for dtype in SCALES),
]
SOME = exhaustively(
    FORMATS,
    but=[
        *("int4-32-bfloat16", "int8-128-float16", "fp8-float32", "mxfp4", "zero4-64-float16", "zero8-row-float32"),
        *("int8-channels-bfloat16", "fp8-channels-bfloat16"),
    ],
)


@pytest.fixture(scope="module", autouse=True)
def on_the_kernel():
    with installed():
        yield


def drawn(kind, outer, inner, *stack, seed=0, size=0.02):
    """A matrix of random codes, NaN not among them, whose scales are about `size`."""
    draw = np.random.default_rng(seed)

    def about(*shape):
        return draw.uniform(0.5, 2, shape) * size * draw.choice([-1, 1], shape)

    if "channels" in kind:
        codes = draw.integers(0, 256, (*stack, outer, inner), np.uint8)
        scale = jnp.asarray(about(*stack, outer, 1), SCALES[kind.rpartition("-")[2]])
        if kind.startswith("int8"):
            return Int8Channels(jnp.asarray(codes.view(np.int8)), scale)
        codes[codes & 127 == 127] = 3
        return Fp8Channels(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), scale)
    if kind.startswith("fp8"):
        codes = draw.integers(0, 256, (*stack, outer, inner), np.uint8)
        weight = jnp.asarray(np.where(codes & 127 == 127, 3, codes).astype(np.uint8).view(ml_dtypes.float8_e4m3fn))
        blocks = (*stack, -(-outer // 128), -(-inner // 128))
        if kind == "fp8-powers":
            powers = draw.integers(118, 124, blocks, np.uint8).view(ml_dtypes.float8_e8m0fnu)
            return Fp8(weight, jnp.asarray(powers))
        return Fp8(weight, jnp.asarray(about(*blocks), SCALES[kind.removeprefix("fp8-")]))
    if kind == "mxfp4":
        packed = draw.integers(0, 256, (*stack, outer, inner // 2), np.uint8)
        return Mxfp4(jnp.asarray(packed), jnp.asarray(draw.integers(118, 124, (*stack, outer, inner // 32), np.uint8)))
    sort, group, dtype = kind.split("-")
    bits = int(sort[-1])
    words = -(-inner * bits // 32)
    packed = draw.integers(-(2**31), 2**31, (*stack, outer, words), np.int64).astype(np.int32)
    groups = 1 if group == "row" else inner // int(group)
    scale = jnp.asarray(about(*stack, outer, groups), SCALES[dtype])
    zeros = None
    if sort.startswith("zero"):
        zeros = jnp.asarray(draw.integers(-(2**31), 2**31, (*stack, -(-outer * bits // 32), groups)).astype(np.int32))
    return packed_integers(jnp.asarray(packed), scale, bits, words * 32 // bits - inner, zeros)


DTYPES = (jnp.float32, jnp.bfloat16)
"""The dtypes of x, as some processors multiply two numbers in bfloat16 at once."""


def check_numbers(matrix):
    """The numbers by which the kernel multiplies are its products with the rows of the identity."""
    expected = np.asarray(matrix.decoded())
    for dtype in DTYPES:
        np.testing.assert_array_equal(KERNEL(jnp.eye(matrix.shape[-1], dtype=dtype), matrix).T, expected)
        for column in (0, matrix.shape[-1] - 1):  # the form for few rows
            one = KERNEL(jnp.zeros((1, matrix.shape[-1]), dtype).at[0, column].set(1), matrix)
            np.testing.assert_array_equal(one[0], expected[:, column])


# Sizes beside the kernels' registers, strips, panels, tiles, parts and tasks. No part or step ends with the matrix.
def sizes(kind):
    multiple = 128 if "-128-" in kind else 64 if "-64-" in kind else 32 if "-32-" in kind or kind == "mxfp4" else 1
    return [(outer, -(-inner // multiple) * multiple) for outer, inner in ((1, 9), (6, 260), (139, 1100), (53, 2600))]


@pytest.mark.parametrize("kind", SOME)
def test_the_numbers_are_the_plain_forms_bit_for_bit(kind):
    for outer, inner in sizes(kind)[:3:2]:
        check_numbers(drawn(kind, outer, inner))


@pytest.mark.parametrize("kind", SOME)
def test_it_is_the_product_summed_in_float32(kind):
    for outer, inner in sizes(kind)[1:]:
        matrix = drawn(kind, outer, inner)
        weight = np.asarray(matrix.decoded(), np.float64)
        for rows, dtype in itertools.product((1, 3, 13), DTYPES):
            x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, inner)), dtype)
            assert CALL in KERNEL.lower(x, matrix).as_text()
            y, wide = KERNEL(x, matrix), np.asarray(x, np.float64)
            assert y.dtype == jnp.float32
            bound = inner * 2**-24 * (np.abs(wide) @ np.abs(weight.T))
            assert np.all(np.abs(np.asarray(y, np.float64) - wide @ weight.T) <= bound)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SOME)
def test_a_rows_bits_are_its_own(kind, dtype):
    """Whoever its neighbours are, and however many; with steps and strips that are not whole at the end."""
    outer, inner = sizes(kind)[2]
    matrix = drawn(kind, outer, inner)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((300, inner)), dtype)
    whole = np.asarray(KERNEL(x, matrix))
    for rows in (1, 2, 3, 4, 5, 129):
        np.testing.assert_array_equal(KERNEL(x[-rows:], matrix), whole[-rows:])
    y = np.asarray(KERNEL(jnp.full_like(x, jnp.nan).at[3].set(x[0]), matrix))
    np.testing.assert_array_equal(y[3], whole[0])
    assert np.all(np.isnan(np.delete(y, 3, axis=0)))


def test_every_scale_in_bfloat16():
    """Those whose numbers are looked up and those whose are not, with subnormal ones, infinities and NaN."""
    scale = np.arange(2**16, dtype=np.uint16).reshape(-1, 8).view(ml_dtypes.bfloat16)
    codes = np.full((len(scale), 32), 0x76543210, np.uint32)
    codes[:, 1::2] = 0xFEDCBA98
    matrix = packed_integers(jnp.asarray(codes.view(np.int32)), jnp.asarray(scale), 4)
    for quarter in range(4):  # of the codes of a group
        x = np.zeros((8, 8, 32), np.float32)
        x[np.arange(8), np.arange(8), quarter * 5] = 1
        check_products_of_one(x.reshape(8, -1), matrix)


@pytest.mark.parametrize("kind", ["int8-32-bfloat16", "int8-32-float16", "int4-32-float16", "mxfp4", "fp8-powers"])
def test_extreme_scales(kind):
    matrix = drawn(kind, 256, 256)
    _, scale = matrix.arrays
    bits = np.dtype(f"uint{scale.dtype.itemsize * 8}")
    many = np.random.default_rng(0).integers(0, 2 ** (8 * bits.itemsize), scale.shape).astype(bits)
    field = list(matrix.STORED)[1]
    matrix = dataclasses.replace(matrix, **{field: jnp.asarray(many.view(scale.dtype))})
    check_products_of_one(np.eye(256, dtype=np.float32)[::37], matrix)


def check_products_of_one(x, matrix):
    """Rows with a single 1, alone and together: W's numbers wherever nothing else of W's row is infinite or NaN."""
    weight = np.asarray(matrix.decoded())
    # Processors take subnormal factors for zeros inside XLA, where the plain form has them as numbers.
    weight = np.where(np.abs(weight) < 2**-126, 0, weight)
    with np.errstate(invalid="ignore"):
        expected = np.stack([np.sum(np.where(row == 0, weight * 0, weight), axis=1) for row in x])
    for rows, dtype in itertools.product((x, x[:1]), DTYPES):
        seen = np.asarray(KERNEL(jnp.asarray(rows, dtype), matrix))
        seen = np.where(np.abs(seen) < 2**-126, 0, seen)
        np.testing.assert_array_equal(seen, expected[: len(rows)])


@pytest.mark.parametrize("rows", [1, 5])
def test_every_code_of_fp8(rows):
    """NaN makes its row of W NaN, and no other."""
    codes = np.arange(256, dtype=np.uint8).reshape(-1, 1).repeat(200, axis=1)
    codes[:, 1:] = 0
    matrix = Fp8(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.full((2, 2), 0.7, jnp.float32))
    y = KERNEL(jnp.ones((rows, 200)), matrix)
    expected = codes[:, 0].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.7)
    np.testing.assert_array_equal(y, np.tile(expected, (rows, 1)))
    assert np.sum(np.isnan(expected)) == 2


@pytest.mark.parametrize("rows", [1, 6])
def test_bits_do_not_depend_on_threads(rows, tmp_path):
    """Another process with one thread computes the same."""
    matrix = drawn("int4-32-bfloat16", 700, 1056)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, 1056)), jnp.float32)
    packed, scale = matrix.arrays
    np.savez(tmp_path / "case.npz", x=x, packed=packed, scale=np.asarray(scale).view(np.uint16))
    program = """
import sys
import jax, jax.numpy as jnp, ml_dtypes, numpy as np
from ling3.ops.cpu import products
case = np.load(sys.argv[1])
scale = jnp.asarray(case["scale"].view(ml_dtypes.bfloat16))
product = jax.jit(lambda x, packed, scale: products.product(x, products.StoredMatrix(packed, scale)))
y = product(jnp.asarray(case["x"]), jnp.asarray(case["packed"]), scale)
np.save(sys.argv[2], y)
"""
    environment = {**os.environ, "XLA_FLAGS": "", "NPROC": "1", "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, str(tmp_path / "case.npz"), str(tmp_path / "y.npy")]
    subprocess.run(command, env=environment, check=True, timeout=300)
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), KERNEL(x, matrix))


@pytest.mark.parametrize("kind", ["int4-32-bfloat16", "fp8-float32"])
def test_its_derivative_is_the_plain_forms(kind):
    matrix = drawn(kind, 9, 256, size=1e-4)
    x, dx = (jnp.asarray(np.random.default_rng(i).standard_normal((3, 256)), jnp.float32) for i in range(2))

    def loss(x, form):
        return jnp.sum(jnp.tanh(form(x, matrix)))

    seen, expected = (jax.jit(jax.grad(functools.partial(loss, form=form)))(x) for form in (KERNEL, PLAIN))
    np.testing.assert_allclose(seen, expected, atol=1e-5)
    forward = [jax.jvp(lambda x, f=f: f(x, matrix), (x,), (dx,))[1] for f in (KERNEL, PLAIN)]
    np.testing.assert_allclose(*forward, atol=1e-4)
    with pytest.raises(TypeError, match="dequantize=True"):
        jax.grad(lambda m: jnp.sum(product(x, m)), allow_int=True)(matrix)


def test_it_maps_over_batches():
    matrix, x = drawn("int8-32-bfloat16", 9, 64), jax.random.normal(jax.random.key(0), (6, 64))
    mapped = jax.jit(jax.vmap(lambda x: KERNEL(x, matrix)))(x.reshape(2, 3, 64))
    np.testing.assert_array_equal(mapped.reshape(6, 9), KERNEL(x, matrix))


@pytest.mark.parametrize("kind", ["int4-32-bfloat16", "int8-32-bfloat16", "mxfp4", "fp8-float32", "fp8-powers"])
def test_the_matrix_is_never_decoded_as_a_whole(kind):
    matrix = drawn(kind, 512, 1024)
    memory = KERNEL.lower(jnp.ones((4, 1024)), matrix).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 512 * 1024 / 4


def chosen_experts(tokens, experts, top_k, hidden, dtype):
    draw = np.random.default_rng(1)
    x = jnp.asarray(draw.standard_normal((tokens, hidden)), dtype)
    chosen = jnp.asarray(np.stack([draw.permutation(experts)[:top_k] for _ in range(tokens)]), jnp.int32)
    return x, chosen, jnp.asarray(draw.random((tokens, top_k)), jnp.float32)


def stacks_of(kind, experts, hidden, intermediate):
    shapes = ((intermediate, hidden), (intermediate, hidden), (hidden, intermediate))
    return [drawn(kind, *shape, experts, seed=i) for i, shape in enumerate(shapes)]


EXPERT_FORMATS = ["int4-32-bfloat16", "int4-row-float32", "int8-32-bfloat16", "mxfp4", "fp8-float32", "fp8-powers"]


class TestExperts:
    @pytest.mark.parametrize("kind", exhaustively(EXPERT_FORMATS, but=["mxfp4"]))
    @pytest.mark.parametrize(
        ("tokens", "experts", "top_k", "limit"), [(1, 9, 3, 0.0), (7, 4, 4, 0.5), (150, 3, 2, 0.0)]
    )
    def test_it_is_the_sum_over_chosen_experts(self, tokens, experts, top_k, limit, kind):
        x = chosen_experts(tokens, experts, top_k, 160, jnp.float32)
        stacks = stacks_of(kind, experts, 160, 96)
        assert "ling3_experts_" in EXPERTS.lower(*x, *stacks, SwiGLU(limit)).as_text()
        numbers = [np.asarray(stack.decoded()) for stack in stacks]
        expected, terms = (by_hand(*x, *numbers, limit, absolute=absolute) for absolute in (False, True))
        assert np.all(np.abs(np.asarray(EXPERTS(*x, *stacks, SwiGLU(limit))) - expected) <= 3e-6 * terms.max() + 1e-6)

    def test_a_limit_that_comes_before_silu(self):
        x, stacks = chosen_experts(7, 4, 2, 64, jnp.float32), stacks_of("mxfp4", 4, 64, 32)
        expected = by_hand(*x, *(np.asarray(stack.decoded()) for stack in stacks), 0.5, limit_first=True)
        np.testing.assert_allclose(native_experts(*x, *stacks, SwiGLU(0.5, limit_first=True)), expected, atol=1e-4)

    @pytest.mark.parametrize(
        ("kind", "dtype"), [*((kind, jnp.float32) for kind in EXPERT_FORMATS), ("mxfp4", jnp.bfloat16)]
    )
    def test_a_rows_bits_are_its_own(self, kind, dtype):
        x, _, weights = chosen_experts(36, 6, 1, 160, dtype)
        stacks, nobody = stacks_of(kind, 6, 160, 96), jnp.full((36, 1), -1, jnp.int32)
        for busy in (1, 3, 5):
            chosen = jnp.where(jnp.arange(36)[:, None] < busy, 2, 3 + jnp.arange(36, dtype=jnp.int32)[:, None] % 3)
            whole = EXPERTS(x, chosen, weights, *stacks)
            for row in (0, busy - 1, 35):
                alone = EXPERTS(x, nobody.at[row].set(chosen[row]), weights, *stacks)
                np.testing.assert_array_equal(alone[row], whole[row])
                assert not np.any(np.delete(np.asarray(alone), row, axis=0))

    def test_hidden_numbers_are_rounded_to_xs_dtype(self):
        """As the experts in bfloat16 do."""
        x, chosen, weights = chosen_experts(3, 4, 1, 64, jnp.bfloat16)
        gate, up, down = stacks_of("int8-32-bfloat16", 4, 64, 32)
        y = np.asarray(EXPERTS(x, chosen, weights, gate, up, down))
        for row, e in enumerate(np.asarray(chosen)[:, 0]):
            g, u = (KERNEL(x[row : row + 1], stack.at(int(e))) for stack in (gate, up))
            inside = (jax.nn.silu(g) * u).astype(jnp.bfloat16)
            expected = KERNEL(inside, down.at(int(e))) * weights[row, 0]
            np.testing.assert_allclose(y[row], expected[0], atol=2**-8 * float(jnp.abs(expected).max()))

    def test_stacks_in_several_formats_are_for_the_plain_form(self):
        x = chosen_experts(3, 4, 1, 64, jnp.float32)
        gate, up, down = stacks_of("mxfp4", 4, 64, 32)[:2] + stacks_of("int8-32-bfloat16", 4, 64, 32)[2:]
        assert "ling3_experts_" not in EXPERTS.lower(*x, gate, up, down).as_text()


class TestWhereItDoesNotSuit:
    def test_other_dtypes(self):
        assert products.unsuited(jnp.ones((2, 64), jnp.float16), self.arrays(), 64, 0).startswith("x is float16")

    def test_groups_between_powers_of_two(self):
        words, scale = jnp.zeros((8, 24), jnp.int32), jnp.ones((8, 2), jnp.bfloat16)
        assert "groups" in products.unsuited(jnp.ones((2, 192)), products.StoredMatrix(words, scale), 192, 0)
        whole = products.StoredMatrix(jnp.zeros((8, 32), jnp.int32), scale)
        assert products.unsuited(jnp.ones((2, 256)), whole, 256, 0) is None

    def test_rows_of_a_word(self):
        word = products.StoredMatrix(jnp.zeros((8, 1), jnp.int32), jnp.ones((8, 1)))
        assert "groups" in products.unsuited(jnp.ones((2, 4)), word, 4, 0)

    def test_small_matrices_are_not_worth_a_compiler(self):
        assert "262,144 bytes" in products.unsuited(jnp.ones((2, 64)), self.arrays(), 64, 2**18)

    def test_the_plain_form(self):
        assert CALL not in PLAIN.lower(jnp.ones((2, 64)), drawn("mxfp4", 8, 64)).as_text()

    def test_without_a_compiler(self, monkeypatch):
        monkeypatch.setattr(native, "missing", lambda *_: "there is no compiler")
        assert products.unsuited(jnp.ones((2, 64)), self.arrays(), 64, 0) == "there is no compiler"

    @staticmethod
    def arrays():
        return arrays_of(drawn("mxfp4", 8, 64))


@pytest.mark.parametrize("kind", ["int4-32-bfloat16", "fp8-float32", "mxfp4"])
@pytest.mark.parametrize("rows", [3, 40])
def test_rows_of_zeros_change_no_other_row(kind, rows):
    matrix = drawn(kind, 70, 288)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, 288)), jnp.float32)
    empty = jnp.arange(rows) % 3 != 0
    y = KERNEL(jnp.where(empty[:, None], -0.0, x), matrix)
    assert not np.asarray(y[empty]).any()
    np.testing.assert_array_equal(y[~empty], KERNEL(x, matrix)[~empty])
    last = KERNEL(jnp.zeros_like(x).at[1, -1].set(1), matrix)  # a row of one number is none of zeros
    np.testing.assert_array_equal(last[1], matrix.decoded()[:, -1])
