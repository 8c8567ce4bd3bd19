"""The kernel for a CPU finds the plain form's token in each row of logits, and log Σ e^z to a few last bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from native_kernels import installed, needs_compiler

from ling3.ops import logits as plain
from ling3.ops.cpu import logits as kernel

pytestmark = [needs_compiler, pytest.mark.thorough]
likeliest = jax.jit(kernel.likeliest)


@pytest.fixture(scope="module", autouse=True)
def on_the_kernel():
    with installed():
        yield


def drawn(rows, vocab, seed=0):
    return jnp.asarray(3 * np.random.default_rng(seed).normal(size=(rows, vocab)), jnp.float32)


# Less than a register, registers and a rest, one segment and a bit, and published vocabularies.
@pytest.mark.parametrize("vocab", [1, 3, 100, 4_097, 49_152, 50_257, 157_184])
def test_tokens_are_the_plain_forms_and_sums_those_of_float64(vocab):
    logits = drawn(5, vocab)
    assert kernel.unsuited(logits) is None
    token, total = likeliest(logits, jnp.ones(5, bool))
    np.testing.assert_array_equal(token, plain.largest(logits))
    np.testing.assert_array_equal(jax.jit(kernel.xla_likeliest)(logits, jnp.arange(5) % 2 == 0)[0][::2], token[::2])
    exact = np.log(np.sum(np.exp(np.asarray(logits, np.float64)), axis=-1))
    # Two roundings of float32: of a segment's sum and of the logarithm; e^z itself is exact to one or two.
    np.testing.assert_allclose(total, exact, rtol=0, atol=4 * np.spacing(np.float32(np.abs(exact).max())) + 4e-7)


def test_the_first_of_several_and_numbers_of_any_size():
    logits = drawn(6, 20_000)
    logits = logits.at[0, jnp.asarray([19_999, 4_100, 9_000])].set(50.0)
    logits = logits.at[1].set(-jnp.inf).at[1, 15_000].set(-3.0)  # what a mask leaves
    logits = logits.at[2].multiply(1e37)
    logits = logits.at[3].set(0.0).at[3, 7].set(-0.0)
    logits = logits.at[4].add(-1e30)
    token, total = likeliest(logits, jnp.ones(6, bool))
    np.testing.assert_array_equal(token, plain.largest(logits))
    np.testing.assert_allclose(total, plain.log_sum_exp(logits), rtol=1e-6)
    assert (int(token[0]), int(token[1]), float(total[1])) == (4_100, 15_000, -3.0)


def test_rows_that_no_token_can_be_chosen_from():
    """As the plain form says: NaN for a NaN wherever it is, ∞ for an ∞, -∞ for nothing; ids stay in the vocabulary."""
    logits = drawn(6, 9_000)
    logits = logits.at[0, 8_999].set(jnp.nan).at[1].set(jnp.nan).at[2, 5_000].set(jnp.inf).at[3].set(-jnp.inf)
    logits = logits.at[4, 3].set(jnp.inf).at[4, 4].set(jnp.nan).at[5].set(-jnp.inf).at[5, 8_000].set(jnp.nan)
    token, total = likeliest(logits, jnp.ones(6, bool))
    np.testing.assert_array_equal(total, plain.log_sum_exp(logits))
    assert np.all((np.asarray(token) >= 0) & (np.asarray(token) < 9_000)) and int(token[2]) == 5_000


def test_a_rows_bits_do_not_depend_on_its_company():
    logits = drawn(7, 20_011)
    together = likeliest(logits, jnp.ones(7, bool))
    some = likeliest(logits, jnp.asarray([True, False, False, True, False, True, False]))
    for row in (0, 3, 5):
        alone = likeliest(logits[row : row + 1], jnp.ones(1, bool))
        for a, b, c in zip(together, some, alone, strict=True):
            assert a[row] == b[row] == c[0]


def test_small_vocabularies_are_left_to_xla(monkeypatch):
    monkeypatch.setattr(kernel, "LEAST", 2**14)
    assert kernel.unsuited(drawn(1, 2**14 - 1)) == "the vocabulary has less than 16,384 tokens"
