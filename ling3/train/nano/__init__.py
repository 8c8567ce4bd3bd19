"""*nano*: a Ling-3 of 1.3 million parameters that answers grade-school word problems step by step.

`problems` is its data, `recipe` trains it, `exam` examines it. The recipe's public names are importable from here, too.
"""

from importlib import import_module
from typing import Any

_RECIPE = ("Recipe", "batches", "corpus", "make")


def __getattr__(name: str) -> Any:
    """A name of `recipe`, imported when first used: the recipe needs the extra `train`, and the problems do not."""
    if name not in _RECIPE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("ling3.train.nano.recipe"), name)
