"""Random experts with a choice among them, and what they give, term by term."""

import jax.numpy as jnp
import numpy as np


def case(tokens, experts, top_k, dtype=jnp.float32, hidden=8, intermediate=6, seed=0):
    draw = np.random.default_rng(seed)
    x = jnp.asarray(draw.normal(size=(tokens, hidden)), dtype)
    chosen = jnp.asarray(np.stack([draw.permutation(experts)[:top_k] for _ in range(tokens)]), jnp.int32)
    weights = jnp.asarray(draw.random(size=(tokens, top_k)), jnp.float32)
    gate, up = (jnp.asarray(draw.normal(size=(experts, intermediate, hidden)), dtype) for _ in range(2))
    down = jnp.asarray(draw.normal(size=(experts, hidden, intermediate)), dtype)
    return x, chosen, weights, gate, up, down


def by_hand(x, chosen, weights, gate, up, down, limit, absolute=False):
    """The sum, term by term; `absolute` takes the last product's terms without their signs."""
    x, weights, gate, up, down = (np.asarray(a, np.float64) for a in (x, weights, gate, up, down))
    y = np.zeros_like(x)
    for t, experts in enumerate(np.asarray(chosen)):
        for j, e in enumerate(experts):
            pre = gate[e] @ x[t]
            g, u = pre / (1 + np.exp(-pre)), up[e] @ x[t]
            if limit > 0:
                g, u = np.minimum(g, limit), np.clip(u, -limit, limit)
            y[t] += weights[t, j] * (np.abs(down[e]) @ np.abs(g * u) if absolute else down[e] @ (g * u))
    return y
