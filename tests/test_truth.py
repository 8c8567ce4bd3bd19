"""ling3's fp32 forward against the whole model written out in numpy float64 (`reference.py`)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_checkpoint import CLAMPED, FLASH_LIKE, TINY_LIKE, draw_well_posed, write

import ling3

CONFIGS = {
    "tiny-like": TINY_LIKE,
    "flash-like with clamps, no bound": dataclasses.replace(CLAMPED, kda_lower_bound=None),
    "a bound that needs smaller sub-chunks": dataclasses.replace(FLASH_LIKE, kda_lower_bound=-12.0),
}

# Logits have a standard deviation near 1, and fp32's rounding through four layers leaves 1e-6 in the median and 1e-5 at
# worst; another order of the same sums moves the worst by a factor of two or three. The smallest error made by other
# ports (an epsilon added to a mean and not to a sum) shows as 2e-4.
TOLERANCE = 5e-5


@pytest.fixture(scope="module", params=CONFIGS)
def question(request, tmp_path_factory):
    """A model loaded from its published layout, 130 tokens, and their true logits."""
    config, path = CONFIGS[request.param], tmp_path_factory.mktemp("checkpoint")
    weights, tokens, truth, _ = draw_well_posed(config, 130)
    write(path, config, weights)
    return ling3.load(path, dtype=jnp.float32), tokens, truth


def test_forward(question):
    model, tokens, truth = question
    logits = np.asarray(model(jnp.array([tokens]))[0])
    assert 0.7 < truth.std() < 1.4
    assert np.abs(logits - truth).max() <= TOLERANCE
    assert np.median(np.abs(logits - truth)) <= TOLERANCE / 20


def test_float64_is_the_truth(tmp_path):
    """In float64 nothing is left but the rounding of the logits to float32: 2^-24 of numbers below 8."""
    weights, tokens, truth, _ = draw_well_posed(TINY_LIKE, 130)
    write(tmp_path, TINY_LIKE, weights)
    with jax.enable_x64(True):
        model = ling3.load(tmp_path, dtype=jnp.float32)
        model = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), model)
        logits = np.asarray(model(jnp.array([tokens], jnp.int32))[0])
    assert np.abs(logits - truth).max() <= 5e-7


def test_token_by_token(question):
    """Absorbed MLA and the KDA recurrence, one token at a time on a cache, give the same logits."""
    model, tokens, truth = question
    cache = model.init_cache(1, len(tokens))
    for token, expected in zip(tokens, truth, strict=True):
        logits, cache = model.step(jnp.array([[token]]), cache)
        assert np.abs(np.asarray(logits[0, 0]) - expected).max() <= TOLERANCE
