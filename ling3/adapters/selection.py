"""The rules by which an adapter's config selects modules by their names, as PEFT applies them."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

Named = str | tuple[str, ...]
"""A regular expression for entire names of modules, or a list of names or of their ends."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """Selects the modules that have an adapter, as PEFT 0.21 does (`check_target_module_exists`).

    A list selects a module whose name is an entry, or ends with a dot and an entry. A string is a regular expression
    for the entire name.
    """

    target_modules: Named
    exclude_modules: Named = ()
    layers_to_transform: tuple[int, ...] | None = None
    """The indices of the layers that a list of targets is limited to; None or empty for all."""
    layers_pattern: tuple[str, ...] = ()
    """Names of the list of layers, as regular expressions; empty for any name."""

    def __call__(self, name: str) -> bool:
        """True if the module of this name has an adapter."""
        if selects(self.exclude_modules, name) or not selects(self.target_modules, name):
            return False
        entire = isinstance(self.target_modules, str) or name in self.target_modules
        return entire or not self.layers_to_transform or self._layer(name) in self.layers_to_transform

    def unknown(self, names: Iterable[str]) -> list[str]:
        """The targets that select none of the modules of these names, even without the other rules."""
        every, targets = list(names), self.target_modules
        each = [(targets, targets)] if isinstance(targets, str) else [(end, (end,)) for end in targets]
        return [said for said, own in each if not any(selects(own, name) for name in every)]

    def _layer(self, name: str) -> int | None:
        """The index of the layer that the module of this name is in: the first number in it."""
        for pattern in self.layers_pattern or (r"[^.]*",):
            if found := re.match(rf"(?:^|.*?\.){pattern}\.(?P<index>\d+)\.", name):
                return int(found["index"])
        return None


def selects(names: Named, name: str) -> bool:
    """True if `names` has the module of this name."""
    if isinstance(names, str):
        return names != "" and re.fullmatch(names, name) is not None
    return name in names or any(name.endswith(f".{end}") for end in names)


def by_pattern(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """The value of the first key that is a regular expression for the end of a module's name, from a dot on."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), default)
