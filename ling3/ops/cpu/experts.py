"""The routed experts on a CPU, by the C++ kernels in `products.cc`, which read the chosen experts in place."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from ling3.ops.cpu import products
from ling3.ops.cpu.matmul import arrays_of
from ling3.ops.cpu.rows import read, weighted
from ling3.ops.experts import Groups, RoutedExperts, blocks_of_experts, differentiated_as_dense
from ling3.ops.forms import form_of, runs
from ling3.ops.matmul import product
from ling3.ops.quantized import Quantized
from ling3.ops.swiglu import SWIGLU

xla_experts = differentiated_as_dense(blocks_of_experts, read=read)
"""`experts.block_experts`, by XLA, with 16-bit and quantized weights read inside a branch (`cpu.rows.read`)."""
loop_experts = differentiated_as_dense(blocks_of_experts, read=read, weighted=weighted)
"""`xla_experts`, but that the sum over each token's experts is the C++ kernel's."""


def unsuited(
    x: Float[Array, "tokens hidden"],
    chosen: Int32[Array, "tokens top_k"],
    *stacks: Float[Array, "..."] | Quantized,
) -> str | None:
    """Why the kernels do not run, or None: they are missing or slower, or cannot read the stacks.

    In bfloat16 they are faster up to one row per expert on average. For more rows XLA uses the bfloat16 instructions
    that some processors have; the limit was measured on such a processor.
    """
    if any(isinstance(stack, Quantized) and stack.rounds for stack in stacks):
        return "the kernel does not round activations to 8 bits"
    arrays = [arrays_of(stack) for stack in stacks]
    gate, up, _ = arrays
    kinds = {(own.numbers.dtype, own.scale is not None and own.scale.dtype, own.macro) for own in arrays}
    if len(kinds) > 1 or (gate.macro != "BLOCKS" and gate.numbers.shape != up.numbers.shape):
        return "the stacks are of several formats"
    if gate.scale is None:
        if x.dtype == jnp.bfloat16 and chosen.size > gate.numbers.shape[0]:
            return "an expert has more than one row in bfloat16 on average, for which XLA is faster"
        return products.unsuited(x, gate, gate.numbers.shape[-1], products.LEAST["experts"])
    least = products.LEAST["quantized"]
    reasons = (products.unsuited(x, own, w.shape[-1], least) for w, own in zip(stacks, arrays, strict=True))
    return next(filter(None, reasons), None)


@differentiated_as_dense
@form_of(RoutedExperts)
def experts(x, chosen, weights, gate_proj, up_proj, down_proj, swiglu=SWIGLU, times=product, spread=None):
    """Computes `experts.block_experts` with the C++ kernels, where they suit."""
    count, stacks = gate_proj.shape[0], (gate_proj, up_proj, down_proj)
    if not runs("experts", unsuited(x, chosen, *stacks)):
        return loop_experts(x, chosen, weights, *stacks, swiglu, times, spread)
    groups = Groups.of(chosen if spread is None else spread.own(chosen, count), count)
    gate, up, down = (arrays_of(stack) for stack in stacks)
    rows = products.expert_rows(x, *groups, gate, up, down, swiglu)
    return weighted(weights, rows if spread is None else spread.together(rows))
