"""The routed experts for few tokens, in one pass over the tokens' choices.

SGLang's counterpart is MegaMoE: one kernel from the dispatch of tokens to the sum of their experts, which reads the
experts as they are stored. `few_token_experts` equals `experts.block_experts` up to rounding; `engine.expert_forms`
has the condition under which DeepSeek-V4's servers use it.
"""

import jax.numpy as jnp
from jax import lax

from ling3.ops.experts import RoutedExperts, differentiated_as_dense
from ling3.ops.forms import form_of
from ling3.ops.matmul import product
from ling3.ops.precision import wide
from ling3.ops.quantized import matrix_of
from ling3.ops.swiglu import SWIGLU


@differentiated_as_dense
@form_of(RoutedExperts)
def few_token_experts(x, chosen, weights, gate_proj, up_proj, down_proj, swiglu=SWIGLU, times=product, spread=None):
    """y_t = Σ_j weights_tj · expert_{chosen_tj}(x_t), one choice after another, each expert read in place.

    Nothing is sorted, and only chosen experts are read; an expert that several tokens chose is read for each of them.
    An out-of-range index means no expert. A token's results are summed in float32 or wider in top-k order; where
    devices share the experts, each device first sums its part.
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
