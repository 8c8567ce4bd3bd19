"""The experts of few tokens are the experts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from expert_cases import by_hand, case, check_gradients

from ling3.ops.experts import block_experts
from ling3.ops.few_token_experts import few_token_experts
from ling3.ops.swiglu import SwiGLU


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("limits", [(0.0, False), (0.5, False), (0.5, True)])
def test_both_forms_are_one_sum(dtype, limits):
    """To rounding; where an index is no expert's, too."""
    x, chosen, *rest = case(9, 4, 2, dtype)
    holes = chosen.at[3, 0].set(-1).at[5].set(4)
    few, grouped = (
        jax.jit(functools.partial(form, swiglu=SwiGLU(*limits))) for form in (few_token_experts, block_experts)
    )
    y = few(x, holes, *rest)
    assert y.dtype == jnp.float32 and not np.any(np.asarray(y[5]))
    np.testing.assert_allclose(y, grouped(x, holes, *rest), atol=3e-5 if dtype == jnp.float32 else 0.1)
    if dtype == jnp.float32:
        np.testing.assert_allclose(y, by_hand(x, holes, *rest, limits[0], limit_first=limits[1]), atol=3e-5)


def test_gradients_are_the_dense_forms():
    check_gradients(few_token_experts)
