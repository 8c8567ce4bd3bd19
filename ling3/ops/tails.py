"""The last tokens of a sequence as a memory: what a short convolution, a window or a compressor looks back at."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def continued(
    tail: Float[Array, "batch tail channels"],
    new: Float[Array, "batch seq channels"],
    length: Int32[Array, " batch"],
) -> tuple[Float[Array, "batch tail+seq channels"], Float[Array, "batch tail channels"]]:
    """`[tail | new]`, and the tail after each row's first `length` new tokens; all in the dtype of `tail`.

    Column i of the first is the token at position start - tail + i, for a row whose new tokens begin at `start`. The
    new tokens after `length` are padding, of which nothing stays.
    """
    joined = jnp.concatenate([tail, new.astype(tail.dtype)], axis=1)
    last = length[:, None] + jnp.arange(tail.shape[1], dtype=jnp.int32)[None]
    return joined, jnp.take_along_axis(joined, last[..., None], axis=1)
