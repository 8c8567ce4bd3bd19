"""A `tiktoken.model` against the `tiktoken` package, with the pieces that the published Kimi models have."""

import random

import pytest
from tokenizer_cases import KIMI_ROWS, kimi_ranks, load

tiktoken = pytest.importorskip("tiktoken", reason="tiktoken is not installed (the extra parity)")

# As published with Kimi-Linear-48B-A3B-Instruct.
PIECES = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PARTS = [
    "a", "aa", "aaa", "b", "ab", "A", "Ab", "the", " ", "  ", "\t", "\n", "\r\n", "'s", "'LL", "'", "ſ", "1", "234",
    "的", "你好", "é", "e\u0301", "\u3000", "\x85", "\u2028", "\u00a0", "ǅ", "ʰ", "!", "--", "😀", "မြ", "\u200d", "½",
    "[EOS]", "<|im_end|>", "<|tool_call_begin|>", "<|reserved_token_404|>", "[BO",
]  # fmt: skip


@pytest.fixture(scope="module")
def theirs():
    ranks, backend = kimi_ranks(), load("tiktoken").backend
    special = {backend.id_to_token(token): token for token in range(len(ranks), KIMI_ROWS)}
    return tiktoken.Encoding("made up", pat_str=PIECES, mergeable_ranks=ranks, special_tokens=special)


def test_the_special_tokens_fill_the_model_s_rows():
    tokenizer = load("tiktoken")
    first = len(kimi_ranks())
    named = [tokenizer.backend.id_to_token(first + place) for place in (0, 1, 4, 100)]
    assert named == ["[BOS]", "[EOS]", f"<|reserved_token_{first + 4}|>", "[PAD]"]
    assert tokenizer.vocab_size == KIMI_ROWS and tokenizer.eos_token_ids == (first + 1,)
    assert tokenizer.decode([first + 5, first + 2]) == "<|tool_call_begin|>", "which is not special"


def test_ids(theirs):
    ours, draw = load("tiktoken"), random.Random(0)
    for _ in range(5_000):
        text = "".join(draw.choices(PARTS, k=draw.randrange(40)))
        if draw.random() < 0.2:
            text += "".join(chr(draw.randrange(0x20, 0xD7FF)) for _ in range(20))
        ids = theirs.encode(text, allowed_special="all")
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids) == text


def test_every_character(theirs):
    """Beside a letter, so that the pieces of one unlike the other's would show."""
    ours = load("tiktoken")
    for start in range(0, 0x110000, 64):
        text = "".join(f"a{chr(code)}b " for code in range(start, start + 64) if not 0xD800 <= code < 0xE000)
        assert ours.encode(text) == theirs.encode(text), hex(start)


def test_texts_of_bytes(theirs):
    ours, draw = load("tiktoken"), random.Random(1)
    for _ in range(1_000):
        ids = [draw.randrange(len(kimi_ranks())) for _ in range(12)]
        assert ours.decode(ids) == theirs.decode(ids)
        assert b"".join(map(ours.token_bytes, ids)) == theirs.decode_bytes(ids)
