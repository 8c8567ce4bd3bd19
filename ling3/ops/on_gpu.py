"""The operators' forms for a GPU: a Pallas kernel where it suits the sizes, and the plain form elsewhere.

Each has its operator's arguments, results and errors.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ling3.ops.attention import latent_attention
from ling3.ops.exchange import Spread
from ling3.ops.experts import block_experts, differentiated_as_dense
from ling3.ops.kda import kda_step
from ling3.ops.lowering import XLA, Lowering
from ling3.ops.precision import Wide
from ling3.ops.quantized import Quantized
from ling3.ops.swiglu import SWIGLU, SwiGLU
from ling3.runtime.interpreted import interpreted

# The kernels are imported where they are used: Pallas takes time to import, which no CPU has a use for.
# ruff: noqa: PLC0415


def gpu_kda_step(
    q: Float[Array, "batch heads key"],
    k: Float[Array, "batch heads key"],
    v: Float[Array, "batch heads value"],
    g: Float[Array, "batch heads key"],
    beta: Float[Array, "batch heads"],
    state: Float[Array, "batch heads key value"],
    lowering: Lowering = XLA,
) -> tuple[Float[Array, "batch heads value"], Float[Array, "batch heads key value"]]:
    """`kda_step` by its kernel, where the key and value widths are powers of two."""
    if any(width & (width - 1) for width in state.shape[2:]):
        return kda_step(q, k, v, g, beta, state, lowering)
    from ling3.ops.kda_step_kernel import fused_kda_step

    return fused_kda_step(q, k, v, g, beta, state, lowering, interpret=interpreted())


def gpu_latent_attention(
    q: Float[Array, "batch rows entry"],
    row_positions: Int32[Array, "batch rows"],
    pages: Float[Array, "pages page entry"],
    table: Int32[Array, "batch columns"],
    length: Int32[Array, " batch"],
) -> Wide[Array, "batch rows entry"]:
    """`latent_attention` by its kernel, where tiles fit pages, heads and entries, and numbers are not float64."""
    from ling3.ops.latent_attention_kernel import LEAST, fused_latent_attention

    rows, entry = q.shape[1:]
    if pages.shape[1] % LEAST or rows < LEAST or rows & (rows - 1) or entry % LEAST or q.dtype == jnp.float64:
        return latent_attention(q, row_positions, pages, table, length)
    return fused_latent_attention(q, row_positions, pages, table, length, interpret=interpreted())


@differentiated_as_dense
def gpu_experts(
    x: Float[Array, "tokens hidden"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_proj: Float[Array, "experts intermediate hidden"] | Quantized,
    up_proj: Float[Array, "experts intermediate hidden"] | Quantized,
    down_proj: Float[Array, "experts hidden intermediate"] | Quantized,
    swiglu: SwiGLU = SWIGLU,
    lowering: Lowering = XLA,
    spread: Spread | None = None,
) -> Float[Array, "tokens hidden"]:
    """`block_experts` by its kernel, where weights are plain, tiles fit their sizes, and all have x's dtype."""
    from ling3.ops.experts_kernel import INNER, grouped_experts

    stacks = (gate_proj, up_proj, down_proj)
    plain = [w for w in stacks if not isinstance(w, Quantized) and w.dtype == x.dtype != jnp.float64]
    if len(plain) < len(stacks) or any(size % INNER for size in gate_proj.shape[1:]):
        return block_experts(x, chosen, weights, *stacks, swiglu, lowering, spread)
    gate, up, down = plain
    return grouped_experts(x, chosen, weights, gate, up, down, swiglu, spread, interpret=interpreted())
