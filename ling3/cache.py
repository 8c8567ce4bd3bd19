"""What a running Ling-3 remembers: states of fixed size for its KDA layers, growing latents for its MLA layers."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, DTypeLike, Float, Int32


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
    """One MLA layer's memory: per token the normalised latent and the rotated shared key, `[latent | rope]`.

    Entries lie in pages, and `table[b, i]` is the page that holds row b's positions [page·i, page·(i+1)). A number that
    is no page stands for none: what is written there is dropped.
    """

    entries: Float[Array, "pages page entry"]
    table: Int32[Array, "batch columns"]

    @staticmethod
    def empty(batch: int, max_length: int, page_size: int, entry: int, dtype: DTypeLike) -> "LatentCache":
        """Room for `max_length` tokens in each row, rounded up to whole pages, each row's pages its own."""
        columns = -(-max_length // page_size)
        table = jnp.arange(batch * columns, dtype=jnp.int32).reshape(batch, columns)
        return LatentCache(jnp.zeros((batch * columns, page_size, entry), dtype), table)

    def append(self, new: Float[Array, "batch seq entry"], span: Span) -> "LatentCache":
        """The cache with the span's tokens at their positions; padding, and what has no page, is dropped."""
        seq, (pages, page_size, _) = new.shape[1], self.entries.shape
        positions = span.positions(seq)
        column = positions // page_size
        kept = span.valid(seq) & (column < self.table.shape[1])
        page = jnp.take_along_axis(self.table, jnp.minimum(column, self.table.shape[1] - 1), axis=1)
        page = jnp.where(kept, page, pages)
        new = new.astype(self.entries.dtype)
        return LatentCache(self.entries.at[page, positions % page_size].set(new, mode="drop"), self.table)

    def capacity(self) -> int:
        """How many tokens a row has room for."""
        return self.table.shape[1] * self.entries.shape[1]


class Cache(eqx.Module):
    """The memory of a whole model: one entry per attention, and how many tokens each row holds."""

    layers: tuple[KDAState | LatentCache, ...]
    length: Int32[Array, " batch"]

    def capacity(self) -> int:
        """How many tokens a row has room for; without an MLA layer, as many as positions can count."""
        return min((layer.capacity() for layer in self.layers if isinstance(layer, LatentCache)), default=2**31 - 1)
