"""A model on a mesh of devices: the plain tree of modules, of which every device runs its part.

Layers do not know about the mesh. In a device's part, each sharded matrix or stack of experts is wrapped in a
`ShardedMatrix` or `ShardedExperts`, which returns the outputs of the unsharded one that the device needs.
"""

import dataclasses
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, DTypeLike, Float, Float32, Int, Int32

from ling3.cache import Cache, CacheSpec, Span, State, pages_of
from ling3.execution import PLAIN, Execution
from ling3.layers.adapted import Adapted, RowAdaptedMatrix
from ling3.layers.linear import Matrix
from ling3.layers.moe import Experts
from ling3.layers.scope import scoped
from ling3.leaves import dotted
from ling3.mesh.exchange import Exchange
from ling3.mesh.placement import Placement, here
from ling3.model import CausalLM
from ling3.ops.absorption import AdaptedLatents
from ling3.ops.precision import Wide
from ling3.ops.spread import Spread


class ShardedMatrix(Matrix):
    """A part of a matrix, or all of it, with the collectives around its product."""

    matrix: Matrix
    """The numbers on this device: some rows or columns of W, or all of it."""
    exchange: Exchange = eqx.field(static=True)
    axes: tuple[str, ...] = eqx.field(static=True)
    name: str = eqx.field(static=True)

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in]: a device's outputs after the exchange, and its inputs before it."""
        rows, columns = self.matrix.shape
        return self.exchange.outputs_of(rows), self.exchange.inputs_of(columns)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype in which the matrix's products are computed."""
        return self.matrix.dtype

    @property
    def operand(self) -> Array | AdaptedLatents:
        """The same numbers as `dense`, for operators; with an adapter for each row, its B for the same outputs."""
        if not (isinstance(self.matrix, RowAdaptedMatrix) and isinstance(whole := self.matrix.operand, AdaptedLatents)):
            return self.dense()
        swap = lambda x: jnp.swapaxes(x, -1, -2)  # noqa: E731
        updates = [(own._replace(B=swap(self.exchange.after(swap(own.B)))), rows) for own, rows in whole.updates]
        return AdaptedLatents(dataclasses.replace(self, matrix=self.matrix.base).dense(), updates)

    def dense(self) -> Float[Array, "{self.out_features} columns"]:
        """The rows of W whose outputs the device has after the exchange."""
        return self.exchange.after(self.matrix.dense().T).T

    def product(
        self, x: Float[Array, "rows {self.in_features}"], execution: Execution
    ) -> Wide[Array, "rows {self.out_features}"]:
        """x Wᵀ: the outputs that this device has after the exchange."""
        return self.exchange.after(self._sums(x, execution))

    def row(self, index: Int[Array, "*batch"], execution: Execution) -> Float[Array, "*batch {self.in_features}"]:
        """W[index], from whichever devices have these rows."""
        return self.exchange.row(lambda own: self.matrix.row(own, execution), index, self.matrix.out_features)

    @scoped
    def __call__(
        self, x: Float[Array, "*batch {self.in_features}"], execution: Execution = PLAIN, dtype: DTypeLike | None = None
    ) -> Float[Array, "*batch {self.out_features}"]:
        """x Wᵀ: the outputs that this device has after the exchange, which moves them in the dtype of the result."""
        y = self._sums(x.reshape(-1, x.shape[-1]), execution)
        return self.exchange.after(y.reshape(*x.shape[:-1], y.shape[-1]).astype(x.dtype if dtype is None else dtype))

    def _sums(self, x: Float[Array, "rows {self.in_features}"], execution: Execution) -> Wide[Array, "rows outer"]:
        whole = self.exchange.before(x, self.matrix.in_features)
        if self.exchange.fenced and isinstance(self.matrix, Adapted):  # its products one by one, before their sum
            product = execution.product
            execution = dataclasses.replace(execution, product=lambda *own: self.exchange.fence(product(*own)))
        return self.exchange.summed(self.matrix.product(whole, execution))


class ShardedExperts(Experts):
    """Some of the experts, or some channels of each, applied to the tokens of all devices that share them."""

    spread: Spread = eqx.field(static=True, kw_only=True)

    @scoped
    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        chosen: Int32[Array, "tokens top_k"],
        weights: Float[Array, "tokens top_k"],
        execution: Execution = PLAIN,
    ) -> Float[Array, "tokens hidden"]:
        """Σ_j weights_j · expert_{chosen_j}(x) over the experts of all devices, in float32 or wider."""
        tokens, matrices = x.shape[0], (self.gate_proj.operand, self.up_proj.operand, self.down_proj.operand)
        x, chosen, weights = (self.spread.every(array) for array in (x, chosen, weights))
        y = execution.experts(x, chosen, weights, *matrices, self.swiglu, execution.times, self.spread)
        return self.spread.ours(y, tokens)


class Sharded(CausalLM):
    """A `CausalLM` whose arrays are sharded over a mesh, as `ling3.mesh.place` and `load(…, mesh=mesh)` make it.

    It has the same methods and results. Each device runs the modules of `part`, on its shards of their arrays.
    """

    placement: Placement = eqx.field(static=True, kw_only=True)

    @property
    def part(self) -> CausalLM:
        """The model with its collectives, as each device runs it; only for use in `Placement.run`."""
        exchanges = dict(self.placement.exchanges)

        def shared(path: tuple[Any, ...], node: Any) -> Any:
            how = exchanges.get(dotted(path))
            if isinstance(node, Experts) and isinstance(how, Spread):
                fields = {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
                return ShardedExperts(**fields, spread=how)
            if isinstance(node, Matrix) and isinstance(how, Exchange):
                return ShardedMatrix(matrix=node, exchange=how, axes=node.axes, name=node.name)
            return node

        units = lambda node: isinstance(node, Matrix | Experts)  # noqa: E731
        return jax.tree_util.tree_map_with_path(shared, self._plain, is_leaf=units)

    @property
    def whole(self) -> CausalLM:
        """The unsharded model's structure, with a `ShapeDtypeStruct` (shape and dtype) in place of each array."""
        stored, tree = jax.tree.flatten(self._plain)
        arrays = zip(self.placement.shares, stored, strict=True)
        return jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(share.unstored(x.shape), x.dtype) for share, x in arrays])

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the unsharded arrays, in the order of `jax.tree.leaves`."""
        return self.whole.shapes

    @property
    def _plain(self) -> CausalLM:
        return CausalLM(self.model, self.lm_head, self.config, self.origin, mtp=self.mtp)

    def watched(
        self, tokens: Int[Array, "batch seq"], span: Span
    ) -> Float32[Array, "batch seq {self.config.vocab_size}"]:
        """The logits of complete sequences. Raises ValueError for a span with a recorder."""
        if span.watched:
            raise ValueError("interventions: a model on a mesh takes none; run them on the model of one device")
        where = PartitionSpec(self.placement.rows(tokens.shape[0]))
        scored = lambda part, tokens: part(tokens, span.execution)  # noqa: E731
        return self.placement.run(scored, (tokens,), (where,), where, self.part)

    def empty_states(self, spec: CacheSpec) -> tuple[State, ...]:
        """The states of all mixers before the first token. Raises ValueError if a layer's pages cannot be packed."""
        shapes = eqx.filter_eval_shape(lambda: self.part.empty_states(spec))
        rows = self.placement.rows(math.gcd(spec.slots, spec.pages))
        groups = 1 if rows is None else self.placement.row_groups
        own = dataclasses.replace(spec, slots=spec.slots // groups, pages=spec.pages // groups)
        empty = lambda part: part.empty_states(own)  # noqa: E731
        return self.placement.run(empty, (), (), self.placement.states(shapes, rows), self.part)

    def continued(
        self, tokens: Int[Array, "batch seq"], cache: Cache, span: Span, last: bool
    ) -> tuple[Float32[Array, "batch out {self.config.vocab_size}"], Cache]:
        """Runs `step` on every device with its part of the model."""
        rows = self.placement.rows(tokens.shape[0])
        states, where = self.placement.states(cache.layers, rows), PartitionSpec(rows)
        execution: Execution = span.execution

        def on_a_device(
            part: CausalLM,
            tokens: Int[Array, "rows seq"],
            layers: tuple[State, ...],
            start: Int32[Array, " rows"],
            table: Int32[Array, "rows columns"],
            length: Int32[Array, " rows"],
        ) -> tuple[Float32[Array, "rows out vocab"], tuple[State, ...]]:
            for paged in pages_of(layers)[:1]:
                table = here(table, paged.entries.shape[0], rows)
            logits, cache = part.step(tokens, Cache(layers, start, table), length, last=last, execution=execution)
            return logits, cache.layers

        inputs = (tokens, cache.layers, cache.length, cache.table, span.length)
        specs = (where, states, where, where, where)
        logits, layers = self.placement.run(on_a_device, inputs, specs, (where, states), self.part)
        return logits, Cache(layers, cache.length + span.length, cache.table)


def placement_of(model: CausalLM) -> Placement | None:
    """The placement of a model on a mesh; None for a model without a mesh."""
    return model.placement if isinstance(model, Sharded) else None
