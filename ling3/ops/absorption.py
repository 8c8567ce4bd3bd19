"""MLA's absorbed products, for decode steps: queries into the latent space, and attended latents back to values."""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, DTypeLike, Float, Int32

from ling3.ops.adapters import RowUpdates, StackedUpdates, added
from ling3.ops.forms import form_of
from ling3.ops.matmul import Multiply
from ling3.ops.precision import Accumulation, Wide, exact, summed_in, wide
from ling3.ops.quantized import Quantized


class LatentHalves(NamedTuple):
    """The two halves of `kv_b_proj`, stored apart: each head's W_uk, transposed, and its W_uv."""

    keys: Quantized
    """[heads, latent, nope]"""
    values: Quantized
    """[heads, value, latent]"""


Absorbed = Float[Array, "channels latent"] | LatentHalves
"""`kv_b_proj`: for each head the nope rows of W_uk, then the value rows of W_uv; or its two halves."""


class AdaptedLatents(NamedTuple):
    """`kv_b_proj` with an adapter for each row of a call: W + scale · B A, which is never formed."""

    base: Any
    """The operand of `kv_b_proj` itself."""
    updates: RowUpdates


def absorbed(
    weight: Float[Array, "channels latent"] | Quantized | LatentHalves | AdaptedLatents, dtype: DTypeLike
) -> Absorbed | AdaptedLatents:
    """Prepares the operand of a `kv_b_proj` for the operators below: an array in `dtype`, or the halves unchanged."""
    if isinstance(weight, AdaptedLatents):
        return weight._replace(base=absorbed(weight.base, dtype))
    if isinstance(weight, LatentHalves):
        return weight
    return (weight.decoded().astype(weight.dtype) if isinstance(weight, Quantized) else weight).astype(dtype)


@runtime_checkable
class LatentQueries(Protocol):
    """q W_uk of each head, accumulated in `sums` or wider (DeepSeek-V2, arXiv 2405.04434, §2.1.2)."""

    def __call__(
        self, q: Float[Array, "batch heads nope"], weight: Absorbed, sums: Accumulation = "float32", /
    ) -> Wide[Array, "batch heads latent"]:
        """Each head's query in the latent space."""
        ...


@runtime_checkable
class LatentValues(Protocol):
    """W_uv (`value` rows) times each head's weighted sum of latents, accumulated in `sums` or wider."""

    def __call__(
        self,
        summed: Float[Array, "batch heads latent"],
        weight: Absorbed,
        value: int,
        sums: Accumulation = "float32",
        /,
    ) -> Wide[Array, "batch heads {value}"]:
        """Each head's value."""
        ...


@form_of(LatentQueries)
def latent_queries(q, weight, sums: Accumulation = "float32"):
    """The plain form of `LatentQueries`: its reference implementation."""
    if isinstance(weight, LatentHalves):
        return _per_head("hbn,hln->hbl", q, weight.keys, sums)
    w_uk = rearrange(weight, "(h d) l -> h d l", h=q.shape[1])[:, : q.shape[2]]
    return _per_head("hbn,hnl->hbl", q, w_uk, sums)


@form_of(LatentValues)
def latent_values(summed, weight, value, sums: Accumulation = "float32"):
    """The plain form of `LatentValues`: its reference implementation."""
    if isinstance(weight, LatentHalves):
        return _per_head("hbl,hvl->hbv", summed, weight.values, sums)
    w_uv = rearrange(weight, "(h d) l -> h d l", h=summed.shape[1])[:, -value:]
    return _per_head("hbl,hvl->hbv", summed, w_uv, sums)


def adapted_queries(
    q: Float[Array, "batch heads nope"],
    weight: Absorbed | AdaptedLatents,
    form: LatentQueries,
    sums: Accumulation,
    times: Multiply,
) -> Wide[Array, "batch heads latent"]:
    """q W_uk by an operator's `form`, and + (scale · q B_uk) A in the rows that have an adapter."""
    if not isinstance(weight, AdaptedLatents):
        return form(q, weight, sums)

    def update(own: StackedUpdates, place: Int32[Array, ""]) -> Array:
        inner = own.scale[place] * latent_queries(q.astype(own.B.dtype), own.B[place], sums)
        return times(inner.reshape(-1, inner.shape[-1]), own.A[place].T).reshape(*q.shape[:2], -1)

    return added(form(q, weight.base, sums), weight.updates, update)


def adapted_values(
    summed: Float[Array, "batch heads latent"],
    weight: Absorbed | AdaptedLatents,
    value: int,
    form: LatentValues,
    sums: Accumulation,
    times: Multiply,
) -> Wide[Array, "batch heads {value}"]:
    """W_uv times the sums by an operator's `form`, and + B_uv (scale · A) times them where rows have an adapter."""
    if not isinstance(weight, AdaptedLatents):
        return form(summed, weight, value, sums)

    def update(own: StackedUpdates, place: Int32[Array, ""]) -> Array:
        inner = times(summed.astype(own.A.dtype).reshape(-1, summed.shape[-1]), own.A[place])
        inner = (own.scale[place] * inner).reshape(*summed.shape[:2], -1)
        return latent_values(inner, own.B[place], value, sums)

    return added(form(summed, weight.base, value, sums), weight.updates, update)


def _per_head(
    product: str,
    x: Float[Array, "batch heads inner"],
    weight: Float[Array, "heads rows columns"] | Quantized,
    sums: Accumulation,
) -> Wide[Array, "batch heads outer"]:
    """One matrix product per head: `product` is an einsum over [heads, batch, inner].

    The head axis comes first because XLA's CPU backend has no bfloat16 product for the other order. As in all products
    with quantized weights, factors are not rounded.
    """
    if isinstance(weight, Quantized):
        x = x.astype(wide(x.dtype))
        weight = weight.decoded().astype(x.dtype)
    rows = rearrange(x, "b h i -> h b i")
    y = jnp.einsum(product, rows, weight, preferred_element_type=summed_in(x.dtype, sums), precision=exact(x.dtype))
    return rearrange(y, "h b o -> b h o")
