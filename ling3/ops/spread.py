"""Sharing experts between devices, inside `jax.shard_map`."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the devices along some axes of the mesh share `experts`.

    Each has as many, in order, the last ones maybe fewer; or with `parts` some channels of every expert. Every device
    runs what it has on the tokens of all that have the same `rows`, or also on those of others along that axis.
    """

    axes: tuple[str, ...]
    experts: int
    """Of all devices together."""
    rows: str | None = None
    """The axis among `axes` along which devices have different tokens."""
    parts: bool = False

    def every(self, x: Shaped[Array, "tokens *rest"]) -> Shaped[Array, "all *rest"]:
        """The tokens of all devices that share the experts."""
        return x if self.rows is None else lax.all_gather(x, self.rows, axis=0, tiled=True)

    def ours(self, y: Float[Array, "all hidden"], tokens: int) -> Float[Array, "tokens hidden"]:
        """The results of this device's own tokens."""
        return y if self.rows is None else lax.dynamic_slice_in_dim(y, lax.axis_index(self.rows) * tokens, tokens)

    def own(self, chosen: Int32[Array, "tokens top_k"], here: int) -> Int32[Array, "tokens top_k"]:
        """A choice in terms of this device's `here` experts; `here` where it is none of these."""
        first = 0 if self.parts else lax.axis_index(self.axes) * here
        own = chosen - first
        return jnp.where((chosen < self.experts) & (own >= 0) & (own < here), own, here)

    def together(self, rows: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
        """Each row as the device that has its expert computed it; others have zeros there, which change no number."""
        return lax.psum(rows, self.axes)
