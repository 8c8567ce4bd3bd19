"""Interventions in an engine: what they are in the model, for their own request alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_engine import CONFIG, LONG, PROMPTS, answer, crowd, engine, idle, model

import ling3

pytestmark = pytest.mark.thorough

CHANGE = ling3.Intervention
TEXTS = [np.random.default_rng(n).integers(6, CONFIG.vocab_size, n).tolist() for n in (1, 33, 90)]
VECTOR = np.asarray(jax.random.normal(jax.random.key(3), (CONFIG.hidden_size,)))
PLAIN = ling3.SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1)
STEERED = [
    CHANGE.add(1, VECTOR, from_position=5),
    CHANGE.set(0, "gate", 0.2, head=1),
    CHANGE.expert(1, 3, 0.7, positions=[0, 40, 50]),
]
OTHERS = [
    CHANGE.add(1, -2 * VECTOR),
    CHANGE.set(0, "gate", 1.0, head=0),
    CHANGE.expert(1, 6, 0.0, positions=[2, 95, 96]),
]
OWN = dataclasses.replace(PLAIN, interventions=STEERED)
ROUNDING = 3e-5


@pytest.fixture(scope="module")
def alone():
    """Each text's answer under its interventions in an engine that serves nothing else."""
    lonely = engine(prefix_cache=False)
    return [answer(lonely.generate([text], OWN)[0].outputs[0]) for text in TEXTS]


@pytest.mark.slow
def test_the_tokens_are_those_of_generate(alone):
    steered = ling3.generate(model(), TEXTS, max_tokens=20, ignore_eos=True, interventions=STEERED)
    plain = ling3.generate(model(), TEXTS, max_tokens=20, ignore_eos=True)
    for found, expected, other in zip(alone, steered, plain, strict=True):
        assert list(found[0]) == expected != other


def test_nobody_else_notices_and_neither_do_they(served, alone):
    """Beside requests with other interventions of the same kind, with others, and with none."""
    lonely = engine(prefix_cache=False)
    third = dataclasses.replace(PLAIN, interventions=[CHANGE.set(2, "heads", 0.0, head=0)])
    params = [OWN, dataclasses.replace(PLAIN, interventions=OTHERS), third, PLAIN]
    requests = [(text, each) for text in TEXTS for each in params]
    found = served.generate([text for text, _ in requests], [each for _, each in requests])
    for (text, each), output in zip(requests, found, strict=True):
        if each is OWN:
            assert answer(output.outputs[0]) == alone[TEXTS.index(text)]
        else:
            assert answer(output.outputs[0]) == answer(lonely.generate([text], each)[0].outputs[0])
    assert len({output.token_ids for output in found}) > 2 * len(TEXTS)


def test_preemption_changes_nothing(alone):
    crowded = engine()
    crowd(crowded, pages=12)
    outputs = crowded.generate([*PROMPTS[:2], *TEXTS], [LONG, LONG, *[OWN] * len(TEXTS)])
    assert [answer(output.outputs[0]) for output in outputs[2:]] == alone
    assert crowded.stats().preemptions > 0


def test_they_use_no_known_prefix_and_leave_none(served, alone):
    text, long = TEXTS[-1], [*TEXTS[-1], 7, 9]
    expected = answer(engine(prefix_cache=False).generate([long], PLAIN)[0].outputs[0])
    served.forget_prefixes()
    served.generate([text], OWN)
    (after,) = served.generate([long], PLAIN)
    assert after.cached_tokens == 0 and answer(after.outputs[0]) == expected
    (known,) = served.generate([long], PLAIN)
    (again,) = served.generate([text], OWN)
    assert known.cached_tokens == 64 and again.cached_tokens == 0 and answer(again.outputs[0]) == alone[-1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_patched_prompt_decodes_beside_the_others(served):
    """Its positions all lie in the prompt: then its decode calls are anyone's."""
    text = TEXTS[1]
    patch = [CHANGE.patch(0, np.tile(VECTOR, (3, 1)), [4, 5, 9])]
    expected = ling3.generate(model(), [text], max_tokens=20, ignore_eos=True, interventions=patch)
    calls = []
    for params in (PLAIN, dataclasses.replace(PLAIN, interventions=patch)):
        served.forget_prefixes()
        before = served.stats().decode_calls
        found = served.generate([text, TEXTS[2]], [params, PLAIN])
        calls.append(served.stats().decode_calls - before)
    assert list(found[0].token_ids) == expected[0] and calls[0] == calls[1]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_causal_tracing_through_the_engine(served):
    """The residuals of another prompt's run, patched in, make its scores of this one's tokens."""
    ours, theirs = TEXTS[1], TEXTS[2][:33]
    every = ling3.SamplingParams(max_tokens=0, capture=ling3.Capture(residual=True))
    (run,) = served.generate([theirs], every)
    logits = jax.nn.log_softmax(model()(jnp.asarray([theirs]))[0])
    for layer in range(CONFIG.num_hidden_layers):
        patched = [CHANGE.patch(layer, run.captured.residual[layer])]
        params = ling3.SamplingParams(max_tokens=0, prompt_logprobs=0, interventions=patched)
        (output,) = served.generate([ours], params)
        found = [score.logprob for score in output.prompt_logprobs[1:]]
        np.testing.assert_allclose(found, logits[np.arange(32), ours[1:]], atol=ROUNDING)


@pytest.mark.slow
def test_what_is_captured_is_under_them(served):
    params = dataclasses.replace(OWN, capture=ling3.Capture(residual=True, gates=True, state_norms=True))
    for text in TEXTS:
        (output,) = served.generate([text], params)
        tokens = jnp.asarray([[*text, *output.token_ids]], jnp.int32)
        expected = ling3.trace(model(), tokens, interventions=STEERED)
        for i, layer in enumerate(expected.layers):
            norm = np.linalg.norm(output.captured.residual[i], axis=-1)
            np.testing.assert_allclose(norm, layer.residual_norm[0], rtol=ROUNDING)
        np.testing.assert_allclose(output.captured.state_norms[1], expected.kda[1].state_norm[0], rtol=ROUNDING)
        assert np.all(output.captured.gates[0][:, 1] == np.float32(0.2))


@pytest.mark.slow
def test_with_a_grammar(served):
    """Its tokens are chosen under both: the likeliest of those that the grammar allows."""
    grammar = ling3.Choice(["a", "b", "c", "d", "e", "f", "g", "h"])
    params = ling3.SamplingParams(max_tokens=4, structured=grammar, logprobs=20)
    strong = CHANGE.add(2, 20 * np.asarray(model().lm_head.weight[served.tokenizer.encode("e")[-1]]))
    plain, steered = served.generate(
        [TEXTS[1], TEXTS[1]], [params, dataclasses.replace(params, interventions=[strong])]
    )
    assert plain.text in "abcdfgh" and steered.text == "e"


def test_several_completions_and_an_abort(served):
    drawn = dataclasses.replace(OWN, temperature=1.0, seed=4, n=2)
    (output,) = served.generate([TEXTS[1]], drawn)
    for index, completion in enumerate(output.outputs):
        (one,) = served.generate([TEXTS[1]], dataclasses.replace(drawn, seed=4 + index, n=1))
        assert answer(one.outputs[0]) == answer(completion)
    number = served.submit(TEXTS[2], OWN)
    served.step()
    assert served.abort(number)
    assert [delta.finish_reason for delta in served.step()] == ["abort"] and idle(served)


def test_what_does_not_hold_of_the_model_is_refused_before_any_work(served):
    with pytest.raises(ValueError, match=r"intervention: layer is 3, expected one in \[0, 3\)"):
        served.submit(TEXTS[0], dataclasses.replace(PLAIN, interventions=[CHANGE.add(3, VECTOR)]))
    with pytest.raises(ValueError, match=r"interventions are 'up', expected a list of ling3.Intervention"):
        ling3.SamplingParams(interventions="up")
