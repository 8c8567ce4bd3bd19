"""Sampling parameters and prompts: every senseless value is named, before any work."""

import dataclasses
import fractions
import math
import pickle
import time

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ling3.engine.sampling_params import LARGEST, MAX_STOP_IDS, SamplingParams, check_prompt, check_room
from ling3.engine.settings import EngineSettings
from ling3.runtime.parameters import ParameterError, meanings, parameter, parameters

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": NAN}, "temperature is nan, expected a number in"),
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": INF}, "temperature is inf"),
        ({"temperature": 1e300}, r"temperature is 1e\+300"),
        ({"temperature": 10**400}, "temperature is 1000"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"temperature": None}, "temperature is None"),
        ({"temperature": True}, "temperature is True"),
        ({"temperature": 1 + 0j}, "temperature is"),
        ({"temperature": [0.5]}, "temperature is"),
        ({"top_p": 0.0}, r"top_p is 0.0, expected a number in \(0, 1\]"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": NAN}, "top_p is nan"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"min_p": 2}, "min_p is 2"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300"),
        ({"presence_penalty": INF}, "presence_penalty is inf"),
        ({"presence_penalty": 1e300}, r"presence_penalty is 1e\+300"),
        ({"frequency_penalty": -INF}, "frequency_penalty is -inf"),
        ({"max_tokens": 0}, "max_tokens is 0, expected a whole number >= 1"),
        ({"max_tokens": -5}, "max_tokens is -5"),
        ({"max_tokens": 2.0}, "max_tokens is 2.0"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"max_tokens": None}, "max_tokens is None"),
        ({"max_tokens": "many"}, "max_tokens is 'many'"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens is 9, expected at most max_tokens, which is 8"),
        ({"n": 0}, "n is 0"),
        ({"n": 129}, r"n is 129, expected a whole number in \[1, 128\]"),
        ({"n": 10**5000}, "n is a number of 16610 bits"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"logprobs": 21}, r"logprobs is 21, expected a whole number in \[0, 20\]"),
        ({"logprobs": True}, "logprobs is True"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**31 - 128}, "seed is 2147483520"),
        ({"seed": 0.5}, "seed is 0.5"),
        ({"ignore_eos": 1}, "ignore_eos is 1, expected True or False"),
        ({"stop": ""}, r"stop is \(''\,\), expected strings that are not empty"),
        ({"stop": ["a", ""]}, "stop is"),
        ({"stop": [b"a"]}, "stop is"),
        ({"stop": [1]}, "stop is"),
        ({"stop": None}, "stop is None"),
        ({"stop": 5}, "stop is 5"),
        ({"stop": ["a"] * 65}, "stop has 65 strings of up to 1 characters, expected at most 64 of 256"),
        ({"stop": ["a", "b" * 257]}, "stop has 2 strings of up to 257"),
        ({"stop_token_ids": [2, 1.5]}, r"stop_token_ids is \[2, 1.5\]"),
        ({"stop_token_ids": [True]}, "stop_token_ids is"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5"),
        ({"stop_token_ids": "56"}, "stop_token_ids is '56'"),
        ({"logit_bias": {1: NAN}}, "logit_bias is"),
        ({"logit_bias": {1: -INF}}, r"logit_bias is .*expected numbers in \[-1e9, 1e9\] by token id"),
        ({"logit_bias": {"1": 2.0}}, "logit_bias is"),
        ({"logit_bias": {1: "2"}}, "logit_bias is"),
        ({"logit_bias": [(1, 2.0)]}, "logit_bias is"),
        ({"logit_bias": dict.fromkeys(range(1025), 0.0)}, "logit_bias has 1025 entries, expected at most 1024"),
    ],
)
def test_senseless_values_are_refused(values, message):
    with pytest.raises(ValueError, match=f"^sampling parameters: {message}"):
        SamplingParams(**values)


def test_every_problem_is_named_at_once():
    with pytest.raises(
        ParameterError, match=r"temperature is nan.*top_k is 0.*min_p is 7.*seed is -1.*stop is.*logit_bias is"
    ) as caught:
        SamplingParams(temperature=NAN, min_p=7, top_k=0, seed=-1, stop=[""], logit_bias={1: NAN})
    error = pickle.loads(pickle.dumps(caught.value))  # as between processes
    fields = ["temperature", "top_k", "min_p", "seed", "stop", "logit_bias"]
    assert error.field == "temperature" and [field for field, _ in error.problems] == fields
    assert str(error) == str(caught.value) == "sampling parameters: " + "; ".join(text for _, text in error.problems)
    assert all(text.startswith(field) for field, text in error.problems)


@pytest.mark.parametrize("problem", [{"min_tokens": 9, "max_tokens": 8}, {"max_tokens": 0}, {"keep": 1}])
def test_a_single_problem_names_its_field(problem):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**problem)
    [(field, _)] = caught.value.problems
    assert caught.value.field == field == next(iter(problem))


@pytest.mark.parametrize("declared", [SamplingParams, EngineSettings])
def test_every_field_says_what_it_means_and_its_default_is_within_its_bounds(declared):
    assert set(meanings(declared)) == {field.name for field in dataclasses.fields(declared)}
    for name, each in parameters(declared).items():
        assert each.problem(each.default) is None and each.default == getattr(declared(), name)


def test_a_message_says_which_bounds_are_out_of_reach():
    @dataclasses.dataclass(frozen=True)
    class Declared:
        share: float = parameter(0.5, gt=0, lt=1e-9)
        most: float = parameter(0.0, le=-1.5)
        least: int | None = parameter(None, gt=2)
        free: bool = parameter(True)

    expected = {
        "share": "a number in (0, 1e-9)",
        "most": "a number <= -1.5",
        "least": "a whole number > 2 or None",
        "free": "True or False",
    }
    for name, each in parameters(Declared).items():
        assert each.problem("x") == f"is 'x', expected {expected[name]}"
    assert parameters(Declared)["least"].problem(2) and parameters(Declared)["share"].problem(0)


def test_unknown_and_positional_fields_are_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)


def test_a_message_is_short_whatever_the_value():
    with pytest.raises(ValueError) as error:
        SamplingParams(stop=["x" * 100_000, 5])
    assert len(str(error.value)) < 250


def test_values_are_made_plain():
    """What numpy or a caller hands in is the same as Python's own, and theirs to change afterwards."""
    bias = {np.int64(5): np.float32(0.5)}
    params = SamplingParams(
        temperature=fractions.Fraction(1, 2),
        top_k=np.int64(4),
        top_p=1,
        max_tokens=np.int32(3),
        seed=np.uint8(7),
        stop="end",
        stop_token_ids=[np.int64(9)],
        logit_bias=bias,
    )
    bias[5] = 100.0
    assert params == SamplingParams(
        temperature=0.5, top_k=4, max_tokens=3, seed=7, stop=("end",), stop_token_ids=(9,), logit_bias={5: 0.5}
    )
    numbers = (params.temperature, params.top_p, params.top_k, params.max_tokens, params.seed)
    assert [type(value) for value in numbers] == [float, float, int, int, int]
    assert SamplingParams(top_k=-1).top_k is None
    assert dataclasses.replace(params, seed=8).stop == ("end",)


@given(
    st.floats(0, LARGEST),
    st.floats(0, 1, exclude_min=True),
    st.floats(0, 1),
    st.floats(1 / LARGEST, LARGEST),
    st.floats(-LARGEST, LARGEST),
)
def test_what_is_accepted_stays_finite_in_float32(temperature, top_p, min_p, repetition, penalty):
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition,
        presence_penalty=penalty,
        frequency_penalty=penalty,
    )
    numbers = np.asarray([params.temperature, params.repetition_penalty, params.presence_penalty], np.float32)
    # The largest logit of a text of a million tokens that are all the same one.
    assert np.all(np.isfinite(numbers))
    assert np.all(np.isfinite(numbers * np.float32(1e6)))
    assert numbers[1] > 0
    assert np.isfinite(np.float32(1e6) / numbers[1])


def test_ends_are_the_models_own_and_the_requests():
    assert SamplingParams(stop_token_ids=[5, 3]).check(10, (7, 3)) == (3, 5, 7)
    assert SamplingParams(stop_token_ids=[5, 3], ignore_eos=True).check(10, (7,)) == (3, 5)
    for ids, bias in (([10], None), ([-1], None), ([], {10: 1.0}), ([], {-1: 1.0})):
        with pytest.raises(ValueError, match=r"has (10|-1), expected ids in \[0, 10\)"):
            SamplingParams(stop_token_ids=ids, logit_bias=bias).check(10)
    many = SamplingParams(stop_token_ids=list(range(MAX_STOP_IDS)))
    assert len(many.check(100)) == MAX_STOP_IDS
    with pytest.raises(ValueError, match="65 stop ids with the model's own, expected at most 64"):
        many.check(100, (99,))


@pytest.mark.parametrize(
    "prompt", [[3, 4, 5], (3, 4, 5), np.asarray([3, 4, 5]), np.asarray([3, 4, 5], np.uint8), jnp.asarray([3, 4, 5])]
)
def test_a_prompt_becomes_plain_ints(prompt):
    ids = check_prompt(prompt, 6)
    assert ids == [3, 4, 5]
    assert {type(token) for token in ids} == {int}


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt is empty"),
        (np.asarray([], np.int32), "prompt is empty"),
        ("text", "prompt is 'text', expected a list of token ids"),
        (b"ab", "expected a list of token ids"),
        ({1: 2}, "expected a list of token ids"),
        ({1, 2}, "expected a list of token ids"),
        (5, "prompt is 5, expected a list of token ids"),
        (None, "prompt is None, expected a list of token ids"),
        (iter([1]), "expected a list of token ids"),
        (np.asarray(5), "expected a list of token ids"),
        (np.asarray([[1, 2]]), "expected a list of token ids"),
        ([[1, 2]], r"prompt, token 0 is \[1, 2\], expected a whole number"),
        ([1, np.asarray([2, 3])], "prompt, token 1 is array"),
        ([True], "prompt, token 0 is True"),
        (np.asarray([True]), "prompt, token 0 is"),
        ([1, 2.0], "prompt, token 1 is 2.0"),
        (np.asarray([1.0]), "prompt, token 0 is"),
        ([None], "prompt, token 0 is None"),
        (["a"], "prompt, token 0 is 'a'"),
        ([1, -1], r"prompt, token 1 is -1, expected an id in \[0, 6\)"),
        ([6], r"prompt, token 0 is 6, expected an id in \[0, 6\)"),
        ([2**70], "prompt, token 0 is 1180591620717411303424"),
        ([10**5000], "prompt, token 0 is a number of 16610 bits"),
    ],
)
def test_what_is_no_prompt_is_named(prompt, message):
    with pytest.raises(ValueError, match=message):
        check_prompt(prompt, 6)


def test_a_long_prompt_takes_no_time_to_check():
    ids = [3, 4, 5] * 40_000
    for prompt in (ids, np.asarray(ids), jnp.asarray(ids)):
        begin = time.perf_counter()
        assert check_prompt(prompt, 6) == ids
        assert time.perf_counter() - begin < 0.25  # 8 µs per id would be 1 s
    with pytest.raises(ValueError, match="prompt, token 119999 is 6"):
        check_prompt([*ids[:-1], 6], 6)


def test_a_prompt_and_its_answer_have_to_fit():
    check_room([1] * 6, 4, 10)
    with pytest.raises(
        ValueError, match="prompt 3 has 7 tokens and max_tokens is 4: 11 together, but there is room for 10"
    ):
        check_room([1] * 7, 4, 10, "prompt 3")
