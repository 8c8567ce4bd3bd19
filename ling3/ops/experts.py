"""The routed experts' feed-forward, down(swiglu(gate x, up x)) of each row x by its expert, in two forms.

`dense_experts` runs every expert on every token; it is the specification. `block_experts` sorts the rows by expert and
runs only the chosen experts, each on its own rows; its gradient does the same. A stack of weights is an array or
`Quantized`; of a quantized stack, a block decodes only its expert's matrices.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ling3.ops import rows as rows_of
from ling3.ops.forms import form_of
from ling3.ops.matmul import Multiply, product
from ling3.ops.precision import exact, wide
from ling3.ops.quantized import Quantized, constant, matrix_of, numbers, rounded_for
from ling3.ops.spread import Spread
from ling3.ops.swiglu import SWIGLU, SwiGLU

# Five iterations over blocks, which copy their experts' weights, cost as much as eight experts in a round.
TURNS, EXPERTS = 5, 8
# Above this many rows per block, rounds over all experts cost more than they save.
ROUNDS_ROWS = 32


@runtime_checkable
class RoutedExperts(Protocol):
    """y_t = Σ_j weights_tj · expert_{chosen_tj}(x_t), in float32 or wider.

    An out-of-range index in `chosen` means no expert. `times` is the matrix product, which a form may use or not.
    `spread` says how devices share the experts; it is omitted on a single device, so kernels need not accept it.
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


@form_of(RoutedExperts)
def dense_experts(x, chosen, weights, gate_proj, up_proj, down_proj, swiglu=SWIGLU, times=product, spread=None):
    """The specification of `RoutedExperts`: computes every expert for every token."""
    dtype = wide(x.dtype)
    experts, intermediate, _ = gate_proj.shape
    chosen = chosen if spread is None else spread.own(chosen, experts)
    inner = x.dtype
    if any(isinstance(stack, Quantized) for stack in (gate_proj, up_proj, down_proj)):
        x = x.astype(dtype)
    rows, rounded = rounded_for(gate_proj, x), functools.partial(rounded_for, down_proj)
    gate_proj, up_proj, down_proj = (numbers(w).astype(x.dtype) for w in (gate_proj, up_proj, down_proj))
    picks = jax.nn.one_hot(chosen, experts, dtype=dtype)
    share = jnp.sum(picks * weights.astype(dtype)[..., None], axis=1)
    stacks = (w.reshape(experts * intermediate, -1) for w in (gate_proj, up_proj))
    gate, up = (times(rows, w).astype(dtype) for w in stacks)
    hidden = rounded(swiglu(gate, up).reshape(-1, experts, intermediate)) * share[..., None]
    down = jnp.swapaxes(down_proj, 1, 2).reshape(experts * intermediate, -1)
    hidden = hidden.reshape(x.shape[0], -1).astype(inner).astype(x.dtype)
    y = jnp.matmul(hidden, down, precision=exact(x.dtype), preferred_element_type=dtype)
    return y if spread is None else spread.together(y)


def differentiated_as_dense(form: Callable[..., jax.Array], **settings: Any) -> Callable[..., jax.Array]:
    """Gives a faster form of `dense_experts` the same gradient, in reverse mode; `settings` are passed to `form`.

    The gradient computes only the chosen experts, and nothing for stacks that it is not taken with respect to; but all
    experts if devices share them, or activations are rounded. It raises TypeError if it is taken with respect to a
    quantized stack.
    """

    def own(x, chosen, weights, gate_proj, up_proj, down_proj, *statics):
        return form(x, chosen, weights, gate_proj, up_proj, down_proj, *statics, **settings)

    def forward(*given):
        inputs = [jax.tree.map(lambda leaf: leaf.value, arg, is_leaf=_is_primal) for arg in given[:6]]
        frozen = not any(leaf.perturbed for leaf in jax.tree.leaves(given[3:6], is_leaf=_is_primal))
        return own(*inputs, *given[6:]), (() if frozen else None, *inputs)  # of these two, neither is an array

    def backward(swiglu, times, spread, inputs, dy):
        frozen, x, chosen, weights, *stacks = inputs
        dy = jnp.zeros(x.shape, wide(x.dtype)) if isinstance(dy, jax.custom_derivatives.SymbolicZero) else dy
        floats = {i: stack for i, stack in enumerate(stacks) if not isinstance(stack, Quantized)}
        rounds = any(stack.rounds for stack in stacks if isinstance(stack, Quantized))
        if spread is None and frozen is not None and not rounds:
            dx, dweights = _input_gradient(x, chosen, weights, stacks, dy, swiglu)
            return dx, None, dweights, None, None, None
        if spread is None and len(floats) == len(stacks):
            dx, dweights, *dstacks = _gradient(x, chosen, weights, stacks, dy, swiglu, times)
            return dx, None, dweights, *dstacks

        def dense(x, weights, floats):
            gate_proj, up_proj, down_proj = (floats.get(i, stack) for i, stack in enumerate(stacks))
            return dense_experts(x, chosen, weights, gate_proj, up_proj, down_proj, swiglu, times, spread)

        dx, dweights, dfloats = jax.vjp(dense, x, weights, floats)[1](dy)
        return dx, None, dweights, *map(dfloats.get, range(3))

    differentiable = jax.custom_vjp(own, nondiff_argnums=(6, 7, 8))
    differentiable.defvjp(forward, backward, symbolic_zeros=True)

    @functools.wraps(form)
    def with_defaults(x, chosen, weights, gate_proj, up_proj, down_proj, swiglu=SWIGLU, times=product, spread=None):
        stacks = (constant(w) if isinstance(w, Quantized) else w for w in (gate_proj, up_proj, down_proj))
        return differentiable(x, chosen, weights, *stacks, swiglu, times, spread)

    return with_defaults


def _is_primal(leaf: Any) -> bool:
    return isinstance(leaf, jax.custom_derivatives.CustomVJPPrimal)


def weighted(
    weights: Float[Array, "tokens top_k"], rows: Float[Array, "tokens*top_k hidden"]
) -> Float[Array, "tokens hidden"]:
    """Each token's rows times their routing weights, summed in top-k order."""
    rows = rows.reshape(*weights.shape, -1) * weights.astype(rows.dtype)[..., None]
    return functools.reduce(jnp.add, (rows[:, j] for j in range(weights.shape[1])))


@form_of(RoutedExperts)
def blocks_of_experts(
    x,
    chosen,
    weights,
    gate_proj,
    up_proj,
    down_proj,
    swiglu=SWIGLU,
    times=product,
    spread=None,
    read: rows_of.Read = rows_of.read,
    weighted: Callable[[jax.Array, jax.Array], jax.Array] = weighted,
):
    """`RoutedExperts` computed for the chosen experts only, in float32 or wider.

    Rows are sorted by expert and split into blocks of one expert each. A loop over the blocks reads each block's
    expert; where most experts have a block, the loop is over rounds instead: a round computes the next block of every
    expert at once and reads the weights in place. Both compute a block the same way, so the choice does not change the
    result bitwise. Quantized experts are decoded block by block, never all at once. An out-of-range index in `chosen`
    means no expert and costs nothing. Every token's results are summed in top-k order, whatever the other tokens are.
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
        owner, rows, count = groups.blocks(block)

        def turn(i, out):
            own = rows[i]

            def of_block():
                return expert(own, *(matrix_of(w, owner[i]) for w in stacks))

            return out.at[own].set(read(of_block, narrow, own[0] >= 0), mode="drop")

        return lax.fori_loop(0, count, turn, out)

    def by_rounds(out):
        every = jnp.arange(experts, dtype=jnp.int32)

        def turn(i, out):
            rows = groups.rows(every, jnp.full(experts, i, jnp.int32), block)
            return out.at[rows].set(expert(rows, *stacks), mode="drop")

        return lax.fori_loop(0, jnp.max(blocks), turn, out)

    # Data-dependent zeros: XLA would hoist a constant buffer for every layer to the start of a prefill, and keep all of
    # them in memory.
    out = jnp.full((tokens * top_k, x.shape[1]), groups.counts[0] < 0, dtype)
    if quantized or block > ROUNDS_ROWS or EXPERTS * tokens * top_k <= TURNS * experts:  # rounds would never pay
        out = by_blocks(out)
    else:
        turns = jnp.sum(blocks, dtype=jnp.int32)
        out = lax.cond(EXPERTS * turns > TURNS * experts * jnp.max(blocks), by_rounds, by_blocks, out)
    return weighted(weights, out if spread is None else spread.together(out))


block_experts = differentiated_as_dense(blocks_of_experts)
"""The plain form of `RoutedExperts`, with its gradient."""


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

    A round takes the next rows of every expert, as many as an expert has on average. Since a token chooses an expert
    at most once, all rounds together compute at most one round more than the dense form's rows.
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


def _input_gradient(
    x: Float[Array, "tokens hidden"],
    chosen: Int32[Array, "tokens top_k"],
    weights: Float[Array, "tokens top_k"],
    stacks: Sequence[Float[Array, "experts _ _"] | Quantized],
    dy: Float[Array, "tokens hidden"],
    swiglu: SwiGLU,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens top_k"]]:
    """The gradients of x and of the weights alone, over blocks of one expert's rows.

    With h = swiglu(gate x, up x) and g = downᵀ dy, a row's weight has the gradient h·g, and h has weight · g. One
    expert's matrices at a time are widened to float32 or decoded.
    """
    (tokens, top_k), experts, dtype = chosen.shape, stacks[0].shape[0], wide(x.dtype)
    block = min(128, 1 << max(2, (-(-tokens * top_k // experts) - 1).bit_length()))
    owner, rows, count = Groups.of(chosen, experts).blocks(block)
    matmul = functools.partial(jnp.matmul, precision=exact(dtype))

    def of_block(i):
        gate, up, down = (numbers(matrix_of(stack, owner[i])).astype(dtype) for stack in stacks)
        taken, dtaken = (a.astype(dtype).at[rows[i] // top_k].get(mode="fill", fill_value=0) for a in (x, dy))
        share = weights.reshape(-1).at[rows[i]].get(mode="fill", fill_value=0).astype(dtype)

        def middle(taken):
            return swiglu(matmul(taken, gate.T), matmul(taken, up.T)).astype(x.dtype).astype(dtype)

        hidden, pullback = jax.vjp(middle, taken)
        dhidden = matmul(dtaken, down)
        return pullback(dhidden * share[:, None])[0], jnp.sum(hidden * dhidden, axis=-1)

    def turn(i, sums):
        dx, dweights = sums
        zeros = jnp.zeros((block, x.shape[1]), dtype), jnp.zeros(block, dtype)
        # Always true: inside a branch XLA does not widen all experts before the loop.
        dtaken, shares = lax.cond(rows[i, 0] < tokens * top_k, of_block, lambda i: zeros, i)
        return dx.at[rows[i] // top_k].add(dtaken, mode="drop"), dweights.at[rows[i]].set(shares, mode="drop")

    zeros = jnp.zeros(x.shape, dtype), jnp.zeros(chosen.size, dtype)
    dx, dweights = lax.fori_loop(0, count, turn, zeros)
    return dx.astype(x.dtype), dweights.reshape(weights.shape).astype(weights.dtype)


class Groups(NamedTuple):
    """The rows `token · top_k + j` of a routing choice, sorted by expert, then token; rows without an expert are last.

    Expert e has `counts[e]` rows, at `order[starts[e]:]`.
    """

    order: Int32[Array, " rows"]
    starts: Int32[Array, " experts"]
    counts: Int32[Array, " experts"]

    @staticmethod
    def of(chosen: Int32[Array, "tokens top_k"], experts: int) -> "Groups":
        """Sorts the rows of `chosen` by expert; an out-of-range index means no expert."""
        flat = jnp.where((chosen >= 0) & (chosen < experts), chosen, experts).reshape(-1)
        counts = jnp.zeros(experts, jnp.int32).at[flat].add(1, mode="drop")
        return Groups(jnp.argsort(flat, stable=True).astype(jnp.int32), jnp.cumsum(counts) - counts, counts)

    def blocks(self, size: int) -> tuple[Int32[Array, " blocks"], Int32[Array, "blocks block"], Int32[Array, ""]]:
        """All blocks of `size` rows in turn: each one's expert, its rows as in `rows`, and how many blocks there are.

        The arrays have room for the most blocks that a choice can make.
        """
        (experts,), (every,) = self.counts.shape, self.order.shape
        blocks = -(-self.counts // size)
        ends = jnp.cumsum(blocks)
        turns = jnp.arange(min(every, experts + every // size), dtype=jnp.int32)
        owner = jnp.minimum(jnp.searchsorted(ends, turns, side="right").astype(jnp.int32), experts - 1)
        return owner, self.rows(owner, turns - (ends - blocks)[owner], size), ends[-1]

    def rows(
        self, expert: Int32[Array, " blocks"], index: Int32[Array, " blocks"], block: int
    ) -> Int32[Array, "blocks block"]:
        """The rows in block number `index` of each `expert`; past the expert's last row, indices are out of range."""
        offsets = index[:, None] * block + jnp.arange(block, dtype=jnp.int32)[None]
        rows = self.order.at[self.starts[expert][:, None] + offsets].get(mode="clip")
        return jnp.where(offsets < self.counts[expert][:, None], rows, self.order.shape[0])


def _block_rows(tokens: int, top_k: int, experts: int, dtype: jnp.dtype) -> int:
    """Rows per block, from an expert's average number: small blocks mean more iterations, large ones more padding.

    A single token has blocks of one row, except in bfloat16, where one row would be computed as two.
    """
    if tokens == 1 and dtype != jnp.bfloat16:
        return 1
    average = tokens * top_k / experts
    return next((block for block, most in ((4, 1.0), (8, 2.0), (16, 8.0), (32, 24.0)) if average <= most), 64)
