"""Engines with several adapters, on one device or a mesh, and the requests that show that answers keep their bits."""

import dataclasses
import functools
import pathlib
import tempfile

import jax.numpy as jnp
import numpy as np
import quantized_models
from promised_requests import answer
from random_adapters import random_adapter
from small_engine import SETTINGS
from tiny import FLASH, TINY
from tiny import open_model as open_ling3
from tiny_transformers import CASES
from tiny_transformers import open_model as open_transformer

import ling3
from ling3.checkpoint.quantizing import quantize

SIZES = {**SETTINGS, "max_model_len": 96, "token_paddings": (32,), "num_pages": 12}
LING3 = {"tiny": TINY, "flash": FLASH}
QUANTIZED = ("int4", "int8")
PROMPTS = [[7, 8, 9], list(range(3, 46)), list(range(3, 44)), [11, 12]]
ADAPTERS = (None, "a", "b")


@functools.cache
def quantized(to):
    """A small Ling-3 as `ling3 quantize` writes it."""
    with tempfile.TemporaryDirectory() as directory:
        dense, few_bits = (pathlib.Path(directory) / name for name in ("dense", "few bits"))
        ling3.save(open_ling3(quantized_models.SIZES), dense)
        quantize(dense, few_bits, to)
        return ling3.load(few_bits, jnp.float32)


def open_model(name):
    if name in QUANTIZED:
        return quantized(name)
    return open_transformer(name) if name in CASES else open_ling3(LING3[name])


@functools.cache
def adapters(name):
    """Two of another rank, one of which leaves MLA's `kv_b_proj` as it is."""
    model = open_model(name)
    return {
        "a": random_adapter(model, rank=3, seed=1),
        "b": random_adapter(model, rank=2, seed=2, but=["kv_b_proj"]),
    }


def engine(name="llama", model=None, **changes):
    """An engine of a model and its adapters; `model` is the same one on a mesh."""
    model = open_model(name) if model is None else model
    return ling3.Engine(model, None, **{**SIZES, "adapters": adapters(name), **changes})


def params(adapter=None, **options):
    return ling3.SamplingParams(**{"max_tokens": 24, "ignore_eos": True, "logprobs": 1, "adapter": adapter, **options})


def requests():
    """Each prompt with each adapter, some of them drawn."""
    options = [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "seed": 6, "n": 2}, {"frequency_penalty": 0.3}]
    return [(prompt, params(own, **some)) for prompt, some in zip(PROMPTS, options, strict=True) for own in ADAPTERS]


def answers(served, asked):
    outputs = served.generate([prompt for prompt, _ in asked], [own for _, own in asked])
    return [[answer(completion) for completion in output.outputs] for output in outputs]


def with_adapter(new, old, asked):
    """The requests with the adapter `old`, but with another."""
    return [(prompt, dataclasses.replace(own, adapter=new)) for prompt, own in asked if own.adapter == old]


def keeps_its_bits(name, **changes):
    """In company with other adapters and none, preempted, and from known prefixes, an answer is that of its solo run.

    Without an adapter it is that of an engine which has none.
    """
    asked, served, expected = requests(), engine(name, **changes), []
    for request in asked:
        served.forget_prefixes()
        expected += answers(served, [request])
    before = served.stats()
    for _ in range(2):
        assert answers(served, asked) == expected
    assert served.stats().preemptions > before.preemptions and served.stats().cached_tokens > before.cached_tokens
    assert len({repr(each) for each in expected}) == len(asked)
    assert answers(engine(name, **{**changes, "adapters": None}), with_adapter(None, None, asked)) == expected[::3]
    return asked, expected


def are_near(found, expected):
    """Asserts that answers have the same tokens, and log-probabilities that differ by rounding."""
    for completions, others in zip(found, expected, strict=True):
        for (tokens, logprobs, *_), (same_tokens, same_logprobs, *_) in zip(completions, others, strict=True):
            assert tokens == same_tokens
            # Logits near 1 in float32: 1e-5 at most.
            np.testing.assert_allclose([x.logprob for x in logprobs], [x.logprob for x in same_logprobs], atol=1e-4)
