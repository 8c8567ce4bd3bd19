"""Ling-3's configuration: what the model *is*, read from a checkpoint's `config.json`."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Ling3Config:
    """The shape and the laws of a Ling-3 model (`BailingMoeV3ForCausalLM`), in the published field names.

    Defaults are those of the published Ling-3.0-tiny. Lengths are in tokens, sizes in channels.
    """

    vocab_size: int = 157184
    hidden_size: int = 1536
    intermediate_size: int = 4608
    num_hidden_layers: int = 24
    layer_group_size: int = 4
    first_k_dense_replace: int = 1
    num_attention_heads: int = 16
    head_dim: int = 128
    q_lora_rank: int | None = 256
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rope_theta: float = 6000000.0
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    short_conv_kernel_size: int = 4
    kda_lower_bound: float | None = -5.0
    num_experts: int = 128
    num_experts_per_tok: int = 8
    num_shared_experts: int = 1
    moe_intermediate_size: int = 512
    moe_shared_expert_intermediate_size: int = 512
    n_group: int = 8
    topk_group: int = 4
    routed_scaling_factor: float = 2.5
    norm_topk_prob: bool = True
    expert_swiglu_limit_list: tuple[float, ...] | None = None
    share_expert_swiglu_limit_list: tuple[float, ...] | None = None
    num_nextn_predict_layers: int = 0
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = (156895,)
    pad_token_id: int | None = 156892

    def attention_kind(self, layer: int) -> Literal["kda", "mla"]:
        """The attention of 0-based `layer`: MLA closes each group of `layer_group_size`, KDA fills the rest."""
        return "mla" if (layer + 1) % self.layer_group_size == 0 else "kda"

    def mlp_kind(self, layer: int) -> Literal["dense", "moe"]:
        """The feed-forward of 0-based `layer`: dense in the first `first_k_dense_replace`, then sparse experts."""
        return "dense" if layer < self.first_k_dense_replace else "moe"
