"""Qwen3-MoE (`Qwen3MoeForCausalLM`): Qwen3's attention, and a mixture of experts with a softmax router."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.config_fields import field, found, too_large
from ling3.families.gguf import EXPERTS, GROUPED, Contents, GgufArchitecture, Keys, check_router, transformer_fields
from ling3.families.qwen3 import Qwen3Fields
from ling3.families.transformer import TransformerConfig, build, count, dense_mlp, family, size
from ling3.layers.moe import MoE, MoEConfig
from ling3.model import CausalLM, FeedForward


@dataclasses.dataclass(frozen=True)
class ExpertFields(TransformerConfig):
    """The fields of Qwen's mixtures of experts."""

    moe_intermediate_size: int = size()
    num_experts: int = count(aliases=("num_local_experts",))
    num_experts_per_tok: int = count()

    def misfits(self) -> Iterable[str]:
        """Problems between fields that are valid by themselves."""
        if self.num_experts_per_tok > self.num_experts:
            expected = f"at most num_experts, {self.num_experts}"
            yield f"num_experts_per_tok: found {self.num_experts_per_tok}; expected {expected}; correct it"
        experts = self.num_hidden_layers * self.num_experts
        yield from too_large(3 * experts * self.hidden_size * self.moe_intermediate_size)

    def moe(self, *, key: PRNGKeyArray, dtype: DTypeLike, normalize: bool, shared: int = 0) -> MoE:
        """The mixture of a sparse layer, with random weights; `shared` is the size of a gated shared expert, if any."""
        config = MoEConfig(
            hidden=self.hidden_size,
            experts=self.num_experts,
            intermediate=self.moe_intermediate_size,
            shared=shared,
            top_k=self.num_experts_per_tok,
            groups=1,
            top_groups=1,
            normalize=normalize,
            scaling=1.0,
            std=self.initializer_range,
            expert_bias=False,
            scores="softmax",
            shared_gate=shared > 0,
        )
        return MoE.init(config, key=key, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class SparseFields(ExpertFields):
    """The fields that say which layers are sparse, and how their experts are weighed."""

    norm_topk_prob: bool = field(absent=False)
    decoder_sparse_step: int = field(ge=1, le=1000, absent=1)
    """The last layer of each group of this size is sparse, unless `mlp_only_layers` names it."""
    mlp_only_layers: tuple[int, ...] = field(ge=0, absent=())
    """The 0-based layers that are always dense."""

    def mlp_kind(self, layer: int) -> str:
        """The feed-forward of 0-based `layer`: `dense` or `moe`."""
        dense = layer in self.mlp_only_layers or (layer + 1) % self.decoder_sparse_step
        return "dense" if dense else "moe"

    def feed_forward(self, layer: int, *, key: PRNGKeyArray, dtype: DTypeLike, shared: int = 0) -> FeedForward:
        """The feed-forward of 0-based `layer`, with random weights."""
        if self.mlp_kind(layer) == "dense":
            return dense_mlp(self, key, dtype)
        return self.moe(key=key, dtype=dtype, normalize=self.norm_topk_prob, shared=shared)

    def misfits(self) -> Iterable[str]:
        """Problems between fields that are valid by themselves."""
        yield from ExpertFields.misfits(self)
        if any(layer >= self.num_hidden_layers for layer in self.mlp_only_layers):
            last = self.num_hidden_layers - 1
            yield f"mlp_only_layers: {found(self.mlp_only_layers)}; expected layers from 0 to {last}; correct it"


@dataclasses.dataclass(frozen=True)
class Qwen3MoeConfig(Qwen3Fields, SparseFields):
    """The fields of a Qwen3-MoE config (Qwen Team, arXiv 2505.09388, §2). Raises ConfigError."""

    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"


def init(config: Qwen3MoeConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, routers in float32, norms 1, biases 0."""
    return build(
        config,
        lambda i, own: config.mixer(i, key=own, dtype=dtype),
        lambda i, own: config.feed_forward(i, key=own, dtype=dtype),
        key=key,
        dtype=dtype,
    )


def _more_fields(contents: Contents, keys: Keys) -> dict[str, Any]:
    """The fields of a GGUF file's config that follow from tensors; `norm_topk_prob` is true, and has no key."""
    check_router(keys, "softmax")
    named = (re.fullmatch(r"blk\.(\d+)\.ffn_gate\.weight", name) for name in contents.tensors)
    dense = sorted(int(found[1]) for found in named if found)
    return {**transformer_fields(contents, keys), "norm_topk_prob": True, "mlp_only_layers": dense}


GGUF = GgufArchitecture("qwen3moe", {**GROUPED, **EXPERTS}, _more_fields, unused=frozenset(("expert_gating_func",)))
FAMILY = family("Qwen3-MoE", Qwen3MoeConfig, init, GGUF)
