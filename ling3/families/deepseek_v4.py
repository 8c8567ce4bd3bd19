"""DeepSeek-V4 (`DeepseekV4ForCausalLM`): several residual streams, attention to a window and to compressed entries."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.config_fields import Only, as_object, check, field, pick, published, read, too_large
from ling3.families.family import Family, Place
from ling3.families.rope_scaling import RopeScaling
from ling3.families.transformer import count, size
from ling3.layers.csa import CSA, CSAConfig
from ling3.layers.hyper import HyperConfig, HyperConnection, HyperHead
from ling3.layers.linear import Linear
from ling3.layers.moe import MoE, MoEConfig, RouterScores
from ling3.layers.norm import RMSNorm
from ling3.layers.rope import Rope
from ling3.model import CausalLM, Decoder, DecoderLayer

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
LayerType = Literal["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
"""Attention to the window alone, also to entries that an indexer chooses, or to the window and all entries."""
RATIOS = {SPARSE: 4, HEAVY: 128}
"""Tokens of an entry, where a file says no more."""
HASH_LAYERS = 3
"""Layers that look their experts up by token id, where a file says no more."""


def _layer_types(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """`layer_types`, or the kinds of the published `compress_ratios`; entries of layers after the last are cut off."""
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
    """`num_hash_layers`, or how many of `mlp_layer_types` are hashed; these come first."""
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
    """`qk_rope_head_dim`, or transformers' share of the head."""
    given, share = pick(raw, ("qk_rope_head_dim", "rope_head_dim"), problems), raw.get("partial_rotary_factor")
    if given is None and isinstance(share, float | int) and isinstance(raw.get("head_dim"), int):
        return int(raw["head_dim"] * share)
    return given


def _theta(own: str, kind: str) -> Any:
    return lambda raw, problems: pick(_with_nested(raw), (own, f"rope_parameters.{kind}.rope_theta"), problems)


def _with_nested(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The file, with the two parts of transformers' `rope_parameters` as objects of their own."""
    parts = raw.get("rope_parameters")
    parts = parts if isinstance(parts, Mapping) else {}
    nested = {f"rope_parameters.{kind}": parts.get(kind) for kind in ("main", "compress")}
    return {**raw, **nested}


def _scaling(raw: Mapping[str, Any], problems: list[str]) -> Any:
    """Of the layers with compressed entries: `rope_scaling`, or what transformers calls it."""
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


@dataclasses.dataclass(frozen=True)
class DeepseekV4Config:
    """DeepSeek-V4's fields, in the published names where there is one. Sizes are in channels. Raises ConfigError."""

    # `check` names what is wrong; the import hook's type check would come before it.
    __no_type_check__ = True

    vocab_size: int = field(ge=1, le=2**24)
    hidden_size: int = size(aliases=("dim",))
    num_hidden_layers: int = field(ge=1, le=1000, aliases=("n_layers",))
    num_attention_heads: int = count(aliases=("n_heads",))
    head_dim: int = size()
    qk_rope_head_dim: int = field(ge=2, le=2**20, read=_rope_dim, aliases=("partial_rotary_factor", "rope_head_dim"))
    """The last channels of a head, which are rotated."""
    q_lora_rank: int = size()
    o_groups: int = count()
    o_lora_rank: int = size()
    sliding_window: int = field(ge=1, aliases=("window_size",))
    """Tokens that a query attends to one by one, its own among them."""
    layer_types: tuple[LayerType, ...] = field(
        per_layer=True, read=_layer_types, aliases=("compress_ratios",), expected="a list of layer types, one per layer"
    )
    compress_rate_csa: int = field(ge=1, read=_ratio(SPARSE, "compress_rate_csa"), aliases=("compress_rates",))
    """Tokens of an entry in layers that choose them; these entries overlap."""
    compress_rate_hca: int = field(ge=1, read=_ratio(HEAVY, "compress_rate_hca"))
    """Tokens of an entry in the heavily compressed layers."""
    index_n_heads: int = count()
    index_head_dim: int = size()
    index_topk: int = field(ge=1, le=2**20)
    """Entries that the indexer chooses for a query."""
    n_routed_experts: int = count(aliases=("num_local_experts",))
    num_experts_per_tok: int = count(aliases=("n_activated_experts",))
    moe_intermediate_size: int = size(aliases=("moe_inter_dim", "intermediate_size"))
    num_hash_layers: int = field(ge=0, le=1000, read=_hash_layers, aliases=("mlp_layer_types", "n_hash_layers"))
    """The first layers, which look their experts up by token id."""
    routed_scaling_factor: float = field(gt=0, absent=1.5, aliases=("route_scale",))
    scoring_func: RouterScores = field(absent="sqrtsoftplus", aliases=("score_func",))
    swiglu_limit: float = field(ge=0, absent=10.0)
    """Cap of the gate before silu, and of ±up, in the routed experts; 0 for none."""
    shared_swiglu_limit: float = field(ge=0, absent=lambda values: values["swiglu_limit"])
    hc_mult: int = field(ge=1, le=64, absent=4)
    """Residual streams."""
    hc_sinkhorn_iters: int = field(ge=1, le=1000, absent=20)
    hc_eps: float = field(gt=0, lt=1, absent=1e-6)
    rms_norm_eps: float = field(gt=0, lt=1, absent=1e-6, aliases=("norm_eps",))
    max_position_embeddings: int = field(ge=1, le=2**31 - 1, absent=2**20)
    rope_theta: float = field(gt=1, absent=10000.0, read=_theta("rope_theta", "main"))
    compress_rope_theta: float = field(gt=1, absent=160000.0, read=_theta("compress_rope_theta", "compress"))
    rope_scaling: RopeScaling | None = field(read=_scaling, aliases=("rope_parameters", "compress_rope_parameters"))
    """Of the layers with compressed entries."""
    initializer_range: float = field(gt=0, absent=0.02)
    bos_token_id: int | None = field(ge=0, le=2**31 - 1)
    eos_token_id: tuple[int, ...] = field(ge=0, le=2**31 - 1, single=True, absent=())

    def __post_init__(self) -> None:
        check(self, self._misfits)

    def _misfits(self) -> Iterable[str]:
        """Problems of fields that are valid by themselves and do not fit together."""
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
        """Tokens of a compressed entry in 0-based `layer`; None where there is none."""
        return {SPARSE: self.compress_rate_csa, HEAVY: self.compress_rate_hca}.get(self.layer_types[layer])

    def rope(self, layer: int) -> Rope:
        """The rotation in 0-based `layer`: with another base, and scaled, where there are compressed entries."""
        if self.ratio(layer) is None:
            return Rope.plain(self.rope_theta, self.qk_rope_head_dim, interleaved=True)
        plain = Rope.plain(self.compress_rope_theta, self.qk_rope_head_dim, interleaved=True)
        if self.rope_scaling is None:
            return plain
        sizes = (self.compress_rope_theta, self.qk_rope_head_dim, self.max_position_embeddings)
        return dataclasses.replace(plain, frequencies=self.rope_scaling.rope(*sizes).frequencies)

    @staticmethod
    def from_dict(raw: object, source: str = "config.json") -> "DeepseekV4Config":
        """The config in the JSON object `raw`, every field of which is accounted for; `source` is for errors."""
        return read(DeepseekV4Config, as_object(raw, source), source, only=ONLY, derived=DERIVED, harmless=UNUSED)

    def to_dict(self) -> dict[str, Any]:
        """A `config.json` that the authors' code and transformers read."""
        names = {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
        scaling = self.rope_scaling
        own = {**published(self, ONLY), "rope_scaling": None if scaling is None else scaling.to_dict()}
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
"""Published fields of which the code computes one value alone."""

DERIVED = {
    "compress_rates": lambda c: {SPARSE: c.compress_rate_csa, HEAVY: c.compress_rate_hca},
    "mlp_layer_types": lambda c: ["hash_moe" if i < c.num_hash_layers else "moe" for i in range(c.num_hidden_layers)],
}
"""What repeats other fields."""

UNUSED = (
    "dspark_config",
    "expert_dtype",
    "index_topk_freq",
    "num_nextn_predict_layers",
    "quantization_config",
    "router_jitter_noise",
)
"""Training's, or of multi-token prediction; what the weights are stored as is in the files' headers."""


def init(config: DeepseekV4Config, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, routing biases, sinks and the like 0.

    Norms, routers, hyper-connections, sinks and position biases are float32 whatever the dtype.
    """
    embedding, head, collapse, *keys = jax.random.split(key, 3 + config.num_hidden_layers)
    sizes = (config.vocab_size, config.hidden_size)
    options = {"dtype": dtype, "std": config.initializer_range, "axes": ("vocab", "hidden")}
    streams = _hyper(config)
    model = Decoder(
        Linear.init(*sizes, key=embedding, **options),
        tuple(_layer(config, i, key=own, dtype=dtype) for i, own in enumerate(keys)),
        RMSNorm.init(config.hidden_size, config.rms_norm_eps),
        None if streams is None else HyperHead.init(streams, key=collapse),
    )
    return CausalLM(model, Linear.init(*sizes, key=head, **options), config)


def _layer(config: DeepseekV4Config, layer: int, *, key: PRNGKeyArray, dtype: DTypeLike) -> DecoderLayer:
    """0-based `layer` of the config's schedule."""
    attention, feed_forward, first, second = jax.random.split(key, 4)
    norms = (RMSNorm.init(config.hidden_size, config.rms_norm_eps) for _ in range(2))
    streams = _hyper(config)
    return DecoderLayer(
        next(norms),
        CSA.init(_attention(config, layer), key=attention, dtype=dtype),
        next(norms),
        MoE.init(_experts(config, layer), key=feed_forward, dtype=dtype),
        *(None if streams is None else HyperConnection.init(streams, key=own) for own in (first, second)),
    )


def _hyper(config: DeepseekV4Config) -> HyperConfig | None:
    """None for a single stream: a plain residual."""
    if config.hc_mult == 1:
        return None
    return HyperConfig(
        hidden=config.hidden_size,
        streams=config.hc_mult,
        iterations=config.hc_sinkhorn_iters,
        eps=config.hc_eps,
        norm_eps=config.rms_norm_eps,
        std=config.initializer_range,
    )


def _attention(config: DeepseekV4Config, layer: int) -> CSAConfig:
    sparse = config.layer_types[layer] == SPARSE
    return CSAConfig(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        q_rank=config.q_lora_rank,
        groups=config.o_groups,
        o_rank=config.o_lora_rank,
        window=config.sliding_window,
        eps=config.rms_norm_eps,
        std=config.initializer_range,
        rope=config.rope(layer),
        ratio=config.ratio(layer),
        overlaps=sparse,
        index_heads=config.index_n_heads if sparse else 0,
        index_dim=config.index_head_dim,
        index_top=config.index_topk,
    )


def _experts(config: DeepseekV4Config, layer: int) -> MoEConfig:
    return MoEConfig(
        hidden=config.hidden_size,
        experts=config.n_routed_experts,
        intermediate=config.moe_intermediate_size,
        shared=config.moe_intermediate_size,
        top_k=config.num_experts_per_tok,
        groups=1,
        top_groups=1,
        normalize=True,
        scaling=config.routed_scaling_factor,
        std=config.initializer_range,
        scores=config.scoring_func,
        limit=config.swiglu_limit,
        shared_limit=config.shared_swiglu_limit,
        limit_first=True,
        hashed=config.vocab_size if layer < config.num_hash_layers else None,
    )


_NAMES = (
    (r"^model\.word_embeddings\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.", ""),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.attention\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.gate\.expert_bias$", ".gate.bias"),
    (r"experts(\.\d+)?\.gate_proj\.", r"experts\1.w1."),
    (r"experts(\.\d+)?\.up_proj\.", r"experts\1.w3."),
    (r"experts(\.\d+)?\.down_proj\.", r"experts\1.w2."),
)
"""From the tree's names to the release's."""


def _renamed(rules: Iterable[tuple[str, str]], name: str) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _saved_by_transformers(name: str, shape: tuple[int, ...], config: DeepseekV4Config) -> Place:
    """The layout that transformers writes by default: the release's, but for the top and one norm."""
    return Place(_renamed(_SAVED_NAMES, name))


def _in_transformers(name: str, shape: tuple[int, ...], config: DeepseekV4Config) -> Place:
    """The names of transformers' modules, whose experts are stacked, each one's gate above its up."""
    name = _renamed(_MODULE_NAMES, _renamed(_SAVED_NAMES, name))
    if not (routed := re.fullmatch(r"(.*\.experts)\.(\d+)\.w([123])\.weight", name)):
        return Place(name)
    stack, expert, part = routed[1], int(routed[2]), routed[3]
    experts, inner, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
    if part == "2":
        return Place(f"{stack}.down_proj", (experts, hidden, inner), expert * hidden * inner)
    before = (2 * expert + (part == "3")) * inner * hidden
    return Place(f"{stack}.gate_up_proj", (experts, 2 * inner, hidden), before)


_SAVED_NAMES = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^hc_head_", "model.hc_head.hc_"),
    (r"^(norm|layers)\.", r"model.\1."),
    (r"\.attn\.kv_norm\.", ".attn.norm."),
)
"""From the release's names to those that transformers writes by default."""

_MODULE_NAMES = (
    (r"^head\.", "lm_head."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attn\.", ".self_attn."),
    (r"\.ffn\.", ".mlp."),
    (r"\.indexer\.compressor\.", ".compressor.indexer."),
    (r"\.indexer\.weights_proj\.", ".compressor.indexer.scorer.weights_proj."),
    (r"\.indexer\.wq_b\.", ".compressor.indexer.q_b_proj."),
    (r"(self_attn|compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.ape$", ".position_bias"),
    (r"\.wq_([ab])\.", r".q_\1_proj."),
    (r"\.wo_([ab])\.", r".o_\1_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"shared_experts\.w1\.", "shared_experts.gate_proj."),
    (r"shared_experts\.w3\.", "shared_experts.up_proj."),
    (r"shared_experts\.w2\.", "shared_experts.down_proj."),
)
"""From those to the names of transformers' modules."""


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """`wo_a` is one matrix in the checkpoint, its groups below each other."""
    return (shape[0] * shape[1], *shape[2:]) if name.endswith(".wo_a.weight") else shape


def _strange_tables(model: CausalLM) -> Iterable[str]:
    """Tables of experts by token id that name experts which are not there."""
    for i, layer in enumerate(model.model.layers):
        assert isinstance(layer.mlp, MoE)
        table, last = layer.mlp.gate.tid2eid, layer.mlp.experts.count - 1
        if table is not None and (table.min() < 0 or table.max() > last):
            at = f"layers.{i}.ffn.gate.tid2eid"
            yield f"{at}: found {int(table.min())} to {int(table.max())}; expected experts from 0 to {last}"


FAMILY = Family(
    name="DeepSeek-V4",
    architectures=("DeepseekV4ForCausalLM",),
    model_types=("deepseek_v4",),
    config=DeepseekV4Config,
    read=DeepseekV4Config.from_dict,
    init=init,
    published=lambda name, config: _renamed(_NAMES, name),
    published_shape=_shape,
    layouts=(_saved_by_transformers, _in_transformers),
    misfits=_strange_tables,
    dequantizes=True,
    skips=lambda name, config: name.startswith("mtp."),
)
