"""Training: a generic loop for any configuration and token stream, and the recipe of the *nano* checkpoint.

`python -m ling3.train --out DIRECTORY` makes nano.
"""

from ling3.train.balance import BalancedRouter, balanced, excess_load, plain
from ling3.train.loop import Batch, Optimization, Progress, next_token_loss, train

__all__ = [
    "BalancedRouter",
    "Batch",
    "Optimization",
    "Progress",
    "balanced",
    "excess_load",
    "next_token_loss",
    "plain",
    "train",
]
