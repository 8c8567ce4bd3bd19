"""MLA's absorbed products, for decode steps: queries into the latent space, and attended latents back to values."""

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from ling3.ops.precision import Accumulation, Wide, exact, summed_in


@runtime_checkable
class LatentQueries(Protocol):
    """q W_uk of each head, accumulated in `sums` or wider (DeepSeek-V2, arXiv 2405.04434, §2.1.2).

    `weight` is `kv_b_proj`: for each head the nope rows of W_uk, then the value rows of W_uv.
    """

    def __call__(
        self, q: Float[Array, "batch heads nope"], weight: Float[Array, "channels latent"], sums: Accumulation, /
    ) -> Wide[Array, "batch heads latent"]:
        """Each head's query in the latent space."""
        ...


@runtime_checkable
class LatentValues(Protocol):
    """W_uv (`value` rows) times each head's weighted sum of latents, accumulated in `sums` or wider."""

    def __call__(
        self,
        summed: Float[Array, "batch heads latent"],
        weight: Float[Array, "channels latent"],
        value: int,
        sums: Accumulation,
        /,
    ) -> Wide[Array, "batch heads {value}"]:
        """Each head's value."""
        ...


def latent_queries(
    q: Float[Array, "batch heads nope"], weight: Float[Array, "channels latent"], sums: Accumulation = "float32"
) -> Wide[Array, "batch heads latent"]:
    """The plain form of `LatentQueries`: its reference implementation."""
    w_uk = rearrange(weight, "(h d) l -> h d l", h=q.shape[1])[:, : q.shape[2]]
    return _per_head("hbn,hnl->hbl", q, w_uk, sums)


def latent_values(
    summed: Float[Array, "batch heads latent"],
    weight: Float[Array, "channels latent"],
    value: int,
    sums: Accumulation = "float32",
) -> Wide[Array, "batch heads {value}"]:
    """The plain form of `LatentValues`: its reference implementation."""
    w_uv = rearrange(weight, "(h d) l -> h d l", h=summed.shape[1])[:, -value:]
    return _per_head("hbl,hvl->hbv", summed, w_uv, sums)


def _per_head(
    product: str, x: Float[Array, "batch heads inner"], weight: Float[Array, "heads rows columns"], sums: Accumulation
) -> Wide[Array, "batch heads outer"]:
    """One matrix product per head: `product` is an einsum over [heads, batch, inner].

    The head axis comes first because XLA's CPU backend has no bfloat16 product for the other order.
    """
    rows = rearrange(x, "b h i -> h b i")
    y = jnp.einsum(product, rows, weight, preferred_element_type=summed_in(x.dtype, sums), precision=exact(x.dtype))
    return rearrange(y, "h b o -> b h o")
