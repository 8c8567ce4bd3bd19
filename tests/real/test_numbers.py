"""Its numbers: those of transformers, and what 8 and 4 bits change of them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from real_texts import PASSAGE, QUESTIONS

import ling3
from ling3.evals.perplexity import log_likelihoods
from ling3.layers.quantized import QuantizedMatrix

GREEDY = ling3.SamplingParams(max_tokens=64, logprobs=1)
FORMATS = ("int8", "fp8", "int4")
# How much the passage's nats per token may rise, and the logits' root mean square differ: twice what was measured.
LIMITS = {"int8": (0.01, 0.15), "fp8": (0.04, 0.8), "int4": (0.3, 2.5)}


def chat(question):
    return [{"role": "user", "content": question}]


@pytest.fixture(scope="module")
def answers(engine):
    """The greedy answers to all questions, made together."""
    return engine.generate([chat(question) for question in QUESTIONS], GREEDY)


@pytest.fixture(scope="module")
def expected(answers, oracle):
    """transformers' logits of each prompt and answer, by one pass over both."""
    with torch.inference_mode():
        whole = [torch.tensor([[*answer.prompt_token_ids, *answer.token_ids]]) for answer in answers]
        return [oracle(ids, use_cache=False).logits[0] for ids in whole]


def test_logits(answers, expected, model, logits):
    for answer, scores in zip(answers, expected, strict=True):
        ids = answer.prompt_token_ids
        np.testing.assert_allclose(np.asarray(logits(model, ids)), scores[: len(ids)].numpy(), rtol=0, atol=2e-4)


def test_sixty_four_greedy_tokens(answers, expected):
    """Each is the likeliest after those before it, and the answer is as long as transformers would make it."""
    for question, answer, scores in zip(QUESTIONS, answers, expected, strict=True):
        chosen = scores[len(answer.prompt_token_ids) - 1 : -1].argmax(-1).tolist()
        assert chosen == list(answer.token_ids), question
        assert len(answer.token_ids) == 64 or (answer.finish_reason, chosen[-1]) == ("stop", 2)
    assert "Paris" in answers[0].text and "Shakespeare" in answers[1].text


def test_log_probabilities(answers, expected):
    for answer, scores in zip(answers, expected, strict=True):
        chosen = scores[len(answer.prompt_token_ids) - 1 : -1].log_softmax(-1).max(-1).values
        np.testing.assert_allclose([each.logprob for each in answer.logprobs], chosen.numpy(), rtol=0, atol=2e-4)


def test_perplexity(model, oracle, tokenizer):
    ids = tokenizer.encode(PASSAGE)
    with torch.inference_mode():
        expected = float(oracle(torch.tensor([ids]), labels=torch.tensor([ids])).loss)
    found = -float(np.mean(log_likelihoods(model, ids)))
    assert math.isclose(found, expected, rel_tol=1e-5)
    assert 2 < found < 4, "a passage in plain English, which it has not seen"


@pytest.fixture(scope="module", params=FORMATS)
def quantized(request, directory, tmp_path_factory):
    out = tmp_path_factory.mktemp("quantized") / request.param
    # Its 576 columns are four and a half blocks of FP8, and eighteen groups of 32.
    ling3.quantize(directory, out, request.param)
    return request.param, out


def test_in_fewer_bits(quantized, model, tokenizer, logits, make_engine):
    """Its decoded weights' numbers, near to those of the weights themselves, and sensible answers."""
    form, out = quantized
    fewer, decoded = (ling3.load(out, dtype=jnp.float32, dequantize=plain) for plain in (False, True))
    matrices = [each for each in jax.tree.leaves(fewer, is_leaf=_quantized) if _quantized(each)]
    assert len(matrices) == 7 * 30 and not any(map(_quantized, jax.tree.leaves(decoded, is_leaf=_quantized)))
    ids = tokenizer.apply_chat_template(chat(QUESTIONS[0]))
    found, same, plain = (np.asarray(logits(each, ids)) for each in (fewer, decoded, model))
    np.testing.assert_allclose(found, same, rtol=0, atol=2e-4)
    nats, differ = LIMITS[form]
    assert np.sqrt(np.mean((found - plain) ** 2)) < differ
    text = tokenizer.encode(PASSAGE)
    worse = np.mean(log_likelihoods(model, text)) - np.mean(log_likelihoods(fewer, text))
    print(form, "rms", np.sqrt(np.mean((found - plain) ** 2)), "nats", worse)
    assert worse < nats
    (answer,) = make_engine(fewer).generate([chat(QUESTIONS[0])], GREEDY)
    print(answer.text)
    assert "Paris" in answer.text


def _quantized(module):
    return isinstance(module, QuantizedMatrix)
