"""The short causal convolution in front of the queries, keys and values of KDA and Gated DeltaNet."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ling3.cache import Span
from ling3.layers.linear import normal
from ling3.layers.scope import scoped


class ShortConv(eqx.Module):
    """y_t = silu(Σ_j w_j · x_{t-taps+1+j}): a depthwise convolution without bias.

    Source: Kimi Linear, arXiv 2510.26692, §4. The state is the last `taps - 1` inputs. The checkpoint stores the weight
    as [channels, 1, taps].
    """

    weight: Float[Array, "channels taps"]
    name: str = eqx.field(static=True, default="")
    axes: tuple[str, ...] = eqx.field(static=True, default=("heads", "taps"))
    """The name of each dimension, as of a `Matrix`: where channels are not those of heads in order, it is another."""

    @staticmethod
    def init(channels: int, taps: int, *, key: PRNGKeyArray, axes: tuple[str, ...] = ("heads", "taps")) -> "ShortConv":
        """Random weights from N(0, 1/taps), float32."""
        return ShortConv(normal(key, (channels, taps), jnp.float32, taps**-0.5), axes=axes)

    @scoped
    def __call__(
        self,
        x: Float[Array, "batch seq {self.weight.shape[0]}"],
        tail: Float[Array, "batch {self.weight.shape[1]-1} all"],
        span: Span,
        first: int = 0,
    ) -> tuple[Float[Array, "batch seq {self.weight.shape[0]}"], Float[Array, "batch {self.weight.shape[1]-1} all"]]:
        """The outputs in float32 or wider, and the tail after each row's last valid token.

        Several convolutions can share a tail: this one has the channels from `first` on.
        """
        return span.execution.short_conv(x, self.weight, tail, span.length, first, span.text_starts)
