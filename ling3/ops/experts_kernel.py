"""The chosen experts' feed-forward as two kernels over blocks of rows: weights are read in place, where chosen."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int32

from ling3.ops.exchange import Spread
from ling3.ops.experts import Groups, swiglu
from ling3.ops.lowering import XLA, Lowering
from ling3.ops.precision import exact, wide
from ling3.ops.triton import triton_params

ROWS = 16
"""Rows of a block, all of one expert: the fewest that matrix units multiply."""
COLUMNS = 64
"""Columns of the result that one program computes."""
INNER = 64
"""Products that are added to a sum at a time, in order; no sum is split between programs."""


def grouped_experts(
    x: Float[Array, "tokens hidden"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_proj: Float[Array, "experts intermediate hidden"],
    up_proj: Float[Array, "experts intermediate hidden"],
    down_proj: Float[Array, "experts hidden intermediate"],
    limit: float,
    lowering: Lowering = XLA,
    limit_first: bool = False,
    spread: Spread | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "tokens hidden"]:
    """`experts.block_experts`: y_t = Σ_j weights_tj · expert_{chosen_tj}(x_t), float32 or wider. Not differentiable.

    Rows are sorted by expert and laid out in blocks of ROWS, each of one expert; a program finds its block's expert in
    a list and reads that expert's weights in place. Tiles are fixed and every sum belongs to one program, so that a
    token's bits depend on its own choice alone. `hidden` and `intermediate` are multiples of COLUMNS and INNER.
    """
    tokens, top_k = chosen.shape
    experts, intermediate, hidden = gate_proj.shape
    if hidden % COLUMNS or intermediate % COLUMNS or hidden % INNER or intermediate % INNER:
        raise ValueError(
            f"experts have hidden size {hidden} and intermediate size {intermediate}, expected multiples of {COLUMNS}"
        )
    owner, place = _layout(chosen if spread is None else spread.own(chosen, experts), experts)
    dtype = wide(x.dtype)
    # place[r] is the place of row r of the choice in the blocks; places without a row stay zero.
    laid = jnp.zeros((owner.shape[0] * ROWS, hidden), x.dtype)
    laid = laid.at[place].set(jnp.repeat(x, top_k, axis=0), mode="drop")
    call = functools.partial(_over_blocks, owner, interpret=interpret)
    inner = call(functools.partial(_gate_and_up, limit, limit_first), laid, (gate_proj, up_proj), x.dtype)
    y = call(_down, inner, (down_proj,), dtype).at[place].get(mode="fill", fill_value=0)
    y = y if spread is None else spread.together(y)
    y = y.reshape(tokens, top_k, hidden) * weights.astype(dtype)[..., None]
    return functools.reduce(jnp.add, (y[:, j] for j in range(top_k)))


def _layout(
    chosen: Int32[Array, "tokens top_k"], experts: int
) -> tuple[Int32[Array, " blocks"], Int32[Array, " rows"]]:
    """Each block's expert (`experts` for an unused block) and each row's place (past the last without an expert)."""
    groups, rows = Groups.of(chosen, experts), chosen.size
    blocks = min(rows, experts + rows // ROWS)
    own = -(-groups.counts // ROWS)
    ends = jnp.cumsum(own)
    owner = jnp.searchsorted(ends, jnp.arange(blocks, dtype=jnp.int32), side="right").astype(jnp.int32)
    rank = jnp.zeros(rows, jnp.int32).at[groups.order].set(jnp.arange(rows, dtype=jnp.int32))
    expert = jnp.clip(chosen, 0, experts - 1).reshape(-1)
    place = (ends - own)[expert] * ROWS + rank - groups.starts[expert]
    return owner, jnp.where(expert == chosen.reshape(-1), place, blocks * ROWS)


def _over_blocks(owner, kernel, x, stacks, dtype, *, interpret):
    """`kernel` for every block of `x` and COLUMNS of its results; `stacks` are the experts' weights, left in place."""
    outer = stacks[0].shape[1]
    return pl.pallas_call(
        functools.partial(_program, kernel, stacks[0].shape[0]),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outer), dtype),
        grid=(owner.shape[0], outer // COLUMNS),
        in_specs=[
            pl.BlockSpec((1,), lambda i, j: (i,)),
            pl.BlockSpec((ROWS, x.shape[1]), lambda i, j: (i, 0)),
            *(pl.BlockSpec(memory_space=pl.ANY) for _ in stacks),
        ],
        out_specs=pl.BlockSpec((ROWS, COLUMNS), lambda i, j: (i, j)),
        interpret=interpret,
        name=f"experts_{len(stacks)}",
        compiler_params=None if interpret else triton_params(warps=4),
    )(owner, x, *stacks)


def _program(kernel, experts, owner, x, *refs):
    *stacks, out = refs
    columns = pl.ds(pl.program_id(1) * COLUMNS, COLUMNS)

    @pl.when(owner[0] < experts)
    def _():
        products = [_product(x, stack, owner[0], columns) for stack in stacks]
        out[...] = kernel(*products).astype(out.dtype)


def _product(x, stack, expert, columns):
    """x Wᵀ for some columns of one expert's W: [ROWS, COLUMNS]."""
    dtype = wide(x.dtype)

    def step(i, total):
        inner = pl.ds(i * INNER, INNER)
        weight = stack[expert, columns, inner]
        return total + lax.dot_general(
            x[:, inner], weight, (((1,), (1,)), ((), ())), precision=exact(x.dtype), preferred_element_type=dtype
        )

    return lax.fori_loop(0, x.shape[1] // INNER, step, jnp.zeros((ROWS, COLUMNS), dtype))


def _gate_and_up(limit, limit_first, gate, up):
    return swiglu(gate, up, limit, limit_first)


def _down(y):
    return y
