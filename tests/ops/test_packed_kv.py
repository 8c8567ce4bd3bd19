"""Packed pages have the bytes that their layout says, for every number under every scale."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from exhaustive_cases import exhaustively

from ling3.ops.packed_kv import ENTRIES, KEYS, hadamard, pack, pack_index, packed_bytes, unpack, unpack_index

pytestmark = pytest.mark.thorough

PACK, PACK_INDEX, HADAMARD = jax.jit(pack), jax.jit(pack_index), jax.jit(hadamard)
UNPACK, UNPACK_INDEX = jax.jit(unpack, static_argnums=1), jax.jit(unpack_index, static_argnums=1)
LARGEST = 255 * 2.0**120
FLOAT32_MAX = float(np.finfo(np.float32).max)


def entries(rows):
    """A page of float32 zeros but for the first channels of these tiles, the eighth of which is the rope part."""
    x = np.zeros((len(rows), 8, 64), np.float32)
    for row, tiles in zip(x, rows, strict=True):
        for tile, numbers in zip(row, tiles, strict=False):
            tile[: len(numbers)] = numbers
    return jnp.asarray(x.reshape(len(rows), 512))


def parts(packed, page):
    """Codes [page, 7, 64], rope bytes [page, 128], scales [page, 8] and the padding."""
    packed = np.asarray(packed)
    rows = packed[: 576 * page].reshape(page, 576)
    scales = packed[576 * page : 584 * page].reshape(page, 8)
    return rows[:, :448].reshape(page, 7, 64), rows[:, 448:], scales, packed[584 * page :]


def expected(x):
    """The bytes in numpy: the casts of ml_dtypes, and frexp for the exponents."""
    with np.errstate(invalid="ignore"):
        h = np.clip(x, -np.float32(3.3895314e38), np.float32(3.3895314e38)).astype(ml_dtypes.bfloat16)
    h[np.isnan(h)] = np.array(0x7FC0, np.uint16).view(ml_dtypes.bfloat16)
    nope = h[:, :448].astype(np.float32).reshape(-1, 7, 64)
    a = np.maximum(np.max(np.where(np.isnan(nope), 0, np.abs(nope)), axis=-1, keepdims=True), np.float32(1e-4))
    half, e = np.frexp(a / np.float32(448))  # a/448 = half·2^e with 0.5 <= half < 1
    e -= half == 0.5
    codes = np.clip(np.ldexp(nope, -e), -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes[np.isnan(nope)] = 0x7F
    rope = np.ascontiguousarray(h[:, 448:]).view(np.uint8)
    rows = np.concatenate([codes.reshape(len(x), 448), rope], axis=1)
    scales = np.pad((e[..., 0] + 127).astype(np.uint8), ((0, 0), (0, 1)))
    flat = np.concatenate([rows.ravel(), scales.ravel()])
    return np.pad(flat, (0, -len(flat) % 576))


def value(code):
    """An e4m3fn number by its definition: (-1)^s·(1 + m/8)·2^(e - 7), subnormal (m/8)·2^-6, NaN with all bits 1."""
    e, m = code >> 3 & 15, code & 7
    size = np.nan if (e, m) == (15, 7) else (1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6
    return -size if code & 0x80 else size


VALUES = np.array([value(code) for code in range(256)])


@functools.cache
def every_number():
    """Each bfloat16 down to 2^-20 of a tile's largest under each of the scales, that largest first in its tile."""
    exponents = np.arange(-22, 121)
    significands = 1 + np.arange(128) / 128
    down = np.ldexp(significands[None], np.arange(8, -13, -1)[:, None]).ravel()
    signed = np.concatenate([down, -down])
    signed = signed[np.abs(signed) <= 448]
    tiles = np.pad(signed, (0, -len(signed) % (63 * 7))).reshape(-1, 7, 63)
    tiles = np.concatenate([np.full((*tiles.shape[:2], 1), 448.0), tiles], axis=-1)
    x = np.ldexp(tiles[None], exponents[:, None, None, None])
    x = np.clip(x.reshape(-1, 448), -LARGEST, LARGEST)  # under the last scale 448·2^120 would not be finite
    return jnp.asarray(np.concatenate([x, x[:, :64]], axis=1), jnp.float32)


@pytest.mark.parametrize(("page", "size"), [(256, 149760), (64, 37440), (2, 1728), (1, 1152), (72, 42048)])
def test_sizes(page, size):
    """584 bytes an entry: 149504 for 256, 37376 for 64 and 1168 for 2, then up to a multiple of 576."""
    assert packed_bytes(page) == size == -(-584 * page // 576) * 576
    assert jax.eval_shape(pack, jnp.zeros((page, 512))).shape == (size,)


# The largest of a tile sets e, the least integer with largest <= 448·2^e; the scale's byte is e + 127. A code is
# sign | exponent + 7 (4 bits) | 3 bits of the significand.
TILES = {
    # e = 0. 448 = 1.75·2^8: 15|6. 1: 7|0. 17 lies between 16 = 11|0 and 18 = 11|1, 19 between 18 and 20 = 11|2: the
    # even one. 2^-10 lies between 0 and the smallest, 2^-9 = 0|1, and 3·2^-10 between 0|1 and 0|2.
    "ties": ([448, 1, -0.5, 17, 19, 2**-10, 3 * 2**-10, -448], "7e38b0585a0002fe", "7f"),
    # 448 < 450, so e = 1, and 225 is rounded to 224 = 1.75·2^7: 14|6.
    "above 448": ([450], "76", "80"),
    # The floor: 1e-4 <= 448·2^-22.
    "zeros": ([0.0, -0.0], "0080", "69"),
    # bfloat16 has 1e-4 as 1.640625·2^-14; times 2^22 that is 420, rounded to 416 = 1.625·2^8: 15|5.
    "floor": ([1e-4], "7d", "69"),
    # The largest bfloat16 is 255·2^120, e = 120, and 255 is rounded to 256 = 2^8: 15|0.
    "infinities": ([np.inf, -np.inf, 1], "78f800", "f7"),
    "1": ([1], "78", "77"),  # 448·2^-9 < 1 <= 448·2^-8, and 1·2^8 is 15|0
    "largest": ([LARGEST, FLOAT32_MAX], "7878", "f7"),
    # Ties at the last of 8 bits, 1 + 2^-8 and 1 + 3·2^-8; infinities; the smallest subnormal number. Low byte first.
    "rope": (
        [1, -2.5, 1 + 2**-8, 1 + 3 * 2**-8, np.inf, -np.inf, 2.0**-133, -0.0],
        "803f20c0803f823f7f7f7fff01000080",
        "",
    ),
}


@pytest.mark.parametrize("call", [PACK, pack], ids=["jit", "eager"])
def test_bytes_derived_by_hand(call):
    numbers, codes, scales = zip(*TILES.values(), strict=True)
    tiles = [bytes.fromhex(tile).ljust(64, b"\0") for tile in codes[:7]]
    row = b"".join([*tiles, bytes.fromhex(codes[7]).ljust(128, b"\0")])
    page = (row + bytes.fromhex("".join(scales)) + b"\0").ljust(1152, b"\0")
    assert np.asarray(call(entries([numbers]))).tobytes() == page


def test_every_number_under_every_scale():
    x = every_number()
    packed = PACK(x)
    codes, _, scales, _ = parts(packed, len(x))
    assert set(scales[:, :7].ravel()) == set(range(105, 248))
    assert set(codes.ravel()) == set(range(256)) - {0x7F, 0xFF}
    np.testing.assert_array_equal(packed, expected(np.asarray(x)))


def test_every_bfloat16_and_its_ties():
    """Every upper half of a float32, NaN too, with lower halves below, at and above the tie: as rope and elsewhere."""
    upper = np.random.default_rng(0).permutation(2**16).astype(np.uint32)
    bits = (upper[:, None] << 16 | np.array([0, 0x7FFF, 0x8000, 0x8001], np.uint32)).reshape(4096, 64)
    x = np.tile(bits, 8).view(np.float32)
    np.testing.assert_array_equal(PACK(jnp.asarray(x)), expected(x))


def test_bfloat16_and_float16_are_packed_as_the_same_numbers_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 512)), jnp.float16)
    x = x.astype(jnp.bfloat16).astype(jnp.float16)
    for dtype in (jnp.bfloat16, jnp.float16):
        np.testing.assert_array_equal(PACK(x.astype(dtype)), PACK(x.astype(jnp.float32)))


def test_unpacked_numbers_are_code_times_scale():
    """All 256 codes under all 256 scales, on a page built by hand, whose padding and spare bytes are noise."""
    page = np.random.default_rng(0).integers(0, 256, packed_bytes(256), np.uint8)
    rows, scales = page[: 256 * 576].reshape(256, 576), page[256 * 576 : 256 * 584].reshape(256, 8)
    rows[:, :256], scales[:, :7] = np.arange(256), np.arange(256)[:, None]
    x = np.asarray(UNPACK(jnp.asarray(page), 256))
    assert x.dtype == np.float32 and x.shape == (256, 512)
    with np.errstate(over="ignore"):
        exact = np.ldexp(VALUES[None], np.arange(-127, 129)[:, None]).astype(np.float32)
    exact = np.where(np.abs(exact) < 2.0**-126, np.copysign(0, exact), exact)  # arithmetic on a CPU flushes these
    np.testing.assert_array_equal(x[:, :256], exact)
    rope = np.ascontiguousarray(rows[:, 448:]).view(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(x[:, 448:], rope)


def test_every_code_comes_back():
    """But for the second NaN, 0xFF. The largest code is in every tile, so that scales stay as they are."""
    page = np.zeros(packed_bytes(2), np.uint8)
    codes = np.resize(np.r_[0:0x7F, 0x80:0xFF], (2, 7, 63))
    page[:1152].reshape(2, 576)[:, :448] = np.concatenate([codes, np.full((2, 7, 1), 0x7E)], axis=-1).reshape(2, 448)
    page[1152:1168].reshape(2, 8)[:, :7] = np.arange(105, 119).reshape(2, 7)
    np.testing.assert_array_equal(PACK(UNPACK(jnp.asarray(page), 2)), page)


def test_the_error_is_a_sixteenth_of_the_largest_at_most():
    x = every_number()
    x = np.asarray(x)[np.max(np.abs(x), axis=1) < 248 * 2.0**120]  # above, the largest unpacks to infinity
    x = jnp.asarray(np.resize(x, every_number().shape))
    y = np.asarray(UNPACK(PACK(x), len(x)), np.float64)
    error = np.abs(y - np.asarray(x))[:, :448].reshape(-1, 7, 64)
    a = np.maximum(np.max(np.abs(np.asarray(x, np.float64)[:, :448].reshape(-1, 7, 64)), axis=-1), 1e-4)
    assert np.max(error.max(axis=-1) / a) <= 1 / 16
    np.testing.assert_array_equal(y[:, 448:], np.asarray(x)[:, 448:])


def test_infinities_come_back_and_the_largest_number_overflows():
    y = np.asarray(UNPACK(PACK(entries([[[np.inf, -np.inf, LARGEST, 1]] * 8])), 1)).reshape(8, 64)[:, :4]
    np.testing.assert_array_equal(y[:7], [[np.inf, -np.inf, np.inf, 0]] * 7)
    np.testing.assert_array_equal(y[7], [LARGEST, -LARGEST, LARGEST, 1])


def test_unpacked_entries_pack_to_themselves():
    """In numbers always; in bytes unless a tile's largest is in (448, 464]·2^k.

    That largest is rounded to 448·2^k, for which the scale below is enough.
    """
    x = jnp.asarray(np.random.default_rng(0).normal(size=(256, 512)), jnp.float32)
    first = PACK(x)
    numbers = UNPACK(first, 256)
    second = PACK(numbers)
    np.testing.assert_array_equal(UNPACK(second, 256), numbers)
    np.testing.assert_array_equal(PACK(UNPACK(second, 256)), second)
    largest = np.abs(x.astype(jnp.bfloat16).astype(jnp.float32)[:, :448].reshape(256, 7, 64)).max(axis=-1)
    half, _ = np.frexp(largest / 448)
    lower = (half > 0.5) & (half <= 232 / 448)
    assert 0 < lower.mean() < 0.2
    (codes, _, scales, _), (again, _, others, _) = parts(first, 256), parts(second, 256)
    np.testing.assert_array_equal(scales[:, :7] - lower, others[:, :7])
    np.testing.assert_array_equal(codes[~lower], again[~lower])


def test_nan_is_refused_where_it_can_be_seen():
    x = np.zeros((2, 512), np.float32)
    x[1, 7] = x[1, 450] = np.nan
    message = r"x is NaN at row 1, channel 7 \(NaN in all: 2\), expected numbers or infinities: find .*jax_debug_nans"
    for dtype in (jnp.float32, jnp.bfloat16):
        with pytest.raises(ValueError, match=message):
            pack(jnp.asarray(x, dtype))
    with pytest.raises(ValueError, match=r"x is NaN at row 1, channel 7 \(NaN in all: 1\)"):
        pack_index(jnp.asarray(x[:, :128]))


def test_nan_under_jit_is_nan_and_leaves_its_tile_as_it_is():
    x = np.random.default_rng(0).normal(size=(2, 512)).astype(np.float32)
    zeroed, poisoned = x.copy(), x.copy()
    where = (np.array([0, 0, 1, 1]), np.array([0, 65, 447, 448]))
    zeroed[where], poisoned[where] = 0, [np.nan, -np.nan, np.nan, -np.nan]
    codes, rope, scales, _ = parts(PACK(jnp.asarray(poisoned)), 2)
    others, other_rope, other_scales, _ = parts(PACK(jnp.asarray(zeroed)), 2)
    np.testing.assert_array_equal(scales, other_scales)
    flat, other = codes.reshape(2, 448), others.reshape(2, 448)
    assert [*flat[where[0][:3], where[1][:3]]] == [0x7F] * 3 and (flat != other).sum() == 3
    assert rope[1, :2].tobytes().hex() == "c07f" and (rope != other_rope).sum() == 2
    np.testing.assert_array_equal(np.isnan(UNPACK(PACK(jnp.asarray(poisoned)), 2)), np.isnan(poisoned))
    only = np.full((2, 512), np.nan, np.float32)
    assert (parts(PACK(jnp.asarray(only)), 2)[2][:, :7] == 105).all()


def test_an_index_page_derived_by_hand():
    """1/448 = (8/7)·2^-9 is 0x3B124925, and 1e-4/448 is 0x346FAECC. 448 is 15|6, and 224 14|6."""
    x = np.zeros((2, 128), np.float32)
    x[0, :2], x[1, 0] = [1, -0.5], -0.0
    rows = bytes.fromhex("7ef6").ljust(128, b"\0") + bytes.fromhex("80").ljust(128, b"\0")
    page = (
        rows + np.array([0x3B124925, np.float32(np.float32(1e-4) / np.float32(448)).view(np.uint32)], "<u4").tobytes()
    )
    for call in (PACK_INDEX, pack_index):
        assert np.asarray(call(jnp.asarray(x))).tobytes() == page


def index_expected(x):
    with np.errstate(invalid="ignore"):
        x = np.clip(x, -np.float32(FLOAT32_MAX), np.float32(FLOAT32_MAX))
        scale = np.maximum(np.max(np.where(np.isnan(x), 0, np.abs(x)), axis=1), np.float32(1e-4)) / np.float32(448)
        codes = np.clip(x / scale[:, None], -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    codes[np.isnan(x)] = 0x7F
    return codes, scale


def test_index_pages_are_divided_and_not_multiplied_by_a_reciprocal():
    """Numbers at each tie, to a rounding of float32; a page under jit, and 64 of them under vmap."""
    rng = np.random.default_rng(0)
    x = np.ldexp(rng.normal(size=(64, 64, 128)), rng.integers(-8, 8, (64, 64, 1))).astype(np.float32)
    ties = (VALUES[1:0x7F] + VALUES[:0x7E]) / 2
    scale = np.abs(x).max(axis=2, keepdims=True) / np.float32(448)
    x[..., 2:] = ties.astype(np.float32) * scale * rng.choice([-1, 1], (64, 64, 126))
    x[0, 0, :3], x[0, 1, 3:5] = [np.inf, -np.inf, 1], [np.nan, -np.nan]
    packed = np.asarray(jax.jit(jax.vmap(pack_index))(jnp.asarray(x)))
    assert packed.shape == (64, 8448)
    codes, scales = index_expected(x.reshape(-1, 128))
    np.testing.assert_array_equal(packed[:, :8192].reshape(-1, 128), codes)
    np.testing.assert_array_equal(np.ascontiguousarray(packed[:, 8192:]).view("<f4").ravel(), scales)
    np.testing.assert_array_equal(PACK_INDEX(jnp.asarray(x[3])), packed[3])
    unpacked = np.asarray(UNPACK_INDEX(jnp.asarray(packed[0]), 64))
    np.testing.assert_array_equal(unpacked, VALUES.astype(np.float32)[codes[:64]] * scales[:64, None])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_hadamard_is_the_product_with_sylvesters_matrix(dtype):
    matrix = np.ones((1, 1))
    for _ in range(7):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 128)), dtype)
    y = HADAMARD(x)
    assert y.dtype == dtype
    wide = np.asarray(x, np.float64) @ matrix / 128**0.5
    # 7 sums and a product, each rounded by 2^-24 of numbers below √128·max|y|; then the rounding to bfloat16.
    bound = 8 * 2**-24 * 128**0.5 * np.abs(wide).max() + (2**-8 * np.abs(wide) if dtype == jnp.bfloat16 else 0)
    assert (np.abs(np.asarray(y, np.float64) - wide) <= bound).all()
    np.testing.assert_array_equal(y, hadamard(x))
    if dtype == jnp.float32:
        np.testing.assert_allclose(HADAMARD(y), x, rtol=0, atol=1e-5)


def test_pages_map_by_vmap():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 512)), jnp.float32)
    packed = jax.jit(jax.vmap(pack))(x)
    np.testing.assert_array_equal(packed, [PACK(page) for page in x])
    back = jax.jit(jax.vmap(lambda page: unpack(page, 2)))(packed)
    np.testing.assert_array_equal(back, [UNPACK(page, 2) for page in packed])


PAGE = jnp.zeros(1728, jnp.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack(jnp.zeros(512)), r"x has the shape \(512,\), expected \(page, 512\) with at least one row"),
        (lambda: pack(jnp.zeros((2, 511))), r"x has the shape \(2, 511\), expected 512 channels along the last axis"),
        (
            lambda: pack(jnp.zeros((0, 512))),
            r"x has the shape \(0, 512\), expected \(page, 512\) with at least one row",
        ),
        (lambda: pack(jnp.zeros((3, 2, 512))), r"x has the shape \(3, 2, 512\), .*map over pages with jax.vmap"),
        (lambda: pack(jnp.zeros((2, 512), jnp.int32)), "x has the dtype int32, expected a floating one: convert it"),
        (lambda: jax.eval_shape(pack, jnp.zeros((2, 448))), r"x has the shape \(2, 448\), expected 512 channels"),
        (lambda: unpack(PAGE, 3), r"bytes has the shape \(1728,\), expected \(2304,\) for a page of 3 rows: give"),
        (lambda: unpack(PAGE[None], 2), r"bytes has the shape \(1, 1728\), expected \(1728,\) .*jax.vmap"),
        (lambda: unpack(PAGE.astype(jnp.int8), 2), "bytes has the dtype int8, expected uint8"),
        (lambda: unpack(PAGE, 0), "page is 0, expected the number of rows of a page, at least 1"),
        (lambda: packed_bytes(-1), "page is -1, expected"),
        (lambda: pack_index(jnp.zeros((2, 512))), r"x has the shape \(2, 512\), expected 128 channels"),
        (lambda: unpack_index(PAGE, 2), r"bytes has the shape \(1728,\), expected \(264,\) for a page of 2 rows"),
        (lambda: unpack_index(PAGE, 0), "page is 0, expected"),
        (lambda: hadamard(jnp.zeros((2, 64))), r"x has the shape \(2, 64\), expected 128 channels along the last axis"),
        (lambda: hadamard(jnp.zeros((2, 128), bool)), "x has the dtype bool, expected a floating one"),
    ],
)
def test_a_wrong_argument_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("page", "pages"), [(3, 4), *exhaustively([(64, 2)])])
@pytest.mark.parametrize("packing", [ENTRIES, KEYS], ids=["entries", "keys"])
def test_entries_written_one_by_one_make_packed_pages(packing, page, pages):
    """In any order, over other bytes; those of no page are dropped, and reading gives what unpacking a page does."""
    draw = np.random.default_rng(page)
    new = jnp.asarray(draw.normal(size=(pages, page, packing.channels)) * 2.0 ** draw.integers(-9, 9), jnp.float32)
    held = jnp.asarray(draw.integers(0, 256, (pages, packing.bytes(page))), jnp.uint8)
    held = held.at[:, packing.entry * page :].set(0)
    at = np.stack(np.divmod(draw.permutation(pages * page), page)).astype(np.int32)
    write = jax.jit(packing.write)
    for some in np.array_split(at, 3, axis=1):
        owners = np.stack([np.where(some[0] == 1, pages, some[0]), np.full_like(some[0], pages + 7)], axis=1)
        rows = jnp.repeat(new[some[0], some[1]][:, None], 2, axis=1)
        held = write(held, owners, np.stack([some[1]] * 2, axis=1), rows)
    expected = [np.asarray(packing.pack(packing.transform(x))) for x in new]
    for i in set(range(pages)) - {1}:
        np.testing.assert_array_equal(held[i], expected[i])
    assert not np.array_equal(held[1], expected[1])
    unpacked = jnp.stack([packing.unpack(held[i], page) for i in (0, pages - 1)])
    np.testing.assert_array_equal(packing.read_pages(held, jnp.asarray([0, pages + 3], jnp.int32)), unpacked)
    one = jax.jit(packing.read)(held, *(jnp.asarray(x, jnp.int32) for x in ([[0], [pages - 1]], [[page - 1], [0]])))
    np.testing.assert_array_equal(one[:, 0], unpacked[np.arange(2), [page - 1, 0]])


def test_a_packing_has_the_published_sizes_and_knows_its_pages():
    """An entry of 576 bytes and 8 of scales, a key of 128 and 4."""
    assert (ENTRIES.entry, KEYS.entry) == (584, 132)
    for page in (1, 2, 63, 64, 71, 72, 73, 256, 5000):
        assert ENTRIES.bytes(page) == packed_bytes(page) and KEYS.bytes(page) == 132 * page
        assert ENTRIES.page(ENTRIES.bytes(page)) == KEYS.page(KEYS.bytes(page)) == page


def test_keys_are_transformed_with_what_they_are_multiplied_with():
    """Inner products stay, up to bfloat16's rounding of both; entries are multiplied as they are."""
    q, k = (jax.random.normal(jax.random.key(i), (3, 128)) for i in range(2))
    np.testing.assert_array_equal(KEYS.transform(q), hadamard(q.astype(jnp.bfloat16)).astype(jnp.float32))
    products = [jnp.sum(a * b, axis=1) for a, b in ((q, k), (KEYS.transform(q), KEYS.transform(k)))]
    # Each of four roundings is of 2^-9 of a number, in sums of 128 products of deviation 1.
    np.testing.assert_allclose(*products, atol=4 * 2**-9 * 128**0.5)
    np.testing.assert_array_equal(ENTRIES.transform(q), q)
