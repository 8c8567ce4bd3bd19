"""When DeepSeek-V4's servers compute the routed experts in the few-token form, which SGLang calls MegaMoE.

`chosen_form` chooses the form from facts that are known before anything is compiled:

    Execution(experts=chosen_form(ServingProfile(fp4_weights=True, max_tokens=64)))
"""

import dataclasses

from ling3.ops.experts import RoutedExperts, block_experts
from ling3.ops.few_token_experts import few_token_experts

MOST_TOKENS = 1024
"""The most tokens per device for which the few-token form is used, outside of decode graphs."""


@dataclasses.dataclass(frozen=True)
class ServingProfile:
    """The facts about a MoE layer and its deployment that are known before it is compiled."""

    max_tokens: int
    """The most tokens per device in one call."""
    fp4_weights: bool = False
    """True if the experts are stored in FP4, in the layout that the few-token form reads."""
    enabled: bool = True
    hashed: bool = False
    """True for a layer that looks its experts up by token id (hash routing)."""
    hashed_too: bool = False
    """True if the few-token form handles hashed layers."""
    next_token_layer: bool = False
    """True for a multi-token prediction layer."""
    across_hosts: bool = False
    """True if the experts are sharded over several hosts."""
    decode_graph: bool = False
    """True in a captured graph of decode steps, which has few tokens whatever `max_tokens` says."""


def takes_few_tokens(serving: ServingProfile) -> bool:
    """True if the few-token form is used, by the condition of SGLang's MegaMoE."""
    few = serving.decode_graph or serving.max_tokens <= MOST_TOKENS
    layer = not serving.next_token_layer and (serving.hashed_too or not serving.hashed)
    return serving.enabled and serving.fp4_weights and layer and not serving.across_hosts and few


def chosen_form(serving: ServingProfile) -> RoutedExperts:
    """The form of the experts for an `Execution`: `few_token_experts` or `block_experts`."""
    return few_token_experts if takes_few_tokens(serving) else block_experts
