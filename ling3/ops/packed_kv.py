"""DeepSeek-V4's cache entries as bytes: FP8 with a scale per 64 channels, and bfloat16 for the RoPE channels.

A page of entries [nope 448 | rope 64] is one array of uint8, the layout of SGLang's `NopeFp8RopeBf16Pack`:

    [page × (448 FP8 | 64 bfloat16)]  [page × (7 scales, one 0)]  [zeros up to a multiple of 576]

and a page of the indexer's keys is [page × 128 FP8] [page × one float32 scale]. Numbers of several bytes are
little-endian. FP8 is e4m3fn (Micikevicius et al., arXiv 2209.05433): up to ±448, a NaN and no infinities. A scale of an
entry is a power of two, stored as its exponent + 127 (UE8M0 of OCP Microscaling Formats 1.0).

`pack`, `unpack` and their like for keys are for one page: `jax.vmap` maps them over several. `Packing` writes and reads
the entries of many pages, [pages, bytes], one by one. Nothing here is differentiable but `hadamard`.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt8, UInt16

from ling3.ops.precision import wide

NOPE, ROPE, TILE = 448, 64, 64
ENTRY = NOPE + 2 * ROPE
"""Bytes of an entry without its scales; pages are multiples of it."""
SCALES = NOPE // TILE + 1
INDEX = 128
# The least max|x| that sets a scale, so that zeros have one too.
FLOOR = 1e-4
LARGEST = 448.0
NAN = 0x7F


def packed_bytes(page: int) -> int:
    """The bytes of a page of `page` entries: ⌈584·page / 576⌉·576."""
    _check_page(page)
    return -(-(ENTRY + SCALES) * page // ENTRY) * ENTRY


# x and bytes have any shape in these signatures, because a wrong one is a ValueError here and not the type checker's
# TypeError.


def pack(x: Shaped[Array, "..."]) -> UInt8[Array, " bytes"]:
    """The bytes of the entries x [page, 512], `packed_bytes(page)` of them.

    x is first rounded to bfloat16, with infinities as the largest number of their sign. Then for each tile of 64 of the
    first 448 channels, with a = max(max|x|, 1e-4) and e the least integer for which a <= 448·2^e,

        scale = e + 127;    FP8 = x·2^(-e), rounded to nearest, ties to even

    An FP8 number is off by at most a/16. The last 64 channels stay in bfloat16.

    Raises a ValueError for NaN; the check waits for the device. Under `jax.jit` and `jax.vmap` it cannot be made: there
    a NaN becomes FP8's NaN (0x7F) or bfloat16's (0x7FC0), and its tile has the scale of the other channels.
    """
    _check_rows(x, NOPE + ROPE)
    bits = _bfloat16_bits(x)
    nope = bits[:, :NOPE].reshape(-1, NOPE // TILE, TILE)
    scale = _scale(nope)
    codes = _fp8(_bfloat16_value(nope) * _bfloat16_value((254 - scale).astype(jnp.uint16) << 7))
    rope = lax.bitcast_convert_type(bits[:, NOPE:], jnp.uint8)
    entries = jnp.concatenate([codes.reshape(-1, NOPE), rope.reshape(-1, 2 * ROPE)], axis=1)
    scales = jnp.pad(scale[..., 0].astype(jnp.uint8), ((0, 0), (0, 1)))
    flat = jnp.concatenate([entries.ravel(), scales.ravel()])
    return jnp.pad(flat, (0, packed_bytes(len(x)) - len(flat)))


def unpack(bytes: Shaped[Array, "..."], page: int) -> Float32[Array, "{page} 512"]:
    """The entries of a page in float32: FP8·2^(scale - 127), then the rope channels as they are.

    This is exact, except that what exceeds float32 is infinite, such as 256·2^120, which `pack` makes of infinity, and
    that a CPU flushes results below 2^-126, of which `pack` makes none.
    """
    _check_bytes(bytes, page, packed_bytes(page))
    entries = bytes[: page * ENTRY].reshape(page, ENTRY)
    scales = bytes[page * ENTRY :][: page * SCALES].reshape(page, SCALES)[:, :-1, None]
    tiles = _fp8_value(entries[:, :NOPE]).reshape(page, NOPE // TILE, TILE)
    nope = jnp.ldexp(tiles, scales.astype(jnp.int32) - 127).reshape(page, NOPE)
    rope = lax.bitcast_convert_type(entries[:, NOPE:].reshape(page, ROPE, 2), jnp.uint16)
    return jnp.concatenate([nope, _bfloat16_value(rope)], axis=1)


def pack_index(x: Shaped[Array, "..."]) -> UInt8[Array, " bytes"]:
    """The bytes of the indexer's keys x [page, 128], 132·page of them.

    In float32, with a scale per key that need not be a power of two. Infinities count as the largest number:

        scale = max(max|x|, 1e-4) / 448;    FP8 = x / scale, rounded to nearest, ties to even

    DeepSeek-V4 packs keys that were rounded to bfloat16 and then transformed by `hadamard`. NaN is as in `pack`.
    """
    _check_rows(x, INDEX)
    x = jnp.clip(x.astype(jnp.float32), jnp.finfo(jnp.float32).min, jnp.finfo(jnp.float32).max)
    top = jnp.max(jnp.where(jnp.isnan(x), 0.0, jnp.abs(x)), axis=1, keepdims=True)
    scale = _quotient(jnp.maximum(top, FLOOR), LARGEST)
    return jnp.concatenate([_fp8(_quotient(x, scale)).ravel(), lax.bitcast_convert_type(scale, jnp.uint8).ravel()])


def unpack_index(bytes: Shaped[Array, "..."], page: int) -> Float32[Array, "{page} 128"]:
    """The keys of a page of the indexer: FP8·scale, rounded to float32."""
    _check_page(page)
    _check_bytes(bytes, page, page * (INDEX + 4))
    codes, scales = bytes[: page * INDEX].reshape(page, INDEX), bytes[page * INDEX :].reshape(page, 4)
    return _fp8_value(codes) * lax.bitcast_convert_type(scales, jnp.float32)[:, None]


def hadamard(x: Shaped[Array, "..."]) -> Float[Array, "... 128"]:
    """y_j = Σ_i (-1)^(number of ones in the bits of i AND j)·x_i / √128 over the last axis, its own inverse.

    This spreads an outlier over all channels before they share a scale. Sums are in float32 or wider, and the result is
    rounded to the dtype of x.
    """
    _check_channels(x, INDEX)
    y = x.astype(wide(x.dtype))
    for _ in range(INDEX.bit_length() - 1):
        # The lowest bit of each index becomes the highest, so that after all of them the order is the first one again.
        even, odd = y[..., 0::2], y[..., 1::2]
        y = jnp.concatenate([even + odd, even - odd], axis=-1)
    return (y * INDEX**-0.5).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How pages of a cache are bytes: entry i of a page of n has its numbers from byte i·numbers on and its scales
    from byte n·numbers + i·scales on. `ENTRIES` and `KEYS` are the two that there are."""

    name: str
    channels: int
    """Of an entry."""
    numbers: int
    """Bytes of an entry without its scales."""
    scales: int
    """Bytes of its scales."""
    pack: Callable[..., Array] = dataclasses.field(repr=False)
    """A page of entries to its bytes."""
    unpack: Callable[..., Array] = dataclasses.field(repr=False)
    """The reverse; the second argument is the page's number of entries."""
    multiple: int = 1
    """What the bytes of a page are padded to a multiple of."""
    transformed: bool = False
    """True if entries, and what is multiplied with them, are rounded to bfloat16 and go through `hadamard` first."""

    @property
    def entry(self) -> int:
        """Bytes of an entry, its scales among them and no padding."""
        return self.numbers + self.scales

    def bytes(self, page: int) -> int:
        """The bytes of a page of `page` entries."""
        return -(-self.entry * page // self.multiple) * self.multiple

    def page(self, bytes: int) -> int:
        """The entries of a page of so many bytes: there is less padding than an entry."""
        return bytes // self.entry

    def transform(self, x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
        """x as it is, or `hadamard` of x in bfloat16: the inner product of two such is that of the originals."""
        return hadamard(x.astype(jnp.bfloat16)).astype(x.dtype) if self.transformed else x

    def write(
        self,
        pages: UInt8[Array, "pages bytes"],
        page: Int32[Array, "*batch"],
        entry: Int32[Array, "*batch"],
        new: Float[Array, "*batch {self.channels}"],
    ) -> UInt8[Array, "pages bytes"]:
        """With the entries `new`, transformed, as entry `entry` of page `page`; those of no page are dropped.

        A page has the bytes of `pack` once all its entries are written, over whatever was there but zero padding.
        """
        rows = self.transform(new).reshape(-1, 1, self.channels)
        packed = jax.vmap(self.pack)(rows)  # each as a page of one
        for width, offset, at in self._parts(pages, entry.ravel()):
            where = jnp.stack([page.ravel(), at], axis=1)
            how = lax.ScatterDimensionNumbers((1,), (0,), (0, 1))
            pages = lax.scatter(pages, where, packed[:, offset : offset + width], how, mode="drop")
        return pages

    def read(
        self,
        pages: UInt8[Array, "pages bytes"],
        page: Int32[Array, "*batch"],
        entry: Int32[Array, "*batch"],
    ) -> Float32[Array, "*batch {self.channels}"]:
        """Entry `entry` of page `page`; where there is none, any other."""
        how = lax.GatherDimensionNumbers((1,), (0,), (0, 1))
        parts = []
        for width, _, at in self._parts(pages, entry.ravel()):
            where = jnp.stack([page.ravel(), at], axis=1)
            parts.append(lax.gather(pages, where, how, (1, width), mode="clip"))
        rows = jnp.pad(jnp.concatenate(parts, axis=1), ((0, 0), (0, self.bytes(1) - self.entry)))
        return jax.vmap(lambda row: self.unpack(row, 1))(rows).reshape(*page.shape, self.channels)

    def read_pages(
        self, pages: UInt8[Array, "pages bytes"], page: Int32[Array, " batch"]
    ) -> Float32[Array, "batch entries {self.channels}"]:
        """All entries of some pages; of a page that is not there, another one's."""
        size = self.page(pages.shape[1])
        return jax.vmap(lambda bytes: self.unpack(bytes, size))(pages.at[page].get(mode="clip"))

    def _parts(
        self, pages: UInt8[Array, "pages bytes"], entry: Int32[Array, " rows"]
    ) -> tuple[tuple[int, int, Int32[Array, " rows"]], ...]:
        """The two parts of an entry: how many bytes, from where on in a page of one, and from where on in its own."""
        first = self.page(pages.shape[1]) * self.numbers
        return (self.numbers, 0, entry * self.numbers), (self.scales, self.numbers, first + entry * self.scales)


ENTRIES = Packing("entries", NOPE + ROPE, ENTRY, SCALES, pack, unpack, multiple=ENTRY)
"""Keys that are values, [nope 448 | rope 64]."""
KEYS = Packing("keys", INDEX, INDEX, 4, pack_index, unpack_index, transformed=True)
"""The indexer's keys."""


def _bfloat16_bits(x: Float[Array, "page channels"]) -> UInt16[Array, "page channels"]:
    """The bits of x clipped to the largest bfloat16, ±3.3895314e38, in bfloat16, with one NaN.

    The limits are applied to bits: `jnp.clip` flushes subnormal numbers to 0 on a CPU.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
    magnitude = bits & 0x7FFF
    return jnp.where(magnitude > 0x7F80, 0x7FC0, bits & 0x8000 | jnp.minimum(magnitude, 0x7F7F))


def _bfloat16_value(bits: UInt16[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def _scale(bits: UInt16[Array, "page tiles channels"]) -> Int32[Array, "page tiles 1"]:
    """e + 127 for each tile of bfloat16 numbers, computed on their bits, since log2 may round to a wrong integer.

    A magnitude m·2^k, with 1 <= m < 2, has the bits (k + 127)·128 + (m - 1)·128. Since 448 is 1.75·2^8, e is k - 8, or
    one more if m > 1.75, when (m - 1)·128 is at least 97 and adding 31 to it carries. The floor 1e-4 has e = -22.
    """
    magnitude = bits & 0x7FFF
    top = jnp.max(jnp.where(magnitude > 0x7F7F, 0, magnitude), axis=-1, keepdims=True).astype(jnp.int32)
    return jnp.maximum(((top + 31) >> 7) - 8, 127 - 22)


def _fp8(y: Float32[Array, "*shape"]) -> UInt8[Array, "*shape"]:
    """The codes of y clipped to ±448. Unclipped, what is above 464 would be cast to NaN."""
    codes = lax.bitcast_convert_type(jnp.clip(y, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn), jnp.uint8)
    return jnp.where(jnp.isnan(y), NAN, codes)


def _fp8_value(codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def _quotient(
    x: Float32[Array, "page channels"], y: Float32[Array, "page 1"] | float
) -> Float32[Array, "page channels"]:
    """x / y for a finite x or NaN, rounded once.

    XLA would multiply by the reciprocal of a constant or broadcast y, which rounds twice. Adding 0·x makes it neither.
    """
    return x / (y + 0.0 * x)


def _check_page(page: int) -> None:
    if page < 1:
        raise ValueError(f"page is {page}, expected the number of rows of a page, at least 1")


def _check_channels(x: Shaped[Array, "..."], channels: int) -> None:
    if x.shape[-1:] != (channels,):
        raise ValueError(f"x has the shape {x.shape}, expected {channels} channels along the last axis")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"x has the dtype {x.dtype}, expected a floating one: convert it with x.astype(jnp.float32)")


def _check_rows(x: Shaped[Array, "..."], channels: int) -> None:
    """Raises a ValueError unless x is a page without NaN. A traced x has no values yet, and may have NaN."""
    if x.ndim != 2 or not len(x):
        expected = f"expected (page, {channels}) with at least one row: map over pages with jax.vmap"
        raise ValueError(f"x has the shape {x.shape}, {expected}")
    _check_channels(x, channels)
    if isinstance(x, jax.core.Tracer):
        return
    places = np.argwhere(np.isnan(np.asarray(x)))
    if len(places):
        row, channel = places[0]
        raise ValueError(
            f"x is NaN at row {row}, channel {channel} (NaN in all: {len(places)}), expected numbers or infinities: "
            "find its origin with jax.config.update('jax_debug_nans', True), or replace it with jnp.nan_to_num"
        )


def _check_bytes(bytes: Shaped[Array, "..."], page: int, size: int) -> None:
    if bytes.dtype != jnp.uint8:
        raise ValueError(f"bytes has the dtype {bytes.dtype}, expected uint8, which packing returns")
    if bytes.shape != (size,):
        found = f"bytes has the shape {bytes.shape}, expected ({size},) for a page of {page} rows"
        raise ValueError(f"{found}: give the page size that it was packed with, and map over pages with jax.vmap")
