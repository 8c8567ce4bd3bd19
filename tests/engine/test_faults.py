"""Bad requests and faults: a clear error for the one, and nothing lost for the others."""

import contextlib
import dataclasses
import gc
import os
import signal
import threading

import jax
import numpy as np
import pytest
import small_engine
from jaxtyping import TypeCheckError
from scripted_runner import scripted
from small_engine import LONG, SETTINGS, SHORT, Fault, answers, balanced, engine, idle, model

import ling3
from ling3 import SamplingParams
from ling3.train.tokenizer import train_tokenizer, write_tokenizer

PROMPTS = small_engine.PROMPTS[:4]


@pytest.fixture(scope="module")
def shared():
    return scripted()


def limit_queue(patch, served, most):
    for part in (served._intake, served._loop):
        patch.setattr(part, "settings", dataclasses.replace(part.settings, max_queue=most))


# Requests that can never be answered


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt is empty"),
        ("", {}, "prompt is empty"),
        ([400], {}, r"prompt, token 0 is 400, expected an id in \[0, 400\)"),
        ([3, -1], {}, "prompt, token 1 is -1"),
        ([3, True], {}, "prompt, token 1 is True"),
        ([3, 4.0], {}, "prompt, token 1 is 4.0"),
        (np.ones((2, 2), np.int32), {}, "expected a list of token ids"),
        (5, {}, "prompt is 5, expected a list of token ids"),
        ({"role": "user", "content": "x"}, {}, "expected a list of token ids"),
        ("a\ud800", {}, "prompt: text: a lone surrogate"),
        ([{"role": "user"}], {}, "prompt: "),
        ([{"role": "judge", "content": "x"}], {}, "prompt: .*a message is of the system"),
        ([3] * 250, {"max_tokens": 7}, "prompt has 250 tokens and max_tokens is 7: 257 together, .* room for 256"),
        ([3] * 256, {"max_tokens": 1}, "prompt has 256 tokens"),
        ([3], {"max_tokens": 10**12}, "max_tokens is 1000000000000"),
        ([3], {"n": 5}, "n is 5, but max_queue is 4"),
        ([3], {"stop_token_ids": [400]}, r"stop_token_ids has 400, expected ids in \[0, 400\)"),
        ([3], {"logit_bias": {-1: 1.0}}, "logit_bias has -1"),
        ([3], {"stop_token_ids": list(range(100, 160))}, "65 stop ids with the model's own"),
    ],
)
def test_a_hopeless_request_is_refused_and_leaves_no_trace(busy, monkeypatch, prompt, params, message):
    limit_queue(monkeypatch, busy, 4)
    before, params = busy.stats(), SamplingParams(**params)
    for ask in (busy.submit, busy.stream):
        with pytest.raises(ValueError, match=message):
            ask(prompt, params)
    with pytest.raises(ValueError, match=message.replace("prompt", "prompt 1") if "n is" not in message else message):
        busy.generate(["good", prompt], [SHORT, params])
    assert busy.stats() == before


def test_a_prompt_that_is_too_long_is_refused_before_a_look_at_its_ids(busy):
    """A billion of them, none of which is an id."""
    endless = range(-(10**9), 0)
    for ask in (busy.submit, busy.stream, lambda prompt: busy.generate([prompt])):
        with pytest.raises(ValueError, match="1000000128 together, but there is room for 256"):
            ask(endless)
    with pytest.raises(ValueError, match="prompt 0 has 1000000000 tokens"):
        ling3.generate(model(), [endless])
    with pytest.raises(ValueError, match="prompt, token 1 is -1"):  # what would be cut off is checked too
        busy.submit([3, -1] + [3] * 300, SHORT, truncate="prompt")


@pytest.mark.parametrize("prompts", [{"role": "user", "content": "x"}, b"ab", {3, 4}])
def test_what_is_no_list_of_prompts_is_refused(busy, prompts):
    with pytest.raises(ValueError, match=r"prompts are .*, expected a list; a chat is a list of messages"):
        busy.generate(prompts)


def test_params_have_to_be_params(busy):
    for wrong in ({"temperature": 1.0}, 1.0, "greedy"):
        with pytest.raises(TypeCheckError, match="params"):
            busy.submit([3], wrong)
    with pytest.raises(TypeCheckError, match="params"):
        busy.generate([[3], [4]], [SHORT, 3])
    with pytest.raises(ValueError, match="3 params for 2 prompts"):
        busy.generate([[3], [4]], [SHORT] * 3)
    with pytest.raises(TypeError, match="trunc"):
        busy.submit([3], trunc="output")
    with pytest.raises(TypeCheckError, match="truncate"):
        busy.submit([3], truncate="both")


def test_truncate_says_what_gives_way(busy):
    params = SamplingParams(max_tokens=10, min_tokens=9, ignore_eos=True)
    prompt = [int(t) for t in np.random.default_rng(1).integers(6, 350, 300)]
    (cut,) = busy.generate([prompt], params, truncate="prompt")
    assert (len(cut.token_ids), list(cut.prompt_token_ids)) == (10, prompt[-246:])
    assert busy.generate([prompt[-246:]], params)[0].token_ids == cut.token_ids
    (short,) = busy.generate([prompt[:250]], params, truncate="output")
    assert (len(short.token_ids), short.finish_reason, list(short.prompt_token_ids)) == (6, "length", prompt[:250])
    # What fits is left alone.
    for way in ("prompt", "output"):
        (whole,) = busy.generate([prompt[:200]], params, truncate=way)
        assert (len(whole.prompt_token_ids), len(whole.token_ids)) == (200, 10)
    for way, tokens, most in (("output", 256, 5), ("output", 300, 5), ("prompt", 300, 256)):
        with pytest.raises(ValueError, match="together, but there is room for 256"):
            busy.submit(prompt[:tokens], SamplingParams(max_tokens=most), truncate=way)


def test_a_request_larger_than_all_pages_is_refused_and_the_largest_runs():
    small = scripted(num_pages=6)
    with pytest.raises(ValueError, match="that takes 7 pages of 16 tokens, and the engine has 6; ask for less"):
        small.submit([3] * 90, SamplingParams(max_tokens=8))
    assert not small.has_work
    # 90 + 7 - 1 cached tokens are exactly 6 pages: the scheduler has to be able to admit it.
    small.submit([3] * 90, SamplingParams(max_tokens=7))
    sequence = small._loop.scheduler.head()
    assert small._loop.scheduler.admit(96) is sequence


def test_an_engine_without_a_tokenizer_says_what_it_lacks(busy):
    deaf = scripted(text=False)
    for prompt in ("text", [{"role": "user", "content": "x"}]):
        with pytest.raises(ValueError, match="prompt is text, and this engine has no tokenizer: give token ids"):
            deaf.submit(prompt)
    with pytest.raises(ValueError, match="stop: strings need a tokenizer"):
        deaf.submit([3], SamplingParams(stop="x"))


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path):
    write_tokenizer(train_tokenizer(["some more words"] * 3, 420), tmp_path, 256)
    large = ling3.load_tokenizer(tmp_path)
    assert large.vocab_size > 352
    narrow = type(model())(model().model, model().lm_head, dataclasses.replace(model().config, vocab_size=355))
    with pytest.raises(ling3.TokenizerError, match="the model's embedding has 355 rows"):
        ling3.Engine(narrow, large)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_running_requests": 0}, "max_running_requests is 0, expected a whole number in"),
        ({"max_running_requests": True}, "max_running_requests is True"),
        ({"max_queue": None}, r"max_queue is None, expected a whole number in \[1, 2147483647\]$"),
        ({"num_pages": 2.0}, r"num_pages is 2.0, expected a whole number in \[1, 67108864\] or None"),
        ({"page_size": -1}, "page_size is -1"),
        ({"chunked_prefill_size": 0, "max_queue": 0}, "chunked_prefill_size is 0.*max_queue is 0"),
        ({"max_model_len": 257}, r"max_model_len is 257, expected a whole number in \[1, 256\]"),
        ({"max_model_len": 10**5000}, "max_model_len is a number of 16610 bits, expected"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"decode_rows": 0}, "decode_rows is 0"),
        ({"decode_steps": 17}, r"decode_steps is 17, expected a whole number in \[1, 16\]"),
        ({"token_paddings": ()}, "expected one of at least chunked_prefill_size, which is 32"),
        ({"token_paddings": (16, 31)}, r"token_paddings are \(16, 31\), expected one of at least"),
        ({"token_paddings": (0, 32)}, r"token_paddings\[0\] is 0"),
        ({"max_running_requests": 10**30}, r"max_running_requests is 10+, expected a whole number in \[1, 65536\]"),
        ({"num_pages": 10**30}, r"num_pages is 10+, expected a whole number in \[1, 67108864\]"),
        ({"num_pages": 10**9}, "num_pages is 1000000000, expected"),
        ({"page_size": 10**5000}, r"page_size is a number of 16610 bits, expected a whole number in \[1, 131072\]"),
        ({"chunked_prefill_size": 10**9}, "chunked_prefill_size is 1000000000, expected"),
        ({"token_paddings": (16, 10**9)}, r"token_paddings\[1\] is 1000000000, expected"),
        ({"token_paddings": range(1, 10**9)}, "the number of token_paddings is 999999999, expected"),
        ({"decode_rows": 10**9}, r"decode_rows is 1000000000, expected a whole number in \[1, 65536\]"),
        ({"mem_fraction": 0.0}, r"mem_fraction is 0.0, expected a number in \(0, 1\]"),
        ({"mem_fraction": 1.5}, "mem_fraction is 1.5"),
        ({"mem_fraction": float("nan")}, "mem_fraction is nan"),
        ({"mem_fraction": "half", "page_size": "16"}, "page_size is '16'.*; mem_fraction is 'half', expected a number"),
        ({"token_paddings": "512"}, "token_paddings is '512', expected a list of whole numbers"),
        ({"token_paddings": 512}, "token_paddings is 512, expected a list of whole numbers or None"),
        ({"token_paddings": (32, 512.0)}, r"token_paddings\[1\] is 512.0, expected a whole number"),
        ({"batch_invariant": 1, "overlap": None}, "batch_invariant is 1, expected True or False; overlap is None"),
        ({"cache_dtype": "fp8"}, "cache_dtype is 'fp8', expected one of 'auto', 'float32', 'bfloat16', 'packed'"),
        ({"cache_dtype": None}, "cache_dtype is None, expected one of"),
        ({"cache_dtype": "packed"}, "expected 'auto', .* this model: layer 2: its entries have no packed form"),
        ({"mem_fraction": 1e-12, "num_pages": None}, "lower max_running_requests or raise mem_fraction"),
    ],
)
def test_senseless_engines_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        engine(**changes)
    if changes in ({"max_model_len": 257}, {"cache_dtype": "packed"}, {"mem_fraction": 1e-12, "num_pages": None}):
        return  # what model and memory decide
    with pytest.raises(ValueError, match=message):
        ling3.EngineSettings(**{**SETTINGS, **changes})


def test_settings_by_other_names_and_places_are_refused():
    with pytest.raises(TypeError, match="no engine setting is called max_runing_requests; there are max_running_re"):
        ling3.Engine(model(), max_runing_requests=4)
    with pytest.raises(TypeError, match="no engine setting is called pages"):
        ling3.Engine.from_pretrained("no such directory", pages=4)
    with pytest.raises(TypeError, match="settings"):
        ling3.Engine(model(), None, 64)


def test_settings_are_given_whole_or_by_name():
    whole = ling3.EngineSettings(**{**SETTINGS, "token_paddings": [np.int64(32), 16, 16]})
    assert (whole.token_paddings, type(whole.token_paddings[1])) == ((16, 32), int)
    assert hash(whole) == hash(ling3.EngineSettings(**SETTINGS)) and whole == ling3.EngineSettings(**SETTINGS)
    given = ling3.Engine(model(), None, whole, num_pages=19)
    named = ling3.Engine(model(), None, **{**SETTINGS, "num_pages": 19})
    resolved = dataclasses.replace(whole, num_pages=19, max_model_len=256)
    assert given.settings == named.settings == resolved and given.max_model_len == 256


def test_what_there_is_no_memory_for_is_refused_before_it_is_allocated(monkeypatch):
    """A slot has 8 bytes for each of 400 ids and two KDA states; a page has 20 numbers for each of 16 tokens."""
    slot, page = 8 * 400 + 2 * 4 * (2 * 8 * 8 + 3 * 48), 4 * 16 * 20
    monkeypatch.setattr("ling3.engine.memory.free_bytes", lambda *_: 4 * slot + 20 * page)
    assert engine().settings.num_pages == 20
    message = r"max_running_requests 4 of 0.0 MB and num_pages 21 of 0.0013 MB take 0 MB, and 0 MB are free: lower one"
    for changes in ({"num_pages": 21}, {"max_running_requests": 5}, {"page_size": 17}):
        with pytest.raises(ValueError, match=message if "num_pages" in changes else "are free: lower one of them"):
            engine(**changes)
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"max_running_requests 4 of .* MB are free: lower one of them"):
        engine(num_pages=2**26, page_size=2**17)
    with pytest.raises(ValueError, match="lower max_running_requests or raise mem_fraction"):
        engine(max_running_requests=2**16, num_pages=None, mem_fraction=1e-6)


def test_a_decode_call_has_no_more_rows_than_there_are_slots():
    for slots, rows in ((1, 1), (5, 5), (64, 16)):
        small = engine(max_running_requests=slots, decode_rows=None)
        assert (small.settings.decode_rows, small._loop.runner.shapes.rows) == (rows, (rows,))
    assert engine(max_running_requests=1, batch_invariant=False)._loop.runner.shapes.rows == (1,)


def test_an_engine_shows_its_size_and_its_load(busy):
    size = sum(leaf.size for leaf in jax.tree.leaves(model()))
    assert repr(engine()).startswith(f"<Engine: {size:,} parameters, 0 of 4 slots running, ")
    asked = [busy.submit([3], SHORT) for _ in range(6)]
    busy.step()
    assert repr(busy) == "<Engine: 0 parameters, 4 of 4 slots running, 2 waiting, 4 of 20 pages in use>"
    for request in asked:
        busy.abort(request)


def test_the_queue_is_bounded(busy, monkeypatch):
    limit_queue(monkeypatch, busy, 3)
    first = busy.submit([3], SHORT)
    busy.submit([4], SamplingParams(max_tokens=12, n=2))
    before = busy.stats()
    for ask in (busy.submit, busy.stream):
        with pytest.raises(ling3.QueueFull, match="3 requests are waiting and max_queue is 3: step until"):
            ask([5], SHORT)
    assert busy.stats() == before
    assert before.waiting == 3
    busy.abort(first)
    with pytest.raises(ling3.QueueFull):
        busy.submit([5], SamplingParams(n=2))
    # `generate` waits for room, and what others submitted goes on beside it.
    assert len(busy.generate([[i] for i in range(10, 22)], SHORT)) == 12
    while busy.has_work:
        busy.step()


# Aborts


def test_abort_wherever_it_is(busy, alone):
    """In the queue, amid its prompt, amid its answer, and put back into the queue."""
    expected = alone(PROMPTS[0], LONG)
    queued = busy.submit(PROMPTS[1], LONG)
    assert busy.abort(queued)
    assert busy.stats().running == 0

    prefilling = busy.submit(list(range(6, 206)), SHORT)
    busy.step()
    sequence = busy._loop.requests[prefilling].sequences[0]
    assert 0 < sequence.prefilled < 200
    assert busy.abort(prefilling)

    company = busy.submit(PROMPTS[0], LONG)
    decoding = busy.submit(PROMPTS[1], LONG)
    got = []
    while len(got) < 10:
        got += [token for delta in busy.step() if delta.request_id == decoding for token in delta.token_ids]
    assert busy.abort(decoding)
    last = [delta for delta in busy.step() if delta.request_id == decoding]
    assert [delta.finish_reason for delta in last] == ["abort"]
    output = last[0].output
    assert list(output.token_ids) == got
    assert output.token_ids == alone(PROMPTS[1], LONG)[0][0][: len(got)]
    assert len(output.logprobs) == len(got)

    deltas = []
    while busy.has_work:
        deltas += busy.step()
    ends = [delta.output for delta in deltas if delta.output is not None]
    assert [output.request_id for output in ends] == [company]
    assert answers(ends) == [expected]
    for rid in (queued, prefilling, decoding, company, 10**9, -1):
        assert not busy.abort(rid)


def test_abort_while_preempted(busy, alone):
    rids = [busy.submit([i] * 50, SamplingParams(max_tokens=100, ignore_eos=True, logprobs=1)) for i in range(40, 44)]
    waiting, deltas = [], []
    while not waiting:
        deltas += busy.step()
        waiting = [each for each in busy._loop.scheduler.queued() if each.times.preemptions]
    (victim,) = waiting[:1]
    assert victim.memory.saved is not None
    assert busy.abort(victim.request.request_id)
    assert victim.memory.saved is None
    assert victim.completion.timings.preemptions > 0
    while busy.has_work:
        deltas += busy.step()
    ends = {delta.request_id: delta.output for delta in deltas if delta.output is not None}
    assert ends[victim.request.request_id].finish_reason == "abort"
    for i, rid in zip(range(40, 44), rids, strict=True):
        if rid != victim.request.request_id:
            assert answers([ends[rid]]) == [alone([i] * 50, LONG)]


def test_abort_ends_all_completions_and_keeps_those_that_are_whole(busy):
    rid = busy.submit([7], SamplingParams(max_tokens=60, n=4, temperature=1.0, seed=1, stop_token_ids=list(range(60))))
    deltas = []
    while not any(delta.finish_reason for delta in deltas):
        deltas += busy.step()
    done = {delta.index for delta in deltas if delta.finish_reason}
    assert len(done) < 4
    assert busy.abort(rid)
    output = busy.step()[-1].output
    assert [c.finish_reason == "abort" for c in output.outputs] == [i not in done for i in range(4)]


# Readers that leave


def test_a_stream_that_is_left_is_aborted(busy):
    def running():
        stats = busy.stats()
        return stats.running + stats.waiting

    never_begun = busy.stream(PROMPTS[0], LONG)
    assert running() == 1
    del never_begun
    assert running() == 0
    begun = busy.stream(PROMPTS[0], LONG)
    next(begun)
    begun.close()
    assert running() == 0
    for _ in busy.stream(PROMPTS[0], LONG):
        break
    assert running() == 0
    cycle = [busy.stream(PROMPTS[0], LONG)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()
    assert running() == 0
    with contextlib.suppress(KeyError):
        for _ in busy.stream(PROMPTS[0], LONG):
            raise KeyError
    assert running() == 0


def test_a_stream_may_be_collected_anywhere(busy, alone, monkeypatch):
    """The garbage collector may run in any thread, also amid a turn."""
    expected = alone(PROMPTS[1], LONG)
    left = [busy.stream(PROMPTS[0], LONG) for _ in range(3)]
    for stream in left:
        next(stream)
    rid = busy.submit(PROMPTS[1], LONG)
    decode, reserve = busy._loop.runner.decode, busy._loop.scheduler.reserve

    def decoding(batch, rows, sequences):
        if left:
            left.pop().close()
        return decode(batch, rows, sequences)

    def reserving(run, tokens):
        if len(left) == 3:
            left.pop().close()
        return reserve(run, tokens)

    monkeypatch.setattr(busy._loop.runner, "decode", decoding)
    monkeypatch.setattr(busy._loop.scheduler, "reserve", reserving)
    deltas = busy.step()
    busy._loop.scheduler.check()
    while busy.has_work:
        deltas += busy.step()
        assert balanced(busy.stats())
    assert not left
    assert answers([deltas[-1].output]) == [expected]
    assert deltas[-1].request_id == rid


# Callbacks


@pytest.mark.parametrize("when", ["first", "later", "last"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_callback_that_raises_ends_its_own_request(busy, alone, when, n):
    seen = []

    def callback(delta):
        seen.append(delta)
        number, last = len(seen), delta.finish_reason is not None
        if (when == "first") or (when == "later" and number == 3) or (when == "last" and last):
            raise OSError("disk full")

    expected = alone(PROMPTS[0])
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, n=n)
    bad = busy.submit(PROMPTS[3], params, on_delta=callback)
    good = busy.submit(PROMPTS[0], SHORT)
    deltas = []
    while busy.has_work:
        deltas += busy.step()
        assert balanced(busy.stats())
    told = [delta for delta in deltas if delta.request_id == bad]
    assert all(delta.finish_reason == "error" and not delta.token_ids for delta in told)
    output = told[-1].output
    assert "the callback for its deltas raised OSError('disk full')" in output.outputs[0].error
    assert {c.finish_reason for c in output.outputs} == {"error"} or when == "last"
    whole = alone(PROMPTS[3], params)
    for completion in output.outputs:
        count = len(completion.token_ids)
        assert completion.token_ids == whole[completion.index][0][:count]
        assert count < 12 or when == "last"
    (last,) = [delta.output for delta in deltas if delta.request_id == good and delta.output]
    assert answers([last]) == [expected]


def test_a_callback_that_raises_in_generate_ends_one_of_many(busy, alone):
    expected = [alone(prompt) for prompt in PROMPTS]
    for when in ("first", "last"):
        mine = []

        def callback(delta, when=when, mine=mine):
            mine.append(delta.request_id)
            if delta.request_id == min(mine) and (when == "first" or delta.finish_reason):
                raise ValueError("no")

        outputs = busy.generate(PROMPTS, SHORT, on_delta=callback)
        assert [output.finish_reason for output in outputs] == ["error", "length", "length", "length"]
        assert "raised ValueError('no')" in outputs[0].error
        assert answers(outputs[1:]) == expected[1:]
        assert idle(busy)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_is_no_exception_is_raised_by_the_step(busy, alone, kind):
    """The turn is whole before it is raised, and no request is lost."""
    expected = alone(PROMPTS[0])
    seen = []

    def callback(delta):
        seen.append(delta)
        if len(seen) == 2:
            raise kind

    busy.submit(PROMPTS[0], SHORT, on_delta=callback)
    other = busy.submit(PROMPTS[1], SHORT)
    deltas, raised = [], 0
    while busy.has_work:
        try:
            deltas += busy.step()
        except kind:
            raised += 1
        assert balanced(busy.stats())
    assert raised == 1
    assert answers([seen[-1].output]) == [expected]
    assert [token for d in deltas for token in d.token_ids] == list(alone(PROMPTS[1])[0][0])
    assert {delta.request_id for delta in deltas} == {other}

    rid = busy.submit(PROMPTS[0], SHORT, on_delta=lambda delta: (_ for _ in ()).throw(kind))
    with pytest.raises(kind):
        busy.abort(rid)


def test_a_callback_may_use_the_engine_but_not_move_it(busy, alone):
    expected = alone(PROMPTS[1])
    seen, errors, rids = [], [], {}

    def callback(delta):
        seen.append(delta)
        assert balanced(busy.stats())
        if len(seen) == 1:
            rids["new"] = busy.submit(PROMPTS[1], SHORT)
            assert busy.abort(rids["other"])
            for move in (busy.step, busy.warmup, lambda: busy.generate([[3]]), lambda: list(busy.stream([3]))):
                with pytest.raises(RuntimeError, match="cannot step the loop that called it") as error:
                    move()
                errors.append(error)
        if len(seen) == 2:
            assert busy.abort(rids["mine"])
            assert not busy.abort(rids["mine"])

    rids["mine"] = busy.submit(PROMPTS[0], LONG, on_delta=callback)
    rids["other"] = busy.submit(PROMPTS[2], LONG)
    deltas = []
    while busy.has_work:
        deltas += busy.step()
    assert len(errors) == 4
    assert [delta.finish_reason for delta in seen[1:]] == [None, "abort"]
    ends = {delta.request_id: delta.output for delta in deltas if delta.output}
    assert ends[rids["other"]].finish_reason == "abort"
    assert answers([ends[rids["new"]]]) == [expected]


def test_a_callback_may_abort_its_request_from_within_an_abort(busy):
    before = busy.stats()
    seen = []

    def callback(delta):
        seen.append(delta.index)
        busy.abort(delta.request_id)

    rid = busy.submit([3], SamplingParams(max_tokens=50, n=3), on_delta=callback)
    busy.step()
    busy.abort(rid)
    assert sorted(seen) == [0, 1, 2]
    stats = busy.stats()
    assert stats.finished["abort"] - before.finished["abort"] == 3
    assert balanced(stats)


def test_a_callback_that_aborts_and_raises_is_counted_once(busy):
    def callback(delta):
        busy.abort(delta.request_id)
        raise OSError

    busy.submit([3], SamplingParams(max_tokens=50, n=2), on_delta=callback)
    deltas = []
    while busy.has_work:
        deltas += busy.step()
        assert balanced(busy.stats())
    assert deltas[-1].output.finish_reason == "error"


# Ctrl-C


def test_an_interrupt_in_generate(busy, alone):
    """By default it is raised; on request it returns what there is. Every slot is free either way."""
    expected = [alone(prompt) for prompt in PROMPTS]
    seen = []

    def callback(delta):
        seen.append(delta)
        if delta.finish_reason == "length":
            raise KeyboardInterrupt

    params = [SamplingParams(max_tokens=m, ignore_eos=True, logprobs=1) for m in (40, 12, 100, 60)]
    with pytest.raises(KeyboardInterrupt):
        busy.generate(PROMPTS, params, on_delta=callback)
    assert idle(busy)

    with pytest.MonkeyPatch.context() as patch:
        limit_queue(patch, busy, 4)  # so that some never come into the queue
        prompts = PROMPTS + [[9]] * 8
        outputs = busy.generate(prompts, params + [LONG] * 8, on_delta=callback, on_interrupt="return")
    assert idle(busy)
    assert len(outputs) == len(prompts)
    assert len({output.request_id for output in outputs}) == len(prompts)
    assert [output.finish_reason for output in outputs] == ["abort", "length", *["abort"] * 10]
    assert answers(outputs[1:2]) == [expected[1]]
    assert outputs[0].token_ids == alone(PROMPTS[0], LONG)[0][0][: len(outputs[0].token_ids)]
    assert len(outputs[0].token_ids) > 0
    assert outputs[-1].token_ids == ()
    assert all(0 <= output.timings.total < 1000 for output in outputs)


@pytest.fixture(autouse=True)
def listening():
    """Ctrl-C raises, as in a terminal: a shell starts its background jobs deaf to it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press():
    """What a terminal does on Ctrl-C."""
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("seconds", [0.0005, 0.002, 0.005, 0.02, 0.05])
def test_a_real_interrupt_at_any_moment(busy, alone, seconds):
    expected = alone(PROMPTS[0])
    before = signal.getsignal(signal.SIGINT)
    timer = threading.Timer(seconds, press)
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        for _ in range(100_000):
            busy.generate(PROMPTS * 4, LONG)
    assert signal.getsignal(signal.SIGINT) is before
    assert idle(busy)
    assert answers(busy.generate(PROMPTS[:1], SHORT)) == [expected]


def test_an_impatient_user_breaks_nothing(busy):
    """Ctrl-C again and again, while the first is being dealt with."""
    allowed = [0]

    def handler(*_):
        if allowed[0]:
            allowed[0] -= 1
            raise KeyboardInterrupt

    stop = threading.Event()

    def presses():
        while not stop.wait(0.0007):
            press()

    before = signal.signal(signal.SIGINT, handler)
    presser = threading.Thread(target=presses)
    presser.start()
    try:
        for _ in range(8):
            with contextlib.suppress(KeyboardInterrupt):
                with contextlib.suppress(KeyboardInterrupt):
                    allowed[0] = 2
                    busy.generate(PROMPTS * 4, LONG)
                    pytest.fail("the interrupt was lost")
                stop.is_set()
            allowed[0] = 0
            stats = busy.stats()
            assert balanced(stats)
            assert (stats.running, stats.waiting) == (0, 0)
    finally:
        stop.set()
        presser.join()
        signal.signal(signal.SIGINT, before)


def test_a_real_interrupt_returns_what_is_finished(busy, alone):
    ends = []

    def callback(delta):
        ends.extend([delta.index] * (delta.output is not None))
        if len(ends) == 3:
            press()

    outputs = busy.generate([[i] for i in range(10, 50)], SHORT, on_delta=callback, on_interrupt="return")
    assert len(outputs) == 40
    reasons = [output.finish_reason for output in outputs]
    assert reasons.count("length") >= 3
    assert reasons[-1] == "abort"
    for i, output in enumerate(outputs[:4]):
        assert output.finish_reason == "abort" or answers([output]) == [alone([10 + i])]


def test_a_real_interrupt_in_a_step_loses_nothing(busy, alone, monkeypatch):
    """It comes while calls are dispatched, and while deltas are handed out; at once, and the turn is completed."""
    expected = [alone(prompt, LONG) for prompt in PROMPTS]
    ends, decode, interrupts, armed = {}, busy._loop.runner.decode, [], [False]

    def handler(*_):
        if armed[0]:
            armed[0] = False
            interrupts.append(busy)
            raise KeyboardInterrupt

    def decoding(batch, rows, sequences):
        press()
        return decode(batch, rows, sequences)

    def callback(delta):
        press()
        ends[delta.request_id] = delta.output

    monkeypatch.setattr(busy._loop.runner, "decode", decoding)
    rids = [busy.submit(prompt, LONG, on_delta=callback) for prompt in PROMPTS]
    signal.signal(signal.SIGINT, handler)
    while len(ends) < len(rids) or not all(ends.values()):
        with contextlib.suppress(KeyboardInterrupt):
            armed[0] = True
            busy.step()
            armed[0] = False
    assert len(interrupts) > 20
    assert answers([ends[rid] for rid in rids]) == expected


def test_another_handler_of_ctrl_c_is_asked(busy):
    """A program that only notes Ctrl-C goes on."""
    noted = []
    before = signal.signal(signal.SIGINT, lambda *_: noted.append(threading.current_thread()))
    try:
        (output,) = busy.generate(
            [PROMPTS[0]], LONG, on_delta=lambda delta: delta.finish_reason or os.kill(os.getpid(), signal.SIGINT)
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert output.finish_reason == "length"
    assert len(noted) > 3
    assert set(noted) == {threading.main_thread()}


def test_ctrl_c_stays_ignored_where_it_is(busy):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        rid = busy.submit(PROMPTS[0], SHORT, on_delta=lambda delta: os.kill(os.getpid(), signal.SIGINT))
        while busy.has_work:
            busy.step()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert not busy.abort(rid)


# The engine's own faults


def test_a_fault_while_waiting_for_the_device(busy, alone, monkeypatch):
    expected = alone(PROMPTS[0])

    def broken(_):
        raise Fault("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", broken)
        with pytest.raises(Fault):
            busy.generate(PROMPTS, SHORT)
    assert idle(busy)
    assert answers(busy.generate(PROMPTS[:1], SHORT)) == [expected]


def test_callbacks_of_requests_that_a_fault_ends(busy, alone, monkeypatch):
    """One that raises, one that asks again at once, and one that exits."""
    expected = alone(PROMPTS[2])
    again = []

    def retrying(delta):
        if delta.finish_reason == "error":
            again.append(busy.submit(PROMPTS[2], SHORT))

    def raising(delta):
        if delta.finish_reason == "error":
            raise OSError

    def exiting(delta):
        if delta.finish_reason == "error":
            raise SystemExit

    for callback in (raising, retrying, exiting):
        busy.submit(PROMPTS[0], LONG, on_delta=callback)
    busy.step()
    with monkeypatch.context() as patch:
        patch.setattr(busy._loop.runner, "decode", lambda *_: (_ for _ in ()).throw(Fault("gone")))
        with pytest.raises((Fault, SystemExit)):
            for _ in range(3):
                busy.step()
    deltas = []
    while busy.has_work:
        with contextlib.suppress(SystemExit):
            deltas += busy.step()
    assert balanced(busy.stats())
    assert deltas[-1].request_id == again[0]
    assert answers([deltas[-1].output]) == [expected]


def test_a_fault_in_warmup_leaves_an_engine(alone, monkeypatch):
    cold = scripted()
    rid = cold.submit(PROMPTS[0], SHORT)

    def broken(first_token):
        yield "one program"
        raise Fault("gone")

    with monkeypatch.context() as patch:
        patch.setattr(cold._loop.runner, "warmup", broken)
        with pytest.raises(Fault):
            cold.warmup()
    assert [(d.request_id, d.finish_reason) for d in cold.step()] == [(rid, "error")]
    assert answers(cold.generate(PROMPTS[:1], SHORT)) == [alone(PROMPTS[0])]
    assert idle(cold)


def test_an_interrupt_in_warmup_leaves_an_engine(alone, monkeypatch):
    """The signal comes while a program is compiled; the next one is not begun."""
    cold = scripted()
    warmup, begun = cold._loop.runner.warmup, []

    def interrupted(first_token):
        for name in warmup(first_token):
            begun.append(name)
            os.kill(os.getpid(), signal.SIGINT)
            yield name

    monkeypatch.setattr(cold._loop.runner, "warmup", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cold.warmup()
    assert len(begun) == 1
    assert answers(cold.generate(PROMPTS[:1], SHORT)) == [alone(PROMPTS[0])]
