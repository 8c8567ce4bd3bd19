"""Answers of a model: its numbers, in any company; what is compiled when, and what memory is free."""

import contextlib
import dataclasses
import gc
import logging
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import ENDS, LONG, PAGES, SETTINGS, answers, engine, idle, model, reciter, tokenizer

import ling3
from ling3 import SamplingParams
from ling3.cache import pages_of, slots_of
from ling3.engine.actor import join_abandoned
from ling3.engine.forward import decode

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
PROMPTS = [[7, 8, 9], list(range(20, 65)), [11], list(range(100, 170)), [12, 13]]


@pytest.fixture
def served(shared):
    """The engine of this module; each test leaves it idle."""
    yield shared
    assert idle(shared)


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


@jax.jit
def forward(model, tokens):
    """Logits of the whole forward pass."""
    return model(tokens)


def reference(tokens):
    """The logits after each of the tokens, in float64; padded, so that all lengths share a program."""
    padded = np.zeros((1, 256), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(forward(model(), jnp.asarray(padded))[0, : len(tokens)], np.float64)


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_nothing_is_printed_where_there_is_no_terminal(served, capfd, caplog):
    served.generate(PROMPTS, GREEDY)
    served.warmup()  # while programs are compiled, forms log why they run or not
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


def test_a_seed_is_a_text_in_any_batch(served):
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=11, ignore_eos=True)
    (alone,) = served.generate([PROMPTS[1]], params)
    others = SamplingParams(max_tokens=40, temperature=1.5, top_k=30)
    crowd = served.generate([*PROMPTS, PROMPTS[1], *PROMPTS], [*[others] * 5, params, *[others] * 5])
    assert answers(crowd[5:6]) == answers([alone])
    assert alone.outputs[0].seed == 11
    (other,) = served.generate([PROMPTS[1]], dataclasses.replace(params, seed=12))
    assert other.token_ids != alone.token_ids


def test_a_draw_among_one_is_greedy(served):
    expected = answers(served.generate(PROMPTS, GREEDY))
    for narrow in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}):
        assert answers(served.generate(PROMPTS, dataclasses.replace(GREEDY, temperature=1.0, **narrow))) == expected


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


def test_the_ends_of_config_generation_config_and_tokenizer_all_end():
    spell, texts = tokenizer().encode, ("ABC", "DEF", "GHI", "JKL", "MNO")
    scripts = [[*spell(text[:2]), end, *spell(text[2])] for text, end in zip(texts, ENDS, strict=True)]
    alphabet, prompts = engine(reciter(*scripts)), [text[0] for text in texts]
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


def test_a_step_leaves_the_slots_and_pages_of_others_alone(served):
    """Bit for bit, with what earlier requests have left in them."""

    def others(sequence):
        layers = jax.device_get(served._loop.runner.pool.layers)
        states = [np.delete(leaf, sequence.memory.slot, axis=0) for leaf in jax.tree.leaves(slots_of(layers))]
        return states + [np.delete(paged.entries, sequence.memory.pages, axis=0) for paged in pages_of(layers)]

    served.generate([[i] * 60 for i in range(10, 16)], dataclasses.replace(GREEDY, max_tokens=40))
    rid = served.submit([9] * 70, dataclasses.replace(GREEDY, max_tokens=60))
    served.step()
    sequence, turns = served._loop.requests[rid].sequences[0], 0
    assert 0 < sequence.prefilled < 70
    before = others(sequence)
    assert sum(np.count_nonzero(leaf) for leaf in before) > 1000
    while served.has_work and sequence.memory.slot is not None:
        held = list(sequence.memory.pages)
        served.step()
        turns += 1
        if sequence.memory.pages == held:
            for old, new in zip(before, others(sequence), strict=True):
                np.testing.assert_array_equal(old, new)
        elif sequence.memory.slot is not None:
            before = others(sequence)
    assert turns > 10


@pytest.mark.slow
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


@contextlib.contextmanager
def logged_compiles():
    """In all threads, which `jax.log_compiles` is not."""
    jax.config.update("jax_log_compiles", True)
    try:
        yield
    finally:
        jax.config.update("jax_log_compiles", False)


@pytest.mark.thorough
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


@pytest.mark.slow
def test_a_request_alone_waits_for_no_more_than_a_first_token_takes():
    """After a warmup for a first token, one request compiles nothing; several at once compile a decode of more rows."""
    served = engine(num_pages=PAGES + 2, batch_invariant=False)  # shapes that no other test has
    served.warmup(first_token=True)
    programs, decodes = served._loop.runner.programs, decode._cache_size()
    assert served._loop.runner.shapes.rows == (2, 4) and served.stats().compile_seconds > 0
    served.submit(PROMPTS[0], GREEDY)
    deltas = []
    while served.has_work:
        deltas += served.step()
    assert [len(delta.token_ids) for delta in deltas[:2]] == [1, 3]
    assert served._loop.runner.programs == programs
    served.generate(PROMPTS, GREEDY)
    assert decode._cache_size() == decodes + 1


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_memory_is_free_before_the_next_engine_is_made():
    """Also if the old one's thread has just been sent a message."""
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            left = engine()
            memory = [weakref.ref(leaf) for leaf in jax.tree.leaves(left._loop.runner.pool.layers)]
            next(left.stream(PROMPTS[0], LONG))
            del left
            left = engine()
            assert [ref() for ref in memory] == [None] * len(memory)
            del left
    finally:
        gc.enable()
