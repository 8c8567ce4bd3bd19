"""What holds of every model, on a tiny one of each family of plain transformers."""

import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import published_transformers as published
import pytest
import safetensors.numpy

import ling3
from ling3 import train
from ling3.families.llama import LlamaConfig
from ling3.families.mistral import MistralConfig
from ling3.families.qwen2 import Qwen2Config
from ling3.families.qwen3 import Qwen3Config
from ling3.families.qwen3_moe import Qwen3MoeConfig
from ling3.interpret.inspect import report

SIZES = {
    "head_dim": 8,
    "hidden_size": 16,
    "initializer_range": 0.3,
    "intermediate_size": 24,
    "max_position_embeddings": 256,
    "max_window_layers": 0,
    "moe_intermediate_size": 12,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
IDS = {"bos_token_id": 0, "eos_token_id": 1}
# Each with what sets its family apart; windows are shorter than the sequences.
CASES = {
    "llama": (
        LlamaConfig,
        published.LLAMA_32_1B,
        {"rope_scaling": published.LLAMA_32_1B["rope_scaling"] | {"original_max_position_embeddings": 64}},
    ),
    "mistral": (MistralConfig, published.MISTRAL_V01, {"sliding_window": 12}),
    "qwen2": (Qwen2Config, published.QWEN25_05B, {"use_sliding_window": True, "sliding_window": 12}),
    "qwen3": (Qwen3Config, published.QWEN3_06B, {}),
    "qwen3-moe": (Qwen3MoeConfig, published.QWEN3_30B_A3B, {"mlp_only_layers": [0], "num_hidden_layers": 2}),
}
WIDTH = 24


@pytest.fixture(params=CASES)
def model(request):
    return open_model(request.param)


@functools.cache
def open_model(name):
    """A random model in float32, its norms and biases too."""
    kind, base, own = CASES[name]
    raw = {key: SIZES.get(key, value) for key, value in base.items()} | IDS | own
    draw = np.random.default_rng(0)
    model = ling3.init(kind.from_dict(raw), key=jax.random.key(0), dtype=jnp.float32)
    return jax.tree.map(
        lambda x: x + jnp.asarray(draw.uniform(-0.5, 0.5, x.shape), x.dtype) if x.ndim == 1 else x, model
    )


def ids(*lengths):
    draw = np.random.default_rng(0)
    return [draw.integers(2, 64, size=length).tolist() for length in lengths]


def test_step_is_the_forward_pass(model):
    """A prompt of unequal lengths on a cache, and then a token: what whole sequences say, beyond a window too."""
    rows = ids(20, 5)
    padded = jnp.asarray([row + [0] * (WIDTH - len(row)) for row in rows], jnp.int32)
    whole = model(padded.at[0, 20].set(7).at[1, 5].set(7))
    prompt, cache = model.step(padded, model.init_cache(2, 64), jnp.asarray([20, 5], jnp.int32))
    token, _ = model.step(jnp.full((2, 1), 7, jnp.int32), cache)
    assert 0.3 < whole.std() < 6
    for row, length in enumerate((20, 5)):
        np.testing.assert_allclose(prompt[row, :length], whole[row, :length], atol=2e-5)
        np.testing.assert_allclose(token[row, 0], whole[row, length], atol=2e-5)


def test_answers_are_generates_in_company_and_alone(model):
    prompts = ids(3, 18, 9, 14)
    expected = ling3.generate(model, prompts, max_tokens=12, ignore_eos=True)
    assert len({tuple(tokens) for tokens in expected}) == 4
    engine = ling3.Engine(
        model,
        max_running_requests=3,
        num_pages=7,
        page_size=8,
        chunked_prefill_size=8,
        token_paddings=(8,),
        decode_rows=3,
        decode_steps=2,
        max_model_len=32,
    )
    params = ling3.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0)
    crowd = [output.outputs[0] for output in engine.generate(prompts, params)]
    assert [list(output.token_ids) for output in crowd] == expected
    assert engine.stats().preemptions
    for prompt, output in zip(prompts, crowd, strict=True):
        (alone,) = engine.generate([prompt], params)
        assert (alone.token_ids, alone.logprobs) == (output.token_ids, output.logprobs)


def test_it_is_saved_and_loaded_bit_for_bit(model, tmp_path):
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, model)
    for kept, own in ((model, tmp_path / "float32"), (half, tmp_path / "bfloat16")):
        ling3.save(kept, own)
        loaded = ling3.load(own)
        assert loaded.config == model.config and jax.tree.structure(loaded) == jax.tree.structure(model)
        for stored, array in zip(jax.tree.leaves(loaded), jax.tree.leaves(kept), strict=True):
            assert stored.dtype == array.dtype and jnp.array_equal(stored, array)
        ling3.save(loaded, tmp_path / "again")
        first, second = (safetensors.numpy.load_file(path / "model.safetensors") for path in (own, tmp_path / "again"))
        assert first.keys() == second.keys()
        assert all(array.tobytes() == second[name].tobytes() for name, array in first.items())
        assert (own / "config.json").read_text() == (tmp_path / "again" / "config.json").read_text()
        shutil.rmtree(tmp_path / "again")


def test_it_is_inspected(model):
    config = model.config
    described = report(config, jnp.float32)
    assert described.parameters == sum(leaf.size for leaf in jax.tree.leaves(model))
    entry = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    assert described.memory.cache_per_token == 4 * entry
    kinds = [(layer["attention"], layer["mlp"]) for layer in described.to_dict()["layers"]]
    assert kinds == ([("gqa", "dense"), ("gqa", "moe")] if config.num_hidden_layers == 2 else [("gqa", "dense")])


def test_it_is_traced(model):
    tokens = jnp.asarray(ids(WIDTH), jnp.int32)
    seen = ling3.trace(model, tokens)
    inside, config = seen.layers[-1].attention, model.config
    assert sorted(inside) == ["entries", "o", "q"]
    assert inside["q"].shape == (1, WIDTH, config.num_attention_heads, config.head_dim)
    np.testing.assert_allclose(seen.layers[-1].logits, model(tokens), atol=2e-5)
    assert sorted(seen.moe) == ([1] if config.num_hidden_layers == 2 else [])


def test_training_lowers_the_loss(model):
    tokens = jnp.asarray(ids(WIDTH) * 2, jnp.int32)
    losses = []
    train.train(
        model,
        [train.Batch(tokens, jnp.ones(tokens.shape))] * 6,
        train.Optimization(steps=6, learning_rate=1e-2, warmup=1),
        every=1,
        report=lambda point, _: losses.append(point.loss),
    )
    assert losses[-1] < 0.8 * losses[0]
