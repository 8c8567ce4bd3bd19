"""The mechanisms of the comparison: their laws as mixers, and variants of one size."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.hybrids import HYBRIDS, KDA_SIZES, MIXERS, VARIANTS
from experiments.mechanisms import HeadDecay, decayed_attention
from ling3.cache import CacheSpec, Span
from ling3.layers.kda import KDA
from ling3.ops.kda import recurrent_kda

LINEAR = ("Gated DeltaNet", "Mamba-2", "lightning")


def test_without_the_delta_rule_it_is_the_recurrence_token_by_token():
    with jax.enable_x64(True):
        check_the_recurrence()


def check_the_recurrence():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, 2, 4))) for _ in range(3))
    g, beta = -jnp.asarray(rng.exponential(0.5, (2, 9, 2))), jnp.asarray(rng.uniform(size=(2, 9, 2)))
    S = start = jnp.asarray(rng.standard_normal((2, 2, 4, 4)))
    outputs = []
    for t in range(9):
        S = jnp.exp(g[:, t])[..., None, None] * S + (beta[:, t, :, None] * k[:, t])[..., None] * v[:, t, :, None]
        outputs.append(jnp.einsum("bhkv,bhk->bhv", S, q[:, t]))
    o, after = decayed_attention(q, k, v, g, beta, start)
    np.testing.assert_allclose(o, jnp.stack(outputs, axis=1), atol=1e-13)  # float64 sums of nine terms near 1
    np.testing.assert_allclose(after, S, atol=1e-13)


@pytest.mark.thorough
@pytest.mark.parametrize("name", LINEAR)
def test_any_split_is_the_whole_and_padding_changes_nothing(name):
    layer, x = MIXERS[name](jax.random.key(0)), jax.random.normal(jax.random.key(1), (2, 20, 64))
    assert isinstance(layer, HeadDecay)
    whole, last = layer(x, None, Span.whole(2, 20))
    state, outputs = layer.empty_state(CacheSpec(2, 0, 1, x.dtype)), []
    for i in range(0, 20, 5):  # five tokens and three columns of padding
        given = jnp.concatenate([x[:, i : i + 5], jnp.full((2, 3, 64), 9.0)], axis=1)
        y, state = layer(given, state, Span(jnp.full(2, i, jnp.int32), jnp.full(2, 5, jnp.int32)))
        outputs.append(y[:, :5])
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), whole, atol=2e-5)  # float32, values near 1
    np.testing.assert_allclose(state.recurrent, last.recurrent, atol=2e-5)


def test_with_one_decay_for_each_channel_alike_the_delta_rule_is_kdas():
    layer, x = HeadDecay.init(KDA_SIZES, key=jax.random.key(0)), jax.random.normal(jax.random.key(1), (1, 20, 64))
    span = Span.whole(1, 20)
    q, k, v, _ = layer.kda.convolved(x, jnp.zeros((1, 3, 192)), span)
    g = jnp.broadcast_to(layer.decay(x, span)[..., None], k.shape)
    o, _ = recurrent_kda(q, k, v, g, layer.kda.gates(x, span)[1], jnp.zeros((1, 2, 32, 32)))
    expected = layer.kda.projected(layer.kda.gated(o, layer.kda.output_gate(x), x.dtype))
    np.testing.assert_allclose(layer(x, None, span)[0], expected, atol=1e-5)  # float32, values near 1


@pytest.mark.thorough
def test_fixed_decays_are_not_trained():
    layer, x = MIXERS["lightning"](jax.random.key(0)), jax.random.normal(jax.random.key(1), (1, 8, 64))
    gradient = eqx.filter_grad(lambda layer: jnp.sum(layer(x, None, Span.whole(1, 8))[0]))(layer)
    assert not jnp.any(gradient.A_log) and jnp.any(gradient.kda.q_proj.weight)
    with pytest.raises(ValueError, match="expected a fixed decay without the delta rule"):
        HeadDecay.init(KDA_SIZES, key=jax.random.key(0), fixed=True)


@pytest.mark.thorough
def test_variants_differ_in_three_layers_and_match_in_parameters():
    experiment, sizes = HYBRIDS["recall"](), []
    for variant in VARIANTS:
        model = eqx.filter_eval_shape(experiment.model, variant, jax.random.key(0))
        kinds = [isinstance(layer.attention, KDA) for layer in model.model.layers]
        assert kinds == [variant not in MIXERS] * 3 + [False]
        sizes.append(sum(leaf.size for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.ShapeDtypeStruct)))
    assert 150_000 < max(sizes) <= 1.01 * min(sizes)
