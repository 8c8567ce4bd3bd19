"""Models with several adapters, of which each row of a call may have another, or none."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ling3.adapters.adapter import Adapter, AdapterError, adaptable, check, replaced
from ling3.layers.adapted import RowAdaptedMatrix
from ling3.model import CausalLM
from ling3.ops.adapters import AdapterRows, StackedUpdates
from ling3.ops.precision import wide


def with_adapters(model: CausalLM, adapters: Mapping[str, Adapter]) -> CausalLM:
    """The model with several adapters beside its weights, which it shares with `model`; `for_rows` says who has which.

    Each matrix has the arrays of the adapters that change it, stacked by rank. A row's numbers are those of
    `with_adapter` up to rounding.

    Raises AdapterError, with its name, for an adapter that does not fit the model, and for a model that has an adapter.
    """
    known = {own.module: own for own in adaptable(model)}
    for name, adapter in adapters.items():
        try:
            check(model, adapter, known)
        except AdapterError as error:
            raise AdapterError(f"adapter {name!r}: {error}") from None
    new = {}
    for name, own in known.items():
        ranks: dict[int, list[int]] = {}
        for i, adapter in enumerate(adapters.values()):
            if (update := adapter.modules.get(name)) is not None:
                ranks.setdefault(update.rank, []).append(i)
        if ranks:
            stacks = tuple(tuple(ranks[rank]) for rank in sorted(ranks))
            updates = tuple(_stacked([list(adapters.values())[i] for i in stack], name) for stack in stacks)
            new[own.path] = RowAdaptedMatrix(
                base=own.matrix, updates=updates, stacks=stacks, axes=own.matrix.axes, name=own.matrix.name
            )
    return replaced(model, new)


def for_rows(model: CausalLM, which: Int32[Array, " rows"]) -> CausalLM:
    """The model of `with_adapters` for calls whose row i has the adapter `which[i]`; out of range for none."""
    matrices = [node for node in jax.tree.leaves(model, is_leaf=_is_adapted) if _is_adapted(node)]
    rows = {stack: AdapterRows.of(which, stack) for matrix in matrices for stack in matrix.stacks}
    return jax.tree.map(lambda node: node.for_rows(rows) if _is_adapted(node) else node, model, is_leaf=_is_adapted)


def _is_adapted(node: object) -> bool:
    return isinstance(node, RowAdaptedMatrix)


def _stacked(adapters: list[Adapter], name: str) -> StackedUpdates:
    """The updates of the module `name` by adapters of one rank, in float32 or wider."""
    updates = [adapter.modules[name] for adapter in adapters]
    dtype = jnp.result_type(*(wide(array.dtype) for array in jax.tree.leaves(updates)))
    A, B = (jnp.stack([own.astype(dtype) for own in some]) for some in zip(*map(jax.tree.leaves, updates), strict=True))
    return StackedUpdates(A, B, jnp.asarray([adapter.scale(name) for adapter in adapters], dtype))
