"""The kernel for a CPU is the operator: values, gradients, bits, and its reading of weights where they lie."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import by_hand, case, check_gradients, check_no_expert
from family_laws import answers_in_company_and_alone, prompts
from native_kernels import installed, needs_compiler
from tiny import FLASH, TINY, open_model

import ling3
from ling3.ops.cpu import kda, products
from ling3.ops.cpu.experts import experts as native_experts
from ling3.ops.swiglu import SwiGLU
from ling3.runtime import native

pytestmark = [needs_compiler, pytest.mark.thorough]


@pytest.fixture(scope="module", autouse=True)
def on_the_kernel():
    with installed():
        yield


KERNEL = jax.jit(native_experts, static_argnums=6)


def test_it_is_what_runs():
    text = KERNEL.lower(*case(3, 4, 2)).as_text()
    assert "ling3_experts_" in text and "dot" not in text


# Sizes at, below and beside the kernel's registers, blocks of 32 rows and tasks of 64.
@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "intermediate"),
    [
        (1, 2, 1, 1, 1),
        (1, 9, 3, 48, 64),
        (2, 3, 2, 33, 67),
        (7, 4, 4, 16, 4),
        (70, 3, 2, 130, 70),
        (200, 5, 1, 64, 129),
    ],
)
def test_it_is_the_sum_over_chosen_experts(tokens, experts, top_k, hidden, intermediate, limit):
    x = case(tokens, experts, top_k, hidden=hidden, intermediate=intermediate)
    expected, terms = by_hand(*x, limit), by_hand(*x, limit, absolute=True)
    assert np.all(np.abs(np.asarray(KERNEL(*x, SwiGLU(limit))) - expected) <= 3e-6 * terms.max() + 1e-6)


def test_a_limit_that_comes_before_silu():
    x = case(7, 4, 2, hidden=33, intermediate=67)
    expected = by_hand(*x, 0.5, limit_first=True)
    np.testing.assert_allclose(native_experts(*x, SwiGLU(0.5, limit_first=True)), expected, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_bfloat16_weights_are_summed_in_float32(tokens):
    x, chosen, weights, *stacks = case(tokens, 8, 2, jnp.bfloat16, hidden=100, intermediate=70)
    assert "ling3_experts_" in KERNEL.lower(x, chosen, weights, *stacks).as_text()
    y = KERNEL(x, chosen, weights, *stacks)
    assert y.dtype == jnp.float32
    # Nothing but the hidden activations is rounded. Few of them lie so near the middle between two bfloat16 numbers
    # that float32's own error decides to which: one by 2^-8 of itself, times a weight near 1.
    wide, (gate, up, down) = np.asarray(x, np.float64), (np.asarray(a, np.float64) for a in stacks)
    expected, largest = np.zeros(x.shape), 0.0
    for t, experts in enumerate(np.asarray(chosen)):
        for j, e in enumerate(experts):
            pre = gate[e] @ wide[t]
            hidden = jnp.asarray(pre / (1 + np.exp(-pre)) * (up[e] @ wide[t]), jnp.float32).astype(jnp.bfloat16)
            expected[t] += weights[t, j] * (down[e] @ np.asarray(hidden, np.float64))
            largest = max(largest, np.abs(np.asarray(hidden, np.float64)).max())
    error = np.abs(np.asarray(y, np.float64) - expected)
    assert np.median(error) < 1e-6 * largest and error.max() < 2**-8 * largest


def test_bfloat16_is_rounded_to_the_nearest_even():
    """silu(128) is 128 in float32, so that 128 (a + b) is the hidden value: here exactly between two numbers."""
    up = jnp.asarray([[1.0, 2**-8], [1.0 + 2**-7, 2**-8], [1.0, 2**-8 + 2**-15], [1.0, 2**-8 - 2**-15]], jnp.bfloat16)
    x = jnp.tile(jnp.asarray([[128.0, 128.0]], jnp.bfloat16), (4, 1))
    gate = jnp.tile(jnp.asarray([[[1.0, 0.0]]], jnp.bfloat16), (4, 1, 1))
    chosen, one = jnp.arange(4, dtype=jnp.int32)[:, None], jnp.ones((4, 1), jnp.float32)
    y = KERNEL(x, chosen, one, gate, up[:, None], jnp.ones((4, 2, 1), jnp.bfloat16))
    np.testing.assert_array_equal(y[:, 0] / 128**2, [1.0, 1.0 + 2**-6, 1.0 + 2**-7, 1.0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("busy", [1, 2, 3, 4, 5, 33])
def test_a_rows_bits_are_its_own(busy, dtype):
    """Whoever shares its expert, at whatever place: sizes that no register or task divides."""
    x, chosen, weights, *stacks = case(36, 40, 1, dtype, hidden=203, intermediate=71)
    chosen = jnp.where(jnp.arange(36)[:, None] < busy, 7, 8 + chosen % 32).astype(jnp.int32)
    whole = KERNEL(x, chosen, weights, *stacks)
    assert "ling3_experts_" in KERNEL.lower(x, chosen, weights, *stacks).as_text()
    nobody = jnp.full_like(chosen, -1)
    for row in (*range(busy), 35):
        alone = KERNEL(x, nobody.at[row].set(chosen[row]), weights, *stacks)
        np.testing.assert_array_equal(alone[row], whole[row])
    np.testing.assert_array_equal(
        KERNEL(x[:busy][::-1], chosen[:busy], weights[:busy][::-1], *stacks)[::-1], whole[:busy]
    )


@pytest.mark.parametrize("outside", [-1, 32, 2**31 - 1])
def test_what_is_no_expert_stands_for_none(outside):
    check_no_expert(KERNEL, outside)


@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_nan_stays_in_its_row(dtype, limit):
    x, *rest = case(5, 8, 1, dtype)
    y = np.asarray(KERNEL(x.at[2, 3].set(jnp.nan), *rest, SwiGLU(limit)))
    assert np.all(np.isnan(y[2])) and np.all(np.isfinite(np.delete(y, 2, axis=0)))


def test_gradients_are_the_dense_forms():
    check_gradients(native_experts)


def test_it_maps_over_batches():
    x, chosen, weights, *stacks = case(6, 8, 2)
    apart = [a.reshape(2, 3, *a.shape[1:]) for a in (x, chosen, weights)]
    mapped = jax.jit(jax.vmap(lambda *a: native_experts(*a, *stacks)))(*apart)
    np.testing.assert_array_equal(mapped.reshape(6, -1), KERNEL(x, chosen, weights, *stacks))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_no_weight_is_copied(dtype):
    x = case(8, 64, 2, dtype, hidden=256, intermediate=64)
    memory = KERNEL.lower(*x).compile().memory_analysis()
    rows = 8 * 2
    assert memory.temp_size_in_bytes < 4 * rows * (256 + 64) * 4 < 64 * 256 * dtype.dtype.itemsize * 8


class TestWhereItDoesNotSuit:
    def test_many_rows_of_bfloat16_have_the_processors_own_products(self):
        assert "ling3_experts_" not in KERNEL.lower(*case(5, 8, 2, jnp.bfloat16)).as_text()

    def test_other_dtypes(self):
        assert "ling3_experts_" not in KERNEL.lower(*case(3, 4, 2, jnp.float16)).as_text()

    @pytest.mark.parametrize("which", [3, 4, 5])
    def test_weights_of_several_dtypes(self, which):
        x = list(case(3, 4, 2))
        x[which] = x[which].astype(jnp.bfloat16)
        assert "ling3_experts_" not in KERNEL.lower(*x).as_text()
        np.testing.assert_allclose(KERNEL(*x), by_hand(*x, 0.0), atol=3e-5)

    def test_small_weights_are_not_worth_a_compiler(self, monkeypatch):
        monkeypatch.setitem(products.LEAST, "experts", 2**24)
        program = jax.jit(functools.partial(native_experts))
        assert "ling3_experts_" not in program.lower(*case(3, 4, 2)).as_text()

    def test_without_a_compiler(self, monkeypatch):
        monkeypatch.setattr(native, "missing", lambda *_: "there is no compiler")
        program = jax.jit(functools.partial(native_experts))
        assert "ling3_experts_" not in program.lower(*case(3, 4, 2)).as_text()


class TestModel:
    # The clamps, which are all that the second has besides, have been compared above.
    @pytest.mark.slow
    @pytest.mark.parametrize("config", [TINY, FLASH], ids=["tiny", "flash"])
    def test_its_logits_are_the_plain_forms(self, config, monkeypatch):
        # The experts alone are another form.
        monkeypatch.setitem(products.LEAST, "dense", 2**40)
        monkeypatch.setattr(kda, "LEAST", 2**40)
        model = open_model(config)
        # Of other tokens one is ill-conditioned: the plain form alone moves by 1e-4 with XLA's optimizations.
        tokens = jax.random.randint(jax.random.key(2), (2, 40), 0, config.vocab_size, jnp.int32)
        program = jax.jit(lambda m, t: m(t))
        assert "ling3_experts_" in program.lower(model, tokens).as_text()
        seen = program(model, tokens)
        monkeypatch.setattr(native, "missing", lambda *_: "there is no compiler")
        jax.clear_caches()
        assert "ling3_experts_" not in program.lower(model, tokens).as_text()
        np.testing.assert_allclose(seen, program(model, tokens), atol=2e-5)

    @pytest.mark.slow
    @pytest.mark.optimized
    def test_the_engines_promise(self):
        """Alone, and among others, preempted and resumed: the same bits."""
        params = [ling3.SamplingParams(max_tokens=12, temperature=t % 2, seed=t, logprobs=0) for t in range(6)]
        company, alone = answers_in_company_and_alone(open_model(TINY), prompts(20, 3, 28, 9, 16, 25), params)
        assert company == alone
