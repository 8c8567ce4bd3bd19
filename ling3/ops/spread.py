"""Experts sharded over devices, inside `jax.shard_map`."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped


@dataclasses.dataclass(frozen=True)
class Spread:
    """How the devices along some axes of a mesh share the routed experts.

    Each device has equally many experts, in order and padded at the end; or with `parts`, some channels of every
    expert. With `rows`, tokens are all-gathered along that axis first (`every`), and the results sliced (`ours`).
    """

    axes: tuple[str, ...]
    experts: int
    """The number of experts on all devices together."""
    rows: str | None = None
    """The axis among `axes` along which devices have different tokens."""
    parts: bool = False

    def every(self, x: Shaped[Array, "tokens *rest"]) -> Shaped[Array, "all *rest"]:
        """All-gathers the tokens of the devices along `rows`."""
        return x if self.rows is None else lax.all_gather(x, self.rows, axis=0, tiled=True)

    def ours(self, y: Float[Array, "all hidden"], tokens: int) -> Float[Array, "tokens hidden"]:
        """The part of the results that belongs to this device's `tokens`."""
        return y if self.rows is None else lax.dynamic_slice_in_dim(y, lax.axis_index(self.rows) * tokens, tokens)

    def own(self, chosen: Int32[Array, "tokens top_k"], here: int) -> Int32[Array, "tokens top_k"]:
        """`chosen` as indices of this device's `here` experts; experts of other devices become `here`."""
        first = 0 if self.parts else lax.axis_index(self.axes) * here
        own = chosen - first
        return jnp.where((chosen < self.experts) & (own >= 0) & (own < here), own, here)

    def together(self, rows: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
        """The psum of the rows: devices without a row's expert add zeros; with `parts`, each adds its share."""
        return lax.psum(rows, self.axes)
