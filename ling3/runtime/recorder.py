"""A recorder of a forward pass's intermediate arrays, which may also replace some; without one there is no overhead."""

from collections.abc import Callable
from typing import Any

Edit = Callable[[str, Any, Any], Any]
"""`edit(path, array, span)` returns the array that the pass continues with: `array`, or one in its place."""


class Recorder:
    """Records intermediate arrays by module path and name, such as `model.layers.3.attention.gate`.

    It is filled while a pass is traced, so `values` has to be read inside the same `jit`. At a *site*, a module shows
    it an array that the pass continues with: `edit` may replace the array, and the replacement is recorded.
    """

    def __init__(self, values: dict[str, Any] | None = None, path: str = "", edit: Edit | None = None):
        self.values: dict[str, Any] = {} if values is None else values
        self.path, self.edit = path, edit

    def __call__(self, **arrays: Any) -> None:
        """Records arrays under their names."""
        if self is not SILENT:
            self.values |= {f"{self.path}{name}": array for name, array in arrays.items()}

    def site(self, name: str, array: Any, span: Any) -> Any:
        """Passes an array through `edit`, if there is one; records and returns the result."""
        if self is SILENT:
            return array
        if self.edit is not None and array is not None:
            array = self.edit(f"{self.path}{name}", array, span)
        self(**{name: array})
        return array

    def within(self, name: str) -> "Recorder":
        """The recorder of a submodule, with the same `values` and `edit`."""
        return self if self is SILENT else Recorder(self.values, f"{self.path}{name}.", self.edit)

    def of(self, path: str) -> dict[str, Any]:
        """The arrays of one module by name, without those of its submodules."""
        own = f"{path}."
        return {
            name[len(own) :]: x
            for name, x in self.values.items()
            if name.startswith(own) and "." not in name[len(own) :]
        }


SILENT = Recorder()
"""The recorder that records nothing: the default of every pass."""
