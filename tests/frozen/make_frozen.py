"""Write the frozen cases anew: `python tests/frozen/make_frozen.py`, with the extra `parity` installed.

Each directory is a checkpoint in the published layout (bf16). The file of its name beside it holds tokens, and what
transformers' `BailingHybridForCausalLM` or `KimiLinearForCausalLM`, in fp32 on the CPU, makes of them.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / folder) for folder in ("support", "parity")]

import kimi_reference  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from oracle import Oracle  # noqa: E402
from random_checkpoint import TINY_LIKE, draw_well_posed, write  # noqa: E402

from ling3.families.kimi_linear import KimiLinearConfig  # noqa: E402

SMALL = dataclasses.replace(
    TINY_LIKE,
    vocab_size=56,
    hidden_size=24,
    intermediate_size=36,
    num_attention_heads=2,
    q_lora_rank=12,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    v_head_dim=10,
    num_experts=8,
    moe_intermediate_size=10,
    moe_shared_expert_intermediate_size=10,
    eos_token_id=(55,),
    pad_token_id=54,
)
CASES = {
    "tiny-like": SMALL,
    "flash-like": dataclasses.replace(SMALL, q_lora_rank=None, first_k_dense_replace=2, rope_theta=6000000.0),
    "no-bound": dataclasses.replace(SMALL, kda_lower_bound=None),
}
PLAIN = {"dtype": torch.float32, "experts_implementation": "eager"}
KIMI = KimiLinearConfig.from_dict(kimi_reference.SMALL)
LENGTH, PROMPT_LENGTHS, NEW_TOKENS = 81, (1, 9, 66), 24


def answers(tokens: list[int], logits, greedy) -> dict[str, np.ndarray]:
    """What `logits(tokens)` and `greedy(prompt, count)` say of a sequence and of its beginnings."""
    expected = {"tokens": np.array(tokens, np.int32), "logits": logits(tokens)}
    for length in PROMPT_LENGTHS:
        expected[f"greedy_after_{length}"] = np.array(greedy(tokens[:length], NEW_TOKENS), np.int32)
    return expected


def kimi_answers(path: Path, tokens: list[int]) -> dict[str, np.ndarray]:
    """Those of transformers' Kimi-Linear, without a cache."""
    model = transformers.KimiLinearForCausalLM.from_pretrained(path, **PLAIN).eval().requires_grad_(False)

    def logits(ids):
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()

    def greedy(prompt, count):
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    return answers(tokens, logits, greedy)


if __name__ == "__main__":
    for name, config in CASES.items():
        weights, tokens, _, _ = draw_well_posed(config, LENGTH, bfloat16=True)
        oracle = Oracle(config, weights)
        write(HERE / name, config, weights)
        safetensors.numpy.save_file(answers(tokens, oracle.logits, oracle.greedy), HERE / f"{name}.safetensors")
    weights, tokens, _ = kimi_reference.draw_well_posed(KIMI, LENGTH, bfloat16=True)
    kimi_reference.write(HERE / "kimi-linear", KIMI, weights)
    safetensors.numpy.save_file(kimi_answers(HERE / "kimi-linear", tokens), HERE / "kimi-linear.safetensors")
