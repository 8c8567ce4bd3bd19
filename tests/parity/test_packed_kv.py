"""Packed pages against the same steps in torch, byte for byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

from ling3.ops.packed_kv import hadamard, pack, pack_index, unpack, unpack_index  # noqa: E402


def torch_pack(x):
    h = x.float().clamp(-3.3895314e38, 3.3895314e38).to(torch.bfloat16)
    nope = h[:, :448].float().unflatten(1, (7, 64))
    a = nope.abs().nan_to_num(nan=0.0).amax(dim=-1, keepdim=True).clamp(min=1e-4)
    half, e = torch.frexp(a / 448)
    e = e - (half == 0.5).int()
    codes = torch.ldexp(nope, -e).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    codes[nope.isnan()] = 0x7F  # the sign that torch's casts give to NaN depends on the processor
    rows = torch.cat([codes.flatten(1), h[:, 448:].contiguous().view(torch.uint8)], dim=1)
    scales = torch.nn.functional.pad((e + 127).squeeze(-1).to(torch.uint8), (0, 1))
    flat = torch.cat([rows.flatten(), scales.flatten()])
    return torch.nn.functional.pad(flat, (0, -len(flat) % 576))


def torch_unpack(packed, page):
    rows = packed[: 576 * page].reshape(page, 576)
    scales = packed[576 * page : 584 * page].reshape(page, 8)[:, :7].int() - 127
    tiles = rows[:, :448].contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (7, 64))
    rope = rows[:, 448:].contiguous().view(torch.bfloat16).float()
    return torch.cat([torch.ldexp(tiles, scales[..., None]).flatten(1), rope], dim=1)


def torch_pack_index(x):
    x = x.float()
    scale = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-4) / 448
    codes = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.cat([codes.flatten(), scale.view(torch.uint8).flatten()])


def every_bfloat16(rows, channels):
    """All but NaN, zeros in their place, each in several tiles: among its like, and among any."""
    sorted_bits = np.arange(2**16, dtype=np.uint16)
    shuffled = np.random.default_rng(0).permutation(sorted_bits)
    bits = torch.from_numpy(np.resize(np.concatenate([sorted_bits, shuffled]), (rows, channels)).view(np.int16))
    return bits.view(torch.bfloat16).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def within_tiles(page):
    """Random numbers of each tile's own magnitude, from subnormal to the largest."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(page, 8, 64)) * np.exp2(rng.integers(-140, 127, (page, 8, 1)))
    return torch.from_numpy(x.reshape(page, 512).astype(np.float32))


def ours(x):
    """The same tensor in jax, in the same dtype."""
    if x.dtype == torch.bfloat16:
        return jax.lax.bitcast_convert_type(jnp.asarray(x.view(torch.uint16).numpy()), jnp.bfloat16)
    return jnp.asarray(x.numpy())


CASES = {
    "every bfloat16": lambda: every_bfloat16(256, 512),
    "float32": lambda: within_tiles(256),
    "float32's ties": lambda: every_bfloat16(256, 512).float().view(torch.int32).add(0x8000).view(torch.float32),
    "zeros": lambda: torch.zeros(2, 512) * -1,
}


@pytest.mark.parametrize("case", CASES)
def test_entries(case):
    x = CASES[case]().nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    packed = jax.jit(pack)(ours(x))
    np.testing.assert_array_equal(packed, torch_pack(x).numpy())
    unpacked = jax.jit(unpack, static_argnums=1)(packed, len(x))
    np.testing.assert_array_equal(unpacked, torch_unpack(torch_pack(x), len(x)).numpy())


def test_nan():
    """In the FP8 part alone: bfloat16 has many NaN, and which torch's cast makes depends on the processor."""
    x = within_tiles(2)
    x[0, 0] = x[1, 100] = torch.nan
    np.testing.assert_array_equal(jax.jit(pack)(ours(x)), torch_pack(x).numpy())


def test_index_pages():
    x = within_tiles(64).reshape(256, 128).clamp(-1e30, 1e30)
    packed = jax.jit(pack_index)(ours(x))
    theirs = torch_pack_index(x)
    np.testing.assert_array_equal(packed, theirs.numpy())
    codes, scales = theirs[: 256 * 128].view(torch.float8_e4m3fn).float(), theirs[256 * 128 :].view(torch.float32)
    unpacked = jax.jit(unpack_index, static_argnums=1)(packed, 256)
    np.testing.assert_array_equal(unpacked, (codes.reshape(256, 128) * scales[:, None]).numpy())


def test_quantized_keys():
    """Keys in bfloat16 through the transform, which sums in the order of the butterflies, and then packed."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)).to(torch.bfloat16)
    y = x.float()
    for axis in range(7):
        pairs = y.reshape(64, -1, 2, 2**axis)
        y = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], dim=2).reshape(64, 128)
    y = (y * 128**-0.5).to(torch.bfloat16)
    np.testing.assert_array_equal(jax.jit(lambda x: pack_index(hadamard(x)))(ours(x)), torch_pack_index(y).numpy())
