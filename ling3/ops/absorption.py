"""What takes a head's channels to the latents and back, so that a decode step attends to latents themselves."""

import functools

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Float32

from ling3.ops import attention_cpu
from ling3.ops.lowering import XLA, Lowering
from ling3.ops.precision import Wide, exact, wide


def latent_queries(
    q: Float[Array, "batch heads nope"], weight: Float[Array, "channels latent"], lowering: Lowering = XLA
) -> Wide[Array, "batch heads latent"]:
    """q W_uk of each head, summed in float32 or wider (DeepSeek-V2, arXiv 2405.04434, §2.1.2).

    The rows of `weight`, `kv_b_proj`, are [W_uk | W_uv] of each head: nope + value of them.
    """
    if _is_native(q, weight, lowering):
        return _native_queries(q, weight)
    w_uk = rearrange(weight, "(h d) l -> h d l", h=q.shape[1])[:, : q.shape[2]]
    return _per_head("hbn,hnl->hbl", q, w_uk)


def latent_values(
    summed: Float[Array, "batch heads latent"],
    weight: Float[Array, "channels latent"],
    value: int,
    lowering: Lowering = XLA,
) -> Wide[Array, "batch heads {value}"]:
    """W_uv times each head's weighted sum of latents, summed in float32 or wider."""
    if _is_native(summed, weight, lowering):
        return _native_values(value, summed, weight)
    w_uv = rearrange(weight, "(h d) l -> h d l", h=summed.shape[1])[:, -value:]
    return _per_head("hbl,hvl->hbv", summed, w_uv)


def _per_head(
    product: str, x: Float[Array, "batch heads inner"], weight: Float[Array, "heads rows columns"]
) -> Wide[Array, "batch heads outer"]:
    """One matrix product per head: `product` is an einsum over [heads, batch, inner].

    Heads stand first because XLA's CPU backend has no bfloat16 product for the other order.
    """
    rows = rearrange(x, "b h i -> h b i")
    y = jnp.einsum(product, rows, weight, preferred_element_type=wide(x.dtype), precision=exact(x.dtype))
    return rearrange(y, "h b o -> b h o")


def _is_native(
    x: Float[Array, "batch heads inner"], weight: Float[Array, "channels latent"], lowering: Lowering
) -> bool:
    """True if the kernel for CPUs computes it, which copies no weights; a row's bits are then its own."""
    return lowering.native and lowering.accumulation == "float32" and attention_cpu.absorbs(x, weight)


@jax.custom_jvp
def _native_queries(
    q: Float[Array, "batch heads nope"], weight: Float[Array, "channels latent"]
) -> Float32[Array, "batch heads latent"]:
    return attention_cpu.absorb_keys(q, weight)


@_native_queries.defjvp
def _derivative_of_queries(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    return _native_queries(*primals), jax.jvp(latent_queries, primals, tangents)[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _native_values(
    value: int, summed: Float[Array, "batch heads latent"], weight: Float[Array, "channels latent"]
) -> Float32[Array, "batch heads {value}"]:
    return attention_cpu.expand_values(summed, weight, value)


@_native_values.defjvp
def _derivative_of_values(value: int, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    plain = functools.partial(latent_values, value=value)
    return _native_values(value, *primals), jax.jvp(plain, primals, tangents)[1]
