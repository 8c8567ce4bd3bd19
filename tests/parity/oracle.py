"""The oracle: transformers' `BailingHybridForCausalLM` over weights in the published names, fp32 or bf16, on the CPU.

Every tensor is placed by the mapping written here and the load is strict: transformers' own loader leaves what it does
not know (the Q-LoRA of Ling-3.0-tiny) randomly initialised. What is missing is lent by transformers' DeepSeek-V3, which
Ling-3's Q-LoRA follows. It has no SwiGLU clamps: those are held to `reference.py` alone.
"""

import re
from collections import OrderedDict, defaultdict

import numpy as np
import torch
from random_checkpoint import published_config
from transformers import BailingHybridConfig, BailingHybridForCausalLM, DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from ling3.families.ling3_config import Ling3Config

FP32_ALWAYS = ("conv1d.weight", "A_log", "dt_bias", "e_score_correction_bias", "inv_freq")
"""What transformers keeps in fp32 in any dtype: its `_keep_in_fp32_modules_strict`, and RoPE's frequencies."""

RENAMED = (
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.self_attn\.(f_proj|A_log|dt_bias)", r".self_attn.forget_gate.\1"),
    (r"\.self_attn\.(q_a_proj|q_a_layernorm|q_b_proj)\.", r".self_attn.q_proj.\1."),
    (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
    (r"\.gate\.expert_bias$", ".gate.e_score_correction_bias"),
)
"""Published names to transformers', in this order; `q_proj` is where the borrowed Q-LoRA hangs."""


class Oracle:
    """transformers' Ling-3 with the weights `[name] -> array` given in the published names, in `dtype`."""

    def __init__(self, config: Ling3Config, weights: dict[str, np.ndarray], dtype: torch.dtype = torch.float32):
        if config.expert_swiglu_limit_list is not None or config.share_expert_swiglu_limit_list is not None:
            raise ValueError("transformers' bailing_hybrid has no SwiGLU clamps: use tests/support/reference.py")
        self.model = BailingHybridForCausalLM(transformers_config(config))
        self.model.set_attn_implementation("eager")
        self.model.set_experts_implementation("eager")
        if config.q_lora_rank is not None:
            for layer in self.model.model.layers:
                if layer.block_type == "full_attention":
                    layer.self_attn.q_proj = deepseek_query_path(config)
        self.model.load_state_dict(transformers_names(weights), strict=True)
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            tensor.data = tensor.to(torch.float32 if name.endswith(FP32_ALWAYS) else dtype)
        self.model.eval().requires_grad_(False)

    def logits(self, tokens: list[int]) -> np.ndarray:
        """`[seq, vocab]` in fp32, of one sequence without a cache."""
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()

    def stages(self, tokens: list[int]) -> dict[str, np.ndarray]:
        """The output of each module that `reference.forward` names, under the published name, in the order computed."""
        stages = {}

        def keep(name, module, arguments, output):
            if name.endswith(".gate"):
                scores, weights, experts = output
                output = torch.zeros_like(scores).scatter(1, experts, weights)
            elif isinstance(output, tuple):
                output = output[0]
            stages[name] = output.float().numpy().reshape(len(tokens), -1)

        hooks = []
        for own_name, module in self.model.named_modules():
            name = own_name.replace("embed_tokens", "word_embeddings").replace("self_attn", "attention")
            if re.fullmatch(r"model\.(word_embeddings|norm|layers\.\d+(\.attention|\.mlp(\.gate)?)?)|lm_head", name):
                hooks.append(module.register_forward_hook(lambda *call, name=name: keep(name, *call)))
        self.model(torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return stages

    def greedy(self, tokens: list[int], count: int) -> list[int]:
        """The `count` ids that follow `tokens`, each the likeliest, one step at a time on transformers' own cache."""
        cache, new, step = DynamicCache(config=self.model.config), [], torch.tensor([tokens])
        for _ in range(count):
            logits = self.model(step, past_key_values=cache, use_cache=True).logits[0, -1]
            new.append(int(logits.argmax()))
            step = torch.tensor([new[-1:]])
        return new


def transformers_config(config: Ling3Config) -> BailingHybridConfig:
    """The published `config.json`, but for the bound: a float always, which `kda_safe_gate` switches off."""
    bound = -5.0 if config.kda_lower_bound is None else float(config.kda_lower_bound)
    return BailingHybridConfig(**published_config(config) | {"kda_lower_bound": bound})


def deepseek_query_path(config: Ling3Config) -> torch.nn.Sequential:
    """`q_b_proj(q_a_layernorm(q_a_proj(x)))`, the three modules taken out of transformers' DeepSeek-V3 attention."""
    sizes = ("hidden_size", "num_attention_heads", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
    donor = DeepseekV3Attention(DeepseekV3Config(**{name: getattr(config, name) for name in sizes}), layer_idx=0)
    return torch.nn.Sequential(
        OrderedDict((name, getattr(donor, name)) for name in ("q_a_proj", "q_a_layernorm", "q_b_proj"))
    )


def transformers_names(weights: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The published tensors under transformers' names: q, k and v convolutions joined, a layer's experts packed."""
    renamed, joined = {}, defaultdict(dict)
    for name, array in weights.items():
        tensor = torch.from_numpy(array.astype(np.float32))
        if match := re.fullmatch(r"(.*)\.([qkv])_conv1d\.weight", name):
            joined[f"{match[1]}.conv1d.weight"]["qkv".index(match[2])] = tensor
        elif match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name):
            packed = "down_proj" if match[3] == "down" else "gate_up_proj"
            joined[f"{match[1]}.{packed}"][int(match[2]), match[3]] = tensor
        else:
            renamed[name] = tensor
    for name, parts in joined.items():
        rows = [parts[key] for key in sorted(parts)]
        if name.endswith("gate_up_proj"):
            rows = [torch.cat(pair) for pair in zip(rows[::2], rows[1::2], strict=True)]
        renamed[name] = torch.cat(rows) if name.endswith("conv1d.weight") else torch.stack(rows)
    for pattern, replacement in RENAMED:
        renamed = {re.sub(pattern, replacement, name): tensor for name, tensor in renamed.items()}
    return renamed
