"""SmolLM2 in 8 and 4 bits: the logits of its dequantized weights, and how near it stays to what it was."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gguf", reason="these tests need the extra `real`: `make real` installs it")

from exhaustive_cases import exhaustively
from smollm2_texts import PASSAGE

import ling3
from ling3.evals.perplexity import log_likelihoods

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Nats per token that the passage may cost more: half as much again as was measured, 0.303, -0.0003 and 0.029.
COST = {"int4": 0.45, "int8": 0.003, "fp8": 0.043}


def nats(model, ids):
    """Per token of a text."""
    return -log_likelihoods(model, ids, context=128).mean()


@pytest.mark.parametrize("to", exhaustively(COST, but=["int4"]))
def test_it_is_quantized(to, file, model, tokenizer, new_engine, tmp_path):
    ling3.save(ling3.load(file, dequantize=True), tmp_path / "bfloat16")
    ling3.quantize(tmp_path / "bfloat16", tmp_path / "x", to)
    own, dense = (ling3.load(tmp_path / "x", dtype=jnp.float32, dequantize=it) for it in (False, True))
    ids = tokenizer.encode(PASSAGE)
    row = jnp.asarray([ids[:64]], jnp.int32)
    assert np.abs(np.asarray(own(row)) - np.asarray(dense(row))).max() <= 2e-4  # transformers' bound, in float32
    assert nats(own, ids) - nats(model, ids) < COST[to]
    (output,) = new_engine(own, prefix_cache=False).generate([QUESTION], ling3.SamplingParams(max_tokens=12))
    assert "Paris" in output.text
