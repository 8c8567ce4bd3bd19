"""Formats of compressed-tensors, and what its configs say of a matrix in one of them (version 0.20)."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ling3.formats.matrix import QuantizedMatrix


class CompressedTensors(QuantizedMatrix):
    """A format that has a name there, and fields of its own in the `weights` of a config's group."""

    FORMAT: ClassVar[str]

    @staticmethod
    @abstractmethod
    def readable(weights: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
        """The values that each field may have, some of them by what others say."""

    @staticmethod
    @abstractmethod
    def options(weights: Mapping[str, Any]) -> dict[str, Any]:
        """The options of `init` that readable fields give."""

    @staticmethod
    @abstractmethod
    def weights(options: Mapping[str, Any]) -> dict[str, Any]:
        """The `weights` fields of a config group with such options."""
