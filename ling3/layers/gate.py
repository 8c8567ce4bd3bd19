"""The output gates of KDA and MLA: their functions, and the projections in front of them."""

from typing import Literal

import jax
from jaxtyping import Array

from ling3.layers.draw import Draw
from ling3.layers.linear import Constant, Linear, LowRank
from ling3.ops.precision import Wide

OutputGate = Literal["sigmoid", "swish", "constant", "none"]
"""The factor of an attention's output: sigmoid(g), g·sigmoid(g), a learned constant in (0, 1), or none."""


def gate_projection(law: OutputGate, draw: Draw, rank: int | None = None) -> Linear | LowRank | Constant | None:
    """`g_proj` for this law: a matrix of full or low rank, a constant (initially 0, a gate of 1/2), or None."""
    drawn = draw.low_rank("g_proj", rank)  # takes its key even if unused, so that later draws stay the same
    if law == "none":
        return None
    return Constant.init(draw.shape("g_proj")[0]) if law == "constant" else drawn


def output_gate(law: OutputGate, g: Wide[Array, "*shape"]) -> Wide[Array, "*shape"]:
    """sigmoid(g), or g · sigmoid(g) for `swish` (Kimi Linear, arXiv 2510.26692, Table 1), in float32 or wider."""
    return jax.nn.silu(g) if law == "swish" else jax.nn.sigmoid(g)
