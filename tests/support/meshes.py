"""Models that are cut, and the meshes of fake devices that they are cut over."""

import dataclasses
import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tiny_transformers
from jax.sharding import PartitionSpec
from tiny import FLASH, TINY, open_model

import ling3
from ling3.cache import Span
from ling3.execution import PLAIN
from ling3.mesh import Rules, place
from ling3.mesh.sharded import placement_of

EIGHT_HEADS = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "head_dim": 32,
    "v_head_dim": 32,
    "initializer_range": 0.1,
}
DELTA = {
    "hidden_size": 64,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "initializer_range": 0.1,
}
"""Eight groups of heads, whose channels four devices share aligned and eight do not."""
FAMILIES = {"delta": "qwen3.5", "delta by key head": "qwen3-next"}
"""Models of Gated DeltaNet and their case in `tiny_transformers`."""
SEEDS = {"tiny": 9, "flash": 1, "delta": 0, "delta by key head": 0}
"""Of models that amplify rounding little (`test_every_mesh.py` holds them to it)."""
MANY = np.random.default_rng(4).integers(3, 64, (16, 40))
"""So many rows as a mean of squares needs: over two of them the ratio of two roundings is anything from 0.6 to 1.3."""
TOKENS = MANY[:2]

MESHES = {
    "TP 1": ({"data": 1, "tensor": 1}, Rules()),
    "TP 2": ({"data": 1, "tensor": 2}, Rules()),
    "TP 4": ({"data": 1, "tensor": 4}, Rules()),
    "TP 8": ({"data": 1, "tensor": 8}, Rules()),
    "DP 4": ({"data": 4, "tensor": 1}, Rules()),
    "DP 2 x TP 2": ({"data": 2, "tensor": 2}, Rules()),
    "DP 2 x TP 4, EP 8": ({"data": 2, "tensor": 4}, Rules(experts=("data", "tensor"))),
    "TP 2, EP 4 beside it": ({"data": 1, "tensor": 2, "expert": 4}, Rules(experts="expert")),
}


@functools.cache
def model(name: str, dtype=jnp.float32) -> ling3.CausalLM:
    """A model of Ling-3's two shapes with 8 heads, nano, or one of another family; on one device."""
    if dtype == jnp.float64:
        with jax.enable_x64(False):  # the same weights, whichever is asked for first
            single = model(name)
        return jax.tree.map(lambda x: x.astype(dtype), single)
    if name == "nano":
        return ling3.load("nano", dtype)
    if name == "grouped":
        return tiny_transformers.open_model("qwen3-moe")
    if name in FAMILIES:
        return ling3.init(delta(name), key=jax.random.key(SEEDS[name]))
    config = dataclasses.replace({"tiny": TINY, "flash": FLASH}[name], **EIGHT_HEADS)
    return open_model(config, SEEDS[name], dtype)


def delta(name: str):
    """The config of a model of Gated DeltaNet."""
    return dataclasses.replace(tiny_transformers.open_model(FAMILIES[name]).config, **DELTA)


@functools.cache
def logits(name: str, rows: int = len(TOKENS)):
    """One device's in float32, for each token of the first rows of `MANY` the vocabulary's."""
    return np.asarray(model(name)(jnp.asarray(MANY[:rows], jnp.int32)))


@functools.cache
def exact(name: str, rows: int = len(TOKENS)):
    """The equations' own logits, of the same shape in float64."""
    with jax.enable_x64(True):
        return np.asarray(logits_as_computed(model(name, jnp.float64), jnp.asarray(MANY[:rows], jnp.int32)))


@functools.cache
def rounding_error(name: str) -> float:
    """How far one device's logits in float32 are, at most, from the equations' own."""
    return float(np.abs(logits(name) - exact(name)).max())


def tolerance(name: str) -> float:
    """How far a mesh's logits in float32, or log probabilities, may be from one device's.

    Both are so far from the equations' own, at most 1.5 of `rounding_error` on a mesh.
    """
    return 2.5 * rounding_error(name)


def mesh(tensor=1, data=1, **others) -> jax.sharding.Mesh:
    """The first fake devices as a mesh of such sizes."""
    sizes = {"data": data, "tensor": tensor, **others}
    count = math.prod(sizes.values())
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=jax.devices()[:count])


@functools.cache
def placed(name: str, tensor=1, data=1, rules: Rules | None = None) -> ling3.CausalLM:
    """A model on a mesh."""
    return place(model(name), mesh(tensor, data), rules)


@eqx.filter_jit
def logits_as_computed(model: ling3.CausalLM, tokens) -> jax.Array:
    """A model's logits in its own dtype: `model(tokens)` gives float32 whatever that is."""

    def scored(part, tokens):
        span, head = Span.whole(*tokens.shape, PLAIN), part.lm_head or part.model.word_embeddings
        hidden, _ = part.model(tokens, (None,) * len(part.model.attentions), span)
        return head(hidden, PLAIN, hidden.dtype)[..., : part.config.vocab_size]

    if (placement := placement_of(model)) is None:
        return scored(model, tokens)
    where = PartitionSpec(placement.rows(tokens.shape[0]))
    return placement.run(scored, (tokens,), (where,), where, model.part)
