"""*nano*: a Ling-3 model of 2.4 million parameters with ten skills; nearly every mechanism matters for some of them.

`skills` has the texts and exams of each skill, `mixture` packs the texts into rows, `recipe` trains the model. The
recipe's public names can be imported from here, too.
"""

from importlib import import_module
from typing import Any

_RECIPE = ("NANO", "WITHOUT", "Recipe", "make")


def __getattr__(name: str) -> Any:
    """Imports a name of `recipe` on first use: the recipe needs the extra `train`, and the problems do not."""
    if name not in _RECIPE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ling3.train.nano.recipe"), name)
