import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ling3.text.detokenizer import StopStrings, StreamDecoder
from ling3.train.tokenizer import train_tokenizer

TEXT = "hello 你好, wörld \U0001f600!"
BACKEND = train_tokenizer([TEXT] * 3, 400)
# The last has no token, the first two are special.
IDS = st.lists(st.integers(0, BACKEND.get_vocab_size()), max_size=40)
# Bytes that only make up characters together.
BYTES = [i for i in range(BACKEND.get_vocab_size()) if BACKEND.decode([i]).startswith("\ufffd")]


def in_pieces(draw, sequence):
    """`sequence` cut at random."""
    cuts = sorted(draw(st.lists(st.integers(0, len(sequence)), max_size=8)))
    return [sequence[i:j] for i, j in zip([0, *cuts], [*cuts, len(sequence)], strict=True)]


@settings(deadline=None)
@given(st.data())
def test_deltas_make_up_what_is_decoded_at_once(data):
    ids = data.draw(st.one_of(IDS, st.lists(st.sampled_from(BYTES), max_size=40)))
    for skip in (True, False):
        decoder = StreamDecoder(BACKEND, skip_special_tokens=skip)
        deltas = [decoder.feed(piece) for piece in in_pieces(data.draw, ids)]
        assert "".join(deltas) + decoder.flush() == BACKEND.decode(ids, skip_special_tokens=skip)


@settings(deadline=None)
@given(st.text(max_size=12), st.text(max_size=12))
def test_no_replacement_characters_and_no_prompt(prompt, text):
    before, ids = BACKEND.encode(prompt).ids, BACKEND.encode(text).ids
    decoder = StreamDecoder(BACKEND, before)
    deltas = [decoder.feed([token]) for token in ids]
    assert "".join(deltas) == BACKEND.decode(ids)
    assert decoder.flush() == ""
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)


def test_a_prompt_may_end_inside_a_character():
    bytewise = train_tokenizer([], 352)
    ids = bytewise.encode(TEXT).ids
    assert len(ids) > len(TEXT)
    for cut in range(len(ids) + 1):
        decoder = StreamDecoder(bytewise, ids[:cut])
        shown = bytewise.decode(ids[:cut]).rstrip("\ufffd")
        assert shown + decoder.feed(ids[cut:]) + decoder.flush() == (TEXT if cut < len(ids) else shown)


def test_an_unfinished_character_is_held_back_until_the_end():
    bytewise = train_tokenizer([], 352)
    decoder = StreamDecoder(bytewise)
    assert decoder.feed(bytewise.encode("a好").ids[:-1]) == "a"
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


@pytest.mark.parametrize("token", [0, BYTES[0], BACKEND.get_vocab_size()], ids=["special", "stray byte", "no token"])
def test_time_is_linear(token):
    def seconds(count):
        decoder = StreamDecoder(BACKEND)
        begin = time.process_time()
        decoder.feed([token] * count)
        return time.process_time() - begin

    seconds(100)
    assert seconds(20_000) < 30 * seconds(2_000) + 0.1


@settings(deadline=None)
@given(st.data())
def test_stops_do_not_depend_on_how_the_text_is_cut(data):
    """Nor does a stop that is complete in the first pieces, where none may end the text."""
    letters = st.text("ab", max_size=30)
    text, stops = data.draw(letters), data.draw(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
    pieces = in_pieces(data.draw, text)
    free = data.draw(st.integers(0, len(pieces)))
    cutter = StopStrings(stops)
    shown = "".join(cutter.feed(piece, may_stop=i >= free) for i, piece in enumerate(pieces))
    shown += cutter.flush()
    first = len("".join(pieces[:free])) + 1
    ends = [
        (end, end - len(stop), stop)
        for stop in stops
        for end in range(first, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    assert (shown, cutter.stopped) == ((text[: min(ends)[1]], min(ends)[2]) if ends else (text, None))


def test_a_possible_stop_is_held_back():
    cutter = StopStrings(["</answer>", "\n\n"])
    pieces = ["4.\n", "5</ans", "ere", "</answer> 6", "7"]
    assert [cutter.feed(piece) for piece in pieces] == ["4.", "\n5", "</ansere", "", ""]
    assert cutter.stopped == "</answer>"


@pytest.mark.parametrize("stops", [[""], ["a", ""]])
def test_an_empty_stop_is_refused(stops):
    with pytest.raises(ValueError, match="not empty"):
        StopStrings(stops)
