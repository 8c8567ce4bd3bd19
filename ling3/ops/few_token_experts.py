"""The experts of few tokens in one pass over them.

SGLang calls that form MegaMoE: one kernel from the dispatch of tokens to the sum of their experts, which reads the
experts as they are stored. `few_token_experts` is the same sum as `experts.block_experts`, to rounding;
`engine.expert_forms` says when DeepSeek-V4's servers take it.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ling3.ops.experts import differentiated_as_dense
from ling3.ops.matmul import Multiply, product
from ling3.ops.precision import wide
from ling3.ops.quantized import Quantized, matrix_of
from ling3.ops.spread import Spread
from ling3.ops.swiglu import SWIGLU, SwiGLU


@differentiated_as_dense
def few_token_experts(
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
    """y_t = Σ_j weights_tj · expert_{chosen_tj}(x_t), one choice after the other, each expert read where it lies.

    Nothing is sorted, and no weight is read for tokens that did not choose it; an expert that several tokens chose is
    read for each of them. An index that is not an expert's stands for no expert. Sums are in float32 or wider, a
    token's in top-k order (where devices share the experts, first each device's).
    """
    top_k, experts, dtype = chosen.shape[1], gate_proj.shape[0], wide(x.dtype)
    flat = (chosen if spread is None else spread.own(chosen, experts)).reshape(-1)

    def choice(i, y):
        token, expert = i // top_k, flat[i]

        def added(y):
            gate, up, down = (matrix_of(stack, expert) for stack in (gate_proj, up_proj, down_proj))
            row = lax.dynamic_slice_in_dim(x, token, 1)
            gate, up = (times(row, weight) for weight in (gate, up))
            hidden = swiglu(gate, up).astype(x.dtype)
            out = times(hidden, down).astype(dtype) * weights.reshape(-1)[i].astype(dtype)
            return y.at[token].add(out[0])

        return lax.cond((expert >= 0) & (expert < experts), added, lambda y: y, y)

    y = lax.fori_loop(0, flat.shape[0], choice, jnp.zeros(x.shape, dtype))
    return y if spread is None else spread.together(y)
