"""New weights in a running engine: the answers of a new engine, and no program compiled again."""

import concurrent.futures
import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from random_adapters import random_adapter
from small_engine import CONFIG, PROMPTS, answers, engine, idle, model, without
from tiny import open_model

import ling3
from ling3.engine.requests import Requests

DRAWN = ling3.SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1, temperature=1.0, seed=3)
KEEP = ling3.SamplingParams(max_tokens=4, ignore_eos=True, keep=True)


@pytest.fixture(scope="module")
def shared():
    return engine()


@pytest.fixture
def served(shared):
    """The engine of this module with the weights of `model()`; each test leaves it idle."""
    shared.update(model())
    yield shared
    assert idle(shared)


@pytest.fixture(scope="module")
def other():
    return open_model(CONFIG, seed=5)


def test_answers_are_those_of_a_new_engine(served, other):
    """Also where prefixes of the old weights were known, and back again."""
    old = answers(served.generate(PROMPTS * 2, DRAWN))
    assert served.stats().cached_pages > 0
    programs = served.loop.runner.programs
    served.update(other)
    assert served.stats().cached_pages == served.stats().snapshot_bytes == 0
    new = answers(served.generate(PROMPTS * 2, DRAWN))
    assert new == answers(engine(other).generate(PROMPTS * 2, DRAWN)) != old
    served.update(model())
    assert answers(served.generate(PROMPTS * 2, DRAWN)) == old
    assert served.loop.runner.programs == programs


@pytest.mark.slow
def test_adapters_take_new_weights():
    """A model with an adapter has other programs than one without, and its engine takes other such adapters."""
    adapters = [ling3.new_adapter(model(), rank=2, targets=["q_proj"], key=jax.random.key(i)) for i in range(2)]
    adapters = [ling3.new_adapter(model(), rank=2, targets=["q_proj"], key=jax.random.key(i)) for i in range(2)]
    one, two = (ling3.with_adapter(model(), adapter) for adapter in adapters)
    two = jax.tree.map(lambda x: x + jnp.asarray(0.1, x.dtype) if eqx.is_inexact_array(x) else x, two)
    tuned = engine(one)
    tuned.update(two)
    assert answers(tuned.generate(PROMPTS, DRAWN)) == answers(engine(two).generate(PROMPTS, DRAWN))
    with pytest.raises(ValueError, match=r"model\.model\.layers\[0\]\.attention\.q_proj is Linear"):
        tuned.update(model())


def test_snapshots_of_old_weights_are_refused(served, other):
    (kept,) = served.generate([PROMPTS[1]], KEEP)
    served.update(other)
    with pytest.raises(ValueError, match="another model"):
        served.generate([kept.snapshot], KEEP)
    (again,) = served.generate([PROMPTS[1]], KEEP)
    assert again.snapshot.origin["model"] != kept.snapshot.origin["model"]
    (further,) = served.generate([again.snapshot], KEEP)
    (fresh,) = engine(other).generate([again.snapshot], KEEP)
    assert further.token_ids == fresh.token_ids


def test_a_request_checked_with_old_weights(served, other):
    """An update between the check of a request with a snapshot and its queue ends it; others have no part in it."""
    (late,) = served._requests([PROMPTS[1]], KEEP, None)
    (plain,) = served._requests([PROMPTS[1]], DRAWN, None)
    served.update(other)
    for request in (late, plain):
        served._actor.call(Requests.enqueue, [request], True)
    assert late.sequences[0].completion.error == "the engine's weights were replaced meanwhile: submit it again"
    while served.has_work:
        served.step()
    assert answers([plain.output()]) == answers(engine(other).generate([PROMPTS[1]], DRAWN))


def changed(field, value):
    return lambda new: dataclasses.replace(new, config=dataclasses.replace(new.config, **{field: value}))


def narrow(new):
    return eqx.tree_at(lambda m: m.model.norm.weight, new, replace_fn=lambda x: x.astype(jnp.bfloat16))


REFUSED = [
    (narrow, r"model\.model\.norm\.weight is bfloat16\[32\] on .*, expected float32\[32\] on "),
    (changed("rope_theta", 3.0), r"model\.config\.rope_theta is 3\.0, expected 6000000\.0"),
    (lambda new: eqx.tree_at(lambda m: m.model.layers, new, new.model.layers[:2]), r"layers has 2 parts, expected 3"),
    (lambda new: eqx.tree_at(lambda m: m.lm_head, new, None), r"model\.lm_head is None, expected a Linear"),
    (lambda new: jax.device_put(new, jax.devices()[1]), r"word_embeddings\.weight is .* committed to .*, expected"),
    (lambda new: jax.tree.map(jax.device_get, new), r"expected an array of JAX"),
]


@pytest.mark.parametrize(("change", "problem"), REFUSED)
def test_weights_that_do_not_fit_are_refused(served, other, change, problem):
    """The error names the first difference, and the engine keeps its weights."""
    with pytest.raises(ValueError, match=problem):
        served.update(change(other))
    assert served.loop.runner.model is model()


def test_engines_without_updates():
    with pytest.raises(ValueError, match="its own forward programs"):
        without("masks").update(model())


def test_requests_end_first(served, other):
    """With unfinished requests it is an error, and these keep their bits; once they are aborted, it is none."""
    expected = answers(served.generate(PROMPTS[:1], DRAWN))
    stream = served.stream(PROMPTS[0], DRAWN)
    with pytest.raises(RuntimeError, match=r"now 1\): let them finish"):
        served.update(other)
    assert answers([[*stream][-1].output]) == expected
    number = served.submit(PROMPTS[1], DRAWN)
    served.step()
    served.abort(number)
    served.update(other)
    served.step()


def test_many_threads(served, other):
    """Whenever a thread replaces the weights, an answer is that of one model or the other."""
    known = [answers(served.generate(PROMPTS[:1], DRAWN)), answers(engine(other).generate(PROMPTS[:1], DRAWN))]

    def replace(new):
        try:
            served.update(new)
        except RuntimeError as error:
            assert "unfinished" in str(error)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        replacing = [pool.submit(replace, [model(), other][i % 2]) for i in range(40)]
        found = [pool.submit(served.generate, PROMPTS[:1], DRAWN) for _ in range(20)]
        assert all(answers(each.result()) in known for each in found)
        assert all(each.result() is None for each in replacing)


@pytest.mark.slow
def test_the_adapters_of_an_engine_stay_beside_new_weights(other):
    named, params = {"a": random_adapter(model())}, dataclasses.replace(DRAWN, adapter="a")
    served = engine(adapters=named)
    old = answers(served.generate(PROMPTS, params))
    programs = served.loop.runner.programs
    served.update(other)
    new = answers(served.generate(PROMPTS, params))
    assert served.loop.runner.programs == programs
    assert new == answers(engine(other, adapters=named).generate(PROMPTS, params)) != old
