"""A recorder of a forward pass's intermediate arrays; a pass without one costs nothing more."""

from typing import Any


class Recorder:
    """Records intermediate arrays by module path and name, such as `model.layers.3.attention.gate`.

    It is filled while a pass is traced, so `values` has to be read inside the same `jit`.
    """

    def __init__(self, values: dict[str, Any] | None = None, path: str = ""):
        self.values: dict[str, Any] = {} if values is None else values
        self.path = path

    def __call__(self, **arrays: Any) -> None:
        """Records arrays under their names."""
        if self is not SILENT:
            self.values |= {f"{self.path}{name}": array for name, array in arrays.items()}

    def within(self, name: str) -> "Recorder":
        """The recorder of a submodule, with the same `values`."""
        return self if self is SILENT else Recorder(self.values, f"{self.path}{name}.")

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
