"""A model on a mesh of devices: the plain tree of modules, of which every device runs its own part."""

import math

import equinox as eqx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32, Int, Int32

from ling3.cache import Cache, CacheSpec, Span, State, pages_of
from ling3.execution import Execution
from ling3.mesh.placement import Placement, here
from ling3.model import CausalLM


class Sharded(CausalLM):
    """A `CausalLM` whose arrays lie over a mesh, as `ling3.mesh.place` and `load(…, mesh=mesh)` make it.

    It has the same methods and results. On each device the modules are those of `part`, with smaller arrays.
    """

    placement: Placement = eqx.field(static=True)

    @property
    def part(self) -> CausalLM:
        """What a device has of the model: it runs in `Placement.run` alone."""
        return CausalLM(self.model, self.lm_head, self.config)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those of its whole arrays, in the order of `jax.tree.leaves`."""
        shares = self.placement.shares
        return tuple(share.unstored(shape) for share, shape in zip(shares, self.part.shapes, strict=True))

    def watched(
        self, tokens: Int[Array, "batch seq"], span: Span
    ) -> Float32[Array, "batch seq {self.config.vocab_size}"]:
        """The logits of whole sequences. ValueError for a recorder."""
        if span.watched:
            raise ValueError("interventions: a model on a mesh takes none; run them on the model of one device")
        where = PartitionSpec(self.placement.rows(tokens.shape[0]))
        scored = lambda part, tokens: part(tokens, span.execution)  # noqa: E731
        return self.placement.run(scored, (tokens,), (where,), where, self.part)

    def empty_states(self, spec: CacheSpec) -> tuple[State, ...]:
        """The memory of every mixer before the first token. ValueError if a layer's pages cannot be packed."""
        shapes = eqx.filter_eval_shape(lambda: self.part.empty_states(spec))
        rows = self.placement.rows(math.gcd(spec.slots, spec.pages))
        groups = 1 if rows is None else self.placement.row_groups
        own = CacheSpec(spec.slots // groups, spec.pages // groups, spec.page_size, spec.dtype, spec.packed)
        empty = lambda part: part.empty_states(own)  # noqa: E731
        return self.placement.run(empty, (), (), self.placement.states(shapes, rows), self.part)

    def continued(
        self, tokens: Int[Array, "batch seq"], cache: Cache, span: Span, last: bool
    ) -> tuple[Float32[Array, "batch out {self.config.vocab_size}"], Cache]:
        """`step` of each device's part."""
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
    """Where a model lies that is on a mesh; None for one that is not."""
    return model.placement if isinstance(model, Sharded) else None
