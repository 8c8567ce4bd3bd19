"""What the rest of the package knows of an architecture."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture: which checkpoints it answers to, how their config is read, and how its tree of modules is built.

    Configs are frozen, hashable and of a class of the family's own, with at least `vocab_size`,
    `max_position_embeddings`, `eos_token_id` (a tuple) and `to_dict()`, which gives the published `config.json`.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    config: type
    read: Callable[[Any, str], Any]
    """`read(raw, source)`: the config in a JSON object; errors name `source`."""
    init: Callable[..., Any]
    """`init(config, *, key, dtype)`: a `CausalLM` of random weights."""
    published: Callable[[str, Any], str] = lambda name, config: name
    """`published(name, config)`: what the checkpoint calls the tensor that the tree's fields name so."""
    skips: Callable[[str, Any], bool] = lambda name, config: False
    """`skips(name, config)`: True for a tensor that checkpoints may have beside the model's, and that `load` leaves."""
    without_skipped: Callable[[Any], Any] = lambda config: config
    """The config of a checkpoint that has none of the tensors that `load` skips: what `save` writes."""
