"""Every model over every mesh of eight fake devices: one device's logits, one device's tokens, and the promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from meshes import (
    FAMILIES,
    MANY,
    MESHES,
    TOKENS,
    exact,
    logits,
    logits_as_computed,
    mesh,
    model,
    rounding_error,
    tolerance,
)

import ling3
from ling3.mesh import place

pytestmark = [
    pytest.mark.slow,
    pytest.mark.parametrize("where", MESHES),
    pytest.mark.parametrize("name", ["tiny", "flash", "nano", "grouped", *FAMILIES]),
]

PROMPTS = [TOKENS[i % 2, : (5, 40, 17, 33, 20, 2)[i]].tolist() for i in range(6)]
PARAMS = [
    ling3.SamplingParams(max_tokens=24, temperature=[0, 0.9][i % 2], seed=i, logprobs=2, ignore_eos=True)
    for i in range(len(PROMPTS))
]
SLOTS = 4
PAGES = {1: 8, 2: 10, 4: 16}
"""For so many groups of devices: fewer than four of the requests need, but where each has one of them."""


@functools.cache
def on(where, name):
    sizes, rules = MESHES[where]
    return place(model(name), mesh(**sizes), rules)


@functools.cache
def generated(name):
    return ling3.generate(model(name), PROMPTS[:4], max_tokens=12, ignore_eos=True)


def engine(model, groups=1):
    return ling3.Engine(
        model,
        max_running_requests=SLOTS,
        num_pages=PAGES[groups],
        page_size=16,
        chunked_prefill_size=32,
        token_paddings=(32,),
        max_model_len=64,
        decode_rows=SLOTS // groups,
        decode_steps=4,
    )


@functools.cache
def answered(name):
    return [each.outputs[0] for each in engine(model(name)).generate(PROMPTS, PARAMS)]


def test_logits_are_as_near_to_the_equations_as_one_device_s(name, where):
    """Rounding, measured on one device of the same model, is all that a mesh changes."""
    largest = np.abs(exact(name)).max()
    assert rounding_error(name) <= 32 * np.finfo(np.float32).eps * largest, "a model that does not amplify rounding"
    found = np.asarray(on(where, name)(jnp.asarray(MANY, jnp.int32)))
    assert np.abs(found[: len(TOKENS)] - exact(name)).max() <= 1.5 * rounding_error(name)
    squares = [np.mean((each - exact(name, len(MANY))) ** 2) for each in (found, logits(name, len(MANY)))]
    assert np.sqrt(squares[0] / squares[1]) <= 1.15


def test_logits_in_float64_are_those_of_one_device(name, where):
    sizes, rules = MESHES[where]
    own = exact(name)
    with jax.enable_x64(True):
        cut = place(model(name, jnp.float64), mesh(**sizes), rules)
        found = np.asarray(logits_as_computed(cut, jnp.asarray(TOKENS, jnp.int32)))
    assert found.dtype == np.float64
    assert np.abs(found - own).max() <= 1e-10


def test_greedy_tokens_are_those_of_one_device(name, where):
    assert ling3.generate(on(where, name), PROMPTS[:4], max_tokens=12, ignore_eos=True) == generated(name)


def test_an_engine_answers_as_on_one_device_and_alike_in_any_company(name, where):
    groups = on(where, name).placement.row_groups
    busy = engine(on(where, name), groups)
    found = [each.outputs[0] for each in busy.generate(PROMPTS, PARAMS)]
    for one, other in zip(answered(name), found, strict=True):
        assert one.token_ids == other.token_ids
        logprobs = zip(one.logprobs, other.logprobs, strict=True)
        assert max(abs(own.logprob - cut.logprob) for own, cut in logprobs) <= tolerance(name)
    assert (busy.stats().preemptions > 0) == (groups < SLOTS)
    busy.forget_prefixes()
    for prompt, params, together in zip(PROMPTS, PARAMS, found, strict=True):
        [alone] = busy.generate([prompt], params)
        assert (alone.outputs[0].token_ids, alone.outputs[0].logprobs) == (together.token_ids, together.logprobs)
