"""`Family`: the record of an architecture for the rest of the package."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple


def _vary(config: Any, layers: Sequence[int] | None, fields: Mapping[str, Any]) -> Any:
    """Only for all layers at once: a config says nothing of single ones unless its family knows how."""
    if layers is not None:
        raise ValueError(f"layers: a {type(config).__name__} says nothing of single layers; leave `layers` out")
    return dataclasses.replace(config, **fields)


class Place(NamedTuple):
    """Where a checkpoint has a tensor: as the tensor `name`, or as a part of that one, which is contiguous in it."""

    name: str
    whole: tuple[int, ...] | None = None
    """The shape of the tensor that it is a part of; None if it is all of it."""
    start: int = 0
    """Numbers of that tensor before the part."""


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
    published_shape: Callable[[str, tuple[int, ...]], tuple[int, ...]] = lambda name, shape: shape
    """`published_shape(name, shape)`: the shape of that tensor in the checkpoint, where it is another one."""
    layouts: tuple[Callable[[str, tuple[int, ...], Any], Place], ...] = ()
    """`layout(name, shape, config)`: where a checkpoint of another layout has the tensor of this published name and
    shape. `load` takes the layout whose names a checkpoint has; `save` writes the published one."""
    misfits: Callable[[Any], Iterable[str]] = lambda model: ()
    """`misfits(model)`: what is wrong with the numbers of a loaded model beside NaN and infinity, a line for each."""
    formats_in_headers: bool = False
    """True if the headers of a checkpoint's files, and not its config, decide which matrices are in FP8 and FP4."""
    skips: Callable[[str, Any], bool] = lambda name, config: False
    """`skips(name, config)`: True for a tensor that checkpoints may have beside the model's, and that `load` leaves."""
    copies: Callable[[str, Any], str | None] = lambda name, config: None
    """`copies(name, config)`: for a tensor that repeats one of the model's, the name of that one. `load` compares the
    two, and `save` does not write it."""
    without_skipped: Callable[[Any], Any] = lambda config: config
    """The config of a checkpoint that has none of the tensors that `load` skips: what `save` writes."""
    vary: Callable[[Any, Sequence[int] | None, Mapping[str, Any]], Any] = _vary
    """`vary(config, layers, fields)`: the config with other values of these fields in some layers, or (None) in all."""
    ablations: Mapping[type, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """For a class of modules, the config's field for each mechanism that `ling3.ablate` can cut from them."""
