"""The experts of few tokens in one pass over them, and the condition under which DeepSeek-V4's servers take it.

SGLang calls that form MegaMoE: one kernel from the dispatch of tokens to the sum of their experts, which reads the
experts as they are stored. `few_token_experts` is the same sum as `experts.block_experts`, to rounding, and
`chosen_form` says which of the two runs, from facts that are known before anything is compiled:

    Execution(experts=chosen_form(ServingProfile(fp4_weights=True, max_tokens=64)))
"""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from ling3.ops.exchange import Spread
from ling3.ops.experts import RoutedExperts, block_experts, differentiated_as_dense
from ling3.ops.matmul import Multiply, product
from ling3.ops.precision import wide
from ling3.ops.quantized import Quantized, matrix_of
from ling3.ops.swiglu import SWIGLU, SwiGLU

MOST_TOKENS = 1024
"""Tokens of a device up to which the form for few tokens is taken, where no decode graph bounds them."""


@dataclasses.dataclass(frozen=True)
class ServingProfile:
    """What is known of a mixture of experts before it is compiled."""

    max_tokens: int
    """The most tokens of one call on one device."""
    fp4_weights: bool = False
    """True if the experts are stored in FP4 in the form's own order."""
    enabled: bool = True
    hashed: bool = False
    """True for a layer that looks its experts up by token id."""
    hashed_too: bool = False
    """True if the form handles such layers."""
    next_token_layer: bool = False
    """True for a layer of multi-token prediction."""
    across_hosts: bool = False
    """True if the experts are spread over several hosts."""
    decode_graph: bool = False
    """True in a recorded graph of decode steps, which has few tokens whatever `max_tokens` says."""


def takes_few_tokens(serving: ServingProfile) -> bool:
    """True where the form for few tokens runs: the condition of SGLang's MegaMoE."""
    few = serving.decode_graph or serving.max_tokens <= MOST_TOKENS
    layer = not serving.next_token_layer and (serving.hashed_too or not serving.hashed)
    return serving.enabled and serving.fp4_weights and layer and not serving.across_hosts and few


def chosen_form(serving: ServingProfile) -> RoutedExperts:
    """The form of the experts for an `Execution`."""
    return few_token_experts if takes_few_tokens(serving) else block_experts


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
