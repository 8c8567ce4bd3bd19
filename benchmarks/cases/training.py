"""Fine-tuning a LoRA adapter beside transformers with PEFT: SmolLM2-135M's shapes, float32, layers recomputed in both.

A measurement is the mean time of the steps after the first, which compiles. The oracle is PEFT's loss of each step.
"""

import importlib.util
import itertools
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ling3
from benchmarks.models import DENSE_TOY, SMOLLM2, checkpoint, prompts
from benchmarks.registry import Absent, Setting, Side, Trial, Wrong, case
from benchmarks.transformers_peer import Peer
from ling3 import train

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ROWS, STEPS = 16, 2, 3
CLOSE = 1e-3
"""The largest difference of losses near 10 nats: fp32 both ways, in other orders, through 30 layers."""


class Pair:
    """ling3 and PEFT with the same weights, the same first adapter, and the same texts, all of them learnt."""

    def __init__(self, setting: Setting):
        self.config = setting.size(full=SMOLLM2, toy=DENSE_TOY)
        directory = checkpoint(self.config, setting.scratch)
        self.model = ling3.load(directory, dtype=jnp.float32)
        self.rows = prompts(self.config, ROWS, setting.size(full=256, toy=32))
        tokens = ROWS * len(self.rows[0])
        how = {"lora": RANK, "targets": TARGETS, "steps": STEPS, "batch": ROWS, "tokens": tokens, "warmup": 0}
        self.settings = train.FineTuning(**how)
        self.adapter = ling3.new_adapter(self.model, rank=RANK, key=jax.random.key(0), targets=TARGETS)
        self.peer = Peer(directory)

    def ours(self) -> tuple[list[float], float]:
        """The loss of each step, and the milliseconds of a step after the first."""
        learnt = (False, *itertools.repeat(True, len(self.rows[0]) - 1))
        log = train.finetune(
            self.model, [train.TrainingText(tuple(row), learnt) for row in self.rows], None, self.settings
        ).log
        return [point["loss"] for point in log], 1e3 * (log[-1]["seconds"] - log[0]["seconds"]) / (STEPS - 1)

    def theirs(self) -> tuple[list[float], float]:
        """The same of PEFT. Raises Absent without it."""
        if importlib.util.find_spec("peft") is None:
            raise Absent("peft is not installed: pip install -e '.[parity]'")
        import peft  # noqa: PLC0415 -- an extra
        import transformers  # noqa: PLC0415 -- an extra

        torch = self.peer.torch
        config = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(TARGETS), task_type="CAUSAL_LM")
        with warnings.catch_warnings():  # PEFT 0.21 asks for attributes that transformers 5.23 has renamed
            warnings.simplefilter("ignore", FutureWarning)
            model: Any = peft.get_peft_model(self.peer.model, config)
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable()
        for name, parameter in model.named_parameters():
            module, _, side = name.removeprefix("base_model.model.").partition(".lora_")
            if side.startswith("A."):
                parameter.data.copy_(torch.tensor(np.asarray(self.adapter.modules[module].lora_A)))
        model.train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 0, STEPS)
        tokens, losses, begin = torch.tensor(self.rows), [], 0.0
        for step in range(STEPS):
            begin = time.perf_counter() if step == 1 else begin
            optimizer.zero_grad()
            loss = model(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        seconds = time.perf_counter() - begin
        self.peer.model = model.unload()
        return losses, 1e3 * seconds / (STEPS - 1)

    def check(self) -> str:
        """Compares the losses. Raises Wrong."""
        off = float(np.abs(np.subtract(self.ours()[0], self.theirs()[0])).max())
        if off > CLOSE:
            raise Wrong(f"losses differ by {off:.1e} nats; at most {CLOSE:.0e} was allowed")
        return f"the losses of {STEPS} steps are PEFT's within {off:.0e} nats"


@case(
    "training/lora-135m",
    "How long does a LoRA step take, beside transformers with PEFT?",
    wanted=1.2,
    rounds=3,
)
def lora(setting: Setting) -> Trial:
    """A step of an adapter of rank 16 on all matrices of the layers."""
    pair = Pair(setting)
    sides = [
        Side("ling3", lambda: pair.ours()[1], pair.check),
        Side("transformers and PEFT", lambda: pair.theirs()[1], lambda: "the oracle"),
    ]
    about = {"rank": RANK, "texts": ROWS}
    return Trial(sides, tokens=ROWS * len(pair.rows[0]), about=about, warm=False)  # the check has run both sides
