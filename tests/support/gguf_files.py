"""GGUF files for tests: any metadata and tensors, or a model as llama.cpp's converters name and arrange its tensors."""

import re
import struct

import numpy as np

from ling3.checkpoint.gguf_file import DENSE, QUANTIZED
from ling3.checkpoint.names import weights_of
from ling3.leaves import array_leaves

NUMBERS = {name: number for number, name in {**DENSE, **QUANTIZED}.items()}
ALIGNMENT = 32


def write(path, metadata, tensors, version=3):
    """Writes a file of tensors by name: float32 arrays, or (type, bytes, shape with the innermost axis last)."""
    infos, data = b"", b""
    for name, tensor in tensors.items():
        kind, stored, shape = ("F32", tensor, tensor.shape) if isinstance(tensor, np.ndarray) else tensor
        data += b"\0" * (-len(data) % ALIGNMENT)
        sizes = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        infos += _string(name) + struct.pack("<I", len(shape)) + sizes
        infos += struct.pack("<IQ", NUMBERS[kind] if isinstance(kind, str) else kind, len(data))
        data += np.ascontiguousarray(stored).tobytes()
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    header += b"".join(_string(key) + _value(value) for key, value in metadata.items()) + infos
    path.write_bytes(header + b"\0" * (-len(header) % ALIGNMENT) + data)
    return path


def _string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value):
    """A value with its type before it."""
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case int():
            return struct.pack("<II", 4, value)
        case float():
            return struct.pack("<If", 6, value)
        case str():
            return struct.pack("<I", 8) + _string(value)
        case list():
            items = [_value(item) for item in value]
            kind = items[0][:4] if items else struct.pack("<I", 4)
            return struct.pack("<I", 9) + kind + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)
    raise TypeError(value)


_STEMS = (
    (r"input_layernorm", "attn_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"(?:attention|self_attn)\.([qkv])_proj", r"attn_\1"),
    (r"(?:attention|self_attn)\.(?:o_proj|dense)", "attn_output"),
    (r"self_attn\.([qk])_norm", r"attn_\1_norm"),
    (r"(?:attention|self_attn)\.([qkv])_conv1d", r"ssm_conv1d_\1"),
    (r"attention\.f_proj", "ssm_f_a"),
    (r"(?:attention|self_attn)\.b_proj", "ssm_beta"),
    (r"(?:attention|self_attn)\.o_norm", "ssm_norm"),
    (r"(?:attention|self_attn)\.q_([ab])_proj", r"attn_q_\1"),
    (r"(?:attention|self_attn)\.q_a_layernorm", "attn_q_a_norm"),
    (r"(?:attention|self_attn)\.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    (r"(?:attention|self_attn)\.kv_a_layernorm", "attn_kv_a_norm"),
    (r"self_attn\.([fg])_([ab])_proj", r"ssm_\1_\2"),
    (r"self_attn\.indexer\.wq_b", "indexer.attn_q_b"),
    (r"self_attn\.indexer\.wk", "indexer.attn_k"),
    (r"self_attn\.indexer\.k_norm", "indexer.k_norm"),
    (r"self_attn\.indexer\.weights_proj", "indexer.proj"),
    (r"linear_attn\.in_proj_qkv", "attn_qkv"),
    (r"linear_attn\.in_proj_z", "attn_gate"),
    (r"linear_attn\.in_proj_ba", "ssm_ba"),
    (r"linear_attn\.in_proj_b", "ssm_beta"),
    (r"linear_attn\.in_proj_a", "ssm_alpha"),
    (r"linear_attn\.(conv1d|norm)", r"ssm_\1"),
    (r"linear_attn\.out_proj", "ssm_out"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
    (r"mlp\.shared_experts?\.(gate|up|down)_proj", r"ffn_\1_shexp"),
    (r"mlp\.shared_expert_gate", "ffn_gate_inp_shexp"),
    (r"mlp\.experts\.(gate|up|down)_proj", r"ffn_\1_exps"),
    (r"mlp\.gate", "ffn_gate_inp"),
    (r"(eh_proj|enorm|hnorm)", r"nextn.\1"),
    (r"final_layernorm", "layer_output_norm"),
)
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.word_embeddings.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def tensors_of(model):
    """The tensors of a model in float32, by the names of a GGUF file."""
    found, config = {}, model.config
    for leaf in array_leaves(model):
        first = next(iter(weights_of(leaf)))
        name = re.sub(r"\.experts\.\d+\.", ".experts.", first.name).replace(".language_model.", ".")
        array = np.asarray(leaf.value, np.float32)
        if name.startswith("mtp."):
            name = _mtp_name(name, config.num_hidden_layers)
        if "linear_num_key_heads" in config.to_dict() and name.endswith("norm.weight") and "linear_attn" not in name:
            array = array + np.float32(1)
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = array
            continue
        layer, within = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
        found |= {f"blk.{layer}.{own}": array for own, array in _stored(within, array, config, int(layer)).items()}
    return found


def _mtp_name(name, layers):
    """The name of an array of Qwen's multi-token-prediction layer as if its layer came after the others."""
    if name.startswith("mtp.layers.0."):
        return name.replace("mtp.layers.0.", f"model.layers.{layers}.")
    around = {
        "pre_fc_norm_embedding": "enorm",
        "pre_fc_norm_hidden": "hnorm",
        "fc": "eh_proj",
        "norm": "final_layernorm",
    }
    _, module, field = name.split(".")
    return f"model.layers.{layers}.{around[module]}.{field}"


def _gated_deltanet(name, array, config):
    """One array of a Gated DeltaNet layer as it is stored, by name."""
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    if name == "in_proj_qkvz.weight":
        groups = array.reshape(key_heads, -1, array.shape[-1])
        each = heads // key_heads * value
        q, k, v, z = (
            own.reshape(-1, array.shape[-1]) for own in np.split(groups, [key, 2 * key, 2 * key + each], axis=1)
        )
        return {"attn_qkv.weight": np.concatenate([q, k, v]), "attn_gate.weight": z}
    if config.to_dict()["model_type"].startswith("qwen3_5"):

        def tiled(rows, size):
            by_head = rows.reshape(key_heads, heads // key_heads, size, *rows.shape[1:])
            return by_head.swapaxes(0, 1).reshape(rows.shape)

        if name in ("in_proj_qkv.weight", "conv1d.weight"):
            qk, v = np.split(array, [2 * key_heads * key])
            array = np.concatenate([qk, tiled(v, value)])
        elif name in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
            array = tiled(array, 1)
        elif name == "in_proj_z.weight":
            array = tiled(array, value)
        elif name == "out_proj.weight":
            array = tiled(array.T, value).T
    if name == "A_log":
        return {"ssm_a": -np.exp(array)}
    module, _, field = f"linear_attn.{name}".rpartition(".")
    if name == "dt_bias":
        return {"ssm_dt.bias": array}
    [stem] = [re.sub(pattern, new, module) for pattern, new in _STEMS if re.fullmatch(pattern, module)]
    return {f"{stem}.{field}": array}


def _halves(array, config):
    """MLA's kv_b_proj as it is stored, by name."""
    heads = array.reshape(config.num_attention_heads, -1, array.shape[-1])
    keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
    return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": values}


_SPECIAL = {
    "self_attn.A_log": lambda array, config: {"ssm_a": -np.exp(array)},
    ".A_log": lambda array, config: {"ssm_a": np.exp(array)[:, None]},
    ".dt_bias": lambda array, config: {"ssm_dt.bias": array},
    ".expert_bias": lambda array, config: {"exp_probs_b.bias": array},
    ".e_score_correction_bias": lambda array, config: {"exp_probs_b.bias": array},
    ".kv_b_proj.weight": _halves,
    ".index_kpool_compress_gate": lambda array, config: {"indexer_compressor_gate.weight": array},
    ".index_kpool_compress_ape": lambda array, config: {"indexer_compressor_ape.weight": array},
}


def _stored(name, array, config, layer):
    """One array of a layer as it is stored, by name; some are two."""
    if name.startswith("hc_"):
        return {f"{name}.weight": array}
    if name.startswith("linear_attn."):
        return _gated_deltanet(name.removeprefix("linear_attn."), array, config)
    for end, special in _SPECIAL.items():
        if name.endswith(end):
            return special(array, config)
    module, _, field = name.rpartition(".")
    if module == "attention.g_proj":
        kda = layer < config.num_hidden_layers and config.attention_kind(layer) == "kda"
        return {f"{'ssm_g_a' if kda else 'attn_gate'}.{field}": array}
    if "conv1d" in module:
        array = array[None, :, None]
    if config.to_dict()["model_type"] == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if "q_proj" in module else config.num_key_value_heads
        array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
    [stem] = [re.sub(pattern, new, module) for pattern, new in _STEMS if re.fullmatch(pattern, module)]
    if stem == "ffn_norm" and "linear_num_key_heads" in config.to_dict():
        stem = "post_attention_norm"
    return {f"{stem}.{field}": array}


_KEYS = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
_LATENT = {
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "v_head_dim": "attention.value_length_mla",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "num_shared_experts": "expert_shared_count",
    "n_shared_experts": "expert_shared_count",
    "n_routed_experts": "expert_count",
    "first_k_dense_replace": "leading_dense_block_count",
}
_HYBRID = {
    **_LATENT,
    "head_dim": "kda.head_dim",
    "kda_safe_gate": "kda.safe_gate",
    "kda_lower_bound": "kda.gate_lower_bound",
    "short_conv_kernel_size": "ssm.conv_kernel",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "expert_swiglu_limit_list": "swiglu_clamp_exp",
    "share_expert_swiglu_limit_list": "swiglu_clamp_shexp",
}


_DELTA = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}


_POOLS = {
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
    "index_topk": "attention.indexer.top_k",
    "index_kpool": "attention.indexer.kpool",
    "hc_mult": "hyper_connection.count",
    "hc_sinkhorn_iters": "hyper_connection.sinkhorn_iterations",
    "hc_eps": "hyper_connection.epsilon",
    "num_nextn_predict_layers": "nextn_predict_layers",
}


def _glm_values(config):
    """The values of a GLM-5.3-Flash's keys that follow from several fields."""
    kinds, linear = config.to_dict()["text_config"]["layer_types"], config.linear_attn_config
    return {
        "attention.head_count_kv": [int(kind != "linear_attention") for kind in kinds],
        "attention.indexer.types": [True] * config.num_hidden_layers,
        "attention.indexer.kpool_select_tail": True,
        "attention.key_length": config.kv_lora_rank,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": config.qk_nope_head_dim,
        "attention.layer_norm_epsilon": 1e-6,
        "kda.head_dim": linear.head_dim,
        "kda.gate_lower_bound": linear.gate_lower_bound,
        "ssm.conv_kernel": linear.short_conv_kernel_size,
        "leading_dense_block_count": [*config.mlp_layer_types, "sparse"].index("sparse"),
        "swiglu_clamp_exp": [config.swiglu_limit] * config.num_hidden_layers,
        "swiglu_clamp_shexp": [config.swiglu_limit] * config.num_hidden_layers,
    }


def _keys_of(config, architecture, predicted):
    """The keys of a config's fields, and further values by key."""
    layers = {"block_count": config.num_hidden_layers + predicted, "nextn_predict_layers": predicted}
    latent = {"expert_gating_func": 2}
    if architecture.startswith("bailing"):
        kinds = [config.attention_kind(i) for i in range(config.num_hidden_layers)] + ["mla"] * predicted
        schedule = {"attention.head_count_kv": [int(kind == "mla") for kind in kinds]}
        sizes = {"attention.key_length_mla": config.qk_head_dim, "attention.key_length": config.latent_entry_dim}
        return {**_KEYS, **_HYBRID}, {**layers, **latent, **schedule, **sizes}
    if architecture == "glm5-next":
        return {**_KEYS, **_LATENT, **_POOLS}, {**latent, **_glm_values(config)}
    if architecture == "deepseek2":
        head = config.qk_nope_head_dim + config.qk_rope_head_dim
        sizes = {
            "attention.key_length_mla": head,
            "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        }
        yarn = config.rope_scaling
        scaling = {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(yarn.factor),
            "rope.scaling.original_context_length": yarn.original_max_position_embeddings,
            "rope.scaling.yarn_beta_fast": float(yarn.beta_fast),
            "rope.scaling.yarn_beta_slow": float(yarn.beta_slow),
            "rope.scaling.yarn_log_multiplier": 0.1 * yarn.mscale_all_dim,
        }
        return {**_KEYS, **_LATENT}, {"attention.head_count_kv": 1, **sizes, **latent, **scaling}
    if not architecture.startswith(("qwen3next", "qwen35")):
        return _KEYS, {}
    values = config.linear_num_value_heads * config.linear_value_head_dim
    linear = [kind == "linear_attention" for kind in config.layer_types] + [False] * predicted
    sections = {} if architecture == "qwen3next" else {"rope.dimension_sections": [11, 11, 10, 0]}
    sizes = {
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.rotary_dim,
        "ssm.inner_size": values,
        "full_attention_interval": 4,
    }
    return {**_KEYS, **_DELTA}, {**layers, **sizes, **sections, "attention.recurrent_layers": linear}


_FLOATS = ("rope.freq_base", "expert_weights_scale", "kda.gate_lower_bound")


def metadata_of(config, architecture, predicted=0):
    """The metadata of a config's GGUF file, as far as it states the model; `predicted` layers of it are MTP's."""
    names, more = _keys_of(config, architecture, predicted)
    raw = config.to_dict()
    raw = raw.get("text_config", raw)
    stated = {names[name]: value for name, value in raw.items() if name in names and value is not None}
    stated |= {"vocab_size": config.vocab_size, **more}
    if not predicted:
        stated.pop("nextn_predict_layers", None)
    own = {f"{architecture}.{key}": float(value) if key in _FLOATS else value for key, value in stated.items()}
    ends = {"tokenizer.ggml.eos_token_id": config.eos_token_id[0]} if config.eos_token_id else {}
    return {"general.architecture": architecture, **own, **ends}


def write_model(path, model, architecture, **changes):
    """Writes a model as a GGUF file in float32; `changes` are of the metadata, None for a key to leave out."""
    metadata = {**metadata_of(model.config, architecture, len(model.mtp)), **changes}
    return write(path, {key: value for key, value in metadata.items() if value is not None}, tensors_of(model))
