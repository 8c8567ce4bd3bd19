"""Token masks over a vocabulary: bit i of word w is 1 if a row may get token 32·w + i, as in llguidance."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, UInt32

WORD = 32
"""Tokens in one word of a mask, one bit each."""


def words(vocab: int) -> int:
    """The number of 32-bit words in a mask over `vocab` tokens."""
    return -(-vocab // WORD)


def masks_of_steps(
    forced: Int32[Array, "rows steps"], allowed: UInt32[Array, "rows words"], at: Int32[Array, "rows some"]
) -> UInt32[Array, "rows some words"]:
    """Each row's masks in some steps: only the forced token, or `allowed` where that is -1, or after the last step."""
    token = jnp.take_along_axis(forced, at, axis=1, mode="fill", fill_value=-1)[..., None]
    word = jnp.arange(allowed.shape[1], dtype=jnp.int32)[None, None]
    bit = jnp.left_shift(jnp.uint32(1), (token % WORD).astype(jnp.uint32))
    return jnp.where(token < 0, allowed[:, None], jnp.where(word == token // WORD, bit, jnp.uint32(0)))


def masked(
    logits: Float32[Array, "batch vocab"], allowed: UInt32[Array, "batch words"]
) -> Float32[Array, "batch vocab"]:
    """The logits of the tokens whose bits are set, and -inf for the others."""
    return jnp.where(bits(allowed, logits.shape[1]), logits, -jnp.inf)


def bits(allowed: UInt32[Array, "batch words"], vocab: int) -> Bool[Array, "batch vocab"]:
    """Unpacks masks into one boolean for each token."""
    shifted = allowed[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None]
    return (shifted & 1).astype(bool).reshape(allowed.shape[0], -1)[:, :vocab]
