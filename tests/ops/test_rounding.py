"""Activations in 8 bits: against numpy, row by row, and the same in all forms of the experts."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ling3.formats import Fp8Channels, Int8Channels
from ling3.layers.linear import Linear
from ling3.ops.cpu.experts import experts as native_experts
from ling3.ops.cpu.matmul import product as cpu_product
from ling3.ops.experts import block_experts, dense_experts
from ling3.ops.matmul import product
from ling3.ops.rounding import Rounding

pytestmark = pytest.mark.thorough

KINDS = {"int": Int8Channels, "float": Fp8Channels}


def by_numpy(rounding, x):
    """The formula for each group of each row."""
    y = np.empty_like(x)
    size = rounding.group or x.shape[-1]
    for row, out in zip(x.reshape(-1, x.shape[-1]), y.reshape(-1, x.shape[-1]), strict=True):
        for start in range(0, len(row), size):
            own = row[start : start + size]
            scale = np.abs(own).max() / np.float32(127.5 if rounding.kind == "int" else 448)
            scale = scale or np.finfo(np.float32).eps
            if rounding.kind == "int":
                codes = np.rint(np.clip(own / scale, -128, 127))
            else:
                codes = np.clip(own / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            out[start : start + size] = codes * scale
    return y


def drawn(*shape, seed=0):
    draw = np.random.default_rng(seed)
    x = draw.standard_normal(shape) * np.exp(2 * draw.standard_normal((*shape[:-1], 1)))
    return x.astype(np.float32)


@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_formula_bit_for_bit(kind, group):
    rounding, x = Rounding(kind, group), drawn(2, 5, 200)
    x[1, 2] = 0
    own = jax.jit(rounding)(jnp.asarray(x))
    np.testing.assert_array_equal(own, by_numpy(rounding, x))
    np.testing.assert_array_equal(jax.jit(rounding)(jnp.asarray(x[0, :1])), own[0, :1])
    narrow = jnp.asarray(x, jnp.bfloat16)
    expected = jnp.asarray(by_numpy(rounding, np.asarray(narrow, np.float32)), jnp.bfloat16)
    np.testing.assert_array_equal(rounding(narrow), expected)


def test_gradients_pass_through():
    x = jnp.asarray(drawn(3, 64))
    np.testing.assert_array_equal(
        jax.grad(lambda x: jnp.sum(Rounding("int")(x) * x[::-1]))(x), Rounding("int")(x)[::-1] + x[::-1]
    )


@pytest.mark.parametrize("times", [product, cpu_product], ids=["plain", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_round_the_rows_that_they_multiply(kind, times):
    matrix = KINDS[kind].init(Linear(jnp.zeros((300, 256))), key=jax.random.key(0), std=0.05)
    rounds, x = dataclasses.replace(matrix, rounding=Rounding(kind)), jnp.asarray(drawn(20, 256))
    y = jax.jit(times)(x, rounds)
    np.testing.assert_array_equal(y, jax.jit(times)(Rounding(kind)(x), matrix))
    np.testing.assert_array_equal(y[3:4], jax.jit(times)(x[3:4], rounds))
    assert np.abs(y - jax.jit(times)(x, matrix)).max() > 1e-3


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_experts_round_before_both_products(kind):
    like = [Linear(jnp.zeros(shape)) for shape in ((4, 64, 128), (4, 64, 128), (4, 128, 64))]
    stacks = [KINDS[kind].init(own, key=jax.random.key(i), std=0.1) for i, own in enumerate(like)]
    rounds = [dataclasses.replace(own, rounding=Rounding(kind)) for own in stacks]
    draw = np.random.default_rng(0)
    x, weights = jnp.asarray(drawn(6, 128)), jnp.asarray(draw.uniform(0.1, 1, (6, 2)), jnp.float32)
    chosen = jnp.asarray(np.stack([draw.permutation(4)[:2] for _ in range(6)]), jnp.int32)
    by_hand = np.zeros((6, 128), np.float32)
    for token in range(6):
        for share, expert in zip(weights[token], chosen[token], strict=True):
            gate, up, down = (np.asarray(own.decoded())[int(expert)] for own in stacks)
            row = by_numpy(Rounding(kind), np.asarray(x[token : token + 1]))
            inside = np.asarray(jax.nn.silu(row @ gate.T)) * (row @ up.T)
            by_hand[token] += float(share) * (by_numpy(Rounding(kind), inside) @ down.T)[0]
    scale = np.abs(by_hand).max()
    for form in (dense_experts, block_experts, native_experts):
        y = np.asarray(form(x, chosen, weights, *rounds))
        # A number inside may round to the next code where sums differ by a rounding.
        assert np.abs(y - by_hand).max() < 0.02 * scale
        assert np.median(np.abs(y - by_hand)) < 1e-5 * scale
