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
    (r"attention\.([qkv])_conv1d", r"ssm_conv1d_\1"),
    (r"attention\.f_proj", "ssm_f_a"),
    (r"attention\.b_proj", "ssm_beta"),
    (r"attention\.o_norm", "ssm_norm"),
    (r"attention\.q_([ab])_proj", r"attn_q_\1"),
    (r"attention\.q_a_layernorm", "attn_q_a_norm"),
    (r"attention\.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    (r"attention\.kv_a_layernorm", "attn_kv_a_norm"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
    (r"mlp\.shared_experts\.(gate|up|down)_proj", r"ffn_\1_shexp"),
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
    """The tensors of a Llama, a Qwen or a Ling-3 in float32, by the names of a GGUF file."""
    found, config = {}, model.config
    for leaf in array_leaves(model):
        first = next(iter(weights_of(leaf)))
        name = re.sub(r"\.experts\.\d+\.", ".experts.", first.name)
        array = np.asarray(leaf.value, np.float32)
        if name in _OUTSIDE:
            found[_OUTSIDE[name]] = array
            continue
        layer, within = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
        found |= {f"blk.{layer}.{own}": array for own, array in _stored(within, array, config, int(layer)).items()}
    return found


def _stored(name, array, config, layer):
    """One array of a layer as it is stored, by name; MLA's kv_b_proj is two."""
    if name.endswith(".A_log"):
        return {"ssm_a": np.exp(array)[:, None]}
    if name.endswith(".dt_bias"):
        return {"ssm_dt.bias": array}
    if name.endswith(".expert_bias"):
        return {"exp_probs_b.bias": array}
    if name == "attention.kv_b_proj.weight":
        heads = array.reshape(config.num_attention_heads, -1, array.shape[-1])
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        return {"attn_k_b.weight": keys.swapaxes(1, 2), "attn_v_b.weight": values}
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
_HYBRID = {
    "head_dim": "kda.head_dim",
    "kda_safe_gate": "kda.safe_gate",
    "kda_lower_bound": "kda.gate_lower_bound",
    "kv_lora_rank": "attention.kv_lora_rank",
    "q_lora_rank": "attention.q_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "v_head_dim": "attention.value_length_mla",
    "short_conv_kernel_size": "ssm.conv_kernel",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "routed_scaling_factor": "expert_weights_scale",
    "norm_topk_prob": "expert_weights_norm",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "expert_swiglu_limit_list": "swiglu_clamp_exp",
    "share_expert_swiglu_limit_list": "swiglu_clamp_shexp",
}


def metadata_of(config, architecture, predicted=0):
    """The metadata of a config's GGUF file, as far as it states the model; `predicted` layers of it are MTP's."""
    raw, keys = config.to_dict(), dict(_KEYS)
    if architecture.startswith("bailing"):
        keys |= _HYBRID
        kinds = [config.attention_kind(i) for i in range(config.num_hidden_layers)] + ["mla"] * predicted
        raw |= {
            "num_hidden_layers": len(kinds),
            "nextn_predict_layers": predicted,
            "attention.head_count_kv": [int(kind == "mla") for kind in kinds],
            "attention.key_length_mla": config.qk_head_dim,
            "attention.key_length": config.latent_entry_dim,
            "expert_gating_func": 2,
        }
        del keys["num_key_value_heads"]
    stated = {keys.get(name, name): value for name, value in raw.items() if value is not None}
    known = {*keys.values(), "attention.key_length_mla", "attention.head_count_kv", "expert_gating_func", "vocab_size"}
    known |= {"nextn_predict_layers"} if predicted else set()
    floats = ("rope.freq_base", "expert_weights_scale", "kda.gate_lower_bound")
    own = {
        f"{architecture}.{key}": float(value) if key in floats else value
        for key, value in stated.items()
        if key in known
    }
    ends = {"tokenizer.ggml.eos_token_id": config.eos_token_id[0]} if config.eos_token_id else {}
    return {"general.architecture": architecture, **own, **ends}


def write_model(path, model, architecture, **changes):
    """Writes a model as a GGUF file in float32; `changes` are of the metadata, None for a key to leave out."""
    metadata = {**metadata_of(model.config, architecture, len(model.mtp)), **changes}
    return write(path, {key: value for key, value in metadata.items() if value is not None}, tensors_of(model))
