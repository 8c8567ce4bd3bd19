"""Rows without a token cost nothing: they are zeros through the model, and kernels pass over zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_engine
import tiny_transformers
from exhaustive_cases import exhaustively
from native_kernels import installed, needs_compiler
from tiny import FLASH, TINY, open_model

import ling3
from ling3.cache import Span
from ling3.engine import sampling
from ling3.execution import PLAIN
from ling3.runtime.recorder import Recorder


@pytest.mark.slow
@pytest.mark.parametrize("seq", [1, 20])
@pytest.mark.parametrize("name", exhaustively(["tiny", "flash", "qwen3-moe"], but=["tiny", "qwen3-moe"]))
def test_padding_stays_zeros(name, seq):
    """After a prefill that left something in the memory of every row."""
    own = {"tiny": TINY, "flash": FLASH}
    model = open_model(own[name]) if name in own else tiny_transformers.open_model(name)
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 60, (3, 20)), jnp.int32)
    _, cache = model.step(tokens, model.init_cache(3, 64))
    lengths, recorder = jnp.asarray([0, 1, seq], jnp.int32), Recorder()
    model.model(tokens[:, :seq], cache.layers, Span(cache.length, lengths, cache.table, PLAIN, recorder))
    padding = np.arange(seq)[None] >= np.asarray(lengths)[:, None]
    for i in range(len(model.model.layers)):
        found = recorder.values[f"layers.{i}.residual"]
        assert not np.asarray(found)[padding].any() and np.asarray(found)[~padding].all(axis=-1).all()


@needs_compiler
@pytest.mark.slow
@pytest.mark.optimized
def test_answers_keep_their_bits_on_the_kernels(monkeypatch):
    """Alone, three of four rows of every call are idle; in company few are."""
    monkeypatch.setattr(sampling, "MANY", 0)
    params = [
        ling3.SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2, temperature=[0, 0.9][i % 2], seed=i)
        for i in range(len(small_engine.PROMPTS))
    ]
    with installed():
        engine = small_engine.engine(text=False, prefix_cache=False)
        together = engine.generate(small_engine.PROMPTS, params)
        for prompt, own, expected in zip(small_engine.PROMPTS, params, together, strict=True):
            (alone,) = engine.generate([prompt], own)
            assert (alone.token_ids, alone.logprobs) == (expected.token_ids, expected.logprobs)
    jax.clear_caches()
