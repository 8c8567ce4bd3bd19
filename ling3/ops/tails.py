"""The last tokens of a sequence as a state, to which short convolutions, windows and compressors look back."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def continued(
    tail: Float[Array, "batch tail channels"],
    new: Float[Array, "batch seq channels"],
    length: Int32[Array, " batch"],
) -> tuple[Float[Array, "batch tail+seq channels"], Float[Array, "batch tail channels"]]:
    """`[tail | new]`, and the tail after each row's first `length` new tokens; both in the dtype of `tail`.

    Column i of the first is the token at position start - tail + i, for a row whose new tokens begin at `start`. New
    tokens from `length` on are padding and do not enter the new tail.
    """
    joined = jnp.concatenate([tail, new.astype(tail.dtype)], axis=1)
    last = length[:, None] + jnp.arange(tail.shape[1], dtype=jnp.int32)[None]
    return joined, jnp.take_along_axis(joined, last[..., None], axis=1)
