"""Sorted expert blocks are every-expert-on-every-token, at the cost of the chosen ones."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exhaustive_cases import thoroughly
from expert_cases import by_hand, case, check_gradients, check_no_expert
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import packed_integers

from ling3.execution import XLA_CPU
from ling3.formats import Fp8, Mxfp4
from ling3.ops import experts as experts_module
from ling3.ops.cpu.experts import xla_experts
from ling3.ops.experts import block_experts, dense_experts
from ling3.ops.few_token_experts import few_token_experts
from ling3.ops.swiglu import SWIGLU, SwiGLU

BLOCKS = jax.jit(functools.partial(xla_experts, times=XLA_CPU.times), static_argnums=6)
DENSE = jax.jit(functools.partial(dense_experts, times=XLA_CPU.times), static_argnums=6)


@settings(max_examples=15)
@given(
    tokens=st.sampled_from([1, 8, 9, 70]),
    experts=st.sampled_from([2, 9]),
    top_k=st.integers(1, 2),
    limit=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 2**16),
)
def test_both_forms_are_the_sum_over_chosen_experts(tokens, experts, top_k, limit, seed):
    x = case(tokens, experts, top_k, seed=seed)
    expected = by_hand(*x, limit)
    np.testing.assert_allclose(BLOCKS(*x, SwiGLU(limit)), expected, atol=3e-5)
    np.testing.assert_allclose(DENSE(*x, SwiGLU(limit)), expected, atol=3e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("form", [block_experts, dense_experts])
def test_a_limit_that_comes_before_silu(form):
    x = case(9, 4, 2)
    y = form(*x, SwiGLU(0.5, limit_first=True))
    np.testing.assert_allclose(y, by_hand(*x, 0.5, limit_first=True), atol=3e-5)
    assert np.abs(np.asarray(y) - by_hand(*x, 0.5)).max() > 0.1


@pytest.mark.parametrize("tokens", [1, 40, 1200])
def test_one_expert_may_take_everything(tokens):
    x, chosen, *rest = case(tokens, 5, 2)
    chosen = jnp.broadcast_to(jnp.asarray([3, 0], jnp.int32), chosen.shape)
    np.testing.assert_allclose(BLOCKS(x, chosen, *rest), DENSE(x, chosen, *rest), atol=3e-5)


@pytest.mark.thorough
def test_gradients_are_the_dense_forms():
    check_gradients()


@pytest.mark.parametrize("tokens", [1, 3, 70])
def test_bfloat16_weights_are_summed_in_float32(tokens):
    x = case(tokens, 6, 2, jnp.bfloat16)
    expected = by_hand(*x, 0.0)
    y = BLOCKS(*x)
    assert y.dtype == jnp.float32
    # Only the hidden activations are rounded, each by at most 2^-8 of itself.
    assert np.all(np.abs(np.asarray(y, np.float64) - expected) <= 2**-8 * by_hand(*x, 0.0, absolute=True) + 1e-4)


def test_no_dense_expansion_is_compiled():
    """A round has eight rows per expert here: temporaries stay below one activation per expert and token."""
    tokens, experts, hidden, intermediate = 64, 64, 64, 64
    x = case(tokens, experts, 2, hidden=hidden, intermediate=intermediate)
    compiled = jax.jit(lambda *a: xla_experts(*a, SWIGLU, XLA_CPU.times)).lower(*x).compile()
    dense = tokens * experts * intermediate * 4
    assert compiled.memory_analysis().temp_size_in_bytes < dense / 2


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [16, 64])
def test_bits_do_not_depend_on_how_many_experts_are_busy(tokens, dtype, monkeypatch):
    """A full choice goes by rounds, a single token's among rows without one by blocks."""
    x, chosen, *rest = case(tokens, 32, 2, dtype, hidden=640, intermediate=160)
    monkeypatch.setattr(experts_module, "TURNS", 1)  # rounds from a quarter of the experts on
    block = experts_module._block_rows(tokens, 2, 32, x.dtype)
    turns = -(-np.bincount(np.asarray(chosen).reshape(-1), minlength=32) // block)
    assert experts_module.EXPERTS * turns.sum() > 32 * turns.max(), "the full choice goes by rounds"
    assert experts_module.EXPERTS * 2 <= 32, "and a single token's by blocks"
    forms = jax.jit(lambda *x: xla_experts(*x, SWIGLU, XLA_CPU.times))
    whole = forms(x, chosen, *rest)
    nobody = jnp.full_like(chosen, 32)
    for row in (0, tokens - 1):
        alone = forms(x, nobody.at[row].set(chosen[row]), *rest)
        np.testing.assert_array_equal(alone[row], whole[row])
        assert not np.any(np.delete(np.asarray(alone), row, axis=0))


@pytest.mark.parametrize("tokens", [1, 8, 300])
def test_no_expert_is_converted_before_it_is_needed(tokens):
    """XLA's CPU backend takes the conversion of all bfloat16 weights to float32 out of a loop, if it can."""
    x = case(tokens, 128, 2, jnp.bfloat16, hidden=256, intermediate=64)
    memory = jax.jit(lambda *a: xla_experts(*a, SWIGLU, XLA_CPU.times)).lower(*x).compile().memory_analysis()
    converted, activations = 2 * x[3].nbytes, tokens * 2 * 256 * 4
    assert memory.temp_size_in_bytes < converted / 2 + 4 * activations


@pytest.mark.thorough
@pytest.mark.parametrize("outside", thoroughly([-1, 32, 2**31 - 1], but=[32]))
def test_what_is_no_expert_stands_for_none(outside):
    check_no_expert(BLOCKS, outside)


def test_the_clamp_is_after_the_silu():
    gate, up = jnp.asarray([[-3.0, 0.5, 9.0]]), jnp.asarray([[-9.0, 0.25, 9.0]])
    silu = np.asarray(gate) / (1 + np.exp(-np.asarray(gate)))
    np.testing.assert_allclose(SwiGLU(2.0)(gate, up), np.minimum(silu, 2.0) * np.clip(up, -2, 2), rtol=1e-6)
    np.testing.assert_allclose(SWIGLU(gate, up), silu * np.asarray(up), rtol=1e-6)


def quantized_case(tokens, experts, hidden=64, intermediate=32):
    """A case whose stacks are of three formats, and the same with their numbers."""
    draw = np.random.default_rng(5)
    x, chosen, weights, *_ = case(tokens, experts, 2, hidden=hidden, intermediate=intermediate)

    def bits(dtype, *shape):
        info = np.iinfo(dtype)
        return jnp.asarray(draw.integers(info.min, info.max, size=(experts, *shape), endpoint=True).astype(dtype))

    scale = jnp.asarray(draw.uniform(0.01, 0.1, size=(experts, intermediate, hidden // 32)), jnp.bfloat16)
    gate = packed_integers(bits(np.int32, intermediate, hidden // 8), scale, 4)
    exponents = jnp.full((experts, intermediate, hidden // 32), 124, jnp.uint8)
    up = Mxfp4(bits(np.uint8, intermediate, hidden // 2), exponents)
    codes = np.asarray(bits(np.uint8, hidden, intermediate)) % 112  # positive, below 32
    down = Fp8(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.full((experts, 1, 1), 0.01, jnp.float32))
    return (x, chosen, weights, gate, up, down), (x, chosen, weights, *(w.decoded() for w in (gate, up, down)))


@pytest.mark.thorough
@pytest.mark.parametrize("tokens", [1, 9, 70])
@pytest.mark.parametrize("form", [block_experts, few_token_experts])
def test_quantized_stacks_are_their_numbers(form, tokens):
    own, numbers = quantized_case(tokens, 4)
    expected = by_hand(*numbers, 0.5)
    y = jax.jit(lambda *a: form(*a, SwiGLU(0.5), XLA_CPU.times))(*own)
    np.testing.assert_allclose(y, expected, rtol=2e-5, atol=2e-5 * np.abs(expected).max())


def test_gradients_of_quantized_experts_are_those_of_activations_and_weights():
    (x, chosen, weights, *stacks), (_, _, _, *floats) = quantized_case(9, 4)

    def scalar(form, x, weights, stacks):
        return jnp.sum(jnp.sin(form(x, chosen, weights, *stacks, SwiGLU(0.5))))

    found = jax.jit(jax.grad(functools.partial(scalar, block_experts), argnums=(0, 1)))(x, weights, stacks)
    expected = jax.jit(jax.grad(functools.partial(scalar, dense_experts), argnums=(0, 1)))(x, weights, floats)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-3 * np.abs(other).max())
    with pytest.raises(TypeError, match="respect to a quantized weight"):
        jax.grad(functools.partial(scalar, block_experts), argnums=2, allow_int=True)(x, weights, stacks)


@pytest.mark.thorough
def test_no_stack_is_decoded_at_once():
    """Temporaries stay far below the numbers of all experts."""
    own, numbers = quantized_case(64, 64, hidden=128, intermediate=128)
    compiled = jax.jit(lambda *a: xla_experts(*a, SWIGLU, XLA_CPU.times)).lower(*own).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < numbers[3].nbytes / 4
