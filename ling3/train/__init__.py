"""Training: a loop for any model and any stream of token batches; `nano` has the recipe of the *nano* checkpoint.

`python -m ling3.train --out DIRECTORY` trains nano.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ling3.train.balance import BalancedRouter, balanced, excess_load, plain
    from ling3.train.fsdp import Fsdp
    from ling3.train.loop import Batch, Optimization, Progress, next_token_loss, train
    from ling3.train.rl import Answers, Grpo, Point, Task, advantages, divergence, grpo, objective

__all__ = [
    "Answers",
    "BalancedRouter",
    "Batch",
    "Fsdp",
    "Grpo",
    "Optimization",
    "Point",
    "Progress",
    "Task",
    "advantages",
    "balanced",
    "divergence",
    "excess_load",
    "grpo",
    "next_token_loss",
    "objective",
    "plain",
    "train",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Imports a public name on first use: the loop needs the extra `train`, nano's problems do not."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        balance = dict.fromkeys(("BalancedRouter", "balanced", "excess_load", "plain"), "balance")
        learned = ("Answers", "Grpo", "Point", "Task", "advantages", "divergence", "grpo", "objective")
        module = (balance | dict.fromkeys(learned, "rl") | {"Fsdp": "fsdp"}).get(name, "loop")
        return getattr(import_module(f"ling3.train.{module}"), name)
