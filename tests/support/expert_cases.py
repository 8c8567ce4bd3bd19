"""Random experts with a choice among them, what they give, term by term, and laws of every form of them."""

import jax
import jax.numpy as jnp
import numpy as np

from ling3.layers.moe import NO_EXPERT
from ling3.ops.experts import block_experts, dense_experts
from ling3.ops.swiglu import SwiGLU


def case(tokens, experts, top_k, dtype=jnp.float32, hidden=8, intermediate=6, seed=0):
    draw = np.random.default_rng(seed)
    x = jnp.asarray(draw.normal(size=(tokens, hidden)), dtype)
    chosen = jnp.asarray(np.stack([draw.permutation(experts)[:top_k] for _ in range(tokens)]), jnp.int32)
    weights = jnp.asarray(draw.random(size=(tokens, top_k)), jnp.float32)
    gate, up = (jnp.asarray(draw.normal(size=(experts, intermediate, hidden)), dtype) for _ in range(2))
    down = jnp.asarray(draw.normal(size=(experts, hidden, intermediate)), dtype)
    return x, chosen, weights, gate, up, down


def by_hand(x, chosen, weights, gate, up, down, limit, absolute=False, limit_first=False):
    """The sum, term by term, without an index that is no expert's.

    `absolute` takes the last product's terms without their signs.
    """
    x, weights, gate, up, down = (np.asarray(a, np.float64) for a in (x, weights, gate, up, down))
    y = np.zeros_like(x)
    for t, experts in enumerate(np.asarray(chosen)):
        for j, e in enumerate(experts):
            if not 0 <= e < len(gate):
                continue
            pre = np.minimum(gate[e] @ x[t], limit) if limit_first else gate[e] @ x[t]
            g, u = pre / (1 + np.exp(-pre)), up[e] @ x[t]
            if limit > 0:
                g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
            y[t] += weights[t, j] * (np.abs(down[e]) @ np.abs(g * u) if absolute else down[e] @ (g * u))
    return y


def check_gradients(form=block_experts):
    """Those of a form are the dense form's: for any choice, for one that all tokens share, and where some have none."""
    x, chosen, *rest = case(20, 6, 2)

    def gradients(form, chosen, wrt):
        def scalar(x, *rest):
            return jnp.sum(jnp.sin(form(x, chosen, *rest, SwiGLU(0.5))))

        return jax.jit(jax.grad(scalar, argnums=tuple(range(wrt))))(x, *rest)

    shared = jnp.broadcast_to(jnp.asarray([3, 0], jnp.int32), chosen.shape)
    for choice in (chosen, shared, chosen.at[::3, 0].set(NO_EXPERT).at[5].set(-1)):
        expected = gradients(dense_experts, choice, 5)
        for wrt in (5, 2):  # with frozen stacks too
            for a, b in zip(gradients(form, choice, wrt), expected[:wrt], strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5)
                assert np.any(np.asarray(b))


def check_no_expert(form, outside):
    """An index outside the experts stands for none: nothing is added for it."""
    x, chosen, *rest = case(40, 32, 2)
    holes = chosen.at[::3, 0].set(outside).at[5].set(outside)
    y = form(x, holes, *rest)
    np.testing.assert_allclose(y, dense_experts(x, holes, *rest), atol=3e-5)
    assert np.any(np.asarray(y[0])) and not np.any(np.asarray(y[5]))
