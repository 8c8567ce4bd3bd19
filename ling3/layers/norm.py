"""Root-mean-square norms and layer norms, computed in float32 or wider whatever the input's dtype."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ling3.layers.scope import scoped
from ling3.ops.precision import Wide, wide


class RMSNorm(eqx.Module):
    """y = w · x / sqrt(mean(x²) + eps) over the last axis (Zhang & Sennrich, arXiv 1910.07467).

    A zero-centered norm multiplies by 1 + w in place of w, as in Qwen3-Next.
    """

    weight: Float[Array, " features"]
    eps: float = eqx.field(static=True)
    name: str = eqx.field(static=True, default="")
    zero_centered: bool = eqx.field(static=True, default=False)

    @staticmethod
    def init(features: int, eps: float, zero_centered: bool = False) -> "RMSNorm":
        """A norm that multiplies by 1, with weights in float32."""
        fill = jnp.zeros if zero_centered else jnp.ones
        return RMSNorm(fill(features, jnp.float32), eps, zero_centered=zero_centered)

    @scoped
    def __call__(
        self, x: Float[Array, "*batch {self.weight.shape[0]}"]
    ) -> Float[Array, "*batch {self.weight.shape[0]}"]:
        """The normed features, in the dtype of `x`."""
        weight = 1.0 + self.weight.astype(wide(x.dtype)) if self.zero_centered else self.weight
        return rms_normalize(x, weight, self.eps).astype(x.dtype)


class GatedRMSNorm(eqx.Module):
    """y = RMSNorm(x) · w · gate: KDA's output norm and output gate, per head, in float32 until the end."""

    weight: Float[Array, " value"]
    eps: float = eqx.field(static=True)
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def init(value: int, eps: float) -> "GatedRMSNorm":
        """A norm with weights of 1 in float32."""
        return GatedRMSNorm(jnp.ones(value, jnp.float32), eps)

    @scoped
    def __call__(
        self, x: Float[Array, "batch seq heads value"], gate: Wide[Array, "batch seq heads value"] | None
    ) -> Wide[Array, "batch seq heads value"]:
        """The gated norm in float32 or wider; None means no gate."""
        normalized = rms_normalize(x, self.weight, self.eps)
        return normalized if gate is None else normalized * gate


class LayerNorm(eqx.Module):
    """y = w · (x - mean(x)) / sqrt(var(x) + eps) + bias over the last axis (Ba et al., arXiv 1607.06450)."""

    weight: Float[Array, " features"]
    bias: Float[Array, " features"]
    eps: float = eqx.field(static=True)
    name: str = eqx.field(static=True, default="")

    @staticmethod
    def init(features: int, eps: float) -> "LayerNorm":
        """A norm with weights of 1 and biases of 0, in float32."""
        return LayerNorm(jnp.ones(features, jnp.float32), jnp.zeros(features, jnp.float32), eps)

    @scoped
    def __call__(
        self, x: Float[Array, "*batch {self.weight.shape[0]}"]
    ) -> Float[Array, "*batch {self.weight.shape[0]}"]:
        """The normed features, in the dtype of `x`."""
        centered = x.astype(wide(x.dtype))
        centered = centered - jnp.mean(centered, axis=-1, keepdims=True)
        normed = rms_normalize(centered, self.weight, self.eps)
        return (normed + self.bias.astype(normed.dtype).reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def rms_normalize(
    x: Float[Array, "*batch features"], weight: Float[Array, " features"], eps: float
) -> Wide[Array, "*batch features"]:
    """w · x / sqrt(mean(x²) + eps) in float32 or wider, not cast back."""
    dtype = wide(x.dtype)
    x = x.astype(dtype)
    scaled = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return scaled * weight.astype(dtype).reshape((1,) * (x.ndim - 1) + (-1,))
