"""What published configs say beside the fields that matter: it is read, and changes nothing."""

import json

import pytest
from published_configs import KIMI_LINEAR, TINY
from published_transformers import (
    DEEPSEEK_V3,
    GLM_53_FLASH,
    KIMI_K2,
    LLAMA_2_7B,
    LLAMA_31_8B,
    LLAMA_32_1B,
    MISTRAL_NEMO,
    MISTRAL_V01,
    MISTRAL_V03,
    MOONLIGHT_16B_A3B,
    QWEN3_06B,
    QWEN3_30B_A3B,
    QWEN3_CODER_30B_A3B,
    QWEN3_NEXT_80B_A3B,
    QWEN25_05B,
    QWEN35_9B,
    QWEN35_35B_A3B,
    R1_DISTILL_QWEN_15B,
    SMOLLM2_135M,
    TINYLLAMA_11B,
    YI_6B,
)

import ling3
from ling3.families import read_config

PUBLISHED = {
    "Llama-2-7b": LLAMA_2_7B,
    "TinyLlama-1.1B": TINYLLAMA_11B,
    "Yi-6B": YI_6B,
    "SmolLM2-135M": SMOLLM2_135M,
    "Llama-3.1-8B": LLAMA_31_8B,
    "Llama-3.2-1B": LLAMA_32_1B,
    "Mistral-7B-v0.1": MISTRAL_V01,
    "Mistral-7B-v0.3": MISTRAL_V03,
    "Mistral-Nemo": MISTRAL_NEMO,
    "Qwen2.5-0.5B": QWEN25_05B,
    "DeepSeek-R1-Distill-Qwen-1.5B": R1_DISTILL_QWEN_15B,
    "Qwen3-0.6B": QWEN3_06B,
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen3-Coder-30B-A3B": QWEN3_CODER_30B_A3B,
    "Kimi-Linear-48B-A3B": KIMI_LINEAR,
    "Ling-3.0-tiny": TINY,
    "DeepSeek-V3": DEEPSEEK_V3 | {"quantization_config": None},
    "Kimi-K2": KIMI_K2 | {"quantization_config": None},
    "Moonlight-16B-A3B": MOONLIGHT_16B_A3B,
    "GLM-5.3-Flash": GLM_53_FLASH,
    "Qwen3-Next-80B-A3B": QWEN3_NEXT_80B_A3B,
    "Qwen3.5-9B": QWEN35_9B,
    "Qwen3.5-35B-A3B": QWEN35_35B_A3B,
}
EVERY = {
    "_attn_implementation_autoset": True,  # transformers 4.46 to 4.51
    "_flash_attn_2_enabled": True,  # transformers 4.34
    "_name_or_path": "/data/checkpoints/step-1000",
    "attn_implementation": "flash_attention_2",
    "auto_map": {"AutoConfig": "configuration.Config"},
    "dtype": "bfloat16",
    "gradient_checkpointing": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "is_encoder_decoder": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "pretraining_tp": 2,  # which transformers reads no more
    "pruned_heads": {},
    "quantization_config": None,
    "return_dict": True,
    "temperature": 0.6,
    "tokenizer_class": "LlamaTokenizer",
    "torch_dtype": "float16",
    "torchscript": False,
    "transformers_version": "4.31.0",
    "unsloth_fixed": True,
    "unsloth_version": "2024.9",
    "use_bfloat16": False,
    "use_cache": False,
}
"""Fields that files of any family may have."""


def config_of(tmp_path, raw):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return read_config(tmp_path)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_read(tmp_path, name):
    raw = PUBLISHED[name]
    config = config_of(tmp_path, raw)
    assert config_of(tmp_path, {key: value for key, value in raw.items() if key not in EVERY} | EVERY) == config
    assert config_of(tmp_path, config.to_dict()) == config


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("pad", [-1, 2**20, None])
def test_padding_may_be_outside_of_the_vocabulary(tmp_path, name, pad):
    config = config_of(tmp_path, PUBLISHED[name] | {"pad_token_id": pad})
    assert config_of(tmp_path, config.to_dict()) == config


def test_yarn_s_first_checkpoints_say_that_they_were_trained_so(tmp_path):
    """As Yarn-Mistral-7b-128k does."""
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192}
    config = config_of(tmp_path, MISTRAL_V01 | {"rope_scaling": yarn | {"finetuned": True}})
    assert config == config_of(tmp_path, MISTRAL_V01 | {"rope_scaling": yarn})


@pytest.mark.parametrize(
    ("raw", "field", "value"),
    [
        (QWEN3_06B, "use_qk_norm", False),
        (LLAMA_2_7B, "use_qk_norm", True),
        (QWEN25_05B, "dual_chunk_attention_config", {"chunk_size": 262144, "local_size": 8192}),
        (QWEN3_CODER_30B_A3B, "shared_expert_intermediate_size", 512),
        (SMOLLM2_135M, "rope_interleaved", True),
        (DEEPSEEK_V3, "attention_bias", True),
        (DEEPSEEK_V3, "head_dim", 128),
        (DEEPSEEK_V3, "moe_layer_freq", 2),
        (DEEPSEEK_V3, "num_key_value_heads", 1),
        (DEEPSEEK_V3, "rope_interleave", False),
        (DEEPSEEK_V3, "scoring_func", "softmax"),
        (DEEPSEEK_V3, "topk_method", "greedy"),
        (QWEN3_NEXT_80B_A3B, "attn_output_gate", False),
        (QWEN3_NEXT_80B_A3B, "use_sliding_window", True),
    ],
)
def test_what_changes_the_numbers_stays_refused(tmp_path, raw, field, value):
    with pytest.raises(ling3.ConfigError, match=field):
        config_of(tmp_path, raw | {field: value})
