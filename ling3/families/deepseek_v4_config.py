"""DeepSeek-V4's config, read in the field names of the release and of transformers."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ling3.families.config_fields import Only, as_object, check, field, pick, published, read, too_large
from ling3.families.quantization import Quantization
from ling3.families.rope_scaling import RopeScaling
from ling3.families.transformer import count, size
from ling3.layers.moe import RouterScores
from ling3.layers.rope import Rope

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
LayerType = Literal["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
"""Attention to the sliding window alone, also to compressed entries that an indexer selects, or also to all of them."""
RATIOS = {SPARSE: 4, HEAVY: 128}
"""The default numbers of tokens per compressed entry."""
HASH_LAYERS = 3
"""The default number of layers that look up their experts by token id."""


def _layer_types(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """`layer_types`, or the types that the published `compress_ratios` imply, without entries after the last layer."""
    layers = pick(raw, ("num_hidden_layers", "n_layers"), problems)
    given, ratios = raw.get("layer_types"), raw.get("compress_ratios")
    if given is None and isinstance(ratios, list):
        kinds = {0: SLIDING, **{ratio: kind for kind, ratio in RATIOS.items()}}
        if unknown := sorted({str(ratio) for ratio in ratios if ratio not in kinds}):
            problems.append(f"compress_ratios: found {', '.join(unknown)}; expected 0, 4 or 128 for each layer")
            return None
        given = [kinds[ratio] for ratio in ratios]
    return given[:layers] if isinstance(given, list) and isinstance(layers, int) else given


def _ratio(kind: str, alias: str) -> Any:
    def read_ratio(raw: Mapping[str, Any], problems: list[str]) -> Any:
        given = pick(raw, (f"compress_rates.{kind}", alias), problems)
        return RATIOS[kind] if given is None else given

    return read_ratio


def _hash_layers(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """`num_hash_layers`, or the number of `hash_moe` in `mlp_layer_types`, where these must come first."""
    given, listed = pick(raw, ("num_hash_layers", "n_hash_layers"), problems), raw.get("mlp_layer_types")
    if isinstance(listed, list):
        hashed = sum(kind == "hash_moe" for kind in listed)
        if listed != ["hash_moe"] * hashed + ["moe"] * (len(listed) - hashed):
            problems.append("mlp_layer_types: expected hash_moe for the first layers, and moe for the others")
        if given not in (None, hashed):
            problems.append(f"num_hash_layers: found {given}; expected {hashed}, as in mlp_layer_types; correct one")
        return hashed
    layers = pick(raw, ("num_hidden_layers", "n_layers"), [])
    return min(HASH_LAYERS, layers) if given is None and isinstance(layers, int) else given


def _rope_dim(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """`qk_rope_head_dim`, or `head_dim` times transformers' `partial_rotary_factor`."""
    given, share = pick(raw, ("qk_rope_head_dim", "rope_head_dim"), problems), raw.get("partial_rotary_factor")
    if given is None and isinstance(share, float | int) and isinstance(raw.get("head_dim"), int):
        return int(raw["head_dim"] * share)
    return given


def _theta(own: str, kind: str) -> Any:
    return lambda raw, problems: pick(raw, (own, f"rope_parameters.{kind}.rope_theta"), problems)


def _scaling(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """The RoPE scaling of layers with compressed entries, from `rope_scaling` or the fields of transformers."""
    parts = raw.get("rope_parameters")
    nested = parts.get("compress") if isinstance(parts, Mapping) else None
    flat = parts if isinstance(parts, Mapping) and not {"main", "compress"} & {*parts} else None
    given = [p for p in (raw.get("rope_scaling"), nested, flat, raw.get("compress_rope_parameters")) if p]
    if not given or not isinstance(given[0], Mapping):
        return given[0] if given else None
    own = {name: value for name, value in given[0].items() if name not in ("rope_theta", "partial_rotary_factor")}
    factor = own.pop("attention_factor", None)
    if factor not in (None, 1, 1.0):
        problems.append(f"rope_scaling.attention_factor: found {factor}; expected 1: queries and keys are not scaled")
    kind = own.get("rope_type", own.get("type"))
    return None if kind in (None, "default") else own


IN_FLOATS = ("embed", "head", ".*compressor", "weights_proj")
"""Modules that are not quantized, if a config does not list them."""


def _quantization(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """`quantization_config`, with the release's top-level `expert_dtype` moved into it."""
    del problems
    given = raw.get("quantization_config")
    if not given or not isinstance(given, Mapping):
        return given
    own = dict(given)
    experts = own.pop("expert_dtype", raw.get("expert_dtype"))
    return own if experts is None else own | {"expert_dtype": experts}


def _stored(raw: Any) -> Quantization | None:
    own = Quantization.read(raw)
    if own is None or own.method == "headers":
        return own
    if own.method != "fp8":
        raise TypeError("another quant_method")
    named = own.to_dict().keys() & {"modules_to_not_convert", "ignored_layers"}
    return own if named else dataclasses.replace(own, ignore=IN_FLOATS)


@dataclasses.dataclass(frozen=True)
class DeepseekV4Config:
    """DeepSeek-V4's fields, under the published names if they have one. Sizes are in channels. Raises ConfigError."""

    # The import hook's type check would come before `check`, whose errors name the field to correct.
    __no_type_check__ = True

    vocab_size: int = field(ge=1, le=2**24)
    hidden_size: int = size(aliases=("dim",))
    num_hidden_layers: int = field(ge=1, le=1000, aliases=("n_layers",))
    num_attention_heads: int = count(aliases=("n_heads",))
    head_dim: int = size()
    qk_rope_head_dim: int = field(ge=2, le=2**20, read=_rope_dim, aliases=("partial_rotary_factor", "rope_head_dim"))
    """The number of channels of a head that are rotated, which are the last ones."""
    q_lora_rank: int = size()
    o_groups: int = count()
    o_lora_rank: int = size()
    sliding_window: int = field(ge=1, aliases=("window_size",))
    """The number of uncompressed tokens that a query attends to, its own included."""
    layer_types: tuple[LayerType, ...] = field(
        per_layer=True, read=_layer_types, aliases=("compress_ratios",), expected="a list of layer types, one per layer"
    )
    compress_rate_csa: int = field(ge=1, read=_ratio(SPARSE, "compress_rate_csa"), aliases=("compress_rates",))
    """Tokens per entry in layers with an indexer; neighbouring entries overlap."""
    compress_rate_hca: int = field(ge=1, read=_ratio(HEAVY, "compress_rate_hca"))
    """Tokens per entry in the heavily compressed layers."""
    index_n_heads: int = count()
    index_head_dim: int = size()
    index_topk: int = field(ge=1, le=2**20)
    """The number of entries that the indexer selects for a query."""
    n_routed_experts: int = count(aliases=("num_local_experts",))
    num_experts_per_tok: int = count(aliases=("n_activated_experts",))
    moe_intermediate_size: int = size(aliases=("moe_inter_dim", "intermediate_size"))
    num_hash_layers: int = field(ge=0, le=1000, read=_hash_layers, aliases=("mlp_layer_types", "n_hash_layers"))
    """The number of layers, from the first on, that look up their experts by token id."""
    routed_scaling_factor: float = field(gt=0, absent=1.5, aliases=("route_scale",))
    scoring_func: RouterScores = field(absent="sqrtsoftplus", aliases=("score_func",))
    swiglu_limit: float = field(ge=0, absent=10.0)
    """In the routed experts, the upper limit of the gate before silu, and the limit of |up|; 0 for none."""
    shared_swiglu_limit: float = field(ge=0, absent=lambda values: values["swiglu_limit"])
    hc_mult: int = field(ge=1, le=64, absent=4)
    """The number of residual streams."""
    hc_sinkhorn_iters: int = field(ge=1, le=1000, absent=20)
    hc_eps: float = field(gt=0, lt=1, absent=1e-6)
    rms_norm_eps: float = field(gt=0, lt=1, absent=1e-6, aliases=("norm_eps",))
    max_position_embeddings: int = field(ge=1, le=2**31 - 1, absent=2**20)
    rope_theta: float = field(gt=1, absent=10000.0, read=_theta("rope_theta", "main"))
    compress_rope_theta: float = field(gt=1, absent=160000.0, read=_theta("compress_rope_theta", "compress"))
    rope_scaling: RopeScaling | None = field(read=_scaling, aliases=("rope_parameters", "compress_rope_parameters"))
    """The RoPE scaling of layers with compressed entries; in others RoPE is unscaled."""
    initializer_range: float = field(gt=0, absent=0.02)
    bos_token_id: int | None = field(ge=0, le=2**31 - 1)
    eos_token_id: tuple[int, ...] = field(ge=0, le=2**31 - 1, single=True, absent=())
    quantization_config: Quantization | None = field(
        None,
        read=_quantization,
        convert=_stored,
        aliases=("expert_dtype",),
        expected="null, or an object with the quant_method fp8",
    )
    """Which matrices are stored in 8 or 4 bits; if the headers of a checkpoint's files differ, they decide."""

    def __post_init__(self) -> None:
        check(self, self._misfits)

    def _misfits(self) -> Iterable[str]:
        """Problems between fields that are valid by themselves."""
        heads, rope, experts = self.num_attention_heads, self.qk_rope_head_dim, self.n_routed_experts
        if rope % 2 or rope > min(self.head_dim, self.index_head_dim):
            most = min(self.head_dim, self.index_head_dim)
            yield f"qk_rope_head_dim: found {rope}; expected an even number up to {most}, the size of a head"
        if heads % self.o_groups:
            yield f"o_groups: found {self.o_groups}; expected a divisor of num_attention_heads, {heads}; correct it"
        if self.num_experts_per_tok > experts:
            found = self.num_experts_per_tok
            yield f"num_experts_per_tok: found {found}; expected at most n_routed_experts, {experts}; correct it"
        if self.num_hash_layers > self.num_hidden_layers:
            found = self.num_hash_layers
            yield f"num_hash_layers: found {found}; expected at most {self.num_hidden_layers}; correct it"
        attention = self.head_dim * heads * (self.q_lora_rank + self.o_lora_rank) + self.hidden_size * self.head_dim
        ffn = 3 * (experts + 1) * self.hidden_size * self.moe_intermediate_size
        yield from too_large(2 * self.vocab_size * self.hidden_size + self.num_hidden_layers * (attention + ffn))

    def ratio(self, layer: int) -> int | None:
        """Tokens per compressed entry in 0-based `layer`; None in a layer without compressed entries."""
        return {SPARSE: self.compress_rate_csa, HEAVY: self.compress_rate_hca}.get(self.layer_types[layer])

    def rope(self, layer: int) -> Rope:
        """The RoPE of 0-based `layer`: a layer with compressed entries has another base, and scaling."""
        if self.ratio(layer) is None:
            return Rope.plain(self.rope_theta, self.qk_rope_head_dim, interleaved=True)
        plain = Rope.plain(self.compress_rope_theta, self.qk_rope_head_dim, interleaved=True)
        if self.rope_scaling is None:
            return plain
        sizes = (self.compress_rope_theta, self.qk_rope_head_dim, self.max_position_embeddings)
        return dataclasses.replace(plain, frequencies=self.rope_scaling.rope(*sizes).frequencies)

    @staticmethod
    def from_dict(raw: object, source: str = "config.json") -> "DeepseekV4Config":
        """Reads the config from the JSON object `raw`, accounting for every field; errors name `source`."""
        return read(DeepseekV4Config, as_object(raw, source), source, only=ONLY, derived=DERIVED, harmless=UNUSED)

    def to_dict(self) -> dict[str, Any]:
        """A `config.json` that the authors' code and transformers read."""
        names = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
        scaling = self.rope_scaling
        own = {**published(self, ONLY), "rope_scaling": None if scaling is None else scaling.to_dict()}
        if experts := own.get("quantization_config", {}).pop("expert_dtype", None):
            own["expert_dtype"] = experts
        ratios = [self.ratio(i) or 0 for i in range(self.num_hidden_layers)]
        return names | own | {"compress_ratios": ratios} | {name: value(self) for name, value in DERIVED.items()}


ONLY = {
    "attention_bias": Only((False, None), "no linear map has a bias"),
    "hidden_act": Only(("silu", None), "every expert is a SwiGLU", written=True),
    "mlp_bias": Only((False, None), "no linear map has a bias"),
    "n_shared_experts": Only((1, None), "one expert is shared", written=True),
    "norm_topk_prob": Only((True, None), "the weights of a token's experts sum to routed_scaling_factor", written=True),
    "num_key_value_heads": Only((1, None), "one head is key and value of all", written=True),
    "tie_word_embeddings": Only((False, None), "the head has a matrix of its own", written=True),
    "topk_method": Only(("noaux_tc", None), "a bias chooses experts, and their scores weigh them", written=True),
}
"""Published fields of which ling3 computes only one value."""

DERIVED = {
    "compress_rates": lambda c: {SPARSE: c.compress_rate_csa, HEAVY: c.compress_rate_hca},
    "mlp_layer_types": lambda c: ["hash_moe" if i < c.num_hash_layers else "moe" for i in range(c.num_hidden_layers)],
}
"""Published fields that repeat others, as functions of the config."""

UNUSED = (
    "dspark_config",
    "index_topk_freq",
    "num_nextn_predict_layers",
    "router_jitter_noise",
)
"""Fields that are ignored, as they concern only training or multi-token prediction."""
