"""Models with an adapter: the laws of the sum, every reader of a matrix, and what is refused."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantized_models
from exhaustive_cases import exhaustively
from random_adapters import random_adapter
from tiny import FLASH, TINY, open_model

import ling3
from ling3.adapters.adapter import LowRankUpdate, adaptable
from ling3.checkpoint.loading import dequantized
from ling3.engine.origins import checksum
from ling3.evals.predictions import fingerprint
from ling3.layers.adapted import AdaptedMatrix

TOKENS = jnp.asarray(np.random.default_rng(0).integers(3, 96, size=(2, 21)), jnp.int32)
PROMPTS = [[5, 6, 7], list(range(3, 40))]


@pytest.fixture(scope="module", params=exhaustively([FLASH, TINY], but=[FLASH]), ids=["flash", "tiny"])
def model(request):
    return open_model(request.param)


def bits(array):
    return np.asarray(array).view(np.int32)


def test_a_new_adapter_changes_no_bit(model):
    adapter = ling3.new_adapter(model, rank=3, key=jax.random.key(0), alpha=12)
    expected = model(TOKENS)
    np.testing.assert_array_equal(bits(ling3.with_adapter(model, adapter)(TOKENS)), bits(expected))
    merged = ling3.merge_adapter(model, adapter)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    for own, other in zip(jax.tree.leaves(merged), jax.tree.leaves(model), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.slow
def test_beside_the_weights_and_in_them(model):
    """The logits' standard deviation is near 1, and each layer sums in another order: 2e-4 as in parity."""
    adapter = random_adapter(model)
    beside, merged = ling3.with_adapter(model, adapter), ling3.merge_adapter(model, adapter)
    assert len(adapter.modules) == len(adaptable(model))
    found, expected = beside(TOKENS), merged(TOKENS)
    assert np.abs(np.asarray(found - model(TOKENS))).max() > 0.3
    np.testing.assert_allclose(found, expected, atol=2e-4)
    answers = ling3.generate(merged, PROMPTS, max_tokens=12, ignore_eos=True)
    assert ling3.generate(beside, PROMPTS, max_tokens=12, ignore_eos=True) == answers
    small = {"num_pages": 16, "page_size": 16, "max_model_len": 64, "chunked_prefill_size": 32, "token_paddings": (32,)}
    engine = ling3.Engine(beside, max_running_requests=2, **small)
    outputs = engine.generate(PROMPTS, ling3.SamplingParams(max_tokens=12, ignore_eos=True))
    assert [list(output.token_ids) for output in outputs] == answers


@pytest.mark.slow
def test_over_quantized_weights_it_is_that_of_their_numbers():
    """QLoRA: products of decoded numbers, in prefill and in a step, where MLA reads `kv_b_proj` in another form."""
    model = quantized_models.model("int4")
    plain = dequantized(model, jnp.float32)
    adapter = random_adapter(model)
    found, expected = (ling3.with_adapter(own, adapter) for own in (model, plain))
    tokens = TOKENS[:1]

    def both(own):
        logits, cache = own.step(tokens, own.init_cache(1, 32))
        return jnp.concatenate([logits, own.step(tokens[:, :1], cache)[0]], axis=1)

    assert np.abs(np.asarray(found(tokens) - model(tokens))).max() > 0.1
    np.testing.assert_allclose(both(found), both(expected), atol=2e-4)
    # Dequantizing a model that has an adapter reaches the matrix below it.
    assert jax.tree.structure(dequantized(found, jnp.float32)) == jax.tree.structure(expected)


@pytest.mark.thorough
def test_gradients_reach_every_a_and_b():
    """With B = 0, as training begins, only B has any; the experts' own weights are no part of the adapter."""
    model = open_model(FLASH)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(adapter, model):
        return jnp.mean(jax.nn.logsumexp(ling3.with_adapter(model, adapter)(TOKENS), axis=-1) ** 2)

    first = ling3.new_adapter(model, rank=2, key=jax.random.key(0), targets=".*", use_rslora=True)
    for name, update in gradient(first, model).modules.items():
        assert not update.lora_A.any() and update.lora_B.any(), name
    for name, update in gradient(random_adapter(model), model).modules.items():
        assert update.lora_A.any() and update.lora_B.any(), name


def test_what_a_new_adapter_has():
    model = open_model(TINY)
    adapter = ling3.new_adapter(model, rank=4, key=jax.random.key(0))
    assert adapter.modules.keys() == {own.module for own in adaptable(model)} - {"lm_head"}
    assert {(update.rank, update.alpha) for update in adapter.modules.values()} == {(4, 4.0)}
    for name, update in adapter.modules.items():
        bound = update.lora_A.shape[1] ** -0.5
        assert 0.5 * bound < np.abs(update.lora_A).max() <= bound and not update.lora_B.any(), name
    some = ling3.new_adapter(model, rank=1, alpha=2, key=jax.random.key(0), targets=["f_proj", "lm_head"])
    assert some.modules.keys() == {"lm_head", *(f"model.layers.{i}.self_attn.forget_gate.f_proj" for i in (0, 1))}
    assert some.scale("lm_head") == 2.0
    with pytest.raises(ling3.AdapterError, match=r"targets: no module has these names; .*q_a_proj.*:\n  gate"):
        ling3.new_adapter(model, rank=1, key=jax.random.key(0), targets=["q_proj", "gate"])
    with pytest.raises(ValueError, match="rank: found 0; expected at least 1"):
        ling3.new_adapter(model, rank=0, key=jax.random.key(0))


def one(model, name="model.layers.0.self_attn.q_proj", rows=16, columns=32):
    return ling3.Adapter({name: LowRankUpdate(jnp.zeros((2, columns)), jnp.zeros((rows, 2)), 1.0)})


def test_an_adapter_of_another_model_is_refused():
    model = open_model(TINY)
    for change in (ling3.with_adapter, ling3.merge_adapter):
        with pytest.raises(ling3.AdapterError, match=r"for another model: no module .*:\n  model.layers.9.x"):
            change(model, one(model, "model.layers.9.x"))
        with pytest.raises(ling3.AdapterError, match=r"q_proj.lora_A: found \[2, 31\]; expected \[2, 32\]"):
            change(model, one(model, columns=31))
        with pytest.raises(ling3.AdapterError, match=r"q_proj.lora_B: found \[17, 2\]; expected \[16, 2\]"):
            change(model, one(model, rows=17))
        with pytest.raises(ling3.AdapterError, match=r"has an adapter already.*:\n  model.layers.0.self_attn.q_proj"):
            change(ling3.with_adapter(model, one(model)), one(model))


def test_what_cannot_hold_an_adapter_is_refused(tmp_path):
    model = open_model(TINY)
    adapted = ling3.with_adapter(model, one(model))
    with pytest.raises(ling3.CheckpointError, match=r"q_proj.lora_A is of an adapter.*save_adapter.*merge_adapter"):
        ling3.save(adapted, tmp_path / "x")
    assert not list(tmp_path.iterdir())
    ling3.save(ling3.merge_adapter(model, one(model)), tmp_path / "x")
    with pytest.raises(
        ValueError, match=r"has an adapter, in model\.layers\.0\.attention\.q_proj and others: merge it first"
    ):
        ling3.ablate.variant(adapted, kda_decay=True)
    quantized = quantized_models.model("int4")
    hidden = quantized.config.hidden_size
    rows = quantized.config.num_attention_heads * quantized.config.head_dim
    with pytest.raises(ling3.AdapterError, match=r"quantized matrices; load .*=True, .*\n.*q_proj: PackedIntegers"):
        ling3.merge_adapter(quantized, one(quantized, rows=rows, columns=hidden))


@pytest.mark.thorough
def test_another_scale_is_another_model():
    """The identities of a model, for snapshots and for files of predictions, are those of before without an adapter."""
    model = open_model(TINY)
    name = "model.layers.0.self_attn.q_proj"
    update = one(model).modules[name]
    two = ling3.Adapter({name: dataclasses.replace(update, alpha=2.0)})
    models = [model, ling3.with_adapter(model, one(model)), ling3.with_adapter(model, two)]
    assert len({checksum(own) for own in models}) == len({fingerprint(own) for own in models}) == 3


def test_names_and_profiles_are_those_of_the_fields():
    model = open_model(TINY)
    matrix = ling3.with_adapter(model, one(model)).model.layers[0].attention.q_proj
    assert isinstance(matrix, AdaptedMatrix) and matrix.name == "q_proj"
    assert matrix.axes == model.model.layers[0].attention.q_proj.axes
    counted = ling3.with_adapter(model, one(model)).parameters - model.parameters
    assert counted == 2 * (16 + 32)
    assert dataclasses.replace(matrix, scale=2.0) != matrix
