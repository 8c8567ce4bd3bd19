"""DeepSeek-V4's cache entries as bytes: FP8 with a scale per 64 channels, and bfloat16 for the RoPE channels.

A page of entries [nope 448 | rope 64] is one array of uint8, the layout of SGLang's `NopeFp8RopeBf16Pack`:

    [page × (448 FP8 | 64 bfloat16)]  [page × (7 scales, one 0)]  [zeros up to a multiple of 576]

and a page of the indexer's keys is [page × 128 FP8] [page × one float32 scale]. Numbers of several bytes are
little-endian. FP8 is e4m3fn (Micikevicius et al., arXiv 2209.05433): up to ±448, a NaN and no infinities. A scale of an
entry is a power of two, stored as its exponent + 127 (UE8M0 of OCP Microscaling Formats 1.0).

`pack`, `unpack` and their counterparts for keys take one page; map them over several with `jax.vmap`. `Packing` writes
and reads single entries of many pages, [pages, bytes]. Only `hadamard` is differentiable.
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
"""Bytes of an entry without its scales; a page is padded to a multiple of it."""
SCALES = NOPE // TILE + 1
INDEX = 128
# The smallest max|x| from which a scale is computed, so that zeros have a scale too.
FLOOR = 1e-4
LARGEST = 448.0
NAN = 0x7F


def packed_bytes(page: int) -> int:
    """The bytes of a page of `page` entries: ⌈584·page / 576⌉·576."""
    _check_page(page)
    return -(-(ENTRY + SCALES) * page // ENTRY) * ENTRY


# x and bytes may have any shape in these signatures, so that a wrong one raises the ValueError below and not the type
# checker's TypeError.


def pack(x: Shaped[Array, "..."]) -> UInt8[Array, " bytes"]:
    """Packs a page of entries x [page, 512] into `packed_bytes(page)` bytes.

    x is first rounded to bfloat16; infinities become the largest finite number of their sign. Then for each tile of 64
    of the first 448 channels, with a = max(max|x|, 1e-4) and e the least integer for which a <= 448·2^e,

        scale = e + 127;    FP8 = x·2^(-e), rounded to nearest, ties to even

    An FP8 number is off by at most a/16. The last 64 channels stay in bfloat16.

    Raises ValueError for NaN; the check waits for the device. Under `jax.jit` and `jax.vmap` there is no check: a NaN
    becomes FP8's NaN (0x7F) or bfloat16's (0x7FC0), and its tile's scale is computed from the other channels.
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
    """Unpacks a page's entries to float32: FP8·2^(scale - 127), and the rope channels unchanged.

    Exact, with two exceptions: values beyond float32 become infinite, such as 256·2^120, which `pack` makes of
    infinity; and a CPU flushes values below 2^-126 to zero, but `pack` makes none of these.
    """
    _check_bytes(bytes, page, packed_bytes(page))
    entries = bytes[: page * ENTRY].reshape(page, ENTRY)
    scales = bytes[page * ENTRY :][: page * SCALES].reshape(page, SCALES)[:, :-1, None]
    tiles = _fp8_value(entries[:, :NOPE]).reshape(page, NOPE // TILE, TILE)
    nope = jnp.ldexp(tiles, scales.astype(jnp.int32) - 127).reshape(page, NOPE)
    rope = lax.bitcast_convert_type(entries[:, NOPE:].reshape(page, ROPE, 2), jnp.uint16)
    return jnp.concatenate([nope, _bfloat16_value(rope)], axis=1)


def pack_index(x: Shaped[Array, "..."]) -> UInt8[Array, " bytes"]:
    """Packs a page of the indexer's keys x [page, 128] into 132·page bytes.

    Computed in float32, with a scale per key that need not be a power of two. Infinities count as the largest number:

        scale = max(max|x|, 1e-4) / 448;    FP8 = x / scale, rounded to nearest, ties to even

    DeepSeek-V4 packs keys that were rounded to bfloat16 and then transformed by `hadamard`. NaN: see `pack`.
    """
    _check_rows(x, INDEX)
    x = jnp.clip(x.astype(jnp.float32), jnp.finfo(jnp.float32).min, jnp.finfo(jnp.float32).max)
    top = jnp.max(jnp.where(jnp.isnan(x), 0.0, jnp.abs(x)), axis=1, keepdims=True)
    scale = _quotient(jnp.maximum(top, FLOOR), LARGEST)
    return jnp.concatenate([_fp8(_quotient(x, scale)).ravel(), lax.bitcast_convert_type(scale, jnp.uint8).ravel()])


def unpack_index(bytes: Shaped[Array, "..."], page: int) -> Float32[Array, "{page} 128"]:
    """Unpacks a page of the indexer's keys: FP8·scale, rounded to float32."""
    _check_page(page)
    _check_bytes(bytes, page, page * (INDEX + 4))
    codes, scales = bytes[: page * INDEX].reshape(page, INDEX), bytes[page * INDEX :].reshape(page, 4)
    return _fp8_value(codes) * lax.bitcast_convert_type(scales, jnp.float32)[:, None]


def hadamard(x: Shaped[Array, "..."]) -> Float[Array, "... 128"]:
    """y_j = Σ_i (-1)^popcount(i & j)·x_i / √128 over the last axis. Applied twice, it is the identity.

    This spreads an outlier over all channels before they share a scale. Sums are in float32 or wider, and the result is
    rounded to the dtype of x.
    """
    _check_channels(x, INDEX)
    y = x.astype(wide(x.dtype))
    for _ in range(INDEX.bit_length() - 1):
        # Each step moves the lowest bit of the index to the top, so after all of them the order is the original one.
        even, odd = y[..., 0::2], y[..., 1::2]
        y = jnp.concatenate([even + odd, even - odd], axis=-1)
    return (y * INDEX**-0.5).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Packing:
    """The byte layout of a cache's pages: of n entries in a page, entry i has its numbers from byte i·numbers on and
    its scales from byte n·numbers + i·scales on. There are two, `ENTRIES` and `KEYS`."""

    name: str
    channels: int
    """Channels of an entry."""
    numbers: int
    """Bytes of an entry without its scales."""
    scales: int
    """Bytes of an entry's scales."""
    pack: Callable[..., Array] = dataclasses.field(repr=False)
    """Packs a page of entries into its bytes."""
    unpack: Callable[..., Array] = dataclasses.field(repr=False)
    """Unpacks a page's bytes; the second argument is its number of entries."""
    multiple: int = 1
    """A page's bytes are padded to a multiple of this."""
    transformed: bool = False
    """True if entries and their queries are rounded to bfloat16 and go through `hadamard` first."""

    @property
    def entry(self) -> int:
        """Bytes of an entry with its scales, without padding."""
        return self.numbers + self.scales

    def bytes(self, page: int) -> int:
        """The bytes of a page of `page` entries."""
        return -(-self.entry * page // self.multiple) * self.multiple

    def page(self, bytes: int) -> int:
        """The number of entries in a page of this many bytes, whose padding is smaller than an entry."""
        return bytes // self.entry

    def transform(self, x: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
        """x, or if `transformed`, `hadamard` of x in bfloat16, which preserves inner products up to rounding."""
        return hadamard(x.astype(jnp.bfloat16)).astype(x.dtype) if self.transformed else x

    def write(
        self,
        pages: UInt8[Array, "pages bytes"],
        page: Int32[Array, "*batch"],
        entry: Int32[Array, "*batch"],
        new: Float[Array, "*batch {self.channels}"],
    ) -> UInt8[Array, "pages bytes"]:
        """Writes `new`, transformed first, as entry `entry` of page `page`; drops it if there is no such page.

        Once all of its entries are written, a page has the bytes that `pack` returns, if its padding was zero before.
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
        """Reads entry `entry` of page `page`; an out-of-range index reads some other entry."""
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
        """Reads all entries of the given pages; an out-of-range index reads some other page."""
        size = self.page(pages.shape[1])
        return jax.vmap(lambda bytes: self.unpack(bytes, size))(pages.at[page].get(mode="clip"))

    def _parts(
        self, pages: UInt8[Array, "pages bytes"], entry: Int32[Array, " rows"]
    ) -> tuple[tuple[int, int, Int32[Array, " rows"]], ...]:
        """Of an entry's numbers and of its scales: bytes, offset in a page of one entry, and offset in its page."""
        first = self.page(pages.shape[1]) * self.numbers
        return (self.numbers, 0, entry * self.numbers), (self.scales, self.numbers, first + entry * self.scales)


ENTRIES = Packing("entries", NOPE + ROPE, ENTRY, SCALES, pack, unpack, multiple=ENTRY)
"""Attention entries [nope 448 | rope 64], each both key and value."""
KEYS = Packing("keys", INDEX, INDEX, 4, pack_index, unpack_index, transformed=True)
"""Keys of the indexer, 128 channels."""


def _bfloat16_bits(x: Float[Array, "page channels"]) -> UInt16[Array, "page channels"]:
    """The bits of x in bfloat16, clipped to its largest finite number, ±3.3895314e38; all NaNs have the same bits.

    The clipping is done on the bits because `jnp.clip` flushes subnormal numbers to 0 on a CPU.
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
    """The FP8 codes of y clipped to ±448; without clipping, values above 464 would be cast to NaN."""
    codes = lax.bitcast_convert_type(jnp.clip(y, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn), jnp.uint8)
    return jnp.where(jnp.isnan(y), NAN, codes)


def _fp8_value(codes: UInt8[Array, "*shape"]) -> Float32[Array, "*shape"]:
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def _quotient(
    x: Float32[Array, "page channels"], y: Float32[Array, "page 1"] | float
) -> Float32[Array, "page channels"]:
    """x / y for a finite x or NaN, rounded once.

    As y is a constant or broadcast, XLA would multiply by its reciprocal, which rounds twice. Adding 0·x prevents it.
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
    """Raises ValueError unless x is a page without NaN. The values of a traced x cannot be checked."""
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
