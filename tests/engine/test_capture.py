"""What an engine captures is what a trace of the whole sequence shows, in any company, and it changes no answer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import CONFIG, LONG, PROMPTS, answer, crowd, engine, idle, model, without
from tiny import widened

import ling3
from ling3.engine.capture import PATHS

pytestmark = pytest.mark.thorough

ALL = ling3.Capture(**dict.fromkeys(PATHS, True))
# One token, a part of a chunk of 32, a whole one, one token more, and several.
TEXTS = [np.random.default_rng(n).integers(6, CONFIG.vocab_size, n).tolist() for n in (1, 20, 32, 33, 90)]
SEEN = ling3.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, capture=ALL)
PLAIN = dataclasses.replace(SEEN, capture=None)
# Of the largest number of an array: a few tokens of a random model amplify float32's rounding by a hundred.
ROUNDING = 3e-5


@pytest.fixture(scope="module")
def alone():
    """Each text's output in an engine that serves nothing else."""
    lonely = engine(prefix_cache=False)
    return [lonely.generate([text], SEEN)[0] for text in TEXTS]


def arrays(captured):
    """Its arrays, by field and layer."""
    found = {}
    for name in PATHS:
        for layer, array in getattr(captured, name).items():
            found |= {(name, layer, i): x for i, x in enumerate(array if name == "router" else [array])}
    return found


def same(one, other):
    """True if two have the same bits."""
    one, other = arrays(one), arrays(other)
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def close(found, expected):
    """The same numbers but for float32's rounding through three layers, in another order of sums."""
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING * max(np.abs(expected).max(), 1.0))


def shown(model, texts):
    """For each text what a trace shows of what is captured, by field and layer: norms in place of vectors."""
    found, longest = {}, max(map(len, texts))
    rows = [[*text, *[0] * (longest - len(text))] for text in texts]  # no token knows of a later one
    trace = ling3.trace(model, jnp.asarray(rows, jnp.int32))
    for i, layer in enumerate(trace.layers):
        found |= {("residual", i, 0): layer.residual_norm, ("attended", i, 0): layer.attention_norm}
        found |= {("added", i, 0): layer.mlp_norm, ("gates", i, 0): layer.attention.gate}
    for i, layer in trace.kda.items():
        found |= {("decays", i, 0): layer.decay, ("betas", i, 0): layer.beta, ("state_norms", i, 0): layer.state_norm}
    for i, layer in trace.moe.items():
        found |= {("router", i, 0): layer.chosen, ("router", i, 1): layer.weights, ("router", i, 2): layer.scores}
    return [
        {key: np.asarray(array[row, : len(text)]) for key, array in found.items()} for row, text in enumerate(texts)
    ]


def test_it_is_the_trace_of_the_whole_sequence(alone):
    """Of every token of prompt and answer, also of the last: within 1e-6, or as near to float64 as float32 comes.

    A few tokens of a random model amplify rounding, a trace's as much as a capture's.
    """
    whole = [[*text, *output.token_ids] for text, output in zip(TEXTS, alone, strict=True)]
    with jax.enable_x64(True):
        exact = shown(widened(model()), whole)
    errors, own = [], []
    for tokens, output, expected, traced in zip(whole, alone, exact, shown(model(), whole), strict=True):
        found = arrays(output.captured)
        assert output.captured.tokens == len(tokens) == len(output.prompt_token_ids) + 12
        assert found.keys() == expected.keys() | {("heads", i, 0) for i in range(CONFIG.num_hidden_layers)}
        for key, array in expected.items():
            name, _, part = key
            ours = np.linalg.norm(found[key], axis=-1) if name in ("residual", "attended", "added") else found[key]
            assert ours.shape == array.shape and len(ours) == len(tokens)
            if (name, part) == ("router", 0):
                assert np.array_equal(ours, array)
                continue
            scale = np.abs(array).max()
            errors.append(np.abs(ours - array).ravel() / scale)
            own.append(np.abs(traced[key] - array).ravel() / scale)
    errors, own = np.concatenate(errors), np.concatenate(own)
    assert np.median(errors) < 1e-6 and np.mean(errors > 1e-6) < 0.1 and errors.max() < 4 * own.max()


def test_the_last_residual_has_the_models_logits(alone):
    for text, output in zip(TEXTS, alone, strict=True):
        hidden = model().model.normed(jnp.asarray(output.captured.residual[CONFIG.num_hidden_layers - 1])[None])
        logits = np.asarray(model().logits(hidden)[0, len(text) - 1 : -1])
        assert np.argmax(logits, axis=-1).tolist() == list(output.token_ids)


@pytest.mark.slow
def test_an_answer_has_the_same_bits_with_it(served):
    """Greedy and drawn, several completions, stops and grammars, and with the prompt's scores."""
    kinds = [
        PLAIN,
        ling3.SamplingParams(max_tokens=8, temperature=1.0, seed=3, n=3, logprobs=0),
        ling3.SamplingParams(max_tokens=8, structured=ling3.Regex("[a-f]{6}"), logprobs=1, frequency_penalty=0.5),
        ling3.SamplingParams(max_tokens=8, stop=["a", "e", "1"], prompt_logprobs=1),
    ]
    few = ling3.Capture(residual=[1], state_norms=True)
    for kind in kinds:
        plain = served.generate(TEXTS, kind)
        seen = served.generate(TEXTS, dataclasses.replace(kind, capture=few))
        for one, other, text in zip(plain, seen, TEXTS, strict=True):
            assert list(map(answer, one.outputs)) == list(map(answer, other.outputs))
            assert one.prompt_logprobs == other.prompt_logprobs and one.captured is None
            for completion in other.outputs:
                whole = len(text) + len(completion.token_ids)
                assert completion.captured.tokens == whole == len(completion.captured.residual[1])


def test_it_is_the_same_in_any_company(served, alone):
    """Beside others, in another order, and where prefixes are known."""
    beside = [*TEXTS[::-1], *PROMPTS]
    outputs = served.generate(beside, [*[SEEN] * len(TEXTS), *[LONG] * len(PROMPTS)])
    assert all(same(one.captured, other.captured) for one, other in zip(outputs, alone[::-1], strict=False))
    lonely = engine(prefix_cache=False)
    for prompt, output in zip(PROMPTS, outputs[len(TEXTS) :], strict=True):
        assert answer(output.outputs[0]) == answer(lonely.generate([prompt], LONG)[0].outputs[0])


def test_preemption_changes_nothing(alone):
    crowded = engine()
    crowd(crowded, pages=14)
    outputs = crowded.generate([*PROMPTS[:2], *TEXTS, *TEXTS], [LONG, LONG, *[SEEN] * (2 * len(TEXTS))])
    assert all(same(one.captured, other.captured) for one, other in zip(outputs[2:], [*alone, *alone], strict=True))
    assert crowded.stats().preemptions > 0


def test_what_is_watched_leaves_no_prefix(served):
    """A later prompt goes on from what the prompt itself left, with the bits of one that knows none."""
    long = [*TEXTS[-1], 7, 9]
    served.forget_prefixes()
    (first,) = served.generate([TEXTS[-1]], SEEN)
    (second,) = served.generate([[*TEXTS[-1], *first.token_ids]], PLAIN)
    (third,) = served.generate([long], PLAIN)
    assert second.cached_tokens == third.cached_tokens == 64
    lonely = engine(prefix_cache=False)
    assert answer(third.outputs[0]) == answer(lonely.generate([long], PLAIN)[0].outputs[0])


def test_a_prompt_alone_can_be_captured(served, alone):
    """Without an answer, and with the prompt's scores."""
    before = served.stats()
    for scores in (None, 0):
        params = ling3.SamplingParams(max_tokens=0, capture=ALL, prompt_logprobs=scores)
        for text, output in zip(TEXTS, served.generate(TEXTS, params), strict=True):
            assert (output.text, output.token_ids, output.finish_reason) == ("", (), "length")
            assert output.captured.tokens == len(text) and output.timings.queued is not None
            assert (output.prompt_logprobs is None) == (scores is None)
            for (name, layer, i), array in arrays(output.captured).items():
                close(array, arrays(alone[TEXTS.index(text)].captured)[name, layer, i][: len(text)])
    assert served.stats().output_tokens == before.output_tokens


def test_it_comes_with_the_last_delta(served):
    deltas = list(served.stream(TEXTS[1], SEEN))
    assert sum(len(delta.token_ids) for delta in deltas) == 12 and len(deltas) > 1
    assert [delta.output is not None for delta in deltas] == [*[False] * (len(deltas) - 1), True]
    assert deltas[-1].output.captured.tokens == 32 and "residual of layers 0, 1, 2" in repr(deltas[-1].output.captured)


def test_an_aborted_request_has_none(served):
    """Before its tokens are whole, and after."""
    for steps in (1, 4, 5, 6, 7, 8):
        number = served.submit(TEXTS[-1], SEEN)
        deltas = [delta for _ in range(steps) for delta in served.step()]
        aborted = served.abort(number)
        deltas += served.step()
        (output,) = [delta.output for delta in deltas if delta.output is not None]
        assert (output.finish_reason, output.captured is None) == (("abort", True) if aborted else ("length", False))
        assert idle(served)


def test_a_callback_that_raises_ends_it(served):
    def raising(delta):
        raise RuntimeError("enough")

    (failed, beside) = served.generate([TEXTS[1], TEXTS[2]], SEEN), served.generate([TEXTS[2]], SEEN)[0]
    number = served.submit(TEXTS[1], SEEN, on_delta=raising)
    deltas = [delta for _ in range(12) for delta in served.step()]
    (output,) = [delta.output for delta in deltas if delta.request_id == number and delta.output is not None]
    assert (output.finish_reason, output.captured) == ("error", None) and idle(served)
    assert same(beside.captured, failed[1].captured)


def test_a_request_may_fill_the_engine(served):
    room = served.max_model_len
    params = ling3.SamplingParams(max_tokens=6, ignore_eos=True, capture=ling3.Capture(residual=[0]))
    (output,) = served.generate([[9] * (room - 6)], params)
    assert output.captured.residual[0].shape == (room, CONFIG.hidden_size)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ling3.Capture, "^capture: nothing is asked for"),
        (lambda: ling3.Capture(residual=3), "^capture: residual is 3, expected True, False or the numbers of layers"),
        (lambda: ling3.Capture(gates=[-1]), r"^capture: gates is \[-1\]"),
        (lambda: ling3.SamplingParams(capture=True), "capture is True, expected a ling3.Capture or None"),
        (lambda: ling3.SamplingParams(max_tokens=0, capture=ALL, n=2), "n is 2, which needs max_tokens >= 1"),
    ],
)
def test_senseless_values_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("capture", "message"),
    [
        (ling3.Capture(residual=[3]), r"capture: residual has layer 3, expected layers in \[0, 3\)"),
        (ling3.Capture(decays=[0, 2]), r"capture: layer 2 has no decays; those that have: \[0, 1\]"),
        (ling3.Capture(router=[0]), r"capture: layer 0 has no router; those that have: \[1, 2\]"),
    ],
)
def test_what_the_model_has_not_is_refused_before_any_work(served, capture, message):
    with pytest.raises(ValueError, match=message):
        served.submit(TEXTS[0], dataclasses.replace(SEEN, capture=capture))


def test_programs_that_cannot_watch_refuse_it():
    other = without("want")
    for params in (SEEN, dataclasses.replace(PLAIN, interventions=[ling3.Intervention.add(0, 0.0)])):
        with pytest.raises(ValueError, match=r"(capture|interventions): the forward passes of this engine do not"):
            other.submit(TEXTS[0], params)
