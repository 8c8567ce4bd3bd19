"""What is captured, traced, changed and cut in SmolLM2."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gguf", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("torch", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("transformers", reason="these tests need the extra `real`: `make real` installs it")

import torch
from small_engine import answer

import ling3

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
LAYERS = (0, 15, 29)


@pytest.fixture(scope="module")
def prompt(tokenizer):
    return tuple(tokenizer.apply_chat_template(QUESTION))


def test_a_capture_is_the_trace_and_transformers(engine, model, theirs, alone, prompt):
    """Of prompt and answer, within float32's rounding through 30 layers; the answer keeps its bits."""
    plain = ling3.SamplingParams(max_tokens=8, logprobs=1)
    seen = ling3.SamplingParams(max_tokens=8, logprobs=1, capture=ling3.Capture(residual=LAYERS, heads=[3]))
    (output,) = engine.generate([list(prompt)], seen)
    assert answer(output.outputs[0]) == answer(alone(prompt, plain).outputs[0])
    ids = [*prompt, *output.token_ids]
    assert output.captured.tokens == len(ids) and output.captured.heads[3].shape == (len(ids), 9, 64)
    states = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states
    trace = ling3.trace(model, jnp.asarray([ids], jnp.int32), logit_lens=False)
    for layer in LAYERS:
        found = output.captured.residual[layer]
        norms = np.linalg.norm(found, axis=-1)
        np.testing.assert_allclose(norms, trace.layers[layer].residual_norm[0], rtol=1e-4)
        if layer < 29:  # transformers' last one is normed
            expected = states[layer + 1][0].numpy()
            assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_an_intervention_changes_one_request(engine, alone, prompt):
    """A residual that is set to 0 ends in other tokens; who runs beside it keeps every bit."""
    plain = ling3.SamplingParams(max_tokens=8, logprobs=1)
    cut = ling3.SamplingParams(
        max_tokens=8, logprobs=1, interventions=[ling3.Intervention.set(29, "residual", 0.0, from_position=0)]
    )
    changed, beside = engine.generate([list(prompt)] * 2, [cut, plain])
    assert answer(beside.outputs[0]) == answer(alone(prompt, plain).outputs[0])
    assert changed.token_ids[0] != beside.token_ids[0]
    assert changed.logprobs[0].logprob == pytest.approx(-np.log(49152), rel=1e-5)  # all tokens alike


def test_layers_are_cut(model, theirs, prompt):
    """Without any attention of layer 7: what transformers says whose layer 7 projects to 0."""
    ids = list(prompt)
    without = ling3.ablate.no_attention(model, [7])
    row = jnp.asarray([ids], jnp.int32)
    weight = theirs.model.layers[7].self_attn.o_proj.weight
    kept = weight.clone()
    try:
        weight.zero_()
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    finally:
        weight.copy_(kept)
    found = np.asarray(without(row)[0])
    assert np.abs(found - expected).max() <= 2e-4
    assert np.abs(found - theirs(torch.tensor([ids])).logits[0].numpy()).max() > 0.1
