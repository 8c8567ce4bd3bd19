"""Training: a loop for any model and any stream of token batches, fine-tuning, and nano's recipe (`nano`).

`python -m ling3.train --out DIRECTORY` trains nano.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ling3.train.balance import BalancedRouter, balanced, excess_load, plain
    from ling3.train.fine_tuning import FineTuned, FineTuning, finetune
    from ling3.train.fsdp import Fsdp
    from ling3.train.loop import Batch, Optimization, Progress, next_token_loss, train
    from ling3.train.memory import TrainingMemory, predict
    from ling3.train.rl import Answers, Grpo, Point, Task, advantages, divergence, grpo, objective
    from ling3.train.texts import TrainingDataError, TrainingText, read_texts

__all__ = [
    "Answers",
    "BalancedRouter",
    "Batch",
    "FineTuned",
    "FineTuning",
    "Fsdp",
    "Grpo",
    "Optimization",
    "Point",
    "Progress",
    "Task",
    "TrainingDataError",
    "TrainingMemory",
    "TrainingText",
    "advantages",
    "balanced",
    "divergence",
    "excess_load",
    "finetune",
    "grpo",
    "next_token_loss",
    "objective",
    "plain",
    "predict",
    "read_texts",
    "train",
]

_MODULE_OF = {
    **dict.fromkeys(("BalancedRouter", "balanced", "excess_load", "plain"), "balance"),
    **dict.fromkeys(("FineTuned", "FineTuning", "finetune"), "fine_tuning"),
    **dict.fromkeys(("TrainingMemory", "predict"), "memory"),
    **dict.fromkeys(("TrainingDataError", "TrainingText", "read_texts"), "texts"),
    **dict.fromkeys(("Answers", "Grpo", "Point", "Task", "advantages", "divergence", "grpo", "objective"), "rl"),
    "Fsdp": "fsdp",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports a public name on first use: the loop needs the extra `train`, nano's problems do not."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"ling3.train.{_MODULE_OF.get(name, 'loop')}"), name)
