"""Fine-tuning against PEFT on transformers with torch's AdamW: the same texts, the same first adapter, float32, CPU."""

import copy
import dataclasses
import types

import jax
import numpy as np
import pytest

pytest.importorskip("torch", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")
pytest.importorskip("peft", reason="the parity suite needs the extra `parity`: pip install -e '.[parity]'")

import peft
import torch
import transformers
from cases import Case
from exhaustive_cases import exhaustively
from family_cases import make

import ling3
from ling3.train import FineTuning, TrainingText, finetune
from ling3.train.micro_batches import learnt_tokens, step_texts

# PEFT 0.21 asks for an attribute that transformers 5.23 has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

LOSS = 1e-4
"""The largest difference allowed between losses near 5 nats: as much as their logits may differ by."""
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SETTINGS = FineTuning(
    lora=4, alpha=8.0, targets=TARGETS, steps=10, batch=4, tokens=128, learning_rate=5e-3, warmup=2, weight_decay=0.1
)


def texts():
    rng = np.random.default_rng(0)
    lengths = rng.integers(4, 33, 8).tolist()
    rows = [rng.integers(2, 64, length).tolist() for length in lengths]
    return [TrainingText(tuple(row), tuple(i >= len(row) // 3 for i in range(len(row)))) for row in rows]


def opened(name, directory):
    if name == "ling3":
        case = Case("flash-like, bound -5.0", directory)
        return types.SimpleNamespace(theirs=case.oracle.model, ours=case.ling3)
    return make(name, directory)


def losses_of_torch(base, adapter, some, packing):
    """The mean loss of each step's learnt tokens, the texts one by one without padding."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(TARGETS), task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(base).requires_grad_(True), config).eval()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = {f"base_model.model.{module}.lora_A.default.weight": each for module, each in adapter.modules.items()}
    assert trained.keys() == own.keys() | {name.replace("lora_A", "lora_B") for name in own}
    for name, update in own.items():
        trained[name].data.copy_(torch.tensor(np.asarray(update.lora_A)))
    optimizer = torch.optim.AdamW(trained.values(), lr=SETTINGS.learning_rate, weight_decay=SETTINGS.weight_decay)
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, SETTINGS.warmup, SETTINGS.steps)
    found = []
    for step in range(1, SETTINGS.steps + 1):
        chosen = step_texts(some, step, SETTINGS.batch, SETTINGS.seed, packing)
        loss = torch.zeros(())
        for text in chosen:
            logits = model(torch.tensor([text.ids]), use_cache=False).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, torch.tensor(text.ids[1:]), reduction="none")
            loss = loss + losses[torch.tensor(text.learnt[1:])].sum() / learnt_tokens(chosen)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.values(), SETTINGS.clip)
        optimizer.step()
        schedule.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("name", "packing"),
    exhaustively(
        [("llama", True), ("qwen2", True), ("ling3", True), ("llama", False)], but=[("llama", True), ("ling3", True)]
    ),
)
def test_the_first_ten_losses_are_pefts(name, packing, tmp_path):
    case, some, settings = opened(name, tmp_path), texts(), dataclasses.replace(SETTINGS, packing=packing)
    how = {"alpha": SETTINGS.alpha, "targets": SETTINGS.targets}
    adapter = ling3.new_adapter(case.ours, rank=4, key=jax.random.key(SETTINGS.seed), **how)
    expected = losses_of_torch(case.theirs, adapter, some, packing)
    assert min(expected) < expected[0] - 0.05, "ten steps should learn something"
    found = [point["loss"] for point in finetune(case.ours, some, None, settings).log]
    assert np.abs(np.subtract(found, expected)).max() <= LOSS
