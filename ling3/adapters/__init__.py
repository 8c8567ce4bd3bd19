"""Adapters of a model's matrices (LoRA): the value, applying and merging it, and which modules it changes."""

from ling3.adapters.adapter import Adapter, AdapterError, LowRankUpdate, merge_adapter, new_adapter, with_adapter

__all__ = ["Adapter", "AdapterError", "LowRankUpdate", "merge_adapter", "new_adapter", "with_adapter"]
