"""The short causal convolution of each channel with its own taps, whose state is the last `taps - 1` inputs."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ling3.ops.forms import form_of
from ling3.ops.precision import Wide, wide
from ling3.ops.tails import continued


@runtime_checkable
class ShortConvolution(Protocol):
    """y_t = silu(Σ_j w_j · x_{t-taps+1+j}) of each channel, in float32 or wider (Kimi Linear, arXiv 2510.26692, §4).

    Several convolutions share a `tail`: this one has the channels from `first` on. Inputs are rounded to the tail's
    dtype. Tokens from `length` on are padding: their outputs are arbitrary, but finite where x is, and they do not
    enter the new tail. With `oldest`, inputs before the column `oldest[b, t]` count as zeros for token t.
    """

    def __call__(
        self,
        x: Float[Array, "batch seq channels"],
        weight: Float[Array, "channels taps"],
        tail: Float[Array, "batch taps-1 all"],
        length: Int32[Array, " batch"],
        first: int,
        oldest: Int32[Array, "batch seq"] | None = None,
        /,
    ) -> tuple[Wide[Array, "batch seq channels"], Float[Array, "batch taps-1 all"]]:
        """The outputs, and the tail after each row's last token."""
        ...


@form_of(ShortConvolution)
def short_conv(x, weight, tail, length, first, oldest=None):
    """The plain form of `ShortConvolution`: its reference implementation."""
    (channels, taps), seq, dtype = weight.shape, x.shape[1], wide(x.dtype)
    own = lax.slice_in_dim(tail, first, first + channels, axis=2)
    inputs, own = continued(own, x, length)
    weight = weight.astype(dtype)

    def tap(j: int) -> Wide[Array, "batch seq channels"]:
        seen = inputs[:, j : j + seq].astype(dtype)
        if oldest is not None:
            columns = jnp.arange(seq, dtype=jnp.int32) + (j - taps + 1)
            seen = jnp.where((columns[None] >= oldest)[..., None], seen, 0.0)
        return seen * weight[None, None, :, j]

    y = sum(tap(j) for j in range(taps))
    return jax.nn.silu(y), lax.dynamic_update_slice_in_dim(tail, own, first, axis=2)
