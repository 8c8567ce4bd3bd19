"""*nano*: a Ling-3 of 2.4 million parameters with ten skills, in some of which nearly every mechanism matters.

`skills` are what it learns, each with its texts and its exam, `mixture` makes rows of them, `recipe` trains it. The
recipe's public names are importable from here, too.
"""

from importlib import import_module
from typing import Any

_RECIPE = ("NANO", "WITHOUT", "Recipe", "make")


def __getattr__(name: str) -> Any:
    """A name of `recipe`, imported when first used: the recipe needs the extra `train`, and the problems do not."""
    if name not in _RECIPE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ling3.train.nano.recipe"), name)
