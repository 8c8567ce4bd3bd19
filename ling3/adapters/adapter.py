"""`Adapter`: low-rank updates (LoRA) of a model's matrices, and the models with an adapter beside or in its weights."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, PRNGKeyArray

from ling3.adapters.selection import Selection
from ling3.families import family_of
from ling3.layers.adapted import AdaptedMatrix
from ling3.layers.linear import Linear, Matrix
from ling3.leaves import dotted
from ling3.mesh.sharded import Sharded
from ling3.mesh.sharding import beside
from ling3.model import CausalLM
from ling3.runtime.quoting import QuotingError

_EMBEDDING, _HEAD = "model.word_embeddings", "lm_head"
_LISTED = 12


class AdapterError(QuotingError):
    """Raised for an adapter that does not fit a model, or that a model cannot take; names the modules."""

    def __init__(self, problem: str, each: Sequence[str] = ()):
        more = [f"... and {len(each) - _LISTED:,} more"] if len(each) > _LISTED else []
        super().__init__("\n  ".join([f"{problem}:" if each else problem, *each[:_LISTED], *more]))


class LowRankUpdate(eqx.Module):
    """The update of one matrix: W + scale · B A, where `Adapter.scale` follows from `alpha` and the rank."""

    lora_A: Float[Array, "rank in_features"]
    lora_B: Float[Array, "out_features rank"]
    alpha: float = eqx.field(static=True)

    @property
    def rank(self) -> int:
        """The rank r of the update."""
        return self.lora_A.shape[0]


class Adapter(eqx.Module):
    """A LoRA adapter: updates by the names that transformers gives to the modules of the base model.

    It is a pytree whose leaves are the arrays A and B: gradients with respect to an adapter are an adapter.
    """

    modules: dict[str, LowRankUpdate]
    use_rslora: bool = eqx.field(static=True, default=False)
    """True for rank-stabilized LoRA (arXiv 2312.03732): alpha is divided by the square root of the rank."""
    base: str | None = eqx.field(static=True, default=None)
    """The base model's path or hub id as the adapter's file states it; nothing is read from there."""

    def scale(self, name: str) -> float:
        """The factor of B A in the update of a module: alpha / rank, or alpha / sqrt(rank) with `use_rslora`."""
        update = self.modules[name]
        return update.alpha / (math.sqrt(update.rank) if self.use_rslora else update.rank)


class Adaptable(NamedTuple):
    """A matrix that an adapter can change."""

    path: str
    """Where it is in the module tree."""
    module: str
    """The name of its module in transformers."""
    published: str
    """The name of its module in the published checkpoint."""
    matrix: Matrix


def adaptable(model: CausalLM) -> list[Adaptable]:
    """The matrices that an adapter can change, in the model's order.

    These are all except the embedding, stacks (such as routed experts) and multi-token-prediction layers. Routers,
    convolutions and norms are no matrices. For a model on a mesh the result has the structures of the unsharded
    matrices, with a `jax.ShapeDtypeStruct` for each array.
    """
    config, family, found = model.config, family_of(model.config), []
    for path, node in jax.tree_util.tree_flatten_with_path(_whole(model), is_leaf=_is_matrix)[0]:
        own = dotted(path)
        if isinstance(node, Matrix) and len(node.shape) == 2 and own != _EMBEDDING and not own.startswith("mtp."):
            published = family.published(f"{own}.weight", config).removesuffix(".weight")
            found.append(Adaptable(own, family.module(published, config), published, node))
    return found


def scales(model: CausalLM) -> tuple[tuple[str, float], ...]:
    """The path and the scale of each matrix that has an adapter, which its arrays do not show; empty without one."""
    nodes = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_matrix)[0]
    return tuple((dotted(path), node.scale) for path, node in nodes if isinstance(node, AdaptedMatrix))


def with_adapter(model: CausalLM, adapter: Adapter) -> CausalLM:
    """The model with an adapter beside its weights: y = x Wᵀ + scale · (x Aᵀ) Bᵀ in each of the adapter's modules.

    The weights are shared with `model` and may be quantized. The result runs, generates and serves like any model, and
    is differentiable with respect to the adapter. It is not a checkpoint: save the adapter by itself, or merge it.

    On a mesh, a device has the rows of B for its outputs of W and the columns of A for its inputs, and the model has no
    gradients. All processes of the mesh call this together, with the same adapter.

    Raises AdapterError if the adapter does not fit the model, and for a model that has an adapter.
    """
    known = {own.module: own for own in adaptable(model)}
    check(model, adapter, known)
    new = {}
    for name, update in adapter.modules.items():
        matrix, scale = known[name].matrix, adapter.scale(name)
        new[known[name].path] = AdaptedMatrix(
            base=matrix, lora_A=update.lora_A, lora_B=update.lora_B, scale=scale, axes=matrix.axes, name=matrix.name
        )
    return replaced(model, new)


def merge_adapter(model: CausalLM, adapter: Adapter) -> CausalLM:
    """The model with an adapter added to its weights: W + scale · B A, summed in float32 and rounded once to W's dtype.

    The result is a plain model, as fast as `model`, that `save` writes. Rounding to bfloat16 loses the small part of an
    update; with float32 weights it is the model of `with_adapter` up to rounding.

    Raises AdapterError as `with_adapter` does, and for a quantized matrix, whose format could not hold the sum: to
    merge into it, load the base with `dequantize=True`.
    """
    if quantized := [
        f"{known.module}: {type(known.matrix).__name__}"
        for known in adaptable(model)
        if known.module in adapter.modules and not isinstance(known.matrix, Linear | AdaptedMatrix)
    ]:
        raise AdapterError(
            "the adapter cannot be merged into quantized matrices; load the base with dequantize=True, or use "
            "with_adapter, which keeps them as they are",
            quantized,
        )

    def merged(node: Any) -> Any:
        if not isinstance(node, AdaptedMatrix):
            return node
        assert isinstance(node.base, Linear), "checked before anything is merged"
        total = node.dense()
        if isinstance(model, Sharded):
            total = jax.device_put(total, node.base.weight.sharding)
        return Linear(weight=total, bias=node.base.bias, axes=node.axes, name=node.name)

    adapted = with_adapter(model, adapter)
    found = jax.tree.map(merged, adapted, is_leaf=_is_matrix)
    return dataclasses.replace(found, placement=model.placement) if isinstance(model, Sharded) else found


def new_adapter(
    model: CausalLM,
    *,
    rank: int,
    key: PRNGKeyArray,
    alpha: float | None = None,
    targets: str | Sequence[str] | None = None,
    use_rslora: bool = False,
) -> Adapter:
    """An adapter to train, which changes nothing yet: A is uniform in ±1/sqrt(in), as PEFT draws it, and B is 0.

    `targets` are names of modules in transformers, or their ends, such as `["q_proj", "v_proj"]`, or a regular
    expression for entire names; None means every matrix but `lm_head`. `alpha` is by default the rank, a scale of 1.
    The arrays are float32.

    Raises ValueError for a rank below 1, and AdapterError for a target that the model does not have.
    """
    if rank < 1:
        raise ValueError(f"rank: found {rank}; expected at least 1")
    known = adaptable(model)
    if targets is None:
        chosen = [own for own in known if own.module != _HEAD]
    else:
        selection = Selection(targets if isinstance(targets, str) else tuple(targets))
        if unknown := selection.unknown(own.module for own in known):
            raise AdapterError(f"targets: {no_such_modules(model)}", unknown)
        chosen = [own for own in known if selection(own.module)]
    modules = {}
    for own, one in zip(chosen, jax.random.split(key, max(1, len(chosen))), strict=False):
        outer, inner = own.matrix.shape
        bound = inner**-0.5
        first = jax.random.uniform(one, (rank, inner), jnp.float32, -bound, bound)
        factor = float(rank if alpha is None else alpha)
        modules[own.module] = LowRankUpdate(first, jnp.zeros((outer, rank), jnp.float32), factor)
    return Adapter(modules, use_rslora, model.origin.path)


def no_such_modules(model: CausalLM) -> str:
    """The beginning of an error about targets that match nothing, with the names that could be meant."""
    ends = dict.fromkeys(own.module.rpartition(".")[2] for own in adaptable(model))
    tied = "; lm_head is tied to the embedding and has no matrix" if model.lm_head is None else ""
    return f"no module has these names; expected ends of names such as {', '.join(ends)}{tied}"


def replaced(model: CausalLM, new: Mapping[str, Matrix]) -> CausalLM:
    """The model with other matrices around those of `adaptable` at the paths that `new` has."""
    changed = jax.tree_util.tree_map_with_path(
        lambda path, node: new.get(dotted(path), node) if _is_matrix(node) else node, _whole(model), is_leaf=_is_matrix
    )
    return beside(model, changed) if isinstance(model, Sharded) else changed


def check(model: CausalLM, adapter: Adapter, known: Mapping[str, Adaptable]) -> None:
    """Raises AdapterError unless the model, whose matrices `known` has by their modules, can take the adapter."""
    if isinstance(model, Sharded) and any(isinstance(array, Tracer) for array in jax.tree.leaves(adapter)):
        raise AdapterError(
            "the model lies on a mesh, and the adapter's arrays are traced by jax.jit or jax.grad: call with_adapter "
            "outside of these, and take gradients of the model of one device"
        )
    if adapted := [own.module for own in known.values() if isinstance(own.matrix, AdaptedMatrix)]:
        raise AdapterError("the model has an adapter already; start from the base model", adapted)
    if unknown := [name for name in adapter.modules if name not in known]:
        raise AdapterError(f"the adapter is for another model: {no_such_modules(model)}", unknown)
    wrong = []
    for name, update in adapter.modules.items():
        (outer, inner), rank = known[name].matrix.shape, update.rank
        for field, array, expected in (
            ("lora_A", update.lora_A, (rank, inner)),
            ("lora_B", update.lora_B, (outer, rank)),
        ):
            if array.shape != expected:
                wrong.append(f"{name}.{field}: found {list(array.shape)}; expected {list(expected)}")
    if wrong:
        raise AdapterError("the adapter is for another model: its arrays have other shapes", wrong)


def _whole(model: CausalLM) -> CausalLM:
    """The model itself, or the structure of the unsharded one if it is on a mesh."""
    return model.whole if isinstance(model, Sharded) else model


def _is_matrix(node: object) -> bool:
    return isinstance(node, Matrix)
