"""What holds of any tokenizer: texts come back, and a stream shows what `decode` does."""

import unicodedata

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizer_cases import MAKERS, after, load, lost_bytes, parts_of_characters

BURMESE = "မင်္ဂလာပါ ကမ္ဘာလောက"
TEXTS = st.one_of(st.text(max_size=20), st.text("ab e你😀é\n ", max_size=20), st.text(BURMESE, max_size=20))
every = pytest.mark.parametrize("name", MAKERS)


def some_ids(data, name):
    """Any ids, also without a token, or parts of characters, or a text's."""
    tokens = st.integers(0, load(name).vocab_size)
    parts = st.sampled_from(parts_of_characters(name))
    drawn = data.draw(st.one_of(st.lists(tokens, max_size=30), st.lists(parts, max_size=30), TEXTS))
    return load(name).encode(drawn) if isinstance(drawn, str) else drawn


def streamed(tokenizer, prompt, ids, skip=True):
    decoder = tokenizer.stream(prompt, skip)
    return "".join([*(decoder.feed([token]) for token in ids), decoder.flush()])


@every
@settings(deadline=None)
@given(text=TEXTS)
def test_a_text_comes_back(name, text):
    tokenizer = load(name)
    text = unicodedata.normalize("NFKC", text)
    assume(lost_bytes(name).isdisjoint(text.encode()))
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    # Where all bytes make up characters, that is what the tokenizers library shows.
    assert tokenizer.backend.decode(ids) == text


@every
@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_stream_shows_what_is_decoded_after_the_prompt(name, data):
    tokenizer = load(name)
    prompt, ids = some_ids(data, name), some_ids(data, name)
    for skip in (True, False):
        assert streamed(tokenizer, prompt, ids, skip) == after(tokenizer, prompt, ids, skip)


@every
def test_a_text_goes_on_at_any_character(name):
    tokenizer = load(name)
    for text in (BURMESE, "the cat 😀😀 sat on 你好, the mat"):
        ids = tokenizer.encode(text)
        for cut in range(1, len(ids)):
            before, after = tokenizer.decode(ids[:cut]), streamed(tokenizer, ids[:cut], ids[cut:])
            assert before.rstrip("\ufffd") + after == text and "\ufffd" not in after


@every
def test_a_blank_at_the_beginning_of_an_answer_is_shown(name):
    tokenizer = load(name)
    prompt, ids = tokenizer.encode("the"), tokenizer.encode("the cat")
    assert ids[: len(prompt)] == prompt
    assert streamed(tokenizer, prompt, ids[len(prompt) :]) == " cat"


@every
def test_no_character_waits_for_the_next(name):
    """Nor does a run of byte tokens wait for its end."""
    tokenizer = load(name)
    ids = tokenizer.encode(BURMESE)
    decoder, shown = tokenizer.stream(), ""
    for count, token in enumerate(ids, 1):
        shown += decoder.feed([token])
        # A blank that shares a token with a part of a character comes with the character.
        assert shown.rstrip() == tokenizer.decode(ids[:count]).rstrip("\ufffd ")


def test_an_invalid_byte_is_all_that_is_lost():
    tokenizer = load("sentencepiece")
    whole, half = tokenizer.encode("😀", add_special_tokens=False), tokenizer.encode("é", add_special_tokens=False)[:2]
    ids = [*whole, *half]
    assert tokenizer.decode(ids) == streamed(tokenizer, [], ids)
    assert tokenizer.decode(ids).startswith("😀")
