"""Every kernel against its operator's plain form, in Pallas' interpreter: no GPU is needed, and no time is taken."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ling3.ops.kda import kda_step
from ling3.ops.kda_step_kernel import fused_kda_step
from ling3.ops.operator import Operator

STEP = jax.jit(functools.partial(fused_kda_step, interpret=True))
PLAIN = jax.jit(kda_step)


def one_token(batch=3, heads=2, width=64, dtype=jnp.float32, seed=0):
    """q, k, v, g, beta and a state; the last row is padding, whose g and beta are 0."""
    draw = np.random.default_rng(seed)
    q, k, v = draw.normal(size=(3, batch, heads, width))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    g = -5 / (1 + np.exp(-3 * draw.normal(size=(batch, heads, width))))
    beta = draw.uniform(size=(batch, heads))
    g[-1], beta[-1] = 0, 0
    state = draw.normal(size=(batch, heads, width, width))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, g, beta, state))


def largest(found, expected):
    return max(float(jnp.max(jnp.abs(x - y))) for x, y in zip(found, expected, strict=True))


class TestKDAStep:
    @pytest.mark.parametrize("width", [8, 32, 64, 128])
    def test_values(self, width):
        x = one_token(width=width)
        # Both add up 128 products of numbers near 1, in different orders.
        assert largest(STEP(*x), PLAIN(*x)) < 5e-6
        with jax.enable_x64(True):
            x = one_token(width=width, dtype=jnp.float64)
            assert largest(STEP(*x), PLAIN(*x)) < 1e-13

    def test_from_nothing_and_through_many_tokens(self):
        *_, state = one_token()
        fused = plain = jnp.zeros_like(state)
        for seed in range(20):
            x = one_token(seed=seed)[:-1]
            (o, fused), (expected, plain) = STEP(*x, fused), PLAIN(*x, plain)
            assert largest((o, fused), (expected, plain)) < 5e-6

    def test_padding_leaves_a_state_as_it_is(self):
        x = one_token()
        np.testing.assert_array_equal(STEP(*x)[1][-1], x[-1][-1])

    def test_the_same_bits_again_and_in_any_company(self):
        x = one_token(batch=8)
        whole = STEP(*x)
        for again, expected in zip(STEP(*x), whole, strict=True):
            np.testing.assert_array_equal(again, expected)
        some = jnp.asarray([5, 0, 7])
        for part, expected in zip(STEP(*(y[some] for y in x)), whole, strict=True):
            np.testing.assert_array_equal(part, expected[some])

    def test_a_row_of_nan_stays_alone(self):
        x = one_token()
        poisoned = STEP(*x[:-1], x[-1].at[1].set(jnp.nan))
        for found, expected in zip(poisoned, STEP(*x), strict=True):
            assert bool(jnp.isnan(found[1]).all())
            np.testing.assert_array_equal(found[jnp.asarray([0, 2])], expected[jnp.asarray([0, 2])])

    def test_for_a_gpu_it_is_one_call_that_writes_into_the_state(self):
        """Lowered here, without a GPU: what it is compiled to there is another matter."""
        traced = jax.jit(fused_kda_step, donate_argnums=5).trace(*one_token(width=128))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("stablehlo.custom_call") == 1
        assert "output_operand_alias<output_tuple_indices = [1], operand_index = 5" in text
        assert "tf.aliasing_output = 1" in text

    def test_a_width_that_does_not_divide(self):
        with pytest.raises(ValueError, match="48 value channels, expected a multiple of 32"):
            fused_kda_step(*one_token(width=48), interpret=True)


class TestOperator:
    def test_a_kernel_takes_a_functions_place_where_it_is_installed(self):
        operator = Operator(kda_step)
        called = []

        def kernel(*x):
            called.append(1)
            return fused_kda_step(*x, interpret=True)

        program, x = jax.jit(operator), one_token()
        before = program(*x)
        operator.install("gpu", kernel)
        assert not called and largest(program(*x), before) == 0
        operator.install("cpu", kernel)
        assert largest(program(*x), before) < 5e-6
        program(*x)
        assert called == [1], "the choice falls when a program is traced"
        assert largest(operator.plain(*x), before) < 5e-6
        operator.install("cpu", None)
        assert largest(program(*x), before) == 0 and called == [1]

    def test_it_keeps_the_functions_name_and_word(self):
        operator = Operator(kda_step)
        assert operator.__name__ == "kda_step" and operator.__doc__ == kda_step.__doc__
