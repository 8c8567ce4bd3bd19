"""The output gates of KDA and MLA: which laws there are, and the projections behind them."""

from typing import Literal

import jax
from jaxtyping import Array, DTypeLike, PRNGKeyArray

from ling3.layers.linear import Constant, Linear, LowRank
from ling3.ops.precision import Wide

OutputGate = Literal["sigmoid", "swish", "constant", "none"]
"""What an attention's output is multiplied by: sigmoid(g), g·sigmoid(g), a learned constant in (0, 1), or nothing."""


def gate_projection(
    law: OutputGate,
    rows: int,
    columns: int,
    *,
    key: PRNGKeyArray,
    dtype: DTypeLike,
    std: float,
    rank: int | None = None,
) -> Linear | LowRank | Constant | None:
    """`g_proj` for this law: a linear map of full or low rank, a constant (at first 0, a gate of 1/2), or none."""
    if law == "none":
        return None
    if law == "constant":
        return Constant.init(rows)
    return projection(rows, columns, key=key, dtype=dtype, std=std, rank=rank)


def projection(
    rows: int, columns: int, *, key: PRNGKeyArray, dtype: DTypeLike, std: float, rank: int | None
) -> Linear | LowRank:
    """A linear map to the heads, of low rank if one is given."""
    if rank is None:
        return Linear.init(rows, columns, key=key, dtype=dtype, std=std, axes=("heads", "hidden"))
    first, second = jax.random.split(key)
    return LowRank(
        Linear.init(rank, columns, key=first, dtype=dtype, std=std, axes=("rank", "hidden")),
        Linear.init(rows, rank, key=second, dtype=dtype, std=std, axes=("heads", "rank")),
    )


def output_gate(law: OutputGate, g: Wide[Array, "*shape"]) -> Wide[Array, "*shape"]:
    """sigmoid(g), or g · sigmoid(g) for `swish` (Kimi Linear, arXiv 2510.26692, Table 1), in float32 or wider."""
    return jax.nn.silu(g) if law == "swish" else jax.nn.sigmoid(g)
