"""The router's choices and weights, and the sum of routed and shared experts."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import FLASH, TINY

from ling3.cache import Span
from ling3.families.ling3 import moe_config
from ling3.layers.moe import MoE, Router

CALL = eqx.filter_jit(lambda module, *arguments: module(*arguments))


def router(weight, bias, *, top_k=2, groups=4, top_groups=2, normalize=True, scaling=2.5):
    return Router(
        jnp.asarray(weight, jnp.float32), jnp.asarray(bias, jnp.float32), top_k, groups, top_groups, normalize, scaling
    )


def by_hand(x, weight, bias, top_k, groups, top_groups, scaling):
    """Chosen experts, best first, ties to the lower index; and their weights."""
    scores = 1 / (1 + np.exp(-(np.asarray(x, np.float32) @ np.asarray(weight, np.float32).T).astype(np.float64)))
    chosen = []
    for row in scores + bias:
        grouped = row.reshape(groups, -1)
        best = np.sort(grouped, axis=1)[:, -2:].sum(axis=1)
        kept = np.argsort(-best, kind="stable")[:top_groups]
        masked = np.where(np.isin(np.arange(groups), kept)[:, None], grouped, -np.inf).reshape(-1)
        chosen.append(np.argsort(-masked, kind="stable")[:top_k])
    weights = np.take_along_axis(scores, np.asarray(chosen), axis=1)
    return np.asarray(chosen), scaling * weights / (weights.sum(axis=1, keepdims=True) + 1e-20)


@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), shift=st.sampled_from([-3.0, -0.5, 0.0, 2.0]), top_groups=st.integers(1, 4))
def test_choices_and_weights(seed, shift, top_groups):
    """A shift of -3 makes every biased score negative: groups masked with 0 would then win."""
    draw = np.random.default_rng(seed)
    x, weight, bias = draw.normal(size=(9, 6)), draw.normal(size=(16, 6)), draw.normal(size=16) + shift
    chosen, weights = CALL(router(weight, bias, top_groups=top_groups), jnp.asarray(x, jnp.float32))
    expected, expected_weights = by_hand(x, weight, bias, 2, 4, top_groups, 2.5)
    np.testing.assert_array_equal(chosen, expected)
    np.testing.assert_allclose(weights, expected_weights, rtol=3e-6)
    np.testing.assert_allclose(np.sum(weights, axis=1), 2.5, rtol=1e-6)


def test_ties_go_to_the_lower_index():
    chosen, weights = router(np.zeros((8, 3)), np.zeros(8))(jnp.ones((2, 3), jnp.float32))
    np.testing.assert_array_equal(chosen, [[0, 1], [0, 1]])
    np.testing.assert_allclose(weights, 1.25, rtol=1e-6)


def test_the_bias_chooses_and_does_not_weigh():
    x, weight = jnp.ones((1, 3), jnp.float32), np.random.default_rng(0).normal(size=(8, 3))
    free, free_weights = router(weight, np.zeros(8), groups=1, top_groups=1)(x)
    last = int(np.setdiff1d(np.arange(8), np.asarray(free))[0])
    chosen, weights = router(weight, 10.0 * np.eye(8)[last], groups=1, top_groups=1)(x)
    assert last in np.asarray(chosen) and int(free[0, 0]) in np.asarray(chosen)
    scores = np.asarray(router(weight, np.zeros(8)).scores(x))[0]
    picked = scores[np.asarray(chosen[0])]
    np.testing.assert_allclose(weights[0], 2.5 * picked / picked.sum(), rtol=1e-6)
    assert not np.allclose(np.sort(weights), np.sort(free_weights))


def test_without_normalisation_the_weights_are_the_scores():
    r = router(np.random.default_rng(0).normal(size=(8, 3)), np.zeros(8), normalize=False, scaling=2.0)
    x = jnp.ones((2, 3), jnp.float32)
    chosen, weights = r(x)
    np.testing.assert_allclose(
        weights, 2.0 * np.take_along_axis(np.asarray(r.scores(x)), np.asarray(chosen), 1), rtol=1e-6
    )


@pytest.mark.parametrize("config", [TINY, FLASH], ids=["plain", "clamped"])
def test_routed_and_shared_experts_add_up(config):
    moe = MoE.init(moe_config(config, 1), key=jax.random.key(0), dtype=jnp.float32)
    x = 3 * jax.random.normal(jax.random.key(1), (2, 5, config.hidden_size))
    chosen, weights = moe.gate(x.reshape(10, -1))

    def expert(gate, up, down, limit, row):
        pre = np.asarray(gate, np.float64) @ row
        silu, linear = pre / (1 + np.exp(-pre)), np.asarray(up, np.float64) @ row
        if limit > 0:
            silu, linear = np.minimum(silu, limit), np.clip(linear, -limit, limit)
        return np.asarray(down, np.float64) @ (silu * linear)

    experts, shared = moe.experts, moe.shared_experts
    limit = 0.5 if config is FLASH else 0.0
    expected = np.stack(
        [
            sum(
                float(w)
                * expert(
                    experts.gate_proj.weight[e], experts.up_proj.weight[e], experts.down_proj.weight[e], limit, row
                )
                for e, w in zip(es, ws, strict=True)
            )
            + expert(shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight, limit, row)
            for row, es, ws in zip(
                np.asarray(x, np.float64).reshape(10, -1), np.asarray(chosen), np.asarray(weights), strict=True
            )
        ]
    )
    np.testing.assert_allclose(np.asarray(CALL(moe, x, Span.whole(*x.shape[:2]))).reshape(10, -1), expected, atol=2e-5)


def test_a_model_may_have_no_shared_expert():
    config = dataclasses.replace(TINY, num_shared_experts=0)
    moe = MoE.init(moe_config(config, 1), key=jax.random.key(0), dtype=jnp.float32)
    x = jnp.ones((1, 2, config.hidden_size))
    chosen, weights = moe.gate(x[0])
    assert moe.shared_experts is None
    np.testing.assert_array_equal(moe(x, Span.whole(1, 2))[0], moe.experts(x[0], chosen, weights))
