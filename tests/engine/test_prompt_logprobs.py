"""Log-probabilities of prompts: what they are, in any company, and what they do not change."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import CONFIG, LONG, PROMPTS, answer, crowd, engine, idle, model, without
from tiny import widened

import ling3
from ling3.engine.forward import score
from ling3.engine.request import NOT_FINITE
from ling3.engine.sampling_params import SamplingParams
from ling3.execution import PLAIN

pytestmark = pytest.mark.thorough

SCORES = SamplingParams(max_tokens=0, prompt_logprobs=3)
# One token, a part of a chunk of 32, a whole one, one token more, and several.
LENGTHS = (1, 2, 31, 32, 33, 100)
TEXTS = [np.random.default_rng(length).integers(6, CONFIG.vocab_size, length).tolist() for length in LENGTHS]


def scores(served, prompts, params=SCORES):
    return [output.prompt_logprobs for output in served.generate(prompts, params)]


@pytest.fixture(scope="module")
def alone():
    """Each prompt's scores in an engine that serves nothing else and knows no prefix."""
    lonely = engine(prefix_cache=False)
    return [scores(lonely, [prompt])[0] for prompt in TEXTS]


# float32's rounding through four layers, against float64: 5e-7 in the median, 9e-6 at worst on one machine; another
# order of the same sums, as another processor has it, moves the worst by a factor of two or three.
MEDIAN, WORST = 1.5e-6, 3e-5


def test_they_are_the_log_softmax_of_the_models_logits(alone):
    errors = []
    with jax.enable_x64(True):
        wide = widened(model())
        rows = [[*prompt, *[0] * (max(LENGTHS) - len(prompt))] for prompt in TEXTS]  # no token knows of a later one
        all_scores = np.asarray(jax.nn.log_softmax(wide(jnp.asarray(rows, jnp.int32))))
        for prompt, expected, found in zip(TEXTS, all_scores, alone, strict=True):
            assert found[0] is None and len(found) == len(prompt)
            for token, row, one in zip(prompt[1:], expected, found[1:]):
                values = list(one.top.values())
                assert one.token_id == token and values == sorted(values, reverse=True)
                errors += [
                    one.logprob - row[token],
                    *(values - row[list(one.top)]),
                    *(values - np.sort(row)[::-1][:3]),
                ]
    assert np.abs(errors).max() <= WORST and np.median(np.abs(errors)) <= MEDIAN


def test_a_token_among_the_likeliest_has_the_very_float(served):
    """Each prompt goes on by its greedy token, which is the likeliest after it."""
    outputs = served.generate(TEXTS, SamplingParams(max_tokens=1, ignore_eos=True))
    echoed = scores(served, [[*prompt, *output.token_ids] for prompt, output in zip(TEXTS, outputs, strict=True)])
    assert all(found[-1].logprob == found[-1].top[found[-1].token_id] for found in echoed)
    assert all(next(iter(found[-1].top)) == found[-1].token_id for found in echoed)


def test_generation_gives_the_same_but_for_rounding(served):
    """A first token is chosen after a product of one row with the head, and a prompt is scored by 16 rows at a time."""
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=20)
    for prompt, output in zip(TEXTS, served.generate(TEXTS, params), strict=True):
        (own,) = output.logprobs
        (found,) = scores(served, [[*prompt, *output.token_ids]], SamplingParams(max_tokens=0, prompt_logprobs=20))
        assert found[-1].token_id == own.token_id and list(found[-1].top) == list(own.top)
        # Float32 logits of a few units: a unit in the last place is 5e-7.
        np.testing.assert_allclose(list(found[-1].top.values()), list(own.top.values()), atol=1e-5)


def test_an_answer_has_the_same_bits_with_them(served):
    """Greedy and drawn, several completions, and with a grammar, whose prompt's last token goes in by itself."""
    kinds = [
        {"max_tokens": 20, "logprobs": 2, "ignore_eos": True},
        {"max_tokens": 12, "temperature": 1.0, "seed": 3, "n": 3, "logprobs": 0},
        {"max_tokens": 30, "structured": ling3.Regex("[a-f]{12}"), "logprobs": 1, "frequency_penalty": 0.5},
    ]
    for kind in kinds:
        for prompt in TEXTS:
            (plain,) = served.generate([prompt], SamplingParams(**kind))
            (echo,) = served.generate([prompt], SamplingParams(**kind, prompt_logprobs=1))
            assert list(map(answer, echo.outputs)) == list(map(answer, plain.outputs))
            assert plain.prompt_logprobs is None and len(echo.prompt_logprobs) == len(prompt)
            assert echo.outputs[0].cached_tokens == 0


def test_they_are_the_same_in_any_company(served, alone):
    """Beside others, after prompts that begin alike, and with an answer."""
    assert scores(served, TEXTS) == alone
    known = served.stats().cached_tokens
    assert scores(served, TEXTS[::-1]) == alone[::-1]
    assert served.stats().cached_tokens == known  # prefixes are known, and not gone on from
    mixed = [*TEXTS, *PROMPTS]
    params = [SamplingParams(max_tokens=i, prompt_logprobs=3, ignore_eos=True) for i in range(len(TEXTS))]
    params += [LONG] * len(PROMPTS)
    assert [output.prompt_logprobs for output in served.generate(mixed, params)] == [*alone, *[None] * len(PROMPTS)]


def test_an_answer_that_is_whole_in_its_first_call_has_them(served):
    """A grammar that leaves no choice forces all of its tokens at once."""
    params = SamplingParams(max_tokens=12, prompt_logprobs=3, structured=ling3.Choice(["a"]))
    outputs = served.generate(TEXTS, params)
    longer = dataclasses.replace(params, structured=ling3.Regex("[a-f]{12}"))
    assert [output.prompt_logprobs for output in outputs] == scores(served, TEXTS, longer)
    assert all(len(output.token_ids) <= 2 for output in outputs) and idle(served)


def test_others_go_on_from_what_such_a_prompt_left(served):
    """Its chunks are in the caches as any prompt's."""
    prompt = [*TEXTS[-1], 7, 9]
    lonely = engine(prefix_cache=False)
    expected = answer(lonely.generate([prompt], LONG)[0].outputs[0])
    served.forget_prefixes()
    scores(served, TEXTS[-1:])
    (output,) = served.generate([prompt], LONG)
    assert output.cached_tokens >= 64 and answer(output.outputs[0]) == expected


def test_preemption_and_waiting_change_nothing(alone):
    crowded = engine()
    crowd(crowded, pages=14)
    params = [LONG, LONG, *[SamplingParams(max_tokens=60, prompt_logprobs=3, ignore_eos=True)] * len(TEXTS)]
    outputs = crowded.generate([*PROMPTS[:2], *TEXTS], params)
    assert [output.prompt_logprobs for output in outputs[2:]] == alone
    assert crowded.stats().preemptions > 0


def test_without_an_answer_it_ends_at_once(served):
    """With no token, no decode call, and no second pass over the last chunk."""
    before = served.stats()
    (short, long) = served.generate([TEXTS[3], TEXTS[-1]], SCORES)
    after = served.stats()
    for output in (short, long):
        assert (output.text, output.token_ids, output.finish_reason, output.error) == ("", (), "length", None)
        assert output.logprobs is None
    assert after.decode_calls == before.decode_calls and after.output_tokens == before.output_tokens
    assert after.prefill_calls - before.prefill_calls == 1 + 4
    assert after.prompt_tokens - before.prompt_tokens == 31 + 99  # nothing comes after the last token
    assert idle(served)


def test_a_prompt_may_fill_the_engine(served):
    room = served.max_model_len
    whole = [9] * room
    (found,) = scores(served, [whole])
    assert len(found) == room and all(math.isfinite(one.logprob) for one in found[1:])
    with pytest.raises(ValueError, match=f"prompt has {room + 1} tokens and max_tokens is 0"):
        served.submit([*whole, 9], SCORES)


def test_an_aborted_request_has_none(served):
    number = served.submit(TEXTS[-1], SamplingParams(max_tokens=90, prompt_logprobs=0, ignore_eos=True))
    served.step()
    assert served.abort(number)
    outputs = [delta.output for delta in served.step() if delta.output is not None]
    assert [(output.finish_reason, output.prompt_logprobs) for output in outputs] == [("abort", None)]


def test_logits_that_are_no_numbers_end_it_in_error():
    head = model().lm_head.weight.at[7].set(jnp.nan)
    broken = engine(eqx.tree_at(lambda m: m.lm_head.weight, model(), head))
    failed, beside = broken.generate([TEXTS[3], [3]], [SCORES, SCORES])
    assert (failed.finish_reason, failed.error, failed.prompt_logprobs) == ("error", NOT_FINITE, None)
    assert (beside.finish_reason, beside.prompt_logprobs) == ("length", (None,))
    assert idle(broken)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_logprobs": -1}, r"prompt_logprobs is -1, expected a whole number in \[0, 20\]"),
        ({"prompt_logprobs": 21}, "prompt_logprobs is 21"),
        ({"prompt_logprobs": True}, "prompt_logprobs is True"),
        ({"max_tokens": 0}, "max_tokens is 0, expected a whole number >= 1"),
        ({"max_tokens": -1, "prompt_logprobs": 0}, "max_tokens is -1, expected a whole number >= 0"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "n": 2}, "n is 2, which needs max_tokens >= 1"),
        ({"max_tokens": 0, "prompt_logprobs": 0, "min_tokens": 1}, "min_tokens is 1, expected at most max_tokens"),
    ],
)
def test_senseless_values_are_refused(values, message):
    with pytest.raises(ValueError, match=f"^sampling parameters: {message}"):
        SamplingParams(**values)


def test_programs_without_targets_refuse_them():
    other = without("targets")
    with pytest.raises(ValueError, match="prompt_logprobs is not None, and the forward passes of this engine"):
        other.submit(PROMPTS[0], SCORES)


@pytest.mark.parametrize("seq", [1, 5, 16, 40])
def test_blocks_of_logits_are_the_whole(seq):
    """By 16 tokens at a time, of which the last block may be padded."""
    draw = np.random.default_rng(seq)
    hidden = jnp.asarray(draw.normal(size=(2, seq, CONFIG.hidden_size)), jnp.float32)
    targets = jnp.asarray(draw.integers(0, CONFIG.vocab_size, (2, seq)), jnp.int32)
    found = jax.jit(score, static_argnums=4)(model(), hidden, targets, jnp.asarray(True), PLAIN)
    expected = np.asarray(jax.nn.log_softmax(model().logits(hidden, PLAIN)))
    assert found.logprob.shape == (2, seq) and found.top_ids.shape == (2, seq, 20)
    np.testing.assert_allclose(
        found.logprob, np.take_along_axis(expected, np.asarray(targets)[..., None], -1)[..., 0], atol=1e-5
    )
    np.testing.assert_allclose(
        found.top_logprobs, np.take_along_axis(expected, np.asarray(found.top_ids), -1), atol=1e-5
    )
