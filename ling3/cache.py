"""What a running Ling-3 remembers: fixed-size states for its KDA layers, growing latents for its MLA layers."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32


class Span(eqx.Module):
    """Which tokens of a right-padded `[batch, seq]` are new: `length[b]` of row b, the first at position `start[b]`.

    Positions are absolute and count from 0; whatever stands after `length[b]` in a row is padding.
    """

    start: Int32[Array, " batch"]
    length: Int32[Array, " batch"]

    def positions(self, seq: int) -> Int32[Array, "batch seq"]:
        """The absolute position of each column."""
        return self.start[:, None] + jnp.arange(seq, dtype=jnp.int32)[None]

    def valid(self, seq: int) -> Bool[Array, "batch seq"]:
        """Which columns are tokens and not padding."""
        return jnp.arange(seq, dtype=jnp.int32)[None] < self.length[:, None]


class KDAState(eqx.Module):
    """One KDA layer's memory, the same size after any number of tokens."""

    recurrent: Float[Array, "batch heads key value"]  # S, float32
    conv: Float[Array, "batch tail channels"]  # the last taps - 1 projections before the convolution: q | k | v


class LatentCache(eqx.Module):
    """One MLA layer's memory: per token the normalised latent and the rotated shared key, `[latent | rope]`."""

    entries: Float[Array, "batch positions entry"]

    def append(self, new: Float[Array, "batch seq entry"], span: Span) -> "LatentCache":
        """The cache with the span's tokens at their positions; padding, and what lies past the end, is dropped."""
        seq, capacity = new.shape[1], self.entries.shape[1]
        positions = jnp.where(span.valid(seq), span.positions(seq), capacity)
        rows = jnp.arange(new.shape[0], dtype=jnp.int32)[:, None]
        return LatentCache(self.entries.at[rows, positions].set(new.astype(self.entries.dtype), mode="drop"))


class Cache(eqx.Module):
    """The memory of a whole model: one entry per layer, and how many tokens each row holds."""

    layers: tuple[KDAState | LatentCache, ...]
    length: Int32[Array, " batch"]

    def capacity(self) -> int:
        """How many tokens a row has room for; without an MLA layer, as many as positions can count."""
        rooms = [layer.entries.shape[1] for layer in self.layers if isinstance(layer, LatentCache)]
        return min(rooms, default=2**31 - 1)
