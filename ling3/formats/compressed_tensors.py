"""The common part of compressed-tensors' formats: how its configs describe them (version 0.20)."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ling3.formats.matrix import QuantizedMatrix


class CompressedTensors(QuantizedMatrix):
    """A format of compressed-tensors: `FORMAT` is its name there, and the `weights` of a config group describe it."""

    FORMAT: ClassVar[str]

    @classmethod
    @abstractmethod
    def readable(cls, weights: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """The values that ling3 reads for each field of `weights`; some depend on other fields."""

    @classmethod
    def options(cls, weights: Mapping[str, Any]) -> dict[str, Any]:
        """The options of `init` for these fields, which are readable: by default none."""
        del weights
        return {}

    @classmethod
    @abstractmethod
    def weights(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """The `weights` fields of a config group for these options of `init`."""
