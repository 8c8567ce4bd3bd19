"""Qwen3-MoE (`Qwen3MoeForCausalLM`): Qwen3's attention, and a mixture of experts with a softmax router."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.config_fields import field, found, too_large
from ling3.families.gguf import EXPERTS, GROUPED, Contents, GgufArchitecture, Keys, check_router, transformer_fields
from ling3.families.qwen3 import Qwen3Fields
from ling3.families.transformer import build, count, dense_mlp, family, size
from ling3.layers.moe import MoE, MoEConfig
from ling3.model import CausalLM, FeedForward


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Fields):
    """The fields of a Qwen3-MoE config (Qwen Team, arXiv 2505.09388, §2). Raises ConfigError."""

    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"

    moe_intermediate_size: int = size()
    num_experts: int = count(aliases=("num_local_experts",))
    num_experts_per_tok: int = count()
    norm_topk_prob: bool = field(absent=False)
    decoder_sparse_step: int = field(ge=1, le=1000, absent=1)
    """The last layer of each group of this size is sparse, unless `mlp_only_layers` names it."""
    mlp_only_layers: tuple[int, ...] = field(ge=0, absent=())
    """The 0-based layers that are always dense."""

    def mlp_kind(self, layer: int) -> str:
        """The feed-forward of 0-based `layer`: `dense` or `moe`."""
        dense = layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step
        return "dense" if dense else "moe"

    def misfits(self) -> Iterable[str]:
        """Problems between fields that are valid by themselves."""
        chosen, experts = self.num_experts_per_tok, self.num_experts
        if chosen > experts:
            yield f"num_experts_per_tok: found {chosen}; expected at most num_experts, {experts}; correct it"
        if any(layer >= self.num_hidden_layers for layer in self.mlp_only_layers):
            last = self.num_hidden_layers - 1
            yield f"mlp_only_layers: {found(self.mlp_only_layers)}; expected layers from 0 to {last}; correct it"
        yield from too_large(3 * self.num_hidden_layers * experts * self.hidden_size * self.moe_intermediate_size)


def init(config: Qwen3MoeConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, routers in float32, norms 1, biases 0."""
    experts = MoEConfig(
        hidden=config.hidden_size,
        experts=config.num_experts,
        intermediate=config.moe_intermediate_size,
        shared=0,
        top_k=config.num_experts_per_tok,
        groups=1,
        top_groups=1,
        normalize=config.norm_topk_prob,
        scaling=1.0,
        std=config.initializer_range,
        expert_bias=False,
        scores="softmax",
    )

    def feed_forward(layer: int, own: PRNGKeyArray) -> FeedForward:
        if config.mlp_kind(layer) == "dense":
            return dense_mlp(config, own, dtype)
        return MoE.init(experts, key=own, dtype=dtype)

    return build(config, lambda i, own: config.mixer(i, key=own, dtype=dtype), feed_forward, key=key, dtype=dtype)


def _more_fields(contents: Contents, keys: Keys) -> dict[str, Any]:
    """The fields of a GGUF file's config that follow from tensors; `norm_topk_prob` is true, and has no key."""
    check_router(keys, "softmax")
    named = (re.fullmatch(r"blk\.(\d+)\.ffn_gate\.weight", name) for name in contents.tensors)
    dense = sorted(int(found[1]) for found in named if found)
    return {**transformer_fields(contents, keys), "norm_topk_prob": True, "mlp_only_layers": dense}


GGUF = GgufArchitecture("qwen3moe", {**GROUPED, **EXPERTS}, _more_fields, unused=frozenset(("expert_gating_func",)))
FAMILY = family("Qwen3-MoE", Qwen3MoeConfig, init, GGUF)
