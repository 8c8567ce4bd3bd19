"""The published name and shape of each array of a model: the path in the module tree, with exceptions.

EXCEPTIONS lists the exceptions of layers; `Family.published` and `Family.published_shape` add those of a family.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import DTypeLike

from ling3.families import Place, family_of, in_formats, init
from ling3.families.quantization import in_floats
from ling3.layers.conv import ShortConv
from ling3.layers.kda import KDA
from ling3.layers.linear import Matrix
from ling3.leaves import ArrayLeaf, array_leaves
from ling3.model import CausalLM


class Weight(NamedTuple):
    """One published weight: its tensor's name, its own shape, and the leaf (at `path`, row `expert`) that it fills."""

    name: str
    shape: tuple[int, ...]
    path: str
    expert: int | None = None
    also: tuple[tuple[int, ...], ...] = ()
    """Other shapes in which checkpoints may store it."""
    whole: tuple[int, ...] | None = None
    """The shape of the whole tensor, if it holds other weights too."""
    start: int = 0
    """The element of the flattened tensor at which this weight begins."""

    @property
    def size(self) -> int:
        """The number of elements of this weight."""
        return math.prod(self.shape)


def _as_it_is(leaf: ArrayLeaf) -> Iterator[Weight]:
    yield Weight(leaf.path, tuple(leaf.value.shape), leaf.path)


def _one_by_one(leaf: ArrayLeaf) -> Iterator[Weight]:
    """`experts.gate_proj.weight` [experts, …] is stored as `experts.{e}.gate_proj.weight` […] for each expert e."""
    experts, projection, field = leaf.path.rsplit(".", 2)
    (count, *rest), path = leaf.value.shape, leaf.path
    shape = tuple(rest)
    for expert in range(count):
        yield Weight(f"{experts}.{expert}.{projection}.{field}", shape, path, expert)


def _with_an_axis_of_one(leaf: ArrayLeaf) -> Iterator[Weight]:
    """[channels, taps] is stored as [channels, 1, taps], PyTorch's shape for depthwise convolutions."""
    channels, taps = leaf.value.shape
    yield Weight(leaf.path, (channels, 1, taps), leaf.path)


def _also_four_dimensional(leaf: ArrayLeaf) -> Iterator[Weight]:
    """[heads], which some checkpoints store as [1, 1, heads, 1]."""
    shape = tuple(leaf.value.shape)
    yield Weight(leaf.path, shape, leaf.path, also=((1, 1, *shape, 1),))


Parts = list[tuple[ArrayLeaf, tuple[Weight, ...]]]
"""The arrays of a model, each with the published weights that fill it."""

EXCEPTIONS: tuple[tuple[Callable[[ArrayLeaf], bool], Callable[[ArrayLeaf], Iterator[Weight]]], ...] = (
    (lambda leaf: isinstance(leaf.module, Matrix) and leaf.axes[:1] == ("experts",), _one_by_one),
    (lambda leaf: isinstance(leaf.module, ShortConv), _with_an_axis_of_one),
    (lambda leaf: isinstance(leaf.module, KDA) and leaf.field == "A_log", _also_four_dimensional),
)
"""Leaves that checkpoints store differently from the tree, and how. The first match applies."""


def structure(config: Any, dtype: DTypeLike = jnp.bfloat16, *, mtp: bool = False) -> CausalLM:
    """The model of `config` with a `jax.ShapeDtypeStruct` for each array: nothing is allocated.

    With `mtp`, it has the multi-token-prediction layers too; raises ValueError if the config has none.
    """
    return _traced(config, jnp.dtype(dtype), family_of(config).init, mtp)


@functools.lru_cache(maxsize=4)  # reading a file in blocks needs the same tree three times
def _traced(config: Any, dtype: jnp.dtype, init_of_family: Callable[..., CausalLM], mtp: bool) -> CausalLM:
    """The structure, which depends on the family's `init` too: a family may be registered again with another one.

    That of a quantized model is made from that of the model in floats, which finding its formats needs as well.
    """
    if (plain := in_floats(config)) is config:
        # The key is traced too.
        return eqx.filter_eval_shape(lambda: init(config, key=jax.random.key(0), dtype=dtype, mtp=mtp))
    model = dataclasses.replace(_traced(plain, dtype, init_of_family, mtp), config=config)
    return eqx.filter_eval_shape(lambda own: in_formats(own, jax.random.key(0)), model)


def weights_of(leaf: ArrayLeaf) -> Iterator[Weight]:
    """The published tensors that make up an array of a model, or of its `structure`."""
    config = leaf.around[0].config
    family = family_of(config)
    publish = next((publish for applies, publish in EXCEPTIONS if applies(leaf)), _as_it_is)
    for weight in publish(leaf):
        name = family.published(weight.name, config)
        shape, also = family.published_shape(name, weight.shape), (weight.shape, *weight.also)
        yield Weight(name, shape, weight.path, weight.expert, also)


def stored_parts(model: CausalLM, names: Container[str]) -> Parts:
    """Each array of `model`, and the tensors that it is made of, as a checkpoint with tensors of these names has them.

    Takes the layout, the published one or one of the family's, with the most names present; ties go to the first. Only
    the first tensor of each array is looked up, and missing tensors are no error.
    """
    config = model.config
    published = [(leaf, tuple(weights_of(leaf))) for leaf in array_leaves(model)]

    def as_published(name: str, shape: tuple[int, ...], config: Any) -> Place:
        return Place(name)

    def place(layout: Callable[[str, tuple[int, ...], Any], Place], weight: Weight) -> Weight:
        name, whole, start = layout(weight.name, weight.shape, config)
        return weight._replace(name=name, whole=whole, start=start)

    def missing(layout: Callable[[str, tuple[int, ...], Any], Place]) -> int:
        return sum(place(layout, first).name not in names for _, (first, *_) in published)

    layout = min((as_published, *family_of(config).layouts), key=missing)
    return [(leaf, tuple(place(layout, weight) for weight in weights)) for leaf, weights in published]


def weight_names(config: Any, *, mtp: bool = False) -> Iterator[Weight]:
    """Every tensor in a checkpoint of `config`, those of multi-token prediction only with `mtp`."""
    for leaf in array_leaves(structure(config, mtp=mtp)):
        yield from weights_of(leaf)
