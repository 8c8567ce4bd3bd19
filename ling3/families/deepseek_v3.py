"""DeepSeek-V3, Kimi-K2 and Moonlight (`DeepseekV3ForCausalLM`): MLA without a gate, over sparse experts."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families import transformer
from ling3.families.config_fields import Only, field, found, too_large
from ling3.families.family import Family
from ling3.families.gguf import (
    ATTENTION,
    LATENT,
    LATENT_KEYS,
    Contents,
    GgufArchitecture,
    Keys,
    latent_fields,
    rope_scaling,
)
from ling3.families.transformer import count, size
from ling3.layers.mla import MLA, MLAConfig
from ling3.layers.moe import MoE, MoEConfig
from ling3.model import CausalLM, FeedForward
from ling3.mtp import MTP
from ling3.ops.swiglu import SWIGLU, SwiGLU

LATENT_EPS = 1e-6
"""The eps of both latent norms in the authors' code and in transformers, whatever `rms_norm_eps` is."""


@dataclasses.dataclass(frozen=True)
class DeepseekV3Config(transformer.TransformerConfig):
    """DeepSeek-V3's fields under the published names (arXiv 2412.19437). Raises ConfigError."""

    architecture = "DeepseekV3ForCausalLM"
    model_type = "deepseek_v3"
    only = transformer.ONLY | {
        "attention_bias": Only((False, None), "no linear map has a bias"),
        "moe_layer_freq": Only((1, None), "every layer after the dense ones is sparse", written=True),
        "rope_interleave": Only((True, None), "RoPE rotates neighbouring channels"),
        "scoring_func": Only(("sigmoid", None), "the router's scores are sigmoids", written=True),
        "topk_method": Only(("noaux_tc", None), "experts are chosen in groups, by biased scores", written=True),
    }
    derived: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "qk_head_dim": lambda c: c.qk_nope_head_dim + c.qk_rope_head_dim
    }

    head_dim: int = count(absent=lambda values: values["qk_rope_head_dim"])
    """`qk_rope_head_dim` again, which transformers writes."""
    q_lora_rank: int | None = size()
    """The rank of the query projection; None for one matrix."""
    kv_lora_rank: int = size()
    qk_nope_head_dim: int = count()
    qk_rope_head_dim: int = count()
    v_head_dim: int = count()
    first_k_dense_replace: int = field(ge=0, le=1000)
    n_routed_experts: int = count(aliases=("num_local_experts",))
    n_shared_experts: int = field(ge=0, le=64)
    num_experts_per_tok: int = count()
    moe_intermediate_size: int = size()
    n_group: int = count(absent=1)
    topk_group: int = count(absent=1)
    norm_topk_prob: bool = field(absent=True)
    routed_scaling_factor: float = field(gt=0)
    num_nextn_predict_layers: int = field(ge=0, le=64, absent=0, aliases=("num_mtp_layers",))
    """The number of multi-token-prediction layers, which `load` skips by default."""

    def misfits(self) -> Iterable[str]:
        """Problems between fields that are valid by themselves."""
        layers, heads = self.num_hidden_layers, self.num_attention_heads
        for name, own in (("num_key_value_heads", heads), ("head_dim", self.qk_rope_head_dim)):
            if (value := getattr(self, name)) != own:
                yield f"{name}: {found(value)}; expected {own}, as MLA has one size and number of heads; leave it out"
        if self.first_k_dense_replace > layers:
            yield f"first_k_dense_replace: found {self.first_k_dense_replace}; expected at most {layers}; correct it"
        yield from transformer.routing_misfits(self, "n_routed_experts", "n_group", "num_experts_per_tok")
        yield from too_large(3 * layers * self.n_routed_experts * self.hidden_size * self.moe_intermediate_size)

    def mlp_kind(self, layer: int) -> str:
        """The feed-forward of 0-based `layer`: `dense` or `moe`."""
        return "dense" if layer < self.first_k_dense_replace else "moe"

    def mixer(self, *, key: PRNGKeyArray, dtype: DTypeLike) -> MLA:
        """The attention of any layer, with random weights."""
        config = MLAConfig(
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            q_rank=self.q_lora_rank,
            latent=self.kv_lora_rank,
            nope=self.qk_nope_head_dim,
            rope=self.qk_rope_head_dim,
            value=self.v_head_dim,
            eps=LATENT_EPS,
            std=self.initializer_range,
            rotation=dataclasses.replace(self.rope, interleaved=True),
            gate_law="none",
            score_factor=1.0 if self.rope_scaling is None else self.rope_scaling.score_factor,
        )
        return MLA.init(config, key=key, dtype=dtype)

    def experts(self, *, key: PRNGKeyArray, dtype: DTypeLike) -> MoE:
        """The mixture of experts of a sparse layer, with random weights."""
        return MoE.init(moe_config(self), key=key, dtype=dtype)


def moe_config(config: Any, swiglu: SwiGLU = SWIGLU) -> MoEConfig:
    """The settings of experts that are chosen in groups, in a config with DeepSeek-V3's fields."""
    return MoEConfig(
        hidden=config.hidden_size,
        experts=config.n_routed_experts,
        intermediate=config.moe_intermediate_size,
        shared=config.moe_intermediate_size * config.n_shared_experts,
        top_k=config.num_experts_per_tok,
        groups=config.n_group,
        top_groups=config.topk_group,
        normalize=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
        std=config.initializer_range,
        swiglu=swiglu,
        shared_swiglu=swiglu,
    )


def init(config: DeepseekV3Config, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, routing biases 0."""

    def feed_forward(layer: int, own: PRNGKeyArray) -> FeedForward:
        if config.mlp_kind(layer) == "dense":
            return transformer.dense_mlp(config, own, dtype)
        return config.experts(key=own, dtype=dtype)

    return transformer.build(
        config, lambda _, own: config.mixer(key=own, dtype=dtype), feed_forward, key=key, dtype=dtype
    )


def mtp_layer(config: DeepseekV3Config, number: int, *, key: PRNGKeyArray, dtype: DTypeLike) -> MTP:
    """Multi-token-prediction layer `number`, of MLA and experts (DeepSeek-V3, §2.2)."""
    return transformer.mtp_layer(
        config,
        lambda own: config.mixer(key=own, dtype=dtype),
        lambda own: config.experts(key=own, dtype=dtype),
        key=key,
        dtype=dtype,
    )


_NAMES = (
    (r"\.attention\.dense\.", ".self_attn.o_proj."),
    (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
    (r"\.final_layernorm\.", ".shared_head.norm."),
)
"""Regexes and replacements that turn the tree's names into the published ones, before those of every transformer."""


def published_name(name: str, config: DeepseekV3Config) -> str:
    """The checkpoint's name of the tensor at the path `name`: MTP layers are numbered after the decoder layers."""
    match name.split(".", 2):
        case ["mtp", number, within]:
            name = f"model.layers.{config.num_hidden_layers + int(number)}.{within}"
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return transformer.published_name(name, config)


_MTP = re.compile(r"model\.layers\.(\d+)\.(.+)")


def _of_mtp(name: str, config: DeepseekV3Config) -> str | None:
    """The name within its layer of a tensor of a multi-token-prediction layer; None for any other tensor."""
    layer = _MTP.fullmatch(name)
    number = -1 if layer is None else int(layer[1]) - config.num_hidden_layers
    return layer[2] if layer is not None and 0 <= number < config.num_nextn_predict_layers else None


def shared_copy(name: str, config: DeepseekV3Config) -> str | None:
    """The original of what each multi-token-prediction layer has a copy of, the embedding and the head; else None."""
    own = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return own.get(_of_mtp(name, config) or "", transformer.tied_copy(name, config))


_LOG = "rope.scaling.yarn_log_multiplier"


def _more_fields(contents: Contents, keys: Keys) -> dict[str, Any]:
    """The fields of a GGUF file's config that follow from several keys, or from tensors.

    The key of YaRN's magnitude is a tenth of `mscale_all_dim`, to which files take `mscale` to be equal.
    """
    scaling, log = rope_scaling(contents, keys), keys.get(_LOG)
    if scaling is not None and log:
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), 10 * log)
    return {
        **latent_fields(keys),
        "q_lora_rank": keys.get("attention.q_lora_rank"),
        "routed_scaling_factor": keys.get("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.get("expert_weights_norm", False),
        "num_nextn_predict_layers": keys.get("nextn_predict_layers", 0),
        "tie_word_embeddings": "output.weight" not in contents.tensors,
        "rope_scaling": scaling,
    }


_OWN_NAMES = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
LATENT_GGUF = {
    **{key: _OWN_NAMES.get(name, name) for key, name in {**ATTENTION, **LATENT}.items()},
    "expert_group_count": "n_group",
}
"""The fields of a GGUF file's keys, in a config with DeepSeek-V3's."""
GGUF = GgufArchitecture(
    "deepseek2",
    LATENT_GGUF,
    _more_fields,
    unused=LATENT_KEYS | {"attention.q_lora_rank", "expert_weights_norm", "nextn_predict_layers", _LOG},
)

FAMILY = Family(
    name="DeepSeek-V3",
    architectures=(DeepseekV3Config.architecture,),
    model_types=(DeepseekV3Config.model_type, "kimi_k2"),
    config=DeepseekV3Config,
    read=DeepseekV3Config.from_dict,
    init=init,
    published=published_name,
    formats_in_headers=True,  # the published `eh_proj` is in bfloat16, of which the config says nothing
    skips=lambda name, config: _of_mtp(name, config) is not None,
    copies=shared_copy,
    mtp=mtp_layer,
    mtp_layers=lambda config: config.num_nextn_predict_layers,
    with_mtp_layers=lambda config, count: dataclasses.replace(config, num_nextn_predict_layers=count),
    gguf=(GGUF,),
)
