"""A recorder of a forward pass's intermediate arrays; a pass without one costs nothing more."""

from typing import Any


class Recorder:
    """Takes down intermediate arrays by the path of the module and their name, as `model.layers.3.attention.gate`.

    It is filled while a pass is traced, so whoever makes it reads `values` inside of the same `jit`.
    """

    def __init__(self, values: dict[str, Any] | None = None, path: str = ""):
        self.values: dict[str, Any] = {} if values is None else values
        self.path = path

    def __call__(self, **arrays: Any) -> None:
        """Files arrays under their names."""
        for name, array in arrays.items():
            self.values[f"{self.path}{name}"] = array

    def within(self, name: str) -> "Recorder":
        """The recorder of a part: it files into the same `values`."""
        return Recorder(self.values, f"{self.path}{name}.")

    def of(self, path: str) -> dict[str, Any]:
        """What a part has filed, by name; nothing of the parts inside of it."""
        own = f"{path}."
        return {
            name[len(own) :]: x
            for name, x in self.values.items()
            if name.startswith(own) and "." not in name[len(own) :]
        }


class _Silent(Recorder):
    """Takes down nothing."""

    def __call__(self, **arrays: Any) -> None:
        """Forgets them."""

    def within(self, name: str) -> "Recorder":
        """Itself: there are no names to tell apart."""
        return self


SILENT: Recorder = _Silent()
"""The recorder that records nothing: the default of every pass."""
