"""DeepSeek-V4 (`DeepseekV4ForCausalLM`): several residual streams, attention to a window and to compressed entries."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jaxtyping import DTypeLike, PRNGKeyArray

from ling3.families.deepseek_v4_config import SPARSE, DeepseekV4Config
from ling3.families.family import Family, Place
from ling3.layers.csa import CSA, CSAConfig
from ling3.layers.hyper import HyperConfig, HyperConnection, HyperHead
from ling3.layers.linear import Linear
from ling3.layers.moe import MoE, MoEConfig
from ling3.layers.norm import RMSNorm
from ling3.model import CausalLM, Decoder, DecoderLayer
from ling3.ops.swiglu import SwiGLU


def init(config: DeepseekV4Config, *, key: PRNGKeyArray, dtype: DTypeLike) -> CausalLM:
    """Random weights: matrices from N(0, initializer_range²) in `dtype`, norms 1, routing biases, sinks and the like 0.

    Norms, routers, hyper-connections, sinks and position biases are float32 whatever the dtype.
    """
    embedding, head, collapse, *keys = jax.random.split(key, 3 + config.num_hidden_layers)
    sizes = (config.vocab_size, config.hidden_size)
    options = {"dtype": dtype, "std": config.initializer_range, "axes": ("vocab", "hidden")}
    streams = None if config.hc_mult == 1 else hyper_config(config)
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
    streams = None if config.hc_mult == 1 else hyper_config(config)
    return DecoderLayer(
        next(norms),
        CSA.init(_attention(config, layer), key=attention, dtype=dtype),
        next(norms),
        MoE.init(_experts(config, layer), key=feed_forward, dtype=dtype),
        *(None if streams is None else HyperConnection.init(streams, key=own) for own in (first, second)),
    )


def hyper_config(config: Any) -> HyperConfig:
    """The settings of the hyper-connections, in a config with DeepSeek-V4's fields for them."""
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
        swiglu=SwiGLU(config.swiglu_limit, limit_first=True),
        shared_swiglu=SwiGLU(config.shared_swiglu_limit, limit_first=True),
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
    (r"\.weight_scale_inv$", ".scale"),
)
"""Regexes and replacements that turn the tree's names into the release's."""


def _renamed(rules: Iterable[tuple[str, str]], name: str) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def _saved_by_transformers(name: str, shape: tuple[int, ...], config: DeepseekV4Config) -> Place:
    """The layout that transformers writes by default: the release's, except for top-level names and one norm."""
    return Place(_renamed(_SAVED_NAMES, name))


def _in_transformers(name: str, shape: tuple[int, ...], config: DeepseekV4Config) -> Place:
    """The layout of transformers' modules: experts are stacked, each with gate and up matrices in one, gate first."""
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
"""Regexes and replacements that turn the release's names into those that transformers writes by default."""

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
"""The same from the names that `_SAVED_NAMES` gives to those of transformers' modules."""


def module_name(name: str, config: DeepseekV4Config) -> str:
    """The name in transformers of the module with the published name `name`."""
    return _renamed(_MODULE_NAMES, _renamed(_SAVED_NAMES, f"{name}.weight")).removesuffix(".weight")


_LAYOUTS = (_saved_by_transformers, _in_transformers)


def _with_scale_inv(
    layout: Callable[[str, tuple[int, ...], DeepseekV4Config], Place],
) -> Callable[[str, tuple[int, ...], DeepseekV4Config], Place]:
    """A layout with scales named `weight_scale_inv`, as in other FP8 checkpoints."""

    def place(name: str, shape: tuple[int, ...], config: DeepseekV4Config) -> Place:
        own = layout(name, shape, config)
        return own._replace(name=re.sub(r"\.scale$", ".weight_scale_inv", own.name))

    return place


def _shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The checkpoint's shape: the groups of `wo_a` are concatenated by rows to one matrix, and so are its scales."""
    return (shape[0] * shape[1], *shape[2:]) if name.endswith((".wo_a.weight", ".wo_a.scale")) else shape


def _strange_tables(model: CausalLM) -> Iterable[str]:
    """The problems of tables of experts by token id: expert ids that are out of range."""
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
    module=module_name,
    layouts=(*_LAYOUTS, *map(_with_scale_inv, (lambda name, shape, config: Place(name), *_LAYOUTS))),
    misfits=_strange_tables,
    formats_in_headers=True,
    skips=lambda name, config: name.startswith("mtp."),
)
