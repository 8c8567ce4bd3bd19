"""SmolLM2 against transformers, on the same GGUF file: ids, chats, logits, greedy answers, perplexity."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("gguf", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("torch", reason="these tests need the extra `real`: `make real` installs it")
pytest.importorskip("transformers", reason="these tests need the extra `real`: `make real` installs it")

import torch
from smollm2_texts import CHATS, PASSAGE, QUESTIONS, TEXTS

import ling3
from ling3.evals.perplexity import log_likelihoods, perplexity, start_token

LOGITS = 2e-4
TIE = 1e-4  # half of what logits may differ by
GREEDY = ling3.SamplingParams(max_tokens=64)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """The ids of every question, as a chat."""
    return [tokenizer.apply_chat_template([{"role": "user", "content": question}]) for question in QUESTIONS]


def logits_of(theirs, ids):
    return theirs(torch.tensor([ids])).logits[0].numpy()


def padded(ids, size):
    """A row of one size, so that one program has all of them: no token knows of a later one."""
    return jnp.asarray([[*ids, *[0] * (size - len(ids))]], jnp.int32)


def test_ids_of_texts(tokenizer, their_tokenizer):
    assert len(set(TEXTS)) == 50
    for text in TEXTS:
        ids = their_tokenizer(text)["input_ids"]
        assert tokenizer.encode(text) == ids, text
        for skip in (False, True):
            said = their_tokenizer.decode(ids, skip_special_tokens=skip)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == said, text


@pytest.mark.parametrize("begins", [True, False])
def test_rendered_chats(tokenizer, their_tokenizer, begins):
    for chat in CHATS:
        how = {"tokenize": False, "add_generation_prompt": begins}
        text = their_tokenizer.apply_chat_template(chat, **how)
        assert tokenizer.apply_chat_template(chat, **how) == text
        ids = their_tokenizer.apply_chat_template(chat, add_generation_prompt=begins, return_dict=False)
        assert tokenizer.apply_chat_template(chat, add_generation_prompt=begins) == ids


def test_logits(model, theirs, prompts):
    for ids in prompts:
        found = np.asarray(model(padded(ids, 64))[0, : len(ids)])
        assert np.abs(found - logits_of(theirs, ids)).max() <= LOGITS


def test_greedy_answers(theirs, tokenizer, prompts, engine):
    """64 tokens of each, or up to its end, the same: but for ties, which transformers' logits must show to be ones."""
    width, end = max(map(len, prompts)), theirs.config.eos_token_id
    rows = torch.tensor([[end] * (width - len(ids)) + ids for ids in prompts])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    answers = theirs.generate(rows, attention_mask=mask, max_new_tokens=64, do_sample=False)[:, width:].tolist()
    outputs, ties = engine.generate(prompts, GREEDY), []
    for ids, answer, output in zip(prompts, answers, outputs, strict=True):
        expected = answer[: answer.index(end) + 1] if end in answer else answer
        found = list(output.token_ids)
        if found == expected:
            continue
        same = next(i for i, (ours, own) in enumerate(zip(found, expected, strict=False)) if ours != own)
        logits = logits_of(theirs, [*ids, *expected[:same]])[-1]
        assert logits.max() - logits[[found[same], expected[same]]].min() < TIE, tokenizer.decode(ids)
        ties.append(output.text)
    assert len(ties) <= 1, ties


def test_perplexity(model, theirs, tokenizer):
    """Whole, and over windows of which each scores what is new in it."""
    ids = [start_token(tokenizer), *tokenizer.encode(PASSAGE, add_special_tokens=False)]

    def scores(begin, end):
        given = torch.log_softmax(theirs(torch.tensor([ids[begin:end]])).logits[0].double(), -1)
        return given[torch.arange(end - begin), torch.tensor(ids[begin + 1 : end + 1])].numpy()

    count = len(ids) - 1
    nats = -scores(0, count).sum()
    found = perplexity(model, tokenizer, PASSAGE)
    assert found.tokens == count and found.perplexity == pytest.approx(math.exp(nats / count), rel=1e-4)
    assert 5 < found.perplexity < 40
    windows = [scores(0, 64)]
    for end in [*range(96, count, 32), count]:
        windows.append(scores(end - 64, end)[64 - (end - sum(map(len, windows))) :])
    ours = log_likelihoods(model, ids, context=64, stride=32)
    assert np.exp(-ours.mean()) == pytest.approx(np.exp(-np.concatenate(windows).mean()), rel=1e-4)
