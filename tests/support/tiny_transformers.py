"""A tiny checkpoint of each family of transformers and hybrids, of numbers that any NumPy draws alike."""

import functools
import json
import pathlib
import tempfile
from typing import Any

import numpy as np
import published_transformers as published
import safetensors.numpy

import ling3
from ling3.checkpoint import weight_names
from ling3.families import read_config

SIZES = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 24,
    "max_position_embeddings": 256,
    "max_window_layers": 0,
    "moe_intermediate_size": 12,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "torch_dtype": "float32",
    "vocab_size": 64,
}
DELTA = {
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 2,
}
TEXT = {
    **DELTA,
    "layer_types": ["linear_attention", "full_attention"],
    "mtp_num_hidden_layers": 0,
    "rope_parameters": published.QWEN35_9B["text_config"]["rope_parameters"] | {"partial_rotary_factor": 0.5},
}
SHARED = {"shared_expert_intermediate_size": 12}


def text(name: str, whole: dict[str, Any]) -> dict[str, Any]:
    """The config of a published one's text model, as transformers' class of this name has it."""
    return {**whole["text_config"], "architectures": [name], "torch_dtype": "float32"}


CASES = {
    "llama": (
        published.LLAMA_32_1B,
        {"rope_scaling": published.LLAMA_32_1B["rope_scaling"] | {"original_max_position_embeddings": 64}},
    ),
    "mistral": (published.MISTRAL_V01, {"sliding_window": 12}),
    "qwen2": (published.QWEN25_05B, {"use_sliding_window": True, "sliding_window": 12}),
    "qwen3": (published.QWEN3_06B, {"head_dim": 12}),
    "qwen3-moe": (published.QWEN3_30B_A3B, {"mlp_only_layers": [0], "num_hidden_layers": 2}),
    "deepseek-v3": (
        published.DEEPSEEK_V3,
        {
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "n_group": 2,
            "n_routed_experts": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "num_nextn_predict_layers": 0,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "quantization_config": None,
            "rope_scaling": published.DEEPSEEK_V3["rope_scaling"] | {"original_max_position_embeddings": 64},
            "topk_group": 1,
            "v_head_dim": 6,
        },
    ),
    "qwen3-next": (
        published.QWEN3_NEXT_80B_A3B,
        {
            **DELTA,
            **SHARED,
            "full_attention_interval": 2,
            "mlp_only_layers": [0],
            "num_nextn_predict_layers": 0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "glm5-next": (
        text("Glm5NextForConditionalGeneration", published.GLM_53_FLASH),
        {
            "hc_mult": 3,
            "index_head_dim": 8,
            "index_n_heads": 8,
            "index_topk": 8,
            "indexer_types": ["full", "full"],
            "kv_lora_rank": 16,
            "layer_types": ["linear_attention", "deepseek_sparse_attention"],
            "linear_attn_config": published.GLM_53_FLASH["text_config"]["linear_attn_config"]
            | {"num_heads": 2, "head_dim": 8, "kda_layers": [0], "full_attn_layers": [1]},
            "mlp_layer_types": ["dense", "sparse"],
            "model_type": "glm5_next",
            "n_routed_experts": 4,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "num_nextn_predict_layers": 0,
            "pad_token_id": None,
            "q_lora_rank": 12,
            "qk_head_dim": 8,
            "qk_nope_head_dim": 8,
            "swiglu_limit": 1.0,
            "v_head_dim": 6,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3.5": (text("Qwen3_5ForCausalLM", published.QWEN35_9B), TEXT | {"tie_word_embeddings": True}),
    "qwen3.5-moe": (text("Qwen3_5MoeForCausalLM", published.QWEN35_35B_A3B), TEXT | SHARED),
}
"""Of each family a published config, and what is special to the tiny one. Windows are shorter than `TOKENS`."""

HYBRIDS = ("deepseek-v3", "glm5-next", "qwen3-next", "qwen3.5", "qwen3.5-moe")
"""The cases whose mixers are others than grouped-query attention."""

TOKENS = np.random.RandomState(0).randint(2, 64, size=24).tolist()


def write(name: str, directory: pathlib.Path) -> None:
    """The case's checkpoint in the published layout, float32, with logits near 1."""
    directory.mkdir(exist_ok=True)
    base, own = CASES[name]
    (directory / "config.json").write_text(json.dumps({k: SIZES.get(k, v) for k, v in base.items()} | own))
    draw, tensors = np.random.RandomState(1), {}
    for weight in sorted(weight_names(read_config(directory)), key=lambda weight: weight.name):
        numbers = draw.standard_normal(weight.shape)
        if weight.name.endswith("norm.weight"):
            centered = base["model_type"].startswith(("qwen3_next", "qwen3_5")) and "linear_attn" not in weight.name
            numbers = (not centered) + 0.2 * numbers
        else:
            numbers *= 0.2 if "embed" in weight.name or weight.name.endswith("bias") else 1.5 * weight.shape[-1] ** -0.5
        tensors[weight.name] = numbers.astype(np.float32)
    safetensors.numpy.save_file(tensors, directory / "model.safetensors")


@functools.cache
def open_model(name: str) -> ling3.CausalLM:
    """The case's model."""
    with tempfile.TemporaryDirectory() as directory:
        write(name, pathlib.Path(directory))
        return ling3.load(directory)


POSITIONS, VOCAB = (0, 11, 23), (0, 9, 18, 27, 36, 45, 54, 63)
FROZEN: dict[str, list[list[float]]] = {
    "llama": [
        [0.0033, -1.95278, -1.00821, -1.28143, -0.85462, 1.72167, 1.58249, 1.30666],
        [0.05437, -1.1268, -1.10377, 0.09553, -1.42963, 0.03583, 0.32258, 0.97738],
        [0.35827, 1.39646, 0.90258, 0.9495, 0.35128, -0.67447, -0.66446, 0.53682],
    ],
    "mistral": [
        [1.29231, 1.77273, -0.90491, 0.03257, 0.69641, 0.80115, 0.70687, -1.95059],
        [0.93436, 0.03906, -0.47761, -0.93103, -0.5326, 2.74402, 1.45629, 1.01776],
        [1.32756, 1.48775, -1.19941, 1.25854, 1.13565, -0.66554, -2.33939, -2.97772],
    ],
    "qwen2": [
        [-2.26122, 1.11544, -4.04341, -1.98887, -1.05077, 1.88781, 0.59455, -0.94241],
        [-2.01551, 0.245, -2.97608, -0.69598, -2.06563, 1.96417, 1.05754, -1.27954],
        [0.34132, 1.02378, -1.19958, -0.29139, 0.68554, -0.45516, 0.50996, -1.03408],
    ],
    "qwen3": [
        [-3.02936, 2.20417, 0.8774, -0.1665, 0.38081, 1.86509, -0.68907, -0.89159],
        [0.70287, 0.77104, 1.09819, 0.27245, 1.83186, -0.30799, -0.18937, -0.91802],
        [2.9018, -1.29202, -0.61528, 1.27545, 0.96897, -2.47913, 0.30376, -0.56294],
    ],
    "qwen3-moe": [
        [-1.28919, 1.68378, 3.49257, 2.04142, -0.11999, -2.0392, -0.3019, -1.77758],
        [-0.99925, 0.31407, 0.21964, 1.6541, -1.03581, -0.004, -1.09012, -0.75717],
        [-0.22096, -0.60633, 2.38237, -1.70744, 1.75005, -0.07131, 2.30847, 1.16489],
    ],
    "deepseek-v3": [
        [0.44799, -0.23778, 1.08543, 0.43995, 0.96936, -3.18526, -1.40176, 2.68511],
        [1.93148, -1.07582, -0.15825, 2.34524, 0.77538, -2.75935, -2.48278, -0.08691],
        [2.67262, -0.54192, 0.93751, -0.68842, -1.83106, -0.83937, -1.60951, -0.77075],
    ],
    "glm5-next": [
        [0.00563, 0.88851, -1.20199, -2.25257, 3.14462, -1.27385, 0.31361, -3.16663],
        [2.85207, -1.06544, -0.28509, -1.97989, 0.31542, -1.89944, 2.19941, 1.45265],
        [-0.41602, 0.37221, 0.51045, 2.46457, 0.30174, 1.58924, 0.67627, 0.20232],
    ],
    "qwen3-next": [
        [1.53033, 0.86038, 0.014, 0.46543, 0.29386, -0.88497, -1.25832, 0.69581],
        [-1.4523, 3.16344, 1.62548, 1.91086, 3.13867, -3.16015, 0.37685, -2.16887],
        [0.26143, 2.95605, 0.2074, 0.5542, -1.71612, 0.67614, 1.97955, -0.59895],
    ],
    "qwen3.5": [
        [-0.0531, -1.16339, 0.48477, 0.60852, 1.06331, 0.01184, 1.79974, 1.1301],
        [0.21268, 0.87795, 0.45285, 1.2202, 1.55288, -2.68993, -1.26333, -0.53033],
        [1.14947, -1.65334, 0.37004, -0.09698, 0.72693, -0.93988, 0.47938, 1.38947],
    ],
    "qwen3.5-moe": [
        [0.05775, -1.89078, 0.23582, 0.27013, 0.73744, -2.45133, 0.41787, 2.37376],
        [-0.82134, 1.30171, -2.29461, -1.44601, -1.20478, -1.39501, -1.32467, 0.1969],
        [-1.16021, -2.26772, 0.10989, -1.72279, 3.04816, 1.40844, 0.61973, 1.80871],
    ],
}
"""What transformers makes of `TOKENS` in float32: logits of some tokens, a row for each of some positions."""

GREEDY: dict[str, list[int]] = {
    "llama": [11, 50, 22, 11, 50, 22, 22, 34, 51, 11, 60, 43],
    "mistral": [22, 33, 11, 5, 33, 53, 46, 45, 55, 22, 42, 52],
    "qwen2": [61, 61, 61, 61, 61, 53, 24, 42, 11, 11, 17, 27],
    "qwen3": [0, 44, 0, 44, 0, 44, 0, 44, 0, 44, 53, 6],
    "qwen3-moe": [12, 32, 31, 13, 21, 44, 31, 13, 29, 18, 6, 59],
    "deepseek-v3": [60, 34, 43, 52, 18, 60, 27, 59, 60, 17, 17, 17],
    "glm5-next": [40, 0, 38, 24, 2, 51, 51, 27, 13, 60, 17, 6],
    "qwen3-next": [26, 9, 32, 52, 21, 11, 8, 27, 50, 27, 52, 11],
    "qwen3.5": [12, 7, 54, 33, 58, 32, 12, 17, 8, 7, 28, 57],
    "qwen3.5-moe": [21, 36, 12, 47, 6, 52, 55, 34, 19, 61, 30, 3],
}
"""And its greedy continuations. `tests/parity/test_frozen_families.py` checks both, and prints them anew."""
