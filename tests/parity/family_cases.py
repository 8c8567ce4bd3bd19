"""A random checkpoint for each thing that a family can do, as transformers saves it: small, and with logits near 1."""

import dataclasses
import math
import pathlib

import jax.numpy as jnp
import numpy as np
import torch
import transformers

import ling3

LENGTHS = (1, 2, 63, 257, 300)
SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "head_dim": 16,
}
LATENT = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 24,
    "n_group": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "num_key_value_heads": 4,
    "num_mtp_layers": 0,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "topk_group": 2,
    "v_head_dim": 12,
}
DELTA = {
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 12,
    "num_hidden_layers": 4,
}
SHARED = {"shared_expert_intermediate_size": 24}
NEXT = {**EXPERTS, **DELTA, **SHARED, "num_nextn_predict_layers": 0}
POOLED = {
    "index_head_dim": 16,
    "index_kpool": 4,
    "index_n_heads": 16,  # with few heads, exact ties at 0 are frequent, which ReLU makes where no head is above it
    "index_topk": 32,
    "kv_lora_rank": 32,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "linear_head_dim": 16,
    "linear_num_heads": 3,
    "mlp_layer_types": ["dense", *["sparse"] * 3],
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "swiglu_limit": 1.0,
    "v_head_dim": 12,
}
VISION = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 64,
    "projection_intermediate_size": 8,
}
CASES = {
    "llama": ("Llama", {}),
    "llama tied, one head each": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama yarn": ("Llama", {"rope_parameters": YARN}),
    "llama yarn, mscale": (
        "Llama",
        {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False}},
    ),
    "llama 3.1": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 40}),
    "mistral without a window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", EXPERTS),
    "qwen3-moe, some dense, weights as they are": (
        "Qwen3Moe",
        EXPERTS | {"decoder_sparse_step": 2, "norm_topk_prob": False, "num_hidden_layers": 4, "mlp_only_layers": [1]},
    ),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "deepseek-v3": ("DeepseekV3", LATENT),
    "deepseek-v3, in one group, without ranks and YaRN": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-3, "rope_parameters": None},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {**NEXT, "layer_types": ["linear_attention", "full_attention"] * 2},
    ),
    "qwen3-next, some dense, with biases": (
        "Qwen3Next",
        {**NEXT, "attention_bias": True, "linear_num_value_heads": 2, "mlp_only_layers": [1]},
    ),
    "qwen3.5": ("Qwen3_5", DELTA | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3.5-moe": ("Qwen3_5Moe", {**EXPERTS, **DELTA, **SHARED}),
    "glm5-next": ("Glm5Next", POOLED),
    "glm5-next, pools of 3, in groups, tied": (
        "Glm5Next",
        POOLED
        | {"index_kpool": 3, "index_topk": 6, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "hc_mult": 3}
        | {"hc_sinkhorn_iters": 2, "hc_eps": 0.02, "rms_norm_eps": 1e-3, "tie_word_embeddings": True},
    ),
}


@dataclasses.dataclass(frozen=True)
class FamilyCase:
    """transformers' model and ling3's, in fp32, of the checkpoint in `directory`."""

    directory: pathlib.Path
    theirs: transformers.PreTrainedModel
    ours: ling3.CausalLM


def make(name: str, directory: pathlib.Path) -> FamilyCase:
    """The case of a name in `CASES`."""
    family, fields = CASES[name]
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    config = config_class(**SIZES | fields)
    theirs = empty(family, config).eval().requires_grad_(False)
    for weight, tensor in theirs.named_parameters():
        if tensor.ndim > 1 and "embed" not in weight:
            tensor.normal_(0, 1.2 * tensor.shape[-1] ** -0.5)
        elif "embed" in weight:
            tensor.normal_(0, 1.0 if not config.tie_word_embeddings else 0.3)
        elif weight.endswith(("hc.base", "hc.scale")):
            tensor.normal_(0, 0.5)
        elif weight.endswith(("A_log", "dt_bias")):
            tensor.uniform_(-4.0, 1.0)
        elif weight.endswith("bias"):
            tensor.normal_(0, 0.3)
        elif hasattr(config, "linear_num_value_heads") and "linear_attn" not in weight:
            tensor.uniform_(-0.5, 0.5)  # zero-centered norms
        else:
            tensor.uniform_(0.5, 1.5)
    for buffer, tensor in theirs.named_buffers():
        if buffer.endswith("correction_bias"):
            tensor.normal_(0, 0.1)
    theirs.save_pretrained(directory)
    return FamilyCase(directory, theirs, ling3.load(directory, jnp.float32))


def empty(family, config):
    """transformers' model of a text model's config; of a family without a class for it, the whole model."""
    if (text_class := getattr(transformers, f"{family}ForCausalLM", None)) is not None:
        return text_class(config)
    tied = config.tie_word_embeddings
    whole = getattr(transformers, f"{family}Config")(
        text_config=config.to_dict(), vision_config=VISION, tie_word_embeddings=tied
    )
    return getattr(transformers, f"{family}ForConditionalGeneration")(whole)


def reopened(directory):
    """transformers' model of the checkpoint in `directory`; of a whole model its vision model is any small one."""
    config, auto = transformers.AutoConfig.from_pretrained(directory), transformers.AutoModelForCausalLM
    if type(config) is transformers.Glm5NextConfig:
        config.vision_config = transformers.Glm5NextVisionConfig(**VISION)
        auto = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(directory, config=config, dtype=torch.float32).eval().requires_grad_(False)


def tokens(length, seed=0):
    return np.random.default_rng(seed).integers(2, 97, size=length).tolist()


def logits_of(theirs, ids):
    return theirs(torch.tensor([ids]), use_cache=False).logits[0].numpy()


def distance_on_a_cache(theirs, ours, rows, following):
    """The largest distance of the logits of rows of unequal lengths on a cache, and of a token that follows each."""
    lengths = jnp.asarray([len(row) for row in rows], jnp.int32)
    padded = jnp.asarray([row + [0] * (max(map(len, rows)) - len(row)) for row in rows], jnp.int32)
    logits, cache = ours.step(padded, ours.init_cache(len(rows), 160), lengths)
    step, _ = ours.step(jnp.asarray(following, jnp.int32)[:, None], cache)
    found = [np.concatenate([own[: len(row)], new]) for row, own, new in zip(rows, logits, step, strict=True)]
    expected = [logits_of(theirs, [*row, token]) for row, token in zip(rows, following, strict=True)]
    return np.max([np.abs(one - other).max() for one, other in zip(found, expected, strict=True)])


def greedy_answers(theirs, ours, prompts, count=24):
    """Those of transformers, by a whole forward pass for each token, of `ling3.generate` and of the engine."""
    expected = []
    for prompt in prompts:
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(logits_of(theirs, ids)[-1].argmax()))
        expected.append(ids[len(prompt) :])
    generated = ling3.generate(ours, prompts, max_tokens=count, ignore_eos=True)
    sizes = {"page_size": math.lcm(16, ours.page_multiple), "chunked_prefill_size": 32, "token_paddings": (32,)}
    engine = ling3.Engine(ours, max_running_requests=2, num_pages=24, **sizes)
    outputs = engine.generate(prompts, ling3.SamplingParams(max_tokens=count, ignore_eos=True))
    return expected, generated, [list(output.token_ids) for output in outputs]
