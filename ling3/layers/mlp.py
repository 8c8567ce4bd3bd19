"""The dense feed-forward: Ling-3's first layers and its shared experts."""

import equinox as eqx
import jax
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray

from ling3.cache import Span
from ling3.layers.linear import Linear, Matrix
from ling3.ops.experts import swiglu
from ling3.ops.precision import wide


class MLP(eqx.Module):
    """y = down_proj(silu(gate_proj(x)) · up_proj(x)) (SwiGLU, arXiv 2002.05202), with flash's clamp where `limit` > 0.

    The clamp: silu(gate_proj(x)), or with `limit_first` gate_proj(x) itself, is capped at `limit`, and up_proj(x)
    clipped to ±limit.
    """

    gate_proj: Matrix  # [intermediate, hidden]
    up_proj: Matrix  # [intermediate, hidden]
    down_proj: Matrix  # [hidden, intermediate]
    limit: float = eqx.field(static=True)
    limit_first: bool = eqx.field(static=True, default=False)

    @staticmethod
    def init(
        hidden: int,
        intermediate: int,
        *,
        key: PRNGKeyArray,
        dtype: DTypeLike,
        std: float,
        limit: float = 0.0,
        limit_first: bool = False,
        bias: bool = False,
    ) -> "MLP":
        """Random weights from N(0, std²), and biases of 0 if there are any."""
        gate, up, down = jax.random.split(key, 3)
        sizes, axes, options = (
            (intermediate, hidden),
            ("intermediate", "hidden"),
            {"dtype": dtype, "std": std, "bias": bias},
        )
        return MLP(
            Linear.init(*sizes, key=gate, axes=axes, **options),
            Linear.init(*sizes, key=up, axes=axes, **options),
            Linear.init(*sizes[::-1], key=down, axes=axes[::-1], **options),
            limit,
            limit_first,
        )

    def __call__(self, x: Float[Array, "batch seq hidden"], span: Span) -> Float[Array, "batch seq hidden"]:
        """Each token for itself; the products of the hidden layer are float32 or wider until they are multiplied."""
        execution, sums = span.execution, wide(x.dtype)
        gate, up = self.gate_proj(x, execution, sums), self.up_proj(x, execution, sums)
        return self.down_proj(swiglu(gate, up, self.limit, self.limit_first).astype(x.dtype), execution)
