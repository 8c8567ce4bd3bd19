"""When DeepSeek-V4's servers take the experts' form for few tokens, which SGLang calls MegaMoE.

`chosen_form` says which form runs, from facts that are known before anything is compiled:

    Execution(experts=chosen_form(ServingProfile(fp4_weights=True, max_tokens=64)))
"""

import dataclasses

from ling3.ops.experts import RoutedExperts, block_experts
from ling3.ops.few_token_experts import few_token_experts

MOST_TOKENS = 1024
"""Tokens of a device up to which the form for few tokens is taken, where no decode graph bounds them."""


@dataclasses.dataclass(frozen=True)
class ServingProfile:
    """The facts about a mixture of experts that are known before it is compiled."""

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
