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
from ling3.families.qwen3_moe import Qwen3MoeConfig
from ling3.mesh import Rules, place

SETTINGS = {
    "max_running_requests": 4,
    "num_pages": 24,
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
        fields = dataclasses.replace(Qwen3MoeConfig(), **tiny_transformers.SIZES)
        return ling3.init(fields, key=jax.random.key(0), dtype=dtype)
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


@pytest.mark.parametrize("sums", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("tensor", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 8))])
@pytest.mark.parametrize("name", ["tiny", *(pytest.param(n, marks=pytest.mark.slow) for n in ("flash", "nano"))])
def test_logits_are_those_of_one_device(name, tensor, sums):
    for found, own in zip(forward(placed(name, tensor, 1, Rules(sums=sums))), expected(name), strict=True):
        assert np.abs(found - own).max() <= WITHIN * np.abs(own).max()
