"""The routed experts in two kernels over blocks of rows, which read only the chosen experts' weights, in place."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from ling3.ops.experts import Groups, RoutedExperts, block_experts, differentiated_as_dense, weighted
from ling3.ops.forms import form_of, runs
from ling3.ops.gpu.triton import triton_params
from ling3.ops.matmul import product
from ling3.ops.precision import exact, wide
from ling3.ops.quantized import Quantized
from ling3.ops.spread import Spread
from ling3.ops.swiglu import SWIGLU, SwiGLU
from ling3.runtime.interpreted import interpreted

TILES = ((32, 64, 128), (0, 16, 64))
"""(average rows per expert from which a tile is used, its rows, its columns). In bfloat16 the tile does not change the
result bitwise, as observed on an H200, so it may depend on the number of rows. Matrix units multiply at least 16."""
INNER = 64
"""Products that are added to a sum at a time, in order. No sum is split between programs."""


def unsuited(x: Float[Array, "tokens hidden"], *stacks: Float[Array, "..."] | Quantized) -> str | None:
    """Why the kernels do not run, or None: weights are quantized or not in x's dtype, or do not divide into tiles."""
    if any(isinstance(w, Quantized) for w in stacks):
        return "the experts are quantized"
    if x.dtype == jnp.float64 or any(w.dtype != x.dtype for w in stacks):
        return "numbers are float64, or of several dtypes"
    odd = any(size % INNER for size in stacks[0].shape[1:])
    return f"the hidden or the intermediate size is no multiple of {INNER}" if odd else None


@differentiated_as_dense
@form_of(RoutedExperts)
def experts(x, chosen, weights, gate_proj, up_proj, down_proj, swiglu=SWIGLU, times=product, spread=None):
    """Computes `experts.block_experts` with the Pallas kernels, where they suit."""
    stacks = (gate_proj, up_proj, down_proj)
    if not runs("experts", unsuited(x, *stacks)):
        return block_experts(x, chosen, weights, *stacks, swiglu, times, spread)
    gate, up, down = (w for w in stacks if not isinstance(w, Quantized))
    return grouped_experts(x, chosen, weights, gate, up, down, swiglu, spread, interpret=interpreted())


def grouped_experts(
    x: Float[Array, "tokens hidden"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_proj: Float[Array, "experts intermediate hidden"],
    up_proj: Float[Array, "experts intermediate hidden"],
    down_proj: Float[Array, "experts hidden intermediate"],
    swiglu: SwiGLU = SWIGLU,
    spread: Spread | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "tokens hidden"]:
    """`experts.block_experts`: y_t = Σ_j weights_tj · expert_{chosen_tj}(x_t), float32 or wider. Not differentiable.

    Rows are laid out in blocks of one expert each; a program looks up its block's expert in a list and reads that
    expert's weights in place. One program computes each sum in a fixed order, so a token's result is bitwise
    independent of the other tokens. Raises ValueError unless `hidden` and `intermediate` are multiples of INNER.
    """
    tokens, top_k = chosen.shape
    experts, intermediate, hidden = gate_proj.shape
    if hidden % INNER or intermediate % INNER:
        raise ValueError(
            f"experts have hidden size {hidden} and intermediate size {intermediate}, expected multiples of {INNER}"
        )
    height, width = _tile(chosen.size / experts, hidden, intermediate, x.dtype)
    chosen = chosen if spread is None else spread.own(chosen, experts)
    dtype = wide(x.dtype)
    owner, place = _layout(chosen, experts, height)
    # place[r] is where row r (token · top_k + j) is in the blocks; places without a row stay zero.
    source = jnp.full(owner.shape[0] * height, tokens, jnp.int32)
    source = source.at[place].set(jnp.arange(tokens * top_k, dtype=jnp.int32) // top_k, mode="drop")
    laid = x.at[source].get(mode="fill", fill_value=0)
    call = functools.partial(_over_blocks, (owner, width), interpret=interpret)
    inner = call(swiglu, laid, (gate_proj, up_proj), x.dtype)
    y = call(_down, inner, (down_proj,), dtype).at[place].get(mode="fill", fill_value=0)
    return weighted(weights, y if spread is None else spread.together(y))


def _tile(average: float, hidden: int, intermediate: int, dtype: jnp.dtype) -> tuple[int, int]:
    """Rows and columns of a tile, given the average number of rows per expert."""
    fitting = [
        tile for least, *tile in TILES if average >= least and not hidden % tile[1] and not intermediate % tile[1]
    ]
    rows, columns = fitting[0 if dtype == jnp.bfloat16 else -1]
    return rows, columns


def _layout(
    chosen: Int32[Array, "tokens top_k"], experts: int, height: int
) -> tuple[Int32[Array, " blocks"], Int32[Array, " rows"]]:
    """Each block's expert (`experts` for an unused block) and each row's place (past the end without an expert).

    Rows are sorted by expert. Few rows get a block each instead: the extra reads cost less than sorting.
    """
    rows = chosen.size
    flat = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(-1)
    if 2 * rows <= experts:
        return flat, jnp.where(flat < experts, height * jnp.arange(rows, dtype=jnp.int32), height * rows)
    groups = Groups.of(chosen, experts)
    blocks = min(rows, experts + rows // height)
    own = -(-groups.counts // height)
    ends = jnp.cumsum(own)
    every = jnp.arange(blocks, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, every, side="right", method="compare_all").astype(jnp.int32)
    rank = jnp.zeros(rows, jnp.int32).at[groups.order].set(jnp.arange(rows, dtype=jnp.int32))
    expert = jnp.minimum(flat, experts - 1)
    place = (ends - own)[expert] * height + rank - groups.starts[expert]
    return owner, jnp.where(flat < experts, place, blocks * height)


def _over_blocks(layout, kernel, x, stacks, dtype, *, interpret):
    """Runs `kernel` for every block of `x` and every tile of output columns; `stacks` are read in place.

    `layout` is each block's expert, and the number of columns of a tile.
    """
    (owner, columns), outer = layout, stacks[0].shape[1]
    rows = x.shape[0] // owner.shape[0]
    return pl.pallas_call(
        functools.partial(_program, kernel, stacks[0].shape[0], columns),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outer), dtype),
        grid=(owner.shape[0], outer // columns),
        in_specs=[
            pl.BlockSpec((1,), lambda i, j: (i,)),
            pl.BlockSpec((rows, x.shape[1]), lambda i, j: (i, 0)),
            *(pl.BlockSpec(memory_space=pl.ANY) for _ in stacks),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
        interpret=interpret,
        name=f"experts_{len(stacks)}",
        compiler_params=None if interpret else triton_params(warps=4),
    )(owner, x, *stacks)


def _program(kernel, experts, width, owner, x, *refs):
    *stacks, out = refs
    columns = pl.ds(pl.program_id(1) * width, width)

    @pl.when(owner[0] < experts)
    def _():
        products = [_product(x, stack, owner[0], columns) for stack in stacks]
        out[...] = kernel(*products).astype(out.dtype)


def _product(x, stack, expert, columns):
    """x Wᵀ for some columns of one expert's W: [rows, columns]."""
    dtype = wide(x.dtype)

    def step(i, total):
        inner = pl.ds(i * INNER, INNER)
        weight = stack[expert, columns, inner]
        return total + lax.dot_general(
            x[:, inner], weight, (((1,), (1,)), ((), ())), precision=exact(x.dtype), preferred_element_type=dtype
        )

    return lax.fori_loop(0, x.shape[1] // INNER, step, jnp.zeros((x.shape[0], columns.size), dtype))


def _down(y):
    return y
