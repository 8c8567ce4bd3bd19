"""The dense feed-forward of Ling-3's first layers and of its shared experts."""

from typing import Annotated

import equinox as eqx
import jax
from jaxtyping import Array, DTypeLike, Float, PRNGKeyArray

from ling3.cache import Span
from ling3.layers.draw import Draw
from ling3.layers.linear import Matrix
from ling3.ops.precision import wide
from ling3.ops.swiglu import SWIGLU, SwiGLU


class MLP(eqx.Module):
    """A gated feed-forward: y = down_proj(swiglu(gate_proj(x), up_proj(x)))."""

    gate_proj: Annotated[Matrix, "intermediate hidden"]
    up_proj: Annotated[Matrix, "intermediate hidden"]
    down_proj: Annotated[Matrix, "hidden intermediate"]
    swiglu: SwiGLU = eqx.field(static=True, default=SWIGLU)

    @staticmethod
    def init(
        hidden: int,
        intermediate: int,
        *,
        key: PRNGKeyArray,
        dtype: DTypeLike,
        std: float,
        swiglu: SwiGLU = SWIGLU,
        bias: bool = False,
    ) -> "MLP":
        """Random weights from N(0, std²), and biases of 0 if there are any."""
        sizes = {"hidden": hidden, "intermediate": intermediate}
        draw = Draw(MLP, sizes, iter(jax.random.split(key, 3)), dtype, std)
        gate, up, down = (draw(field, bias=bias) for field in ("gate_proj", "up_proj", "down_proj"))
        return MLP(gate, up, down, swiglu)

    def __call__(self, x: Float[Array, "batch seq hidden"], span: Span) -> Float[Array, "batch seq hidden"]:
        """The output for each token. Gate and up projections stay in float32 or wider until they are multiplied."""
        execution, sums = span.execution, wide(x.dtype)
        gate, up = self.gate_proj(x, execution, sums), self.up_proj(x, execution, sums)
        return self.down_proj(self.swiglu(gate, up).astype(x.dtype), execution)
