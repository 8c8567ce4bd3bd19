"""SmolLM2 beside llama.cpp, on the same GGUF file: ids, and how far llama.cpp's rounding moves its log-probabilities.

llama.cpp rounds the activations before each quantized matrix to 8 bits, in blocks of 32 with a scale of a 127th of the
largest one, and ling3 does not. So its log-probabilities are compared with the differences that this rounding makes in
transformers, whose unrounded ones are ling3's within 2e-4 (test_transformers.py). `pytest -s` prints the comparison.
"""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("gguf", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("torch", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("transformers", reason="these tests need the extra `real`: `make real` installs it")

import torch
from llama_server import LlamaServer
from smollm2_texts import PASSAGE, QUESTIONS, TEXTS

LIKELIEST = 5
WIDTH = 160


@pytest.fixture(scope="module")
def llama(file):
    return LlamaServer(file)


@pytest.fixture(scope="module")
def rows(tokenizer):
    """The ids of a passage and of chats, and the place in each from which on no other row has the same tokens."""
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]
    same = next(i for i, tokens in enumerate(zip(*chats)) if len(set(tokens)) > 1)
    return [(tokenizer.encode(PASSAGE), 0), *((ids, same) for ids in chats)]


@pytest.fixture(scope="module")
def ours(model, rows):
    """ling3's log-probabilities at every place."""
    return [
        log_softmax(model(jnp.asarray([[*ids, *[0] * (WIDTH - len(ids))]], jnp.int32))[0, : len(ids)])
        for ids, _ in rows
    ]


@pytest.fixture(scope="module")
def rounded(theirs, rows):
    """transformers' log-probabilities with activations that are rounded as llama.cpp's."""
    linear = [module for module in theirs.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_pre_hook(lambda _, given: (in_8_bits(given[0]),)) for module in linear]
    try:
        return [log_softmax(theirs(torch.tensor([ids])).logits[0].numpy()) for ids, _ in rows]
    finally:
        for hook in hooks:
            hook.remove()


def in_8_bits(x):
    """`x` rounded in blocks of 32 (ggml's Q8_0 and Q8_1)."""
    blocks = x.unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    return (torch.round(blocks / scale.clamp_min(1e-30)) * scale.half().float()).flatten(-2)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def rms(differences):
    return float(np.sqrt(np.mean(np.square(differences))))


def test_ids(llama, tokenizer):
    """All but those of texts with special tokens, which the server is told not to look for."""
    plain = [text for text in TEXTS if "<|" not in text]
    assert len(plain) >= 45
    for text in plain:
        assert tokenizer.encode(text, add_special_tokens=False) == llama.ids(text), text


def test_another_token_is_likeliest_only_where_rounding_can_make_it(llama, rows, ours, rounded):
    """Both hold what llama.cpp computes to be ling3's numbers with rounded activations, and no others:

    its log-probabilities are as far from ling3's as those of the emulated rounding, in the root mean square over the
    five likeliest tokens of each place (measured: 0.128 and 0.123 nats; a fourth more is allowed);
    another token is likeliest only where ling3's two candidates are closer than four standard deviations of the
    difference of two such log-probabilities, √2 times the emulated rounding's root mean square (measured: 0.192 nats
    at most, where 0.696 are allowed).
    """
    found, emulated, margins, places = [], [], [], 0
    for (ids, first), own, other in zip(rows, ours, rounded):
        for i in range(first, len(ids)):
            said = llama.likeliest(ids[: i + 1], LIKELIEST)
            best, chosen = max(said, key=said.__getitem__), int(own[i].argmax())
            found += [own[i, token] - said[token] for token in said]
            emulated += [own[i, token] - other[i, token] for token in said]
            places += 1
            if best != chosen:
                margins.append(own[i, chosen] - own[i, best])
    bound = 4 * np.sqrt(2) * rms(emulated)
    listed = ", ".join(f"{margin:.3f}" for margin in sorted(margins))
    print(
        f"\n{places} places: llama.cpp's log-probabilities differ by {np.median(np.abs(found)):.3f} nats in the "
        f"median, {rms(found):.3f} in the root mean square and {np.abs(found).max():.3f} at most; the emulated "
        f"rounding's by {np.median(np.abs(emulated)):.3f}, {rms(emulated):.3f} and {np.abs(emulated).max():.3f}. "
        f"Another token is likeliest at {len(margins)} places, with margins of {listed} nats; "
        f"the bound is {bound:.3f}"
    )
    assert places > 400
    assert rms(found) <= 1.25 * rms(emulated)
    assert max(margins, default=0) <= bound
