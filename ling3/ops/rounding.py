"""Activations rounded to 8 bits and back, as servers of some quantized checkpoints multiply them."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

MOST = {"int": 127.5, "float": 448.0}
"""The magnitude of a token's largest number in units of its scale: half of INT8's range, or the end of E4M3's."""


@dataclasses.dataclass(frozen=True)
class Rounding:
    """x' = scale · round(x / scale) in INT8 or E4M3, with a scale for each token or for each `group` of its numbers.

    scale = amax / 127.5 for INT8, whose integers end at -128 and 127, and amax / 448 for E4M3, computed in float32
    (compressed-tensors 0.20, `compute_dynamic_scales_and_zp`; for groups DeepSeek-V3, arXiv 2412.19437, §3.3). A row's
    result depends on that row alone. Gradients pass through unchanged.
    """

    kind: Literal["int", "float"]
    group: int | None = None

    def __call__(self, x: Float[Array, "*batch inner"]) -> Float[Array, "*batch inner"]:
        """The rounded activations, in x's dtype."""
        return _rounded(self, x)


def _rounded(rounding: Rounding, x: Float[Array, "*batch inner"]) -> Float[Array, "*batch inner"]:
    @jax.custom_jvp
    def straight_through(x: Float[Array, "*batch inner"]) -> Float[Array, "*batch inner"]:
        *batch, inner = x.shape
        group = inner if rounding.group is None else rounding.group
        wide = jnp.pad(x.astype(jnp.float32), [(0, 0)] * len(batch) + [(0, -inner % group)])
        groups = wide.reshape(*batch, -1, group)
        most = jnp.float32(MOST[rounding.kind])
        scale = _divided(jnp.max(jnp.abs(groups), axis=-1, keepdims=True), most)
        scale = jnp.where(scale == 0, jnp.finfo(jnp.float32).eps, scale)
        own = _divided(groups, scale)
        if rounding.kind == "int":
            own = jnp.round(jnp.clip(own, -128, 127))
        else:
            own = jnp.clip(own, -most, most).astype(jnp.float8_e4m3fn).astype(jnp.float32)
        return (own * scale).reshape(*batch, -1)[..., :inner].astype(x.dtype)

    straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), *tangents))
    return straight_through(x)


def _divided(x: Float32[Array, "*shape"], by: Float32[Array, "..."]) -> Float32[Array, "*shape"]:
    """x / by, rounded once. XLA would multiply by the reciprocal of a divisor that many elements share."""
    return x / lax.optimization_barrier(jnp.broadcast_to(by, x.shape))
