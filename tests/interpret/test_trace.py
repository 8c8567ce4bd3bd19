"""What a trace shows is what the model computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from einops import einsum
from exhaustive_cases import exhaustively
from tiny import FLASH, TINY, UNBOUNDED, open_model

import ling3
from ling3.cache import CacheSpec, Span

pytestmark = pytest.mark.thorough

TOKENS = jax.random.randint(jax.random.key(1), (2, 21), 0, TINY.vocab_size)
SPAN = Span(jnp.zeros(2, jnp.int32), jnp.full(2, 21, jnp.int32))
# Sums of 32 float32 products in another order, of outputs of size 1.
ROUNDING = 3e-5


@pytest.fixture(scope="module", params=exhaustively([FLASH, UNBOUNDED], but=[FLASH]), ids=["flash", "unbounded"])
def traced(request):
    model = open_model(request.param)
    return model, ling3.trace(model, TOKENS)


def test_the_logits_are_the_models(traced):
    model, seen = traced
    np.testing.assert_allclose(seen.logits, model(TOKENS), atol=ROUNDING)
    assert np.array_equal(seen.layers[-1].logits, seen.logits)


@pytest.mark.slow
def test_attention_maps_times_values_are_the_attentions_outputs(traced):
    model, seen = traced
    x = model.model.word_embeddings.embed(TOKENS)
    for layer, inside in zip(model.model.layers, seen.layers, strict=True):
        attention, normed = layer.attention, layer.input_layernorm(x)
        expected, memory = attention(normed, None, SPAN)
        weights = inside.attention.attention_map
        assert np.all(np.triu(weights, 1) == 0)
        if isinstance(inside.attention, type(seen.kda[0])):
            _, _, v, _ = attention.convolved(normed, attention.empty_state(CacheSpec(2, 0, 1, jnp.float32)).conv, SPAN)
            o = einsum(weights, v, "b h i j, b j h v -> b i h v")
            heads = attention.gated(o, inside.attention.gate, jnp.float32)
            np.testing.assert_allclose(inside.attention.state, memory.recurrent, atol=ROUNDING)
            norms = jnp.linalg.norm(memory.recurrent, axis=(-2, -1))
            np.testing.assert_allclose(inside.attention.state_norm[:, -1], norms, rtol=1e-5)
        else:
            np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
            latent = inside.attention.entries[..., : -attention.rope]
            v = attention.kv_b_proj(latent).reshape(2, 21, weights.shape[1], -1)[..., attention.nope :]
            heads = attention.gated(einsum(weights, v, "b h i j, b j h v -> b i h v"), inside.attention.gate)
        np.testing.assert_allclose(attention.projected(heads), expected, atol=ROUNDING)
        np.testing.assert_allclose(inside.attention_norm, jnp.linalg.norm(expected, axis=-1), rtol=1e-5)
        x, _ = layer(x, None, SPAN)
        np.testing.assert_allclose(inside.residual_norm, jnp.linalg.norm(x, axis=-1), rtol=1e-5)


def test_gates_lie_where_their_laws_put_them(traced):
    model, seen = traced
    for inside in seen.kda.values():
        bound = model.config.kda_lower_bound
        assert np.all(inside.decay <= 0) and (bound is None or np.all(inside.decay >= bound))
        assert np.all((inside.beta > 0) & (inside.beta < 1)) and np.all((inside.gate > 0) & (inside.gate < 1))
    assert sorted(seen.kda) + sorted(seen.mla) == sorted(
        range(len(seen.layers)), key=lambda i: (model.config.attention_kind(i) == "mla", i)
    )


def test_loads_are_the_shares_of_the_choices(traced):
    model, seen = traced
    assert sorted(seen.moe) == list(range(1, len(seen.layers)))
    for inside in seen.moe.values():
        counts = np.bincount(np.asarray(inside.chosen).ravel(), minlength=model.config.num_experts)
        np.testing.assert_allclose(inside.load, counts / counts.sum(), rtol=1e-6)
        scaling = np.full(inside.weights.shape[:2], model.config.routed_scaling_factor)
        np.testing.assert_allclose(inside.weights.sum(-1), scaling, rtol=1e-5)


def test_the_lens_can_be_left_out_and_no_tokens_are_refused():
    model = open_model(TINY)
    assert all(layer.logits is None for layer in ling3.trace(model, TOKENS, logit_lens=False).layers)
    with pytest.raises(ValueError, match="at least one row and one column"):
        ling3.trace(model, TOKENS[:, :0])
