"""The form of the experts is chosen from what is known before anything is compiled."""

import dataclasses
import itertools

from ling3.engine.expert_forms import ServingProfile, chosen_form, takes_few_tokens
from ling3.ops.experts import block_experts
from ling3.ops.few_token_experts import few_token_experts


def test_the_form_is_chosen_from_what_is_known_beforehand():
    """Against the condition written out, over every combination of facts, at and beside its bound of tokens."""
    facts = [field.name for field in dataclasses.fields(ServingProfile) if field.name != "max_tokens"]
    seen = set()
    for tokens, *values in itertools.product((1024, 1025), *[(False, True)] * len(facts)):
        own = dict(zip(facts, values, strict=True))
        use = own["enabled"] and own["fp4_weights"] and not own["next_token_layer"] and not own["across_hosts"]
        use = use and not (own["hashed"] and not own["hashed_too"]) and (own["decode_graph"] or tokens <= 1024)
        serving = ServingProfile(tokens, **own)
        assert takes_few_tokens(serving) == use
        assert chosen_form(serving) is (few_token_experts if use else block_experts)
        seen.add(use)
    assert seen == {True, False} and not takes_few_tokens(ServingProfile(1))
