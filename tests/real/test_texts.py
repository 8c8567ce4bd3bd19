"""Its tokenizer and its chat template, as in transformers."""

import pytest
from real_texts import CHATS, TEXTS


def test_ids_of_fifty_texts(tokenizer, oracle_tokenizer):
    assert len(set(TEXTS)) == 50
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == oracle_tokenizer(text)["input_ids"], text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == oracle_tokenizer.decode(ids, skip_special_tokens=skip), text


@pytest.mark.parametrize("chat", CHATS)
def test_rendered_chats(tokenizer, oracle_tokenizer, chat):
    text = oracle_tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(chat, tokenize=False) == text
    ids = oracle_tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert tokenizer.apply_chat_template(chat) == ids


def test_a_stream_is_the_text(tokenizer):
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for skip in (True, False):
            decoder = tokenizer.stream((), skip)
            pieces = [*(decoder.feed([token]) for token in ids), decoder.flush()]
            assert "".join(pieces) == tokenizer.decode(ids, skip), text


def test_it_writes_no_tool_calls(tokenizer):
    """The published template shows no tools, so the server refuses them."""
    assert tokenizer.tool_form is None
