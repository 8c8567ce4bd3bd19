"""The likeliest token of each row of logits z, and log Σ e^z: a token's log-probability is its z minus that."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ling3.ops.forms import form_of

SEGMENT = 256
"""Logits are first reduced in segments of this size: XLA's CPU backend is slow over rows as long as a vocabulary."""


@runtime_checkable
class Likeliest(Protocol):
    """The id of each row's largest logit, the first of several, and log Σ e^z over the row's logits z.

    A row with NaN has NaN for the logarithm and any id of the vocabulary. Rows that are not `active` may have any
    values.
    """

    def __call__(
        self, logits: Float32[Array, "batch vocab"], active: Bool[Array, " batch"], /
    ) -> tuple[Int32[Array, " batch"], Float32[Array, " batch"]]:
        """The ids and the logarithms."""
        ...


@form_of(Likeliest)
def likeliest(logits, active):
    """The plain form of `Likeliest`: its reference implementation."""
    return largest(logits), log_sum_exp(logits)


def largest(logits: Float32[Array, "batch vocab"]) -> Int32[Array, " batch"]:
    """The id of each row's largest logit, the first of several."""
    segments = _segments(logits)
    segment = jnp.argmax(jnp.max(segments, axis=-1), axis=-1)
    inside = jnp.take_along_axis(segments, segment[:, None, None], axis=1)[:, 0]
    return (segment * SEGMENT + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def log_sum_exp(logits: Float32[Array, "batch vocab"]) -> Float32[Array, " batch"]:
    """log Σ e^z of each row; NaN if any of its logits is NaN."""
    segments = _segments(logits)
    top = jnp.max(jnp.max(segments, axis=-1), axis=-1)
    shift = jnp.where(jnp.isfinite(top), top, 0.0)
    return shift + jnp.log(jnp.sum(jnp.sum(jnp.exp(segments - shift[:, None, None]), axis=-1), axis=-1))


def _segments(logits: Float32[Array, "batch vocab"]) -> Float32[Array, "batch segments segment"]:
    """The logits in segments, padded with -inf."""
    batch, vocab = logits.shape
    filled = jnp.pad(logits, ((0, 0), (0, -vocab % SEGMENT)), constant_values=-jnp.inf)
    return filled.reshape(batch, -1, SEGMENT)
