"""Drawing a token of each row of logits: temperature, the filters that narrow the choice, and Gumbel noise."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, Key

from ling3.ops.forms import form_of
from ling3.ops.logits import largest

Logits = Float32[Array, "batch vocab"]


@runtime_checkable
class DrawToken(Protocol):
    """The id with the largest z_i / temperature + G_i of those that a row's filters keep, the first of several.

    G_i is `jax.random.gumbel`'s noise from the row's key, so that a kept id is drawn with the probability that softmax
    gives its z / temperature among all kept ids (the Gumbel-max trick, Maddison et al. 2014, arXiv 1411.0030). Of the
    `top_k` likeliest ids the fewest are kept that together have `top_p` of their probability (Holtzman et al. 2020,
    arXiv 1904.09751), and of these the ids that are at least `min_p` times as likely as the likeliest (Nguyen et al.
    2024, arXiv 2407.01082). The temperature is above 0; a `top_k` of the vocabulary's size, a `top_p` of 1 and a
    `min_p` of 0 keep all. Rows that are not `active`, or whose largest logit is not finite, get any id.
    """

    def __call__(
        self,
        logits: Logits,
        active: Bool[Array, " batch"],
        key: Key[Array, " batch"],
        temperature: Float32[Array, " batch"],
        top_k: Int32[Array, " batch"],
        top_p: Float32[Array, " batch"],
        min_p: Float32[Array, " batch"],
        /,
    ) -> Int32[Array, " batch"]:
        """The ids."""
        ...


@form_of(DrawToken)
def draw(logits, active, key, temperature, top_k, top_p, min_p):
    """The plain form of `DrawToken`: its reference implementation."""
    noise = jax.vmap(lambda own: jax.random.gumbel(own, logits.shape[1:], jnp.float32, mode="low"))(key)
    return largest(narrowed(logits, temperature, top_k, top_p, min_p) + noise)


def narrowed(
    logits: Logits,
    temperature: Float32[Array, " batch"],
    top_k: Int32[Array, " batch"],
    top_p: Float32[Array, " batch"],
    min_p: Float32[Array, " batch"],
) -> Logits:
    """Logits over temperature, with -inf for the tokens that the filters remove."""
    # Rows that are not drawn have a temperature of 0.
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    return at_least_min_p(within_top_k_and_top_p(scaled, top_k, top_p), min_p)


def within_top_k_and_top_p(logits: Logits, top_k: Int32[Array, " batch"], top_p: Float32[Array, " batch"]) -> Logits:
    """Keeps the `top_k` likeliest tokens, and of these the fewest that together reach `top_p`; one sort does both."""

    def kept() -> Logits:
        order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
        ranked = jnp.take_along_axis(logits, order, axis=-1)
        rank = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        ranked = jnp.where(rank < top_k[:, None], ranked, -jnp.inf)
        probability = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        least = top_p[:, None]
        ranked = jnp.where((before < least) | (least >= 1) | (rank == 0), ranked, -jnp.inf)
        return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)

    wanted = (top_k < logits.shape[1]) | (top_p < 1)
    # Sorting changes no bit of a row that keeps all its tokens, so a row does not depend on the filters of others.
    return lax.cond(jnp.any(wanted), kept, lambda: logits)


def at_least_min_p(logits: Logits, min_p: Float32[Array, " batch"]) -> Logits:
    """Sets tokens that are less than `min_p` times as likely as the likeliest to -inf."""
    floor = jnp.max(logits, axis=-1) + jnp.log(min_p)
    return jnp.where(logits >= floor[:, None], logits, -jnp.inf)
