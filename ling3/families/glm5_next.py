"""GLM-5.3-Flash's text model (`Glm5NextForConditionalGeneration`): KDA and indexed MLA over residual streams."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, no_type_check

import jax
from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families import kimi_linear, transformer
from ling3.families.config_fields import Only, check, field, found, published, read, rules, too_large
from ling3.families.deepseek_v3 import LATENT_GGUF, moe_config
from ling3.families.deepseek_v4 import hyper_config
from ling3.families.family import Family
from ling3.families.gguf import LATENT_KEYS, SCHEDULE, Contents, GgufArchitecture, Keys, latent_fields, schedule
from ling3.families.quantization import Quantization
from ling3.families.qwen3_5 import NESTED, text_of
from ling3.families.transformer import count, size
from ling3.layers.hyper import HyperConnection, HyperMean
from ling3.layers.indexed_mla import IndexedMLA, PoolIndexerConfig
from ling3.layers.kda import KDA
from ling3.layers.mla import MLAConfig
from ling3.layers.mlp import MLP
from ling3.layers.moe import MoE
from ling3.model import CausalLM, FeedForward, Mixer
from ling3.ops.swiglu import SwiGLU
from ling3.runtime.quoting import shown

LINEAR, INDEXED = "linear_attention", "deepseek_sparse_attention"
_SYNONYMS = {"full_attention": INDEXED, "indexed_attention": INDEXED}
"""The words of other files for `INDEXED`."""


@dataclasses.dataclass(frozen=True)
class BoundedLinearAttention(kimi_linear.LinearAttention):
    """`linear_attn_config`: KDA's sizes and bound, and the 0-based layers of each kind of attention."""

    __no_type_check__ = True

    kda_layers: tuple[int, ...] = field(ge=0)
    full_attn_layers: tuple[int, ...] = field(ge=0)
    gate_lower_bound: float = field(lt=0)
    """The lower bound of KDA's log decay, in nats."""


def _linear_attention(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """`linear_attn_config`, or the same object from the fields that transformers writes instead."""
    own = kimi_linear.linear_attention(raw, problems, first=0)
    if not isinstance(own, Mapping):
        return own
    own = {"gate_lower_bound": raw.get("linear_lower_bound"), **own}
    if (safe := own.pop("safe_gate", True)) is not True:
        problems.append(f"linear_attn_config.safe_gate: {found(safe)}; expected true: the decay has a lower bound")
    return own


def _mlp_layer_types(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """`mlp_layer_types`, or by `first_k_dense_replace`: that many dense layers, and then sparse ones."""
    dense, layers = raw.get("first_k_dense_replace"), raw.get("num_hidden_layers")
    if raw.get("mlp_layer_types") is not None or type(dense) is not int or type(layers) is not int:
        return raw.get("mlp_layer_types")
    return ["dense" if i < dense else "sparse" for i in range(min(layers, 1000))]


@dataclasses.dataclass(frozen=True)
class Glm5NextConfig:
    """The fields of GLM-5.3-Flash's text model under the published names. Sizes are in channels. Raises ConfigError."""

    # The import hook's type check would come before `check`, whose errors name the field to correct.
    __no_type_check__ = True

    vocab_size: int = field(ge=1, le=2**24)
    hidden_size: int = size()
    intermediate_size: int = size()
    num_hidden_layers: int = field(ge=1, le=1000)
    linear_attn_config: BoundedLinearAttention = field(
        read=_linear_attention,
        expected="an object with the sizes and the bound of KDA and the 0-based layers of either attention",
    )
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] = field(per_layer=True, read=_mlp_layer_types)
    num_attention_heads: int = count()
    """The heads of MLA; KDA's are in `linear_attn_config`."""
    q_lora_rank: int = size()
    kv_lora_rank: int = size()
    qk_nope_head_dim: int = count()
    v_head_dim: int = count()
    index_n_heads: int = count()
    index_head_dim: int = size()
    index_topk: int = field(ge=1, le=2**20)
    """The number of tokens that the indexer selects for a query, beside those of the incomplete pool."""
    index_kpool: int = field(ge=1, le=2**10)
    """Tokens in a pool, which are selected together."""
    n_routed_experts: int = count(aliases=("num_local_experts",))
    n_shared_experts: int = field(ge=0, le=64)
    num_experts_per_tok: int = count()
    moe_intermediate_size: int = size()
    n_group: int = count(absent=1)
    topk_group: int = count(absent=1)
    norm_topk_prob: bool = field(absent=True)
    routed_scaling_factor: float = field(gt=0)
    swiglu_limit: float = field(gt=0)
    """In every feed-forward, the upper limit of the gate before silu, and the limit of |up|."""
    hc_mult: int = field(ge=1, le=64)
    """The number of residual streams."""
    hc_sinkhorn_iters: int = field(ge=1, le=1000)
    hc_eps: float = field(gt=0, lt=1)
    rms_norm_eps: float = field(gt=0, lt=1, absent=1e-5)
    max_position_embeddings: int = field(ge=1, le=2**31 - 1)
    tie_word_embeddings: bool = field(absent=False)
    initializer_range: float = field(gt=0, absent=0.02)
    bos_token_id: int | None = field(ge=0, le=2**31 - 1)
    eos_token_id: tuple[int, ...] = field(ge=0, le=2**31 - 1, single=True, absent=())
    pad_token_id: int | None = field(ge=-1, le=2**31 - 1)
    """Unused, but written: without it transformers takes the id that the published vocabulary has for it."""
    num_nextn_predict_layers: int = field(ge=0, le=64, absent=0)
    """The number of multi-token-prediction layers, which `load` skips."""
    quantization_config: Quantization | None = field(
        None,
        kw_only=True,
        convert=Quantization.read,
        expected="null, or an object with the quant_method fp8 or compressed-tensors",
    )

    def __post_init__(self) -> None:
        check(self, self._misfits)

    def _misfits(self) -> Iterable[str]:
        """Problems between fields that are valid by themselves."""
        layers = self.num_hidden_layers
        yield from kimi_linear.misplaced_layers(self.linear_attn_config, 0, layers - 1)
        if self.index_topk % self.index_kpool:
            expected = f"a multiple of index_kpool, {self.index_kpool}, as tokens are selected in pools"
            yield f"index_topk: found {self.index_topk}; expected {expected}; correct it"
        yield from transformer.routing_misfits(self, "n_routed_experts", "n_group", "num_experts_per_tok")
        experts = 3 * self.n_routed_experts * self.hidden_size * self.moe_intermediate_size
        yield from too_large(2 * self.vocab_size * self.hidden_size + layers * experts)

    def attention_kind(self, layer: int) -> str:
        """The kind of attention in the 0-based `layer`, in the published words."""
        return LINEAR if layer in self.linear_attn_config.kda_layers else INDEXED

    @staticmethod
    def from_dict(raw: object, source: str = "config.json") -> "Glm5NextConfig":
        """Reads the text model's fields from a whole or a flat config, accounting for each; errors name `source`."""
        text = text_of(raw, source, rules(Glm5NextConfig).keys() - {"pad_token_id"})
        if isinstance(kinds := text.get("layer_types"), list):
            text["layer_types"] = [_SYNONYMS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
        return read(Glm5NextConfig, text, source, only=ONLY, derived=DERIVED, harmless=UNUSED)

    def to_dict(self) -> dict[str, Any]:
        """A `config.json` of the whole model, whose `text_config` has the fields; it says nothing of vision."""
        text = {
            "model_type": "glm5_next_text",
            **published(self, ONLY),
            "linear_attn_config": published(self.linear_attn_config, {}),
            **{name: value(self) for name, value in DERIVED.items()},
        }
        top = {name: text.pop(name) for name in ("tie_word_embeddings", "quantization_config") if name in text}
        return {"architectures": [ARCHITECTURE], "model_type": "glm5_next", **top, "text_config": text}


ARCHITECTURE = "Glm5NextForConditionalGeneration"


def _all(word: str, listed: object) -> bool:
    """True for a list, or a string of letters, that says nothing but this word."""
    return isinstance(listed, list | str) and set(listed) == {word}


ONLY = {
    "attention_bias": Only((False, None), "no linear map has a bias"),
    "attn_output_gate": Only((False, None), "MLA has no output gate"),
    "hidden_act": Only(("silu",), "every MLP is a SwiGLU", written=True),
    "index_kpool_always_select_tail": Only((True, None), "the incomplete pool is always seen", written=True),
    "index_kpool_compress": Only((True, None), "a pool has one key", written=True),
    "index_topk_freq": Only((1, None), "each layer runs its indexer"),
    "index_topk_pattern": Only((None,), "each layer runs its indexer", accepts=lambda own: _all("F", own)),
    "indexer_types": Only(
        (["full"], None), "each layer runs its indexer; none shares another's", accepts=lambda own: _all("full", own)
    ),
    "mhc": Only((True, None), "residual streams are mixed by hyper-connections"),
    "mla_use_nope": Only((True, None), "nothing is rotated", written=True),
    "moe_layer_freq": Only((1, None), "every layer after the dense ones is sparse"),
    "moe_router_dtype": Only(("float32", None), "the router is computed in float32"),
    "qk_rope_head_dim": Only((0, None), "no channel is rotated", written=True),
    "scoring_func": Only(("sigmoid", None), "the router's scores are sigmoids", written=True),
    "topk_method": Only(("noaux_tc", None), "experts are chosen in groups, by biased scores", written=True),
}
"""Published fields of which ling3 computes only one value."""

DERIVED = {
    "first_k_dense_replace": lambda c: [*c.mlp_layer_types, "sparse"].index("sparse"),
    "layer_types": lambda c: [c.attention_kind(i) for i in range(c.num_hidden_layers)],
    "linear_conv_kernel_dim": lambda c: c.linear_attn_config.short_conv_kernel_size,
    "linear_head_dim": lambda c: c.linear_attn_config.head_dim,
    "linear_lower_bound": lambda c: c.linear_attn_config.gate_lower_bound,
    "linear_num_heads": lambda c: c.linear_attn_config.num_heads,
    "num_key_value_heads": lambda c: c.num_attention_heads,
    "qk_head_dim": lambda c: c.qk_nope_head_dim,
}
"""Published fields that repeat others, as functions of the config."""

UNUSED = (
    *("head_dim", "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "indexer_rope_interleave"),
    *("index_share_for_mtp_iteration", "index_skip_topk_offset"),
)
"""Ignored fields: no layer uses RoPE, none shares an indexer's choice, and multi-token prediction is not computed."""


def init(config: Glm5NextConfig, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, routing biases 0.

    Norms, convolutions, routers, hyper-connections and KDA's `A_log` and `dt_bias` are float32 whatever the dtype.
    """
    swiglu = SwiGLU(config.swiglu_limit, limit_first=True)

    def mixer(layer: int, own: PRNGKeyArray) -> Mixer:
        if config.attention_kind(layer) == LINEAR:
            kda = kimi_linear.kda_config(config, config.linear_attn_config.gate_lower_bound)
            return KDA.init(kda, key=own, dtype=dtype)
        return IndexedMLA.init(_mla(config), _indexer(config), key=own, dtype=dtype)

    def feed_forward(layer: int, own: PRNGKeyArray) -> FeedForward:
        if config.mlp_layer_types[layer] == "sparse":
            return MoE.init(moe_config(config, swiglu), key=own, dtype=dtype)
        sizes = (config.hidden_size, config.intermediate_size)
        return MLP.init(*sizes, key=own, dtype=dtype, std=config.initializer_range, swiglu=swiglu)

    return _with_streams(
        transformer.build(config, mixer, feed_forward, key=key, dtype=dtype), jax.random.fold_in(key, 1)
    )


def _with_streams(model: CausalLM, key: PRNGKeyArray) -> CausalLM:
    """The model with hyper-connections around each sublayer, and the mean of the streams before the last norm."""
    config = model.config
    streams, decoder, layers = hyper_config(config), model.model, []
    for layer, own in zip(decoder.layers, jax.random.split(key, len(decoder.layers)), strict=True):
        first, second = (HyperConnection.init(streams, key=each) for each in jax.random.split(own))
        layers.append(dataclasses.replace(layer, attn_hc=first, ffn_hc=second))
    decoder = dataclasses.replace(decoder, layers=tuple(layers), hc_head=HyperMean(config.hc_mult))
    return dataclasses.replace(model, model=decoder)


def _mla(config: Glm5NextConfig) -> MLAConfig:
    return MLAConfig(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        q_rank=config.q_lora_rank,
        latent=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=0,
        value=config.v_head_dim,
        eps=config.rms_norm_eps,
        std=config.initializer_range,
        gate_law="none",
    )


def _indexer(config: Glm5NextConfig) -> PoolIndexerConfig:
    return PoolIndexerConfig(
        hidden=config.hidden_size,
        q_rank=config.q_lora_rank,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        pool=config.index_kpool,
        top=config.index_topk // config.index_kpool,
        std=config.initializer_range,
    )


_NAMES = (
    (r"\.attention\.mla\.dense\.", ".self_attn.o_proj."),
    (r"\.attention\.mla\.", ".self_attn."),
    (r"\.attention\.([fg])_proj\.([ab])_proj\.", r".self_attn.\1_\2_proj."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"^model\.", NESTED),
)
"""Regexes and replacements that turn the tree's names into the published ones, in this order."""


@no_type_check  # called for every tensor
def published_name(name: str, config: Glm5NextConfig) -> str:
    """The checkpoint's name of the tensor at the path `name` of the module tree."""
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def skipped(name: str, config: Glm5NextConfig) -> bool:
    """True for a tensor of the vision model, or of a multi-token-prediction layer."""
    first = config.num_hidden_layers
    further = (f"{NESTED}layers.{first + i}." for i in range(config.num_nextn_predict_layers))
    return name.startswith(("model.visual.", *further))


_CLAMPS, _INDEXERS = ("swiglu_clamp_exp", "swiglu_clamp_shexp"), "attention.indexer.types"


def _more_fields(contents: Contents, keys: Keys) -> dict[str, Any]:
    """The fields of a GGUF file's config that follow from several keys, or from tensors."""
    fields = latent_fields(keys)
    full = schedule(keys, fields["num_hidden_layers"])
    limits = {limit for key in _CLAMPS for limit in keys.get(key, ())}
    if len(limits) != 1:
        raise ValueError(f"{' and '.join(_CLAMPS)}: found {shown(sorted(limits))}; expected one limit for all layers")
    linear = {
        "kda_layers": [layer for layer, own in enumerate(full) if not own],
        "full_attn_layers": [layer for layer, own in enumerate(full) if own],
        "num_heads": keys.get("attention.head_count"),
        "head_dim": keys.get("kda.head_dim"),
        "short_conv_kernel_size": keys.get("ssm.conv_kernel", 4),
        "gate_lower_bound": keys.get("kda.gate_lower_bound"),
    }
    return {
        **fields,
        "linear_attn_config": linear,
        "swiglu_limit": limits.pop(),
        "indexer_types": ["full" if own else "shared" for own in keys.get(_INDEXERS, ())] or None,
        "tie_word_embeddings": "output.weight" not in contents.tensors,
    }


GGUF = GgufArchitecture(
    "glm5-next",
    {
        **LATENT_GGUF,
        "attention.q_lora_rank": "q_lora_rank",
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
        "attention.indexer.kpool": "index_kpool",
        "attention.indexer.kpool_select_tail": "index_kpool_always_select_tail",
        "hyper_connection.count": "hc_mult",
        "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
        "hyper_connection.epsilon": "hc_eps",
        "expert_weights_norm": "norm_topk_prob",
        "nextn_predict_layers": "num_nextn_predict_layers",
    },
    _more_fields,
    unused=LATENT_KEYS
    | {*_CLAMPS, _INDEXERS, "ssm.conv_kernel", "kda.head_dim", "kda.gate_lower_bound", "attention.layer_norm_epsilon"},
    lists=frozenset((SCHEDULE, _INDEXERS, *_CLAMPS)),
)

FAMILY = Family(
    name="GLM-5.3-Flash",
    architectures=(ARCHITECTURE,),
    model_types=("glm5_next", "glm5_next_text"),
    config=Glm5NextConfig,
    read=Glm5NextConfig.from_dict,
    init=init,
    published=published_name,
    module=lambda name, config: re.sub(r"\.self_attn\.(f_[ab]_proj)$", r".self_attn.forget_gate.\1", name),
    formats_in_headers=True,  # published FP8 files have KDA, indexers and `kv_b_proj` in bfloat16
    skips=skipped,
    copies=lambda name, config: (
        f"{NESTED}embed_tokens.weight" if config.tie_word_embeddings and name == "lm_head.weight" else None
    ),
    gguf=(GGUF,),
)
