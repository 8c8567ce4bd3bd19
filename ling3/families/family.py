"""`Family`: the record of an architecture for the rest of the package."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ling3.families.gguf import GgufArchitecture


def _vary(config: Any, layers: Sequence[int] | None, fields: Mapping[str, Any]) -> Any:
    """The default `Family.vary`, for configs that only describe all layers. Raises ValueError if `layers` is given."""
    if layers is not None:
        raise ValueError(f"layers: a {type(config).__name__} says nothing of single layers; leave `layers` out")
    return dataclasses.replace(config, **fields)


class Place(NamedTuple):
    """Where a checkpoint stores a tensor: as the tensor `name`, or as a contiguous part of that one."""

    name: str
    whole: tuple[int, ...] | None = None
    """The shape of the tensor `name` if this is a part of it; None if it is all of it."""
    start: int = 0
    """The element of the flattened tensor `name` at which the part begins."""


@dataclasses.dataclass(frozen=True)
class Family:
    """An architecture: which checkpoints belong to it, how their config is read, and how its module tree is built.

    Configs are frozen, hashable and of a class that no other family uses, with at least `vocab_size`,
    `max_position_embeddings`, `eos_token_id` (a tuple) and `to_dict()`, which returns the published `config.json`.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    config: type
    read: Callable[[Any, str], Any]
    """`read(raw, source)`: the config from a JSON object; errors name `source`."""
    init: Callable[..., Any]
    """`init(config, *, key, dtype)`: a `CausalLM` with random weights."""
    published: Callable[[str, Any], str] = lambda name, config: name
    """`published(name, config)`: the checkpoint's name of the tensor at the path `name` of the module tree."""
    published_shape: Callable[[str, tuple[int, ...]], tuple[int, ...]] = lambda name, shape: shape
    """`published_shape(name, shape)`: the checkpoint's shape of the tensor `name`; `shape` is that in the tree."""
    module: Callable[[str, Any], str] = lambda name, config: name
    """`module(name, config)`: transformers' name, which adapters use, of the module with the published name `name`."""
    layouts: tuple[Callable[[str, tuple[int, ...], Any], Place], ...] = ()
    """Each `layout(name, shape, config)`: where a checkpoint in another layout stores the tensor of this published name
    and shape. `load` takes the layout with the most names present; `save` writes the published one."""
    misfits: Callable[[Any], Iterable[str]] = lambda model: ()
    """`misfits(model)`: a line for each problem in a loaded model's numbers, beside NaN and infinity."""
    formats_in_headers: bool = False
    """True if the headers of the files, and not the config, decide which matrices are in FP8 and FP4."""
    skips: Callable[[str, Any], bool] = lambda name, config: False
    """`skips(name, config)`: True for a tensor that `load` ignores, unless it keeps multi-token-prediction layers."""
    copies: Callable[[str, Any], str | None] = lambda name, config: None
    """`copies(name, config)`: the name of the tensor of which this one is a copy, or None. `load` compares the two;
    `save` omits the copy."""
    mtp: Callable[..., Any] | None = None
    """`mtp(config, number, *, key, dtype)`: a random multi-token-prediction layer, an `MTP`; None if ling3 computes no
    such layers in this family."""
    mtp_layers: Callable[[Any], int] = lambda config: 0
    """`mtp_layers(config)`: the number of multi-token-prediction layers that a checkpoint has."""
    with_mtp_layers: Callable[[Any, int], Any] = lambda config, count: config
    """`with_mtp_layers(config, count)`: the config of a model with that many of these layers, as `save` writes it."""
    vary: Callable[[Any, Sequence[int] | None, Mapping[str, Any]], Any] = _vary
    """`vary(config, layers, fields)`: the config with new values of these fields in some layers, or in all for None."""
    gguf: tuple[GgufArchitecture, ...] = ()
    """The architectures of GGUF files that are of this family."""
    ablations: Mapping[type, Mapping[str, str]] = dataclasses.field(default_factory=dict)
    """For each module class, the config field that controls each mechanism that `ling3.ablate` can remove."""
