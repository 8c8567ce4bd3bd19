"""SwiGLU, the gated activation of a feed-forward, with optional clamps."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@dataclasses.dataclass(frozen=True)
class SwiGLU:
    """silu(gate) · up (SwiGLU, arXiv 2002.05202), clamped where `limit` is above 0.

    min(silu(gate), limit) · clip(up, -limit, limit)      Ling-3.0-flash
    silu(min(gate, limit)) · clip(up, -limit, limit)      DeepSeek-V4, with `limit_first`
    """

    limit: float = 0.0
    limit_first: bool = False

    def __call__(
        self, gate: Float[Array, "*batch intermediate"], up: Float[Array, "*batch intermediate"]
    ) -> Float[Array, "*batch intermediate"]:
        """The activation, element by element."""
        if self.limit <= 0:
            return jax.nn.silu(gate) * up
        up = jnp.clip(up, -self.limit, self.limit)
        if self.limit_first:
            return jax.nn.silu(jnp.minimum(gate, self.limit)) * up
        return jnp.minimum(jax.nn.silu(gate), self.limit) * up


SWIGLU = SwiGLU()
"""SwiGLU without clamps."""
