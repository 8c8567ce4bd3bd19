"""What is asked and what is answered: prompts, params, deltas, completions, counts."""

import contextlib
import dataclasses
import gc
import itertools
import logging
import time
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import ENDS, PAGES, SETTINGS, SLOTS, answer, balanced, engine, idle, model, reciter, tokenizer

import ling3
from ling3 import SamplingParams
from ling3.cache import pages_of, slots_of
from ling3.engine.actor import join_abandoned
from ling3.engine.pool import decode

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
CHAT = [{"role": "user", "content": "hi"}]
PROMPTS = [[7, 8, 9], list(range(20, 65)), [11], list(range(100, 170)), [12, 13]]


@pytest.fixture
def served(shared):
    """The engine of this module; each test leaves it idle."""
    yield shared
    assert idle(shared)


def answers(outputs):
    return [[answer(completion) for completion in output.outputs] for output in outputs]


@jax.jit
def forward(model, tokens):
    """Logits of the whole forward pass."""
    return model(tokens)


def reference(tokens):
    """The logits after each of the tokens, in float64; padded, so that all lengths share a program."""
    padded = np.zeros((1, 256), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(forward(model(), jnp.asarray(padded))[0, : len(tokens)], np.float64)


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


def test_the_callers_lists_stay_the_callers(served):
    prompt, bias = [7, 8, 9], {50: 5.0}
    params = SamplingParams(max_tokens=16, logit_bias=bias)
    expected = answers(served.generate([prompt], params))
    rid = served.submit(prompt, params)
    prompt.append(10)
    bias[60] = 1e6
    deltas = []
    while served.has_work:
        deltas += served.step()
    assert answers([deltas[-1].output]) == expected
    assert deltas[-1].request_id == rid


def test_order_is_kept_and_each_may_have_its_params(served):
    """Short ones finish first, long ones are preempted, and greedy ones are what `ling3.generate` says."""
    lengths = [60, 3, 90, 1, 30, 75, 8, 2]
    prompts = [[10 + i] * (40 + 7 * i) for i in range(8)]
    params = [SamplingParams(max_tokens=most, ignore_eos=True) for most in lengths]
    before = served.stats().preemptions
    outputs = served.generate(prompts, params)
    assert served.stats().preemptions > before
    assert [len(output.token_ids) for output in outputs] == lengths
    assert [output.request_id for output in outputs] == sorted(output.request_id for output in outputs)
    whole = ling3.generate(model(), prompts, max_tokens=90, ignore_eos=True)
    assert [list(output.token_ids) for output in outputs] == [row[:most] for row, most in zip(whole, lengths)]


def test_nothing_is_printed_where_there_is_no_terminal(served, capfd, caplog):
    with caplog.at_level(logging.DEBUG, logger="ling3"):
        served.generate(PROMPTS, GREEDY)
        served.warmup()
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


@pytest.mark.parametrize(("prompt", "most"), [(255, 1), (200, 56), (1, 255), (32, 1), (33, 1), (31, 4)])
def test_a_request_may_fill_the_context(served, prompt, most):
    ids = [int(t) for t in np.random.default_rng(prompt).integers(6, 350, prompt)]
    (output,) = served.generate([ids], SamplingParams(max_tokens=most, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (most, "length")
    assert list(output.token_ids) == reference([*ids, *output.token_ids]).argmax(axis=-1)[prompt - 1 : -1].tolist()


# Seeds and completions


def test_a_seed_is_a_text_in_any_batch(served):
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=11, ignore_eos=True)
    (alone,) = served.generate([PROMPTS[1]], params)
    others = SamplingParams(max_tokens=40, temperature=1.5, top_k=30)
    crowd = served.generate([*PROMPTS, PROMPTS[1], *PROMPTS], [*[others] * 5, params, *[others] * 5])
    assert answers(crowd[5:6]) == answers([alone])
    assert alone.outputs[0].seed == 11
    (other,) = served.generate([PROMPTS[1]], dataclasses.replace(params, seed=12))
    assert other.token_ids != alone.token_ids


def test_a_seed_that_was_drawn_is_reported_and_repeats_the_text(served):
    params = SamplingParams(max_tokens=16, temperature=1.0, ignore_eos=True)
    first, second = served.generate([PROMPTS[0]] * 2, params)
    assert first.token_ids != second.token_ids
    for output in (first, second):
        (again,) = served.generate([PROMPTS[0]], dataclasses.replace(params, seed=output.outputs[0].seed))
        assert answers([again]) == answers([output])


def test_n_completions_have_seeds_in_a_row(served):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=40, n=6, ignore_eos=True, logprobs=2)
    (output,) = served.generate([PROMPTS[0]], params)
    assert [c.index for c in output.outputs] == list(range(6))
    assert [c.seed for c in output.outputs] == list(range(40, 46))
    assert len({tuple(c.token_ids) for c in output.outputs}) == 6
    for completion in output.outputs:
        (single,) = served.generate([PROMPTS[0]], dataclasses.replace(params, n=1, seed=completion.seed))
        assert answer(completion) == answer(single.outputs[0])
    first = output.outputs[0]
    assert (output.text, output.token_ids, output.logprobs) == (first.text, first.token_ids, first.logprobs)
    assert (output.finish_reason, output.error, output.timings) == ("length", None, first.timings)


def test_a_draw_among_one_is_greedy(served):
    expected = answers(served.generate(PROMPTS, GREEDY))
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert answers(served.generate(PROMPTS, dataclasses.replace(GREEDY, temperature=1.0, **narrow))) == expected


# Log-probabilities, and what is done to logits


def test_logprobs_are_the_models_own(served):
    """Under all that changes the choice, they are those of softmax(z), and the likeliest beside them."""
    params = [
        SamplingParams(max_tokens=24, logprobs=20, ignore_eos=True),
        SamplingParams(max_tokens=24, logprobs=5, temperature=1.3, top_k=40, seed=1, ignore_eos=True),
        SamplingParams(max_tokens=24, logprobs=1, logit_bias={30: 50.0}, repetition_penalty=2.0, ignore_eos=True),
        SamplingParams(max_tokens=24, logprobs=0, ignore_eos=True),
        SamplingParams(max_tokens=24, ignore_eos=True),
    ]
    for prompt, wanted, output in zip(PROMPTS, params, served.generate(PROMPTS, params), strict=True):
        if wanted.logprobs is None:
            assert output.logprobs is None
            continue
        logits = reference([*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        expected = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        for row, entry in zip(expected, output.logprobs, strict=True):
            # The whole forward sums the recurrence by chunks and the engine token by token: some 1e-5 in float32.
            np.testing.assert_allclose(entry.logprob, row[entry.token_id], atol=2e-4, rtol=0)
            values = list(entry.top.values())
            assert len(values) == wanted.logprobs
            assert values == sorted(values, reverse=True)
            np.testing.assert_allclose(values, np.sort(row)[::-1][: len(values)], atol=2e-4, rtol=0)
            np.testing.assert_allclose(values, row[list(entry.top)], atol=2e-4, rtol=0)
            assert entry.top.get(entry.token_id, entry.logprob) == entry.logprob


def adjusted(logits, prompt, output, params, ends):
    """The formula in SamplingParams' docstring."""
    z = logits.copy()
    for token, bias in (params.logit_bias or {}).items():
        z[token] += bias
    seen = sorted({*prompt, *output})
    z[seen] = np.where(z[seen] > 0, z[seen] / params.repetition_penalty, z[seen] * params.repetition_penalty)
    for token in set(output):
        z[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        z[list(ends)] = -np.inf
    return z


@pytest.mark.parametrize(
    "values",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7},
        {"presence_penalty": 1.5},
        {"presence_penalty": -0.8},
        {"frequency_penalty": 0.9},
        {"logit_bias": {7: 1.0, 8: -3.0, 40: 2.5}},
        {"min_tokens": 30},
        {
            "repetition_penalty": 1.2,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.3,
            "logit_bias": {7: 3.0, 90: 4.0},
            "min_tokens": 5,
        },
    ],
    ids="+".join,
)
def test_penalties_follow_their_formula_step_by_step(served, values):
    """Greedy: each token is the argmax of the adjusted logits, of a numpy reference. In a crowd, and preempted."""
    stops = list(range(6, 46)) if "min_tokens" in values else []
    params = SamplingParams(max_tokens=40, stop_token_ids=stops, ignore_eos=not stops, **values)
    prompts = [[int(t) for t in np.random.default_rng(i).integers(6, 350, 20)] for i in range(5)]
    plain = served.generate(prompts, dataclasses.replace(GREEDY, max_tokens=40))
    long = SamplingParams(max_tokens=150, ignore_eos=True)
    outputs = served.generate([*prompts[:2], *prompts], [*[long] * 2, *[params] * 5])[2:]
    assert stops or sum(output.timings.preemptions for output in outputs) > 0
    assert [output.token_ids for output in outputs] != [output.token_ids for output in plain]
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = reference([*prompt, *output.token_ids])
        for i, token in enumerate(output.token_ids):
            ends = {*stops, *ENDS} if stops else ()
            z = adjusted(logits[len(prompt) + i - 1], prompt, list(output.token_ids[:i]), params, ends)
            # Float32 sums in another order, some 1e-5: a tie closer than this may fall either way.
            assert z[token] >= z.max() - 1e-3
        if stops:
            assert len(output.token_ids) == 40 or output.token_ids[-1] in {*stops, *ENDS}
            assert not set(output.token_ids[: params.min_tokens]) & {*stops, *ENDS}


def test_a_bias_decides(served):
    always, never = SamplingParams(max_tokens=8, logit_bias={33: 1e9}), SamplingParams(max_tokens=64, temperature=1.0)
    assert served.generate([PROMPTS[0]], always)[0].token_ids == (33,) * 8
    never = dataclasses.replace(never, seed=3, ignore_eos=True, logit_bias=dict.fromkeys(range(200), -1e9))
    assert min(served.generate([PROMPTS[0]], never)[0].token_ids) >= 200


# Ends


@pytest.fixture(scope="module")
def alphabet():
    """A model that says the alphabet, one letter a token, and then bytes of 你, 字 and é; and what ends texts."""
    spell = tokenizer().encode
    return engine(
        reciter(
            [*spell("abcdefghijklmnopqrstuvwxyz"), *spell("你字"), *spell("é")],
            [*spell("A"), *spell("B"), ENDS[0], *spell("C")],
            [*spell("D"), *spell("E"), ENDS[1], *spell("F")],
            [*spell("G"), *spell("H"), ENDS[2], *spell("I")],
            [*spell("J"), *spell("K"), ENDS[3], *spell("L")],
            [*spell("M"), *spell("N"), ENDS[4], *spell("O")],
        )
    )


def test_the_ends_of_config_generation_config_and_tokenizer_all_end(alphabet):
    prompts = ["A", "D", "G", "J", "M"]
    outputs = alphabet.generate(prompts, SamplingParams(max_tokens=6))
    assert [output.text for output in outputs] == ["B", "E", "H", "K", "N"]
    assert [output.finish_reason for output in outputs] == ["stop"] * 5
    assert [output.outputs[0].stop_reason for output in outputs] == list(ENDS)
    assert [output.token_ids[-1] for output in outputs] == list(ENDS)
    outputs = alphabet.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True))
    assert [output.finish_reason for output in outputs] == ["length"] * 5
    assert [output.token_ids[1] for output in outputs] == list(ENDS)
    # Without a tokenizer, an engine knows the config's alone.
    deaf = ling3.Engine(reciter([30, 31, 5, 32], [40, 41, 1, 42]), None, **SETTINGS)
    outputs = deaf.generate([[30], [40]], SamplingParams(max_tokens=3, logprobs=0))
    assert [list(output.token_ids) for output in outputs] == [[31, 5], [41, 1, 42]]
    assert [output.text for output in outputs] == ["", ""]
    assert [len(output.logprobs) for output in outputs] == [2, 3]


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
        for delta in served.step():
            seen.append(time.perf_counter() - begin)
            outputs.append(delta.output)
        time.sleep(0.002)  # a turn's tokens come after the turn before has been read
    times = outputs[-1].timings
    assert times.first_token <= seen[0]
    assert seen[-2] <= times.total <= seen[-1]
    assert times.per_token >= (seen[-2] - seen[0]) / 60


def test_the_books_balance_after_every_step():
    served, draw = engine(), np.random.default_rng(2)
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
        used = {page for sequence in served._loop.scheduler.running for page in sequence.pages}
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


def test_a_step_leaves_the_slots_and_pages_of_others_alone(served):
    """Bit for bit, with what earlier requests have left in them."""

    def others(sequence):
        layers = jax.device_get(served._loop.runner.pool.layers)
        states = [np.delete(leaf, sequence.slot, axis=0) for leaf in jax.tree.leaves(slots_of(layers))]
        return states + [np.delete(paged.entries, sequence.pages, axis=0) for paged in pages_of(layers)]

    served.generate([[i] * 60 for i in range(10, 16)], dataclasses.replace(GREEDY, max_tokens=40))
    rid = served.submit([9] * 70, dataclasses.replace(GREEDY, max_tokens=60))
    served.step()
    sequence, turns = served._loop.requests[rid].sequences[0], 0
    assert 0 < sequence.prefilled < 70
    before = others(sequence)
    assert sum(np.count_nonzero(leaf) for leaf in before) > 1000
    while served.has_work and sequence.slot is not None:
        held = list(sequence.pages)
        served.step()
        turns += 1
        if sequence.pages == held:
            for old, new in zip(before, others(sequence), strict=True):
                np.testing.assert_array_equal(old, new)
        elif sequence.slot is not None:
            before = others(sequence)
    assert turns > 10


def test_from_pretrained_is_one_line():
    nano = ling3.Engine.from_pretrained(
        "nano",
        dtype=jnp.float32,
        max_running_requests=2,
        num_pages=8,
        page_size=64,
        chunked_prefill_size=64,
        token_paddings=(64,),
        decode_rows=2,
        decode_steps=16,
    )
    question = "Tom has 5 balls. He wins 4 more. How many balls does Tom have?"
    (output,) = nano.generate([{"role": "user", "content": question}], SamplingParams(max_tokens=60))
    assert output.text.endswith("The answer is 9.")
    assert output.finish_reason == "stop"
    with pytest.raises(TypeError, match="pages"):
        ling3.Engine.from_pretrained("nano", pages=3)


# Compilation


@contextlib.contextmanager
def logged_compiles():
    """In all threads, which `jax.log_compiles` is not."""
    jax.config.update("jax_log_compiles", True)
    try:
        yield
    finally:
        jax.config.update("jax_log_compiles", False)


def test_nothing_is_compiled_after_warmup(caplog):
    """Mixed traffic: every padding, sampling of all kinds, preemption, aborts, NaN; shapes that no other test has."""
    served = engine(num_pages=PAGES + 1)
    served.warmup()
    programs = served._loop.runner.programs
    draw = np.random.default_rng(4)
    kinds = [
        {},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"logprobs": 20},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.1, "presence_penalty": 0.1},
        {"logit_bias": {5: 1.0}, "min_tokens": 4, "n": 2},
        {"stop": ["a"], "stop_token_ids": list(range(50, 90))},
    ]
    with caplog.at_level(logging.DEBUG), logged_compiles():
        for i in range(24):
            params = SamplingParams(max_tokens=int(draw.integers(1, 90)), seed=i, **kinds[i % 6])
            rid = served.submit([9 + i] * int(draw.integers(1, 120)), params)
            if i % 5 == 4:
                served.step()
                served.abort(rid)
        bad = served.submit([9] * 20, on_delta=lambda delta: 1 / 0)
        while served.has_work:
            served.step()
    assert not served.abort(bad)
    assert served.stats().preemptions > 0
    assert served.stats().finished["error"] == 1
    assert [record.getMessage() for record in caplog.records if "Compiling" in record.getMessage()] == []
    assert served._loop.runner.programs == programs


def test_the_first_token_does_not_wait_for_decode_to_be_compiled():
    """After a warmup for it alone: the second waits, once, and the time is told."""
    served = engine(num_pages=PAGES + 2)  # shapes that no other test has
    served.warmup(first_token=True)
    warmed, decodes = served.stats().compile_seconds, decode._cache_size()
    assert warmed > 0
    served.submit(PROMPTS[0], GREEDY)
    first = []
    while not first:
        first = served.step()
    assert [len(delta.token_ids) for delta in first] == [1]
    assert decode._cache_size() == decodes and served.stats().compile_seconds == warmed
    while served.has_work:
        served.step()
    assert decode._cache_size() == decodes + 1
    told = served.stats().compile_seconds
    assert told > warmed
    served.generate(PROMPTS, GREEDY)
    assert served.stats().compile_seconds == told


def test_an_engine_that_is_left_gives_its_memory_back():
    """At once, and not when the garbage collector next looks for cycles: the next engine may need it."""
    left = engine()
    left.generate(PROMPTS, GREEDY)
    stream = left.stream(PROMPTS[0], GREEDY)
    next(stream)
    memory = [weakref.ref(leaf) for leaf in jax.tree.leaves(left._loop.runner.pool.layers)]
    gc.collect()
    gc.disable()
    try:
        del stream, left
        join_abandoned()  # the engine's thread may be amid a turn, which the next engine waits for
        assert [ref() for ref in memory] == [None] * len(memory)
    finally:
        gc.enable()
