"""Softmax attention over latents, block by block, and the plain form that specifies it."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from ling3.ops.precision import exact, wide

# Keys per step of `block_attention`: fixed, so that sums run in the same order whatever the context.
BLOCK = 256


def attention(
    q: Float[Array, "batch heads rows width"],
    k: Float[Array, "batch positions heads width"],
    v: Float[Array, "batch positions heads value"],
    mask: Bool[Array, "batch rows positions"],
) -> Float[Array, "batch heads rows value"]:
    """softmax(q kᵀ) v over the allowed positions, in float32 or wider: the specification. Nothing allowed gives 0."""
    scores = jnp.einsum("bhrw,bphw->bhrp", q, k, precision=lax.Precision.HIGHEST)
    scores = jnp.where(jnp.broadcast_to(mask[:, None], scores.shape), scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), jnp.finfo(weights.dtype).tiny)
    return jnp.einsum("bhrp,bphv->bhrv", weights / total, v, precision=lax.Precision.HIGHEST)


def block_attention(
    q: Float[Array, "batch heads rows width"],
    row_positions: Int32[Array, "batch rows"],
    read: Callable[[Int32[Array, ""]], tuple[Float[Array, "..."], Float[Array, "..."]]],
    length: Int32[Array, " batch"],
    blocks: int | Int32[Array, ""],
    value: int,
) -> Float[Array, "batch heads rows value"]:
    """Causal attention with a running softmax: only `blocks` blocks of keys are read, one at a time.

    `read(i)` returns block i, positions [BLOCK·i, BLOCK·(i+1)), as keys [batch, BLOCK, heads, width] and values
    [batch, BLOCK, heads, value]; its rows past `length` must be finite. A query row sees the positions up to its own
    and below `length`. With an int for `blocks` the result is differentiable. Sums and result are float32 or wider.
    """
    dtype = wide(q.dtype)
    rows = q.shape[:3]

    def step(i, carry):
        top, total, sums = carry
        i = jnp.asarray(i, jnp.int32)
        k, v = read(i)
        positions = i * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        allowed = (positions[None, None] <= row_positions[..., None]) & (positions[None, None] < length[:, None, None])
        scores = jnp.einsum("bhrw,bphw->bhrp", q, k, precision=exact(q.dtype), preferred_element_type=dtype)
        scores = jnp.where(jnp.broadcast_to(allowed[:, None], scores.shape), scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        shift = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
        weights = jnp.exp(scores - shift[..., None])
        rescale = jnp.exp(top - shift)
        shares = weights.astype(v.dtype)
        products = jnp.einsum("bhrp,bphv->bhrv", shares, v, precision=exact(v.dtype), preferred_element_type=dtype)
        total = rescale * total + jnp.sum(weights, axis=-1)
        return new_top, total, rescale[..., None] * sums + products

    empty = (jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, value), dtype))
    _, total, sums = lax.fori_loop(0, blocks, step, empty)
    return sums / jnp.maximum(total, jnp.finfo(dtype).tiny)[..., None]
