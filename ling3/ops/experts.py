"""The experts' feed-forward, each row through its own expert: two forms of one function.

`dense_experts` runs every expert on every token: the specification, and what is differentiated. `block_experts` sorts
the rows by expert and runs only the experts that were chosen, each on its own rows; its gradient is that of the dense
form. Rows go through `down(silu(gate x) · up x)`, or with a limit L > 0 through
`down(min(silu(gate x), L) · clip(up x, -L, L))` (Ling-3.0-flash).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ling3.ops.precision import exact, wide


def swiglu(
    gate: Float[Array, "*batch intermediate"], up: Float[Array, "*batch intermediate"], limit: float
) -> Float[Array, "*batch intermediate"]:
    """silu(gate) · up; with `limit` > 0 the first factor is capped at it and the second clipped to ±limit."""
    gate = jax.nn.silu(gate)
    if limit > 0:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return gate * up


def dense_experts(
    x: Float[Array, "tokens hidden"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_proj: Float[Array, "experts intermediate hidden"],
    up_proj: Float[Array, "experts intermediate hidden"],
    down_proj: Float[Array, "experts hidden intermediate"],
    limit: float,
) -> Float[Array, "tokens hidden"]:
    """y_t = Σ_j weights_tj · expert_{chosen_tj}(x_t), in float32 or wider, every expert computed for every token."""
    dtype = wide(x.dtype)
    experts, intermediate, _ = gate_proj.shape
    picks = jax.nn.one_hot(chosen, experts, dtype=dtype)
    share = jnp.sum(picks * weights.astype(dtype)[..., None], axis=1)
    gate, up = (_times(x, w.reshape(experts * intermediate, -1), dtype) for w in (gate_proj, up_proj))
    hidden = swiglu(gate, up, limit).reshape(-1, experts, intermediate) * share[..., None]
    down = jnp.swapaxes(down_proj, 1, 2).reshape(experts * intermediate, -1)
    hidden = hidden.reshape(x.shape[0], -1).astype(x.dtype)
    return jnp.matmul(hidden, down, precision=exact(x.dtype), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def block_experts(
    x: Float[Array, "tokens hidden"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_proj: Float[Array, "experts intermediate hidden"],
    up_proj: Float[Array, "experts intermediate hidden"],
    down_proj: Float[Array, "experts hidden intermediate"],
    limit: float,
) -> Float[Array, "tokens hidden"]:
    """The same function at the cost of the chosen experts alone, in float32 or wider.

    Rows are sorted by expert and cut into blocks of one expert each; a loop with as many turns as there are blocks
    reads each block's expert once. An index that is no expert, in `chosen`, stands for none and costs nothing.
    Every token's results are summed in top-k order, whoever its neighbours are.
    """
    tokens, top_k = chosen.shape
    experts = gate_proj.shape[0]
    block = _block_rows(tokens * top_k / experts, x.dtype)
    dtype = wide(x.dtype)

    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)  # rows by expert, then by token
    counts = jnp.zeros(experts, jnp.int32).at[flat].add(1)
    ends = jnp.cumsum(counts)
    block_ends = jnp.cumsum(-(-counts // block))  # blocks up to and including each expert

    def step(i, out):
        expert = jnp.searchsorted(block_ends, i, side="right").astype(jnp.int32)
        blocks_before = block_ends[expert] - (-(-counts[expert] // block))
        first = ends[expert] - counts[expert] + (i - blocks_before) * block
        places = first + jnp.arange(block, dtype=jnp.int32)
        rows = order.at[places].get(mode="clip")
        taken = x[rows // top_k]
        gate, up, down = (lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in (gate_proj, up_proj, down_proj))
        hidden = swiglu(_times(taken, gate, dtype), _times(taken, up, dtype), limit)
        y = _times(hidden.astype(x.dtype), down, dtype)
        return out.at[jnp.where(places < ends[expert], rows, flat.shape[0])].set(y, mode="drop")

    out = lax.fori_loop(0, block_ends[-1], step, jnp.zeros((tokens * top_k, x.shape[1]), dtype))
    out = out.reshape(tokens, top_k, -1) * weights.astype(dtype)[..., None]
    return functools.reduce(jnp.add, (out[:, j] for j in range(top_k)))


def _block_rows(rows_per_expert: float, dtype: jnp.dtype) -> int:
    """Rows per block: twice what an expert has on average, so that most need one; at most 64; never one in bfloat16.

    Fewer mean more turns of the loop, more mean more padding. XLA's CPU backend converts the whole weight to float32
    for a single bfloat16 row.
    """
    block = 64 if rows_per_expert > 64 else 2 ** min(5, max(0, math.floor(math.log2(2 * rows_per_expert))))
    return max(block, 2) if dtype == jnp.bfloat16 else block


def _times(
    x: Float[Array, "rows inner"], weight: Float[Array, "outer inner"], dtype: jnp.dtype
) -> Float[Array, "rows outer"]:
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(x, weight, dimensions, precision=exact(x.dtype), preferred_element_type=dtype)


def _forward(x, chosen, weights, gate_proj, up_proj, down_proj, limit):
    y = block_experts(x, chosen, weights, gate_proj, up_proj, down_proj, limit)
    return y, (x, chosen, weights, gate_proj, up_proj, down_proj)


def _backward(limit, inputs, dy):
    x, chosen, *weights = inputs
    _, pull = jax.vjp(lambda x, *weights: dense_experts(x, chosen, *weights, limit=limit), x, *weights)
    dx, *dweights = pull(dy)
    return dx, None, *dweights


block_experts.defvjp(_forward, _backward)
