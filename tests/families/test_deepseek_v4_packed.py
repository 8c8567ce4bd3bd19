"""DeepSeek-V4 with packed caches: what is read of them, what that loses, and the engine's promise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from deepseek_v4_checkpoint import WIDE
from family_laws import answers_in_company_and_alone, prompts

import ling3
from ling3.cache import Paged, is_paged, pages_of, slots_of
from ling3.engine.memory import Footprint
from ling3.families.deepseek_v4_config import HEAVY, SPARSE, DeepseekV4Config
from ling3.ops.packed_kv import ENTRIES, KEYS, hadamard

FEW = ling3.EngineSettings(max_running_requests=2, num_pages=4, page_size=8)


def drawn(**changes):
    """With other sinks, biases and hyper-connections than the first ones of a training."""
    keys = iter(jax.random.split(jax.random.key(1), 100))
    fresh = ling3.init(DeepseekV4Config.from_dict(WIDE | changes), key=jax.random.key(0), dtype=jnp.float32)

    def other(x):
        return x + 0.3 * jax.random.normal(next(keys), x.shape) if x.ndim == 1 and x.dtype == jnp.float32 else x

    return jax.tree.map(other, fresh)


@pytest.fixture(scope="module")
def model():
    return drawn()


def ids(seed, *shape):
    return np.random.default_rng(seed).integers(3, 64, size=shape).astype(np.int32)


def unpacked(node):
    """The same numbers as floats, which are read without a packing; keys as they were before their transform."""
    if not is_paged(node):
        return node
    entries = jax.vmap(lambda page: node.packing.unpack(page, node.page))(node.entries)
    return Paged(hadamard(entries) if node.packing is KEYS else entries, node.tokens)


def poisoned(node):
    """With NaN for the numbers of all entries from those of token 24 on."""
    if not is_paged(node):
        return node
    numbers = slice(24 // node.tokens * node.packing.numbers, node.page * node.packing.numbers)
    return dataclasses.replace(node, entries=node.entries.at[:, numbers].set(0x7F))


def test_only_what_lies_in_pages_is_packed(model):
    plain, packed = model.init_cache(2, 20), model.init_cache(2, 20, packed=True)
    pages = pages_of(packed.layers)
    assert [paged.packing for paged in pages] == [ENTRIES, KEYS, ENTRIES]
    assert {paged.entries.dtype for paged in pages} == {jnp.dtype(jnp.uint8)}
    for one, other in zip(*(jax.tree.leaves(slots_of(cache.layers)) for cache in (plain, packed)), strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert plain.capacity() == packed.capacity()
    narrow = jax.tree.leaves(slots_of(model.init_cache(2, 20, jnp.bfloat16, packed=True).layers))
    assert {x.dtype for x in narrow} == {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}  # windows, and tails


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
def test_what_is_read_is_what_the_bytes_say(model, width):
    """By a decode step, which reads the entries that it chooses, and by a prefill, which reads all: the logits are
    those over the same numbers as floats, whatever is in entries that are not there yet."""
    _, cache = model.step(ids(0, 2, 24), model.init_cache(2, 64, packed=True), np.asarray([24, 16], np.int32))
    layers = (jax.tree.map(change, cache.layers, is_leaf=is_paged) for change in (unpacked, poisoned))
    floats, dirty = (dataclasses.replace(cache, layers=own) for own in layers)
    one, other, same = (model.step(ids(1, 2, width), held)[0] for held in (cache, floats, dirty))
    np.testing.assert_array_equal(one, same)
    # The tokens complete no entry. Queries of the indexer are rounded to bfloat16 for the one: it chooses the same.
    np.testing.assert_allclose(one, other, atol=2e-5)


@pytest.mark.slow
def test_decode_reads_what_prefill_reads(model):
    """A prompt at once, and in two parts and then token by token: nearly all bytes are the same, and so are logits.

    Sums in another order may round a number in 10,000 to the next one of FP8 or bfloat16.
    """
    tokens = ids(2, 1, 24)
    whole, together = model.step(tokens, model.init_cache(1, 64, packed=True))
    parts, cache = [], model.init_cache(1, 64, packed=True)
    for start, end in ((0, 11), (11, 20), (20, 21), (21, 22), (22, 23), (23, 24)):
        new = np.zeros((1, 11 if start < 20 else 1), np.int32)
        new[0, : end - start] = tokens[0, start:end]
        logits, cache = model.step(new, cache, np.asarray([end - start], np.int32))
        parts.append(logits[:, : end - start])
    np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=1e-3)
    for one, other in zip(pages_of(cache.layers), pages_of(together.layers), strict=True):
        filled = np.count_nonzero(other.entries)
        assert filled and np.count_nonzero(one.entries != other.entries) <= 1e-3 * filled


def losses(model, tokens, **how):
    """The logits' difference from those over float32 caches (rms and largest, by the logits' deviation), the mean KL
    divergence in nats, and the share of tokens whose largest logit is another's."""
    length = tokens.shape[1]
    exact, other = (
        np.asarray(model.step(tokens, model.init_cache(1, length, **way))[0][0], np.float64) for way in ({}, how)
    )
    p, q = (np.asarray(jax.nn.log_softmax(x)) for x in (exact, other))
    distance = np.abs(other - exact) / np.std(exact)
    flipped = np.mean(exact.argmax(-1) != other.argmax(-1))
    return np.sqrt(np.mean(distance**2)), distance.max(), np.mean(np.sum(np.exp(p) * (p - q), axis=-1)), flipped


@pytest.mark.exhaustive
@pytest.mark.slow
def test_what_packing_loses_in_logits():
    """Over 300 tokens that see all their entries: FP8 rounds by at most 2^-4 of a number and bfloat16 by 2^-9.

    So packed entries lose at most 32 times what bfloat16 ones do, and less as the RoPE channels are bfloat16 in both
    and the window is float32 beside packed pages. Evenly spread, FP8's roundings take 2^-4 / √3 of an entry, and those
    of four layers add up like independent errors, to twice that.
    """
    every = drawn(hc_mult=4, index_topk=512, layer_types=[SPARSE, HEAVY] * 2, num_hidden_layers=4)
    narrow, packed = (losses(every, ids(0, 1, 300), **how) for how in ({"dtype": jnp.bfloat16}, {"packed": True}))
    for name, found in {"bfloat16": narrow, "packed": packed}.items():
        print(f"\n{name:8}: logits off by {found[0]:.4f} (rms), {found[1]:.3f} (largest) of their deviation, ", end="")
        print(f"KL divergence {found[2]:.1e} nats, {1 - found[3]:.3f} of the largest logits the same", end="")
    assert narrow[0] < packed[0] < 32 * narrow[0]
    assert packed[0] < 2 * 2**-4 / 3**0.5


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.exhaustive
def test_answers_are_the_same_bits_in_company_and_after_preemption(model):
    """From packed pages that were moved to the host and back, and after a known prefix."""
    params = [ling3.SamplingParams(max_tokens=20, temperature=t, seed=3, ignore_eos=True, logprobs=0) for t in (0, 1)]
    crowd, alone = answers_in_company_and_alone(model, prompts(3, 11, 8, 17, 1, 14), params * 3, cache_dtype="packed")
    assert crowd == alone


def test_an_engine_packs_its_pages_alone(model):
    pool = ling3.Engine(model, settings=FEW, cache_dtype="packed")._loop.runner.pool.layers
    assert {paged.entries.dtype for paged in pages_of(pool)} == {jnp.dtype(jnp.uint8)}
    assert {x.dtype for x in jax.tree.leaves(slots_of(pool))} == {jnp.dtype(jnp.float32)}


def test_an_engine_counts_bytes_of_packed_pages(model):
    settings = dataclasses.replace(FEW, page_size=256, cache_dtype="packed")
    page = Footprint.of(model, settings).page
    assert page == ENTRIES.bytes(64) + KEYS.bytes(64) + ENTRIES.bytes(32)
    assert Footprint.of(model, dataclasses.replace(settings, cache_dtype="float32")).page > 3 * page


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 256}, "layer 0: its entries have 256 channels, and packed ones have 512"),
        ({"qk_rope_head_dim": 32}, "layer 0: RoPE turns 32 channels of its entries, and 64 of packed ones"),
        ({"index_head_dim": 64}, "layer 0: its keys have 64 channels, and packed ones have 128"),
    ],
)
def test_entries_of_other_sizes_are_refused(changes, message):
    other = ling3.init(DeepseekV4Config.from_dict(WIDE | changes), key=jax.random.key(0))
    with pytest.raises(ValueError, match=f"cache_dtype is 'packed', expected 'auto', .* this model: {message}"):
        ling3.Engine(other, settings=FEW, cache_dtype="packed")
    with pytest.raises(ValueError, match=f"cannot be packed, keep them in a floating dtype: {message}"):
        other.init_cache(1, 8, packed=True)
