"""The experts' feed-forward, in which each row goes through its own expert: two forms of one function.

`dense_experts` runs every expert on every token; it is the specification. `block_experts` sorts the rows by expert and
runs only the experts that were chosen, each on its own rows; its gradient does the same. Each stack is an array, or a
`Quantized` stack, of which a block decodes its expert's matrices alone. A row x gives `down(swiglu(gate x, up x))`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ling3.ops import rows as rows_of
from ling3.ops.matmul import Multiply, product
from ling3.ops.precision import exact, wide
from ling3.ops.quantized import Quantized, constant, matrix_of, numbers
from ling3.ops.spread import Spread
from ling3.ops.swiglu import SWIGLU, SwiGLU

# Five iterations of `block_experts`, which copy their experts' weights, cost as much as eight experts of a round.
TURNS, EXPERTS = 5, 8
# Rows of a block above which a round of every expert costs more than it saves.
ROUNDS_ROWS = 32


@runtime_checkable
class RoutedExperts(Protocol):
    """y_t = Σ_j weights_tj · expert_{chosen_tj}(x_t), in float32 or wider.

    An index in `chosen` that is not an expert's stands for no expert. `times` is the product that a form may be made
    of; `spread` says how devices share the experts, and is left out where they do not.
    """

    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        chosen: Int32[Array, "tokens top_k"],
        weights: Float[Array, "tokens top_k"],
        gate_proj: Float[Array, "experts intermediate hidden"] | Quantized,
        up_proj: Float[Array, "experts intermediate hidden"] | Quantized,
        down_proj: Float[Array, "experts hidden intermediate"] | Quantized,
        swiglu: SwiGLU = SWIGLU,
        times: Multiply = product,
        spread: Spread | None = None,
        /,
    ) -> Float[Array, "tokens hidden"]:
        """Each token's sum over its experts."""
        ...


def dense_experts(
    x: Float[Array, "tokens hidden"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_proj: Float[Array, "experts intermediate hidden"] | Quantized,
    up_proj: Float[Array, "experts intermediate hidden"] | Quantized,
    down_proj: Float[Array, "experts hidden intermediate"] | Quantized,
    swiglu: SwiGLU = SWIGLU,
    times: Multiply = product,
    spread: Spread | None = None,
) -> Float[Array, "tokens hidden"]:
    """`RoutedExperts` with every expert computed for every token: the specification."""
    dtype = wide(x.dtype)
    experts, intermediate, _ = gate_proj.shape
    chosen = chosen if spread is None else spread.own(chosen, experts)
    inner = x.dtype
    if any(isinstance(stack, Quantized) for stack in (gate_proj, up_proj, down_proj)):
        x = x.astype(dtype)
    gate_proj, up_proj, down_proj = (numbers(w).astype(x.dtype) for w in (gate_proj, up_proj, down_proj))
    picks = jax.nn.one_hot(chosen, experts, dtype=dtype)
    share = jnp.sum(picks * weights.astype(dtype)[..., None], axis=1)
    stacks = (w.reshape(experts * intermediate, -1) for w in (gate_proj, up_proj))
    gate, up = (times(x, w).astype(dtype) for w in stacks)
    hidden = swiglu(gate, up).reshape(-1, experts, intermediate) * share[..., None]
    down = jnp.swapaxes(down_proj, 1, 2).reshape(experts * intermediate, -1)
    hidden = hidden.reshape(x.shape[0], -1).astype(inner).astype(x.dtype)
    y = jnp.matmul(hidden, down, precision=exact(x.dtype), preferred_element_type=dtype)
    return y if spread is None else spread.together(y)


def differentiated_as_dense(form: Callable[..., jax.Array], **settings: Any) -> Callable[..., jax.Array]:
    """A faster form of `dense_experts`, with its gradient; TypeError where that is one of quantized stacks.

    `settings` are the form's own. The gradient costs the chosen experts alone, or all of them where stacks are
    quantized or devices share them.
    """

    def own(x, chosen, weights, gate_proj, up_proj, down_proj, *statics):
        return form(x, chosen, weights, gate_proj, up_proj, down_proj, *statics, **settings)

    def forward(x, chosen, weights, gate_proj, up_proj, down_proj, *statics):
        y = own(x, chosen, weights, gate_proj, up_proj, down_proj, *statics)
        return y, (x, chosen, weights, gate_proj, up_proj, down_proj)

    def backward(swiglu, times, spread, inputs, dy):
        x, chosen, weights, *stacks = inputs
        floats = {i: stack for i, stack in enumerate(stacks) if not isinstance(stack, Quantized)}
        if spread is None and len(floats) == len(stacks):
            dx, dweights, *dstacks = _gradient(x, chosen, weights, stacks, dy, swiglu, times)
            return dx, None, dweights, *dstacks

        def dense(x, weights, floats):
            gate_proj, up_proj, down_proj = (floats.get(i, stack) for i, stack in enumerate(stacks))
            return dense_experts(x, chosen, weights, gate_proj, up_proj, down_proj, swiglu, times, spread)

        dx, dweights, dfloats = jax.vjp(dense, x, weights, floats)[1](dy)
        return dx, None, dweights, *map(dfloats.get, range(3))

    differentiable = jax.custom_vjp(own, nondiff_argnums=(6, 7, 8))
    differentiable.defvjp(forward, backward)

    @functools.wraps(form)
    def with_defaults(x, chosen, weights, gate_proj, up_proj, down_proj, swiglu=SWIGLU, times=product, spread=None):
        stacks = (constant(w) if isinstance(w, Quantized) else w for w in (gate_proj, up_proj, down_proj))
        return differentiable(x, chosen, weights, *stacks, swiglu, times, spread)

    return with_defaults


def blocks_of_experts(
    x: Float[Array, "tokens hidden"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    gate_proj: Float[Array, "experts intermediate hidden"] | Quantized,
    up_proj: Float[Array, "experts intermediate hidden"] | Quantized,
    down_proj: Float[Array, "experts hidden intermediate"] | Quantized,
    swiglu: SwiGLU = SWIGLU,
    times: Multiply = product,
    spread: Spread | None = None,
    read: rows_of.Read = rows_of.read,
) -> Float[Array, "tokens hidden"]:
    """The same function at the cost of the chosen experts alone, in float32 or wider.

    Rows are sorted by expert and cut into blocks of one expert each. A loop over the blocks reads each block's expert;
    where most experts have a block, one round computes the next block of every expert at once and reads their weights
    in place. Both compute a block in the same way, so the choice between them changes no bits. Quantized experts are
    decoded block by block, and never all at once.

    An index in `chosen` that is not an expert's stands for no expert and costs nothing. Every token's results are
    summed in top-k order, whatever the other tokens are.
    """
    tokens, top_k = chosen.shape
    experts, dtype = gate_proj.shape[0], wide(x.dtype)
    block = _block_rows(tokens, top_k, experts if spread is None else spread.experts, x.dtype)
    chosen = chosen if spread is None else spread.own(chosen, experts)
    groups = Groups.of(chosen, experts)
    blocks = -(-groups.counts // block)
    stacks = (gate_proj, up_proj, down_proj)
    quantized = any(isinstance(stack, Quantized) for stack in stacks)
    narrow = jnp.uint8 if quantized else gate_proj.dtype

    def expert(rows, gate, up, down):
        taken = x.at[rows // top_k].get(mode="clip")
        gate, up = (times(taken, w) for w in (gate, up))
        return times(swiglu(gate, up).astype(x.dtype), down).astype(dtype)

    def by_blocks(out):
        ends = jnp.cumsum(blocks)
        turns = jnp.arange(min(tokens * top_k, experts + tokens * top_k // block), dtype=jnp.int32)
        owner = jnp.minimum(jnp.searchsorted(ends, turns, side="right").astype(jnp.int32), experts - 1)
        rows = groups.rows(owner, turns - (ends - blocks)[owner], block)

        def turn(i, out):
            own = rows[i]

            def of_block():
                return expert(own, *(matrix_of(w, owner[i]) for w in stacks))

            return out.at[own].set(read(of_block, narrow, own[0] >= 0), mode="drop")

        return lax.fori_loop(0, ends[-1], turn, out)

    def by_rounds(out):
        every = jnp.arange(experts, dtype=jnp.int32)

        def turn(i, out):
            rows = groups.rows(every, jnp.full(experts, i, jnp.int32), block)
            return out.at[rows].set(expert(rows, *stacks), mode="drop")

        return lax.fori_loop(0, jnp.max(blocks), turn, out)

    # Data-dependent zeros: XLA would otherwise hoist a constant buffer for every layer to the start of a prefill, and
    # keep them all in memory.
    out = jnp.full((tokens * top_k, x.shape[1]), groups.counts[0] < 0, dtype)
    if quantized or block > ROUNDS_ROWS or EXPERTS * tokens * top_k <= TURNS * experts:  # then it can never be rounds
        out = by_blocks(out)
    else:
        turns = jnp.sum(blocks, dtype=jnp.int32)
        out = lax.cond(EXPERTS * turns > TURNS * experts * jnp.max(blocks), by_rounds, by_blocks, out)
    return weighted(weights, out if spread is None else spread.together(out))


block_experts = differentiated_as_dense(blocks_of_experts)
"""The plain form of `RoutedExperts`."""


def _gradient(
    x: Float[Array, "tokens hidden"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    stacks: Sequence[Float[Array, "experts _ _"]],
    dy: Float[Array, "tokens hidden"],
    swiglu: SwiGLU,
    times: Multiply,
) -> tuple[Float[Array, "..."], ...]:
    """The gradients of x, of the weights and of each stack.

    A round takes the next rows of every expert, as many as they have on average. As a token chooses an expert once at
    most, all rounds together have the rows of the dense form and of one round more at most.
    """
    tokens, top_k = chosen.shape
    experts, dtype = stacks[0].shape[0], wide(x.dtype)
    groups, every = Groups.of(chosen, experts), jnp.arange(experts, dtype=jnp.int32)
    block = -(-tokens * top_k // experts)

    def expert(taken, gate, up, down):
        gate, up = (times(taken, w) for w in (gate, up))
        return times(swiglu(gate, up).astype(x.dtype), down).astype(dtype)

    def turn(i, sums):
        dx, dweights, dstacks = sums
        rows = groups.rows(every, jnp.full(experts, i, jnp.int32), block)
        taken, dtaken = (a.at[rows // top_k].get(mode="fill", fill_value=0) for a in (x, dy.astype(dtype)))
        share = weights.reshape(-1).at[rows].get(mode="fill", fill_value=0).astype(dtype)
        y, pullback = jax.vjp(expert, taken, *stacks)
        down, *own = pullback(dtaken * share[..., None])
        dx = dx.at[rows // top_k].add(down.astype(dtype), mode="drop")
        dweights = dweights.at[rows].set(jnp.sum(y * dtaken, axis=-1), mode="drop")
        return dx, dweights, [total + part.astype(dtype) for total, part in zip(dstacks, own, strict=True)]

    zeros = jnp.zeros(x.shape, dtype), jnp.zeros(chosen.size, dtype), [jnp.zeros(w.shape, dtype) for w in stacks]
    dx, dweights, dstacks = lax.fori_loop(0, jnp.max(-(-groups.counts // block)), turn, zeros)
    return (
        dx.astype(x.dtype),
        dweights.reshape(weights.shape).astype(weights.dtype),
        *(total.astype(w.dtype) for total, w in zip(dstacks, stacks, strict=True)),
    )


def weighted(
    weights: Float[Array, "tokens top_k"], rows: Float[Array, "tokens*top_k hidden"]
) -> Float[Array, "tokens hidden"]:
    """Each token's rows times their weights, summed in top-k order."""
    rows = rows.reshape(*weights.shape, -1) * weights.astype(rows.dtype)[..., None]
    return functools.reduce(jnp.add, (rows[:, j] for j in range(weights.shape[1])))


class Groups(NamedTuple):
    """The rows `token · top_k + j` of a choice, sorted by expert, then by token; those without an expert come last."""

    order: Int32[Array, " rows"]
    starts: Int32[Array, " experts"]
    counts: Int32[Array, " experts"]

    @staticmethod
    def of(chosen: Int32[Array, "tokens top_k"], experts: int) -> "Groups":
        """The rows of a choice. An index that is not an expert's stands for no expert."""
        flat = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(-1)
        counts = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
        return Groups(jnp.argsort(flat, stable=True).astype(jnp.int32), jnp.cumsum(counts) - counts, counts)

    def rows(
        self, expert: Int32[Array, " blocks"], index: Int32[Array, " blocks"], block: int
    ) -> Int32[Array, "blocks block"]:
        """The rows of each expert's block of this index; indices past the expert's last row are out of range."""
        offsets = index[:, None] * block + jnp.arange(block, dtype=jnp.int32)[None]
        rows = self.order.at[self.starts[expert][:, None] + offsets].get(mode="clip")
        return jnp.where(offsets < self.counts[expert][:, None], rows, self.order.shape[0])


def _block_rows(tokens: int, top_k: int, experts: int, dtype: jnp.dtype) -> int:
    """Rows per block, from an expert's average: fewer mean more iterations, more mean more padding.

    A single token has blocks of one row, except in bfloat16, where one row would be computed as two.
    """
    if tokens == 1 and dtype != jnp.bfloat16:
        return 1
    average = tokens * top_k / experts
    return next((block for block, most in ((4, 1.0), (8, 2.0), (16, 8.0), (32, 24.0)) if average <= most), 64)
