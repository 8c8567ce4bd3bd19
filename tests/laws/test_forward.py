"""Laws of the whole model: one definition for one token or many, in any company."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from exhaustive_cases import exhaustively
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import FLASH, TINY, UNBOUNDED, open_model

from ling3.cache import KDAState

# Every law holds in float64 up to the rounding of the logits themselves to float32 (4e-7 at size 4); the float32 runs
# show that nothing overflows, and that two orders of summation stay within what these random layers amplify.
CASES = {
    "tiny": (TINY, jnp.float32, 1e-3),
    "flash": (FLASH, jnp.float32, 1e-3),
    "unbounded": (UNBOUNDED, jnp.float32, 1e-3),
    "tiny-float64": (TINY, jnp.float64, 1e-6),
    "flash-float64": (FLASH, jnp.float64, 1e-6),
    "unbounded-float64": (UNBOUNDED, jnp.float64, 1e-6),
}


@pytest.fixture(params=exhaustively(CASES, but=["tiny-float64"]))
def name(request):
    with jax.enable_x64(CASES[request.param][1] == jnp.float64):
        yield request.param


def case(name):
    config, dtype, close = CASES[name]
    return open_model(config, dtype=dtype), close


def ids(seed, *shape):
    return np.random.default_rng(seed).integers(3, TINY.vocab_size, size=shape).astype(np.int32)


def padded(tokens, width):
    """The tokens, right-padded to so many columns."""
    return np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])))


def counts(*lengths):
    return np.asarray(lengths, np.int32)


def test_logits_are_wide_enough_to_tell(name):
    model, _ = case(name)
    logits = np.asarray(model(ids(0, 3, 40)))
    assert logits.dtype == jnp.float32 and 0.3 < logits.std() < 3


def test_prefill_is_decode(name):
    model, close = case(name)
    tokens = ids(1, 3, 40)
    cache, logits = model.init_cache(3, 256), []
    for t in range(40):
        step, cache = model.step(tokens[:, t : t + 1], cache)
        logits.append(step)
    np.testing.assert_allclose(np.concatenate(logits, axis=1), model(tokens), atol=close)
    np.testing.assert_array_equal(cache.length, [40, 40, 40])


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 64), min_size=2, max_size=4), seed=st.integers(0, 99))
def test_any_split_of_a_prompt_is_the_whole(name, cuts, seed):
    """Parts go in right-padded to 64 columns, or as they are where they are one token: the decode form."""
    model, close = case(name)
    tokens = ids(seed, 1, 256)
    whole, together = model.step(tokens, model.init_cache(1, 256), counts(sum(cuts)))
    cache, parts, start = model.init_cache(1, 256), [], 0
    for cut in cuts:
        part = padded(tokens[:, start : start + cut], 1 if cut == 1 else 64)
        logits, cache = model.step(part, cache, counts(cut))
        parts.append(np.asarray(logits)[:, :cut])
        start += cut
    np.testing.assert_allclose(np.concatenate(parts, axis=1), np.asarray(whole)[:, :start], atol=close)
    for one, other in zip(jax.tree.leaves(cache), jax.tree.leaves(together), strict=True):
        np.testing.assert_allclose(one, other, atol=close)


@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 40), min_size=3, max_size=3), more=st.integers(1, 7), seed=st.integers(0, 99))
def test_a_batch_is_each_row_alone(name, lengths, more, seed):
    """Unequal lengths, right padding, an empty row: then everyone goes on together."""
    model, close = case(name)
    tokens, rest = ids(seed, 3, 40), ids(seed + 1, 3, 7)
    batch, cache = model.step(tokens, model.init_cache(3, 256), counts(*lengths))
    after, cache = model.step(rest, cache, counts(more, more, more), last=True)
    batch, after = np.asarray(batch), np.asarray(after)
    for row, length in enumerate(lengths):
        alone = np.concatenate([tokens[row : row + 1, :length], rest[row : row + 1, :more]], axis=1)
        expected = np.asarray(model.step(padded(alone, 64), model.init_cache(1, 256), counts(length + more))[0])
        np.testing.assert_allclose(batch[row, :length], expected[0, :length], atol=close)
        np.testing.assert_allclose(after[row, 0], expected[0, length + more - 1], atol=close)
    np.testing.assert_array_equal(cache.length, np.asarray(lengths) + more)


def test_a_row_without_tokens_keeps_its_memory_bit_for_bit(name):
    model, _ = case(name)
    _, cache = model.step(ids(2, 3, 40), model.init_cache(3, 256), counts(20, 20, 20))
    _, after = model.step(ids(3, 3, 40), cache, counts(5, 0, 40))
    memories = jax.tree.map(np.asarray, [eqx.filter(c.layers, eqx.is_inexact_array) for c in (cache, after)])
    for before, now in zip(*map(jax.tree.leaves, memories), strict=True):
        np.testing.assert_array_equal(before[1], now[1])
        assert np.any(before[0] != now[0]) and np.any(before[2] != now[2])


def test_nan_in_unused_memory_changes_nothing(name):
    """Poison every cache entry past a row's length, and another row's states: the row's bits stay."""
    model, _ = case(name)
    tokens, more = ids(4, 3, 40), ids(5, 3, 40)
    _, cache = model.step(tokens, model.init_cache(3, 256), counts(20, 20, 20))

    def poison(leaf, *places):
        poisoned = np.array(leaf)
        for place in places:
            poisoned[place] = np.nan
        return jnp.asarray(poisoned)

    def poison_state(state):
        if isinstance(state, KDAState):
            return jax.tree.map(lambda x: poison(x, 1), state)
        return eqx.tree_at(lambda s: s.entries, state, poison(state.entries, (0, np.s_[20:]), 1))

    poisoned = eqx.tree_at(lambda c: c.layers, cache, tuple(poison_state(state) for state in cache.layers))
    for width, length in ((1, 1), (40, 3)):
        clean, dirty = (
            np.asarray(model.step(more[:, :width], memory, counts(length, length, length))[0])
            for memory in (cache, poisoned)
        )
        np.testing.assert_array_equal(clean[[0, 2]], dirty[[0, 2]])
        assert np.all(np.isnan(dirty[1]))


@pytest.mark.thorough
def test_no_token_sees_a_later_one(name):
    """The gradient of token t's logits by token t+1's embedding is exactly 0; by earlier ones it is not."""
    model, _ = case(name)
    tokens = jnp.arange(3, 27, dtype=jnp.int32)[None]  # every token its own row of the table

    def scalar(table):
        embedded = eqx.tree_at(lambda m: m.model.word_embeddings.weight, model, table)
        return jnp.sum(embedded(tokens)[0, 11] ** 2)

    gradient = np.abs(jax.jit(jax.grad(scalar))(model.model.word_embeddings.weight))[3:27].sum(axis=-1)
    assert np.all(gradient[12:] == 0) and np.all(gradient[:12] > 0)


@pytest.mark.parametrize(("held", "length"), [(256, 1), (250, 7), (0, -1), (0, 41)])
def test_what_does_not_fit_is_nan_and_not_a_guess(held, length):
    model = open_model(TINY)
    cache = model.init_cache(3, 256)
    cache = eqx.tree_at(lambda c: c.length, cache, jnp.asarray([held, 0, 0], jnp.int32))
    logits = np.asarray(model.step(ids(9, 3, 40), cache, counts(length, 40, 20))[0])
    assert np.all(np.isnan(logits[0])) and np.all(np.isfinite(logits[1:]))


@pytest.mark.parametrize("shape", [(1, 0), (0, 3)])
def test_no_tokens_are_refused(shape):
    model = open_model(TINY)
    with pytest.raises(ValueError, match="expected at least"):
        model(jnp.zeros(shape, jnp.int32))
    with pytest.raises(ValueError, match="expected at least"):
        model.step(jnp.zeros(shape, jnp.int32), model.init_cache(shape[0], 8))


@pytest.mark.slow
@settings(max_examples=5)
@given(
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([4, 10]),
    group=st.integers(1, 3),
    layers=st.integers(1, 3),
    q_rank=st.sampled_from([None, 6]),
    latent=st.sampled_from([6, 20]),
    rope=st.sampled_from([2, 6]),
    value=st.sampled_from([4, 9]),
    experts=st.sampled_from([(4, 1, 1, 2), (12, 3, 2, 3)]),
    bound=st.sampled_from([-5.0, -0.5, None]),
    taps=st.integers(2, 5),
)
def test_prefill_is_decode_for_any_sizes(
    heads, head_dim, group, layers, q_rank, latent, rope, value, experts, bound, taps
):
    count, groups, top_groups, top_k = experts
    config = dataclasses.replace(
        TINY,
        num_hidden_layers=layers,
        layer_group_size=group,
        num_attention_heads=heads,
        head_dim=head_dim,
        q_lora_rank=q_rank,
        kv_lora_rank=latent,
        qk_rope_head_dim=rope,
        v_head_dim=value,
        num_experts=count,
        n_group=groups,
        topk_group=top_groups,
        num_experts_per_tok=top_k,
        kda_lower_bound=bound,
        short_conv_kernel_size=taps,
    )
    with jax.enable_x64(True):
        model = open_model(config, dtype=jnp.float64)
        tokens, cache, parts = ids(layers, 2, 21), model.init_cache(2, 21), []
        for t in range(21):
            logits, cache = model.step(tokens[:, t : t + 1], cache)
            parts.append(logits)
        np.testing.assert_allclose(np.concatenate(parts, axis=1), model(tokens), atol=1e-6)


def test_padding_past_the_end_of_the_cache_writes_nothing(name):
    """250 of 256 places are taken: 6 tokens fit, their 58 columns of padding do not."""
    model, close = case(name)
    tokens = ids(7, 1, 256)
    whole, _ = model.step(tokens, model.init_cache(1, 256), counts(256))
    _, cache = model.step(tokens, model.init_cache(1, 256), counts(250))
    narrow, after = model.step(padded(tokens[:, 250:], 64), cache, counts(6))
    np.testing.assert_allclose(np.asarray(narrow)[0, :6], np.asarray(whole)[0, 250:], atol=close)
    np.testing.assert_array_equal(after.length, [256])
