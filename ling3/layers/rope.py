"""Rotary position embedding (RoFormer, arXiv 2104.09864): pairs of channels rotated by their position."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int32

from ling3.ops.precision import Wide, wide


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotates pair i by position · frequencies[i] radians and multiplies it by `magnitude`.

    If `interleaved`, pairs are neighbours (x_2i, x_2i+1), as in Ling-3; else they are (x_i, x_i+rope/2), as in Llama.
    The order of the channels stays the same.
    """

    frequencies: tuple[float, ...]
    magnitude: float = 1.0
    interleaved: bool = False

    @staticmethod
    def plain(theta: float, rope: int, interleaved: bool = False) -> "Rope":
        """Frequencies theta^(-2i/rope) for `rope` channels; `theta` is at least 1."""
        return Rope(tuple((theta ** (-np.arange(0, rope, 2) / rope)).tolist()), 1.0, interleaved)

    def __call__(
        self, x: Float[Array, "batch seq heads {2*len(self.frequencies)}"], positions: Int32[Array, "batch seq"]
    ) -> Float[Array, "batch seq heads {2*len(self.frequencies)}"]:
        """The rotated channels, computed in float32 or wider, in the dtype of `x`. `positions` are absolute."""
        dtype = wide(x.dtype)
        angle = angles(positions, self.frequencies, dtype)[:, :, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        if self.magnitude != 1.0:
            cos, sin = self.magnitude * cos, self.magnitude * sin
        if not self.interleaved:
            first, second = jnp.split(x.astype(dtype), 2, axis=-1)
            turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
            return turned.astype(x.dtype)
        even, odd = x[..., 0::2].astype(dtype), x[..., 1::2].astype(dtype)
        turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
        return turned.reshape(x.shape).astype(x.dtype)


def angles(
    positions: Int32[Array, "batch seq"], frequencies: tuple[float, ...], dtype: DTypeLike = jnp.float32
) -> Wide[Array, "batch seq {len(frequencies)}"]:
    """position · frequency in radians, for frequencies in (0, 1]; in float32 modulo 2π.

    In float32, angles are counted in units of 2^-32 turn, so that integer overflow *is* the modulo. The error stays
    near 1e-7 in a short text and below 1e-4 at position 131,072, where position · frequency in float32 is 8e-3 off.
    """
    radians = np.asarray(frequencies)
    if dtype == jnp.float64:
        return positions.astype(dtype)[..., None] * jnp.asarray(radians)[None, None]
    step = jnp.asarray(np.round(radians / (2 * math.pi) * 2**32).astype(np.uint32))
    phase = positions.astype(jnp.uint32)[..., None] * step[None, None]
    return lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32) * jnp.float32(2 * math.pi / 2**32)
