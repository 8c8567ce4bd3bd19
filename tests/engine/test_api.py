"""What is asked and what is answered: prompts, params, deltas, completions, counts."""

import dataclasses
import itertools
import time

import numpy as np
import pytest
from scripted_runner import after, scripted
from small_engine import ENDS, PAGES, SLOTS, answer, answers, balanced, idle, tokenizer

from ling3 import SamplingParams

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
CHAT = [{"role": "user", "content": "hi"}]
PROMPTS = [[7, 8, 9], list(range(20, 65)), [11], list(range(100, 170)), [12, 13]]


@pytest.fixture(scope="module")
def shared():
    return scripted()


@pytest.fixture
def served(shared):
    """The engine of this module; each test leaves it idle."""
    yield shared
    assert idle(shared)


# Prompts


def test_prompts_come_as_text_ids_or_chat(served):
    text, chat = tokenizer().encode("hello"), tokenizer().apply_chat_template(CHAT)
    expected = answers(served.generate([text, chat], GREEDY))
    assert answers(served.generate(["hello", CHAT], GREEDY)) == expected
    assert answers(served.generate(iter(["hello", chat]), GREEDY)) == expected
    assert answers(served.generate([np.asarray(text), tuple(chat)], GREEDY)) == expected
    for one, alone in (("hello", 0), (text, 0), (np.asarray(text), 0), (CHAT, 1), (tuple(chat), 1)):
        (output,) = served.generate(one, GREEDY)
        assert answers([output]) == expected[alone : alone + 1]
        assert output.prompt == (one if isinstance(one, str) else None)
        assert list(output.prompt_token_ids) == (chat if alone else text)
    assert served.generate([], GREEDY) == []


def test_a_sampling_parameter_by_its_name_is_told_where_it_belongs(served):
    with pytest.raises(TypeError, match=r"no max_tokens=…: give sampling parameters as SamplingParams\(max_tokens=…\)"):
        served.generate(["hello"], max_tokens=5)


# Seeds and completions


def test_a_seed_that_was_drawn_is_reported_and_repeats_the_text(served):
    params = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)
    first, second = served.generate([PROMPTS[0]] * 2, params)
    assert first.token_ids != second.token_ids
    for output in (first, second):
        (again,) = served.generate([PROMPTS[0]], dataclasses.replace(params, seed=output.outputs[0].seed))
        assert answers([again]) == answers([output])


def test_n_completions_have_seeds_in_a_row(served):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=40, n=6, ignore_eos=True, logprobs=2)
    before = served.stats()
    (output,) = served.generate([PROMPTS[0]], params)
    assert served.stats().prefill_calls == before.prefill_calls + 1
    assert [c.cached_tokens for c in output.outputs] == [0] + [len(PROMPTS[0]) - 1] * 5
    assert [c.index for c in output.outputs] == list(range(6))
    assert [c.seed for c in output.outputs] == list(range(40, 46))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 6
    for completion in output.outputs:
        (single,) = served.generate([PROMPTS[0]], dataclasses.replace(params, n=1, seed=completion.seed))
        assert answer(completion) == answer(single.outputs[0])
    first = output.outputs[0]
    assert (output.text, output.token_ids, output.logprobs) == (first.text, first.token_ids, first.logprobs)
    assert (output.finish_reason, output.error, output.timings) == ("length", None, first.timings)


# Ends


@pytest.fixture(scope="module")
def alphabet():
    """An engine that says the alphabet, one letter a token, and then bytes of 你, 字 and é; and a text with an end."""
    spell = tokenizer().encode
    return scripted(after([*spell("abcdefghijklmnopqrstuvwxyz你字é")], [*spell("AB"), ENDS[0]]))


def test_stop_ids_end_and_min_tokens_puts_them_off(alphabet):
    (stop,) = tokenizer().encode("d")
    params = SamplingParams(max_tokens=20, stop_token_ids=[stop, 399])
    (output,) = alphabet.generate("a", params)
    assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == ("bc", "stop", stop)
    assert output.token_ids[-1] == stop
    # The third token may be the end once there are two before it, and not once there must be three.
    assert alphabet.generate("a", dataclasses.replace(params, min_tokens=2))[0].token_ids == output.token_ids
    (later,) = alphabet.generate("a", dataclasses.replace(params, min_tokens=3))
    assert later.token_ids[2] != stop
    # An end that is also asked for ends in spite of `ignore_eos`.
    (asked,) = alphabet.generate("A", SamplingParams(max_tokens=9, ignore_eos=True, stop_token_ids=[ENDS[0]]))
    assert asked.outputs[0].stop_reason == ENDS[0]


@pytest.mark.parametrize(
    ("stop", "text", "reason", "tokens"),
    [
        ("f", "bcde", "f", 5),
        ("b", "", "b", 1),
        ("defghijkl", "bc", "defghijkl", 11),
        (["xyz", "ghi"], "bcdef", "ghi", 8),
        (["cdefg", "ef"], "bcd", "ef", 5),
        (["fgh", "efgh", "gh"], "bcd", "efgh", 7),
        (["gh", "fgh"], "bcde", "fgh", 7),
        (["hij", "hij", "hi"], "bcdefg", "hi", 8),
        ("z你", "bcdefghijklmnopqrstuvwxy", "z你", 28),
        ("字", "bcdefghijklmnopqrstuvwxyz你", "字", 31),
        (["\ufffd", "é"], "bcdefghijklmnopqrstuvwxyz你字", "é", 33),
        (["mX", "fghX"], "bcdefghijklmnopqrstuvwxyz你字é", None, 33),
        ("éX", "bcdefghijklmnopqrstuvwxyz你字é", None, 33),
    ],
)
def test_a_stop_string_ends_the_text_before_it(alphabet, stop, text, reason, tokens):
    """Earliest first, across tokens and calls, inside no character; and no delta shows a part of it."""
    params = SamplingParams(max_tokens=33, stop=stop, logprobs=0)
    (output,) = alphabet.generate("a", params)
    assert (output.text, output.outputs[0].stop_reason, len(output.token_ids)) == (text, reason, tokens)
    assert output.finish_reason == ("length" if reason is None else "stop")
    assert len(output.logprobs) == tokens
    shown = ""
    for delta in alphabet.stream("a", params):
        shown += delta.text
        assert text.startswith(shown)
    assert shown == text


def test_a_stop_string_before_min_tokens_is_text(alphabet):
    for stop, least, text in ((["d", "h"], 4, "bcdefg"), ("defg", 5, "bc"), ("defg", 6, "bc"), ("defg", 7, "bcdefghi")):
        (output,) = alphabet.generate("a", SamplingParams(max_tokens=8, stop=stop, min_tokens=least))
        assert output.text == text


def test_a_stop_that_an_unfinished_character_completes(alphabet):
    """At the end what is left of a character is shown as U+FFFD, and that is text like any other."""
    params = SamplingParams(max_tokens=27, stop="z\ufffd")
    (output,) = alphabet.generate("a", params)
    assert (output.text, output.finish_reason) == ("bcdefghijklmnopqrstuvwxy", "stop")
    assert output.outputs[0].stop_reason == "z\ufffd"


def test_any_piece_of_any_text_can_stop_it(served):
    """Against the whole text of a random model, bytes of broken characters and all."""
    draw = np.random.default_rng(0)
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=5, ignore_eos=True)
    (free,) = served.generate([PROMPTS[0]], params)
    text = free.text
    assert text == tokenizer().decode(free.token_ids)
    prompts, stops = [], []
    for _ in range(40):
        begin, size, more = draw.integers(len(text) - 1), draw.integers(1, 6), draw.integers(len(text) - 2)
        stops.append([text[begin : begin + size], text[more : more + 2], "never"])
        prompts.append(PROMPTS[0])
    outputs = served.generate(prompts, [dataclasses.replace(params, stop=stop) for stop in stops])
    for stop, output in zip(stops, outputs, strict=True):
        found = [(text.find(s) + len(s), text.find(s), s) for s in stop if s in text]
        _, begin, which = min(found)
        assert (output.text, output.outputs[0].stop_reason) == (text[:begin], which)
        assert output.token_ids == free.token_ids[: len(output.token_ids)]


# Deltas


def test_a_character_is_whole_or_held_back(alphabet):
    for most, text in ((25, ""), (26, "\ufffd"), (27, "\ufffd"), (28, "你"), (29, "你\ufffd"), (33, "你字é")):
        deltas = list(alphabet.stream("a", SamplingParams(max_tokens=most)))
        assert all("\ufffd" not in delta.text for delta in deltas[:-1])
        assert "".join(delta.text for delta in deltas) == "bcdefghijklmnopqrstuvwxyz" + text


def test_no_text_of_the_prompt_is_in_the_answer(alphabet):
    """A prompt may end inside a character: what completes it is the answer's."""
    ids = tokenizer().encode("yz你")
    for cut, text in ((1, "z你"), (2, "你"), (3, "你"), (4, "你"), (5, "字")):
        (output,) = alphabet.generate([ids[:cut]], SamplingParams(max_tokens=9 - cut))
        assert output.text.startswith(text)


@pytest.mark.parametrize("n", [1, 3])
def test_deltas_add_up_to_the_completion_however_they_come(served, n):
    """stream, step and on_delta; text, ids and log-probabilities."""
    params = SamplingParams(
        max_tokens=50, temperature=1.0, seed=3, n=n, logprobs=2, ignore_eos=True, stop=["q", "\u00e9"]
    )
    (expected,) = served.generate([PROMPTS[1]], params)
    ways = {"stream": list(served.stream(PROMPTS[1], params)), "step": [], "submit": [], "generate": []}
    served.submit(PROMPTS[1], params)
    while served.has_work:
        ways["step"] += served.step()
    served.submit(PROMPTS[1], params, on_delta=ways["submit"].append)
    while served.has_work:
        assert served.step() == []
    served.generate([PROMPTS[1]], params, on_delta=ways["generate"].append)
    for deltas in ways.values():
        assert len({delta.request_id for delta in deltas}) == 1
        assert [delta.output is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]
        assert answers([deltas[-1].output]) == answers([expected])
        for completion in expected.outputs:
            mine = [delta for delta in deltas if delta.index == completion.index]
            assert [delta.finish_reason for delta in mine[:-1]] == [None] * (len(mine) - 1)
            assert mine[-1].finish_reason == completion.finish_reason
            assert "".join(delta.text for delta in mine) == completion.text
            assert tuple(itertools.chain(*(delta.token_ids for delta in mine))) == completion.token_ids
            assert tuple(itertools.chain(*(delta.logprobs for delta in mine))) == completion.logprobs
            assert all(delta.token_ids for delta in mine)


def test_streams_may_take_turns(served):
    expected = answers(served.generate(PROMPTS, GREEDY))
    ends = {}
    streams = dict(enumerate(served.stream(prompt, GREEDY) for prompt in PROMPTS))
    while streams:
        for i, stream in list(streams.items()):
            delta = next(stream, None)
            if delta is None:
                del streams[i]
            elif delta.output is not None:
                ends[i] = delta.output
    assert answers([ends[i] for i in range(len(PROMPTS))]) == expected
    # And a whole batch may be asked for amid a stream.
    stream = served.stream(PROMPTS[0], GREEDY)
    next(stream)
    assert answers(served.generate(PROMPTS, GREEDY)) == expected
    assert answers([list(stream)[-1].output]) == expected[:1]


# Times and counts


def test_timings_are_in_order(served):
    params = [dataclasses.replace(GREEDY, max_tokens=most) for most in (100, 100, 100, 100, 1, 20)]
    outputs = served.generate([[i] * 40 for i in range(10, 16)], params)
    for output in outputs:
        times = output.timings
        assert 0 <= times.queued <= times.first_token <= times.total < 60
        count = len(output.token_ids)
        assert (times.per_token is None) == (count == 1)
        if count > 1:
            assert times.per_token * (count - 1) <= times.total - times.first_token + 1e-9
    assert sum(output.timings.preemptions for output in outputs) > 0
    # The fifth had to wait for a slot, and the first had not.
    assert outputs[4].timings.queued > outputs[0].timings.queued
    rid = served.submit([3])
    served.abort(rid)
    (delta,) = served.step()
    times = delta.output.timings
    assert (times.queued, times.first_token, times.per_token, times.preemptions) == (None, None, None, 0)


def test_tokens_are_timed_when_they_come(served):
    list(served.stream(PROMPTS[0], GREEDY))  # a first call writes the checks of what it calls, before it is submitted
    begin, seen, outputs = time.perf_counter(), [], []
    served.submit(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=60))
    while served.has_work:
        if deltas := served.step():
            seen.append(time.perf_counter() - begin)
            outputs += [delta.output for delta in deltas]
        time.sleep(0.002)  # a turn's tokens come after the turn before has been read
    times = outputs[-1].timings
    assert times.first_token <= seen[0]
    assert seen[-2] <= times.total <= seen[-1]
    assert times.per_token >= (seen[-2] - seen[0]) / 60


def test_the_books_balance_after_every_step():
    served, draw = scripted(), np.random.default_rng(2)
    rids, prompts, tokens, deltas = [], 0, 0, []
    for turn in range(400):
        if turn < 200 and turn % 4 == 0:
            prompt, most = [7] * int(draw.integers(1, 100)), int(draw.integers(1, 80))
            rids.append(served.submit(prompt, SamplingParams(max_tokens=most, ignore_eos=True, n=1 + turn % 3)))
        if turn % 17 == 5 and rids:
            served.abort(rids[int(draw.integers(len(rids)))])
        deltas += served.step()
        stats = served.stats()
        assert balanced(stats)
        served._loop.scheduler.check()
        used = {page for sequence in served._loop.scheduler.running for page in sequence.memory.pages}
        assert stats.free_pages + len(used) == PAGES
        assert stats.steps == turn + 1
        if not served.has_work:
            break
    assert idle(served)
    stats = served.stats()
    assert stats.preemptions > 0
    assert stats.finished["abort"] > 0
    ends = [delta.output for delta in deltas if delta.output is not None]
    assert sorted(output.request_id for output in ends) == sorted(rids)
    assert sum(stats.finished.values()) == stats.submitted == sum(len(output.outputs) for output in ends)
    whole = [c for output in ends for c in output.outputs if c.finish_reason == "length"]
    tokens = sum(len(c.token_ids) for output in ends for c in output.outputs)
    prompts = sum(len(output.prompt_token_ids) for output in ends for c in output.outputs if c in whole)
    assert stats.output_tokens == tokens
    assert stats.prompt_tokens + stats.cached_tokens >= prompts
    assert (stats.slots, stats.page_size) == (SLOTS, 16)
