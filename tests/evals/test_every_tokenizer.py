"""Evaluations on every tokenizer: what stands before a text; scores and texts are compared in tests/parity."""

import pytest
from tokenizer_cases import MAKERS, load

from ling3.evals.perplexity import start_token
from ling3.evals.prompts import Question
from ling3.evals.run import prepare

FIRST = {
    "byte-level": "<|role_end|>",
    "sentencepiece": "<s>",
    "published": "<EOT>",
    "tiktoken": "[BOS]",
    "smollm2": "<|im_start|>",
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_token_before_a_text(name):
    """The one that begins a text, or else the one that ends it."""
    tokenizer = load(name)
    assert tokenizer.decode([start_token(tokenizer)], skip_special_tokens=False) == FIRST[name]


def test_a_question_begins_with_one_bos():
    """Which the post-processor adds, or the chat template writes."""
    tokenizer = load("sentencepiece")
    for chat in (None, "auto"):
        (asked,) = prepare(tokenizer, [Question("the cat", "1")], chat)
        assert asked.ids[0] == 1 and asked.ids.count(1) == 1
