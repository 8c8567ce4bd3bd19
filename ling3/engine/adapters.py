"""The adapters of an engine: their names for requests, and the model that has all of them."""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

from ling3.adapters import Adapter
from ling3.adapters.by_row import with_adapters
from ling3.checkpoint.adapters import load_adapter
from ling3.engine.origins import checksum_of_adapter
from ling3.model import CausalLM
from ling3.runtime.parameters import ParameterError
from ling3.runtime.quoting import shown


@dataclasses.dataclass(frozen=True)
class ServedAdapters:
    """Adapters by their names, and a model that has all of them beside the weights that it shares with its base."""

    model: CausalLM
    each: Mapping[str, Adapter]

    @staticmethod
    def of(model: CausalLM, adapters: Mapping[str, Adapter | str | os.PathLike[str]]) -> "ServedAdapters":
        """The adapters for engines of `model`; a path or hub id is read as `ling3.load_adapter` does.

        Raises ValueError for a name that is no text, and TypeError for a value that is neither an adapter nor a path;
        AdapterError for an adapter that does not fit, or a model that has one already; and `load_adapter`'s errors.
        """
        for name, adapter in adapters.items():
            if not isinstance(name, str) or not name:
                raise ValueError(f"adapters: the name {shown(name)}: expected a text that is not empty")
            if not isinstance(adapter, (Adapter, str, os.PathLike)):
                raise TypeError(f"adapters: {name!r} is {shown(adapter)}, expected a ling3.Adapter or a path")
        each = {
            name: adapter if isinstance(adapter, Adapter) else load_adapter(model, adapter)
            for name, adapter in adapters.items()
        }
        return ServedAdapters(with_adapters(model, each), each)

    def beside(self, model: CausalLM) -> "ServedAdapters":
        """The same adapters beside other weights of the same structure."""
        return dataclasses.replace(self, model=with_adapters(model, self.each))

    def portable(self) -> "ServedAdapters":
        """A copy for another process that only checks names: it has no arrays."""
        nothing: Any = None
        return dataclasses.replace(self, model=nothing, each=dict.fromkeys(self.each, nothing))

    def index(self, name: str) -> int:
        """The index of an adapter. Raises ParameterError for a name that none has."""
        if name not in self.each:
            raise ParameterError("adapter", f"adapter is {shown(name)}, expected one of {', '.join(self.each)}")
        return list(self.each).index(name)

    def origin(self, name: str) -> Mapping[str, Any]:
        """The part of a snapshot's origin that is the adapter's."""
        return {"adapter": self._checksums[name]}

    @functools.cached_property
    def _checksums(self) -> Mapping[str, str]:
        return {name: checksum_of_adapter(adapter) for name, adapter in self.each.items()}
