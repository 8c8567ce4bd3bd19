"""ling3's router against transformers' own, where biased scores are negative and where they tie."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from random_checkpoint import TINY_LIKE

torch = pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("transformers", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import reference  # noqa: E402
from oracle import transformers_config  # noqa: E402
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridTopkRouter  # noqa: E402

from ling3.layers.moe import Router  # noqa: E402

CONFIG = dataclasses.replace(TINY_LIKE, hidden_size=16)
TOKENS = 200


def routed(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The weight of each expert for each token, `[tokens, experts]`: ling3's, transformers', the equations'."""
    router = Router(
        weight=jnp.asarray(weight),
        expert_bias=jnp.asarray(bias),
        top_k=CONFIG.num_experts_per_tok,
        groups=CONFIG.n_group,
        top_groups=CONFIG.topk_group,
        normalize=CONFIG.norm_topk_prob,
        scaling=CONFIG.routed_scaling_factor,
    )
    chosen, weights = router(jnp.asarray(x))
    ours = np.zeros((len(x), CONFIG.num_experts), np.float32)
    np.put_along_axis(ours, np.asarray(chosen), np.asarray(weights), axis=1)

    oracle = BailingHybridTopkRouter(transformers_config(CONFIG))
    oracle.load_state_dict({"weight": torch.tensor(weight), "e_score_correction_bias": torch.tensor(bias)}, strict=True)
    with torch.no_grad():
        _, weights, chosen = oracle(torch.tensor(x))
    theirs = np.zeros_like(ours)
    np.put_along_axis(theirs, chosen.numpy(), weights.numpy(), axis=1)

    true, _ = reference.route(x.astype(np.float64) @ weight.astype(np.float64).T, bias.astype(np.float64), CONFIG)
    return ours, theirs, true


def test_negative_biased_scores():
    """Every biased score is below 0, so striking groups out with 0 in place of -inf would choose from those groups."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((n, CONFIG.hidden_size)).astype(np.float32) for n in (TOKENS, CONFIG.num_experts))
    bias = rng.uniform(-2.0, -1.0, CONFIG.num_experts).astype(np.float32)
    ours, theirs, true = routed(x, weight, bias)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours, true, rtol=0, atol=1e-6)


def test_ties():
    """Experts in equal pairs and groups in equal pairs: exact ties at both choices, since these products never round.

    Which of two equals torch's top-k takes is not defined, so against transformers the weights are compared sorted;
    ling3's own rule, the lower index, is that of the equations.
    """
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, (TOKENS, CONFIG.hidden_size)).astype(np.float32)
    pairs = rng.integers(-2, 3, (CONFIG.num_experts // 4, CONFIG.hidden_size)).astype(np.float32) / 8
    groups = np.repeat(pairs, 2, axis=0).reshape(2, 4, CONFIG.hidden_size)
    weight = np.concatenate([groups, groups], axis=1).reshape(CONFIG.num_experts, CONFIG.hidden_size)
    bias = np.full(CONFIG.num_experts, -0.75, np.float32)
    ours, theirs, true = routed(x, weight, bias)
    np.testing.assert_allclose(np.sort(ours, axis=1), np.sort(theirs, axis=1), rtol=0, atol=1e-6)
    np.testing.assert_allclose(ours, true, rtol=0, atol=1e-6)


def test_all_scores_equal():
    """A zero input: the first experts of the first groups, with equal weights."""
    zeros = np.zeros((1, CONFIG.hidden_size), np.float32)
    weight = np.ones((CONFIG.num_experts, CONFIG.hidden_size), np.float32)
    ours, theirs, _ = routed(zeros, weight, np.zeros(CONFIG.num_experts, np.float32))
    count = CONFIG.num_experts_per_tok
    np.testing.assert_allclose(ours[0, :count], CONFIG.routed_scaling_factor / count, rtol=1e-6)
    np.testing.assert_allclose(np.sort(ours), np.sort(theirs), rtol=0, atol=1e-6)


def test_weights_sum_to_the_scaling_factor():
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((n, CONFIG.hidden_size)).astype(np.float32) for n in (TOKENS, CONFIG.num_experts))
    ours, _, _ = routed(3 * x, weight, rng.uniform(-0.9, 0.1, CONFIG.num_experts).astype(np.float32))
    assert ((ours > 0).sum(axis=1) == CONFIG.num_experts_per_tok).all()
    np.testing.assert_allclose(ours.sum(axis=1), CONFIG.routed_scaling_factor, rtol=1e-6)
