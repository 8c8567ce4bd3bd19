"""Absorbed and expanded MLA are the same attention."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import FLASH, TINY, open_model

import ling3
from ling3.cache import CacheSpec, Paged, Span
from ling3.formats import KeyValueHalves
from ling3.layers.mla import MLA

CALL = eqx.filter_jit(lambda mla, x, state, span: mla(x, state, span))


def first_mla(config):
    return next(layer.attention for layer in open_model(config).model.layers if isinstance(layer.attention, MLA))


IN_HALVES = dataclasses.replace(TINY, qk_nope_head_dim=32, kv_lora_rank=32)


def in_halves(mla):
    """The layer with a `kv_b_proj` that is stored in two halves of different block types."""
    sizes = {"nope": mla.nope, "value": mla.value, "blocks": ("Q5_0", "Q8_0")}
    halves = KeyValueHalves.init(mla.kv_b_proj, key=jax.random.key(3), std=0.2, **sizes)
    return eqx.tree_at(lambda own: own.kv_b_proj, mla, halves)


@pytest.mark.parametrize("config", [TINY, FLASH, IN_HALVES], ids=["q_lora", "q_proj", "halves"])
@pytest.mark.parametrize("held", [0, 1, 255, 300])
def test_absorbed_is_expanded(config, held):
    mla = first_mla(config)
    mla = in_halves(mla) if config is IN_HALVES else mla
    draw = np.random.default_rng(held)
    context = jnp.asarray(draw.normal(size=(2, max(held, 1), config.hidden_size)), jnp.float32)
    x = jnp.asarray(draw.normal(size=(2, 1, config.hidden_size)), jnp.float32)
    cache, table = mla.empty_state(CacheSpec(2, 4, 256, jnp.float32)), jnp.arange(4, dtype=jnp.int32).reshape(2, 2)
    none = jnp.zeros(2, jnp.int32)
    _, cache = CALL(mla, context, cache, Span(none, none + held, table))
    span = Span(none + held, none + 1, table)
    absorbed, cache_one = CALL(mla, x, cache, span)
    padded = jnp.pad(x, ((0, 0), (0, 1), (0, 0)))  # two columns, one of them padding: the expanded form
    expanded, cache_two = CALL(mla, padded, cache, span)
    np.testing.assert_allclose(absorbed[:, 0], expanded[:, 0], atol=2e-6)
    np.testing.assert_allclose(cache_one.entries, cache_two.entries, atol=2e-6)


def test_a_token_of_the_published_model_leaves_576_numbers():
    structure = eqx.filter_eval_shape(ling3.init, ling3.Ling3Config(), key=jax.random.key(0), dtype=jnp.bfloat16)
    cache = eqx.filter_eval_shape(lambda model: model.init_cache(3, 100), structure)
    latents = [layer.entries for layer in cache.layers if isinstance(layer, Paged)]
    assert [latent.shape for latent in latents] == [(3, 256, 576)] * 6


def test_the_gate_multiplies_each_head():
    """With the gate's weights at 0 every head is halved: sigmoid(0) = 1/2, before `dense`."""
    mla = first_mla(TINY)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, TINY.hidden_size)), jnp.float32)
    span = Span.whole(1, 5)
    half = eqx.tree_at(lambda m: m.g_proj.weight, mla, jnp.zeros_like(mla.g_proj.weight))
    double = eqx.tree_at(lambda m: m.dense.weight, half, 2 * mla.dense.weight)
    (whole, _), (halved, _), (doubled, _) = (CALL(m, x, None, span) for m in (mla, half, double))
    np.testing.assert_allclose(2 * halved, doubled, rtol=1e-6)
    assert np.max(np.abs(np.asarray(halved - whole))) > 1e-3

    ungated = np.asarray(mla.g_proj(x, dtype=jnp.float32))  # the gate comes before `dense`: undone there, head by head
    gates = np.repeat(1 / (1 + np.exp(-ungated)), TINY.v_head_dim, axis=-1)
    heads = np.linalg.lstsq(
        np.asarray(mla.dense.weight, np.float64), 2 * np.asarray(halved[0], np.float64).T, rcond=None
    )[0].T
    np.testing.assert_allclose(whole[0], (heads * gates[0]) @ np.asarray(mla.dense.weight, np.float64).T, atol=1e-5)
