"""A model over fake devices: what each has, what it computes, and what the engine on it answers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_transformers
from tiny import FLASH, TINY, open_model

import ling3
from ling3.evals.predictions import fingerprint
from ling3.leaves import leaves
from ling3.mesh import MeshError, Rules, place, plan

SETTINGS = {
    "max_running_requests": 4,
    "num_pages": 16,
    "page_size": 16,
    "chunked_prefill_size": 32,
    "token_paddings": (16, 32),
    "max_model_len": 160,
    "decode_rows": 2,
    "decode_steps": 4,
}
EIGHT_HEADS = {"hidden_size": 64, "num_attention_heads": 8}
WITHIN = 2e-6
"""How far logits may be from one device's, in shares of the largest."""


@functools.cache
def model(name, dtype=jnp.float32):
    if name == "nano":
        return ling3.load("nano", jnp.float32)
    if name == "grouped":
        return tiny_transformers.open_model("qwen3-moe")
    return open_model(dataclasses.replace({"tiny": TINY, "flash": FLASH}[name], **EIGHT_HEADS), dtype=dtype)


def mesh(tensor, data=1):
    return jax.make_mesh((data, tensor), ("data", "tensor"), devices=jax.devices()[: data * tensor])


@functools.cache
def placed(name, tensor, data=1, rules=None):
    return place(model(name), mesh(tensor, data), rules)


def forward(model):
    """Logits of whole sequences, after a prefill, and after a decode step."""
    tokens = jnp.asarray(np.random.default_rng(0).integers(3, model.config.vocab_size, (2, 40)), jnp.int32)
    cache = model.init_cache(2, 64)
    prefilled, cache = model.step(tokens[:, :39], cache, last=True)
    decoded, _ = model.step(tokens[:, 39:], cache)
    return [np.asarray(logits) for logits in (model(tokens), prefilled, decoded)]


@functools.cache
def expected(name):
    return forward(model(name))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "tensor", "data", "rules"),
    [
        ("tiny", 2, 1, Rules()),
        *(
            pytest.param(name, 4, 1, Rules(sums=sums), marks=SLOW)
            for name in ("flash", "grouped")
            for sums in (False, True)
        ),
        *(pytest.param("nano", tensor, 1, Rules(), marks=SLOW) for tensor in (1, 2, 8)),
        pytest.param("tiny", 2, 2, Rules(experts=("data", "tensor")), marks=SLOW),
        pytest.param("tiny", 4, 2, Rules(experts=None), marks=SLOW),
    ],
)
def test_logits_are_those_of_one_device(name, tensor, data, rules):
    for found, own in zip(forward(placed(name, tensor, data, rules)), expected(name), strict=True):
        assert np.abs(found - own).max() <= WITHIN * np.abs(own).max()


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["tiny", "flash", "nano"])
def test_bits_are_those_of_one_device_where_asked(name, tensor):
    for found, own in zip(forward(placed(name, tensor, 1, Rules(same_bits=True))), expected(name), strict=True):
        assert np.array_equal(found, own)


@pytest.mark.slow
def test_float64_agrees_to_rounding():
    with jax.enable_x64(True):
        one = model("tiny", jnp.float64)
        tokens = jnp.asarray(np.random.default_rng(0).integers(3, 96, (2, 24)), jnp.int32)
        own, found = np.asarray(one(tokens)), np.asarray(place(one, mesh(4))(tokens))
        assert np.abs(found - own).max() <= 1e-10 * np.abs(own).max()


DRAWN = np.random.default_rng(0)
PROMPTS = [DRAWN.integers(3, 96, size=n).tolist() for n in (5, 40, 17, 33, 60, 2)]
PARAMS = [
    ling3.SamplingParams(max_tokens=12, temperature=[0, 0.9][i % 2], seed=i, logprobs=2, ignore_eos=True)
    for i in range(len(PROMPTS))
]


@pytest.mark.parametrize(
    ("tensor", "data", "rules"),
    [
        (2, 2, Rules(experts=("data", "tensor"))),
        pytest.param(4, 1, Rules(), marks=SLOW),
        pytest.param(1, 4, Rules(), marks=SLOW),
    ],
)
def test_an_engine_answers_as_on_one_device_and_alike_in_any_company(tensor, data, rules):
    settings = SETTINGS | {"decode_rows": SETTINGS["max_running_requests"] // data}
    own = [each.outputs[0] for each in ling3.Engine(model("tiny"), **settings).generate(PROMPTS, PARAMS)]
    engine = ling3.Engine(placed("tiny", tensor, data, rules), **settings)
    found = [each.outputs[0] for each in engine.generate(PROMPTS, PARAMS)]
    for one, other in zip(own, found, strict=True):
        assert one.token_ids == other.token_ids
        assert max(abs(x.logprob - y.logprob) for x, y in zip(one.logprobs, other.logprobs, strict=True)) <= 1e-5
    engine.forget_prefixes()
    for prompt, params, together in zip(PROMPTS, PARAMS, found, strict=True):
        [alone] = engine.generate([prompt], params)
        assert (alone.outputs[0].token_ids, alone.outputs[0].logprobs) == (together.token_ids, together.logprobs)
    assert max(each.timings.preemptions for each in found) > 0 or data > 1


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(MeshError, match=r"heads are 8, which 3 devices cannot share evenly; 1, 2, 4, 8 can"):
        plan(model("tiny"), mesh(3))
    with pytest.raises(ValueError, match="sums or same_bits"):
        Rules(sums=True, same_bits=True)


@pytest.mark.slow
def test_a_cut_model_is_identified_as_on_one_device():
    assert fingerprint(placed("tiny", 2)) == fingerprint(model("tiny"))


def test_a_cut_model_counts_its_own_numbers():
    one, cut = model("tiny"), placed("tiny", 2)
    assert cut.parameters == one.parameters == sum(leaf.value.size for leaf in leaves(one))
    assert cut.shapes == one.shapes != tuple(leaf.value.shape for leaf in leaves(cut))
