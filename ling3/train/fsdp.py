"""Training over several devices (FSDP): weights, optimizer state and the batch are sharded.

The training step is written as for one device; XLA partitions it and inserts the collectives (GSPMD, arXiv
2105.04663). This file only says how arrays are sharded, and that a layer's weights are all-gathered while the layer
runs: for its forward pass, then dropped, and again for its backward pass (ZeRO stage 3, arXiv 1910.02054).
"""

import dataclasses
from typing import TypeVar

import equinox as eqx
import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ling3.cache import Span, State
from ling3.execution import Execution
from ling3.mesh.rules import MeshError
from ling3.mesh.sharding import automatic
from ling3.model import CausalLM, DecoderLayer, Mixer
from ling3.ops import experts

_Tree = TypeVar("_Tree")

DIVISIBLE = Execution(experts=experts.dense_experts)
"""The execution of the step on a mesh: operators that XLA can partition along the batch, and no C++ kernels.

Every expert runs on every token: to sort tokens by expert, each device would need the tokens of all devices.
"""


@dataclasses.dataclass(frozen=True)
class Fsdp:
    """A mesh, and its `axis` along which arrays are sharded; along other axes they are replicated.

    An array is sharded in its largest dimension that the axis size divides (the first of equals), and replicated if
    there is none. So optimizer state is sharded like the weights that it belongs to.
    """

    mesh: Mesh
    axis: str = "data"

    def __post_init__(self) -> None:
        if self.axis not in self.mesh.shape:
            axes = ", ".join(self.mesh.shape)
            raise MeshError(f"the mesh has the axes {axes}; training cuts along {self.axis!r}, which is none of them")
        object.__setattr__(self, "mesh", automatic(self.mesh))

    @property
    def devices(self) -> int:
        """The number of devices that share an array."""
        return self.mesh.shape[self.axis]

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """The PartitionSpec of an array of this shape."""
        fits = [axis for axis, size in enumerate(shape) if size % self.devices == 0]
        if not fits:
            return PartitionSpec()
        return PartitionSpec(*[None] * max(fits, key=lambda axis: shape[axis]), self.axis)

    def sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """The NamedSharding of an array of this shape."""
        return NamedSharding(self.mesh, self.spec(shape))

    def place(self, tree: _Tree) -> _Tree:
        """A copy of a tree with its arrays sharded."""
        arrays, statics = eqx.partition(tree, eqx.is_array)
        return eqx.combine(jax.device_put(arrays, self._shardings(arrays), may_alias=False), statics)

    def rows(self, batch: _Tree) -> _Tree:
        """Shards the arrays of a batch by rows. Raises ValueError if `devices` does not divide their number."""
        count = jax.tree.leaves(batch)[0].shape[0]
        if count % self.devices:
            raise ValueError(
                f"the batch has {count} rows, which the {self.devices} devices along {self.axis!r} cannot share "
                f"evenly: expected a multiple of {self.devices}"
            )
        return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec(self.axis)))

    def settled(self, tree: _Tree) -> _Tree:
        """Constrains the arrays' sharding, inside jit."""
        arrays, statics = eqx.partition(tree, eqx.is_array)
        return eqx.combine(lax.with_sharding_constraint(arrays, self._shardings(arrays)), statics)

    def whole(self, tree: _Tree) -> _Tree:
        """Replicates the arrays on every device, inside jit."""
        arrays, statics = eqx.partition(tree, eqx.is_array)
        return eqx.combine(lax.with_sharding_constraint(arrays, NamedSharding(self.mesh, PartitionSpec())), statics)

    def _shardings(self, arrays: _Tree) -> _Tree:
        return jax.tree.map(lambda x: self.sharding(x.shape), arrays)

    def gathering(self, model: CausalLM) -> CausalLM:
        """The same model for use inside jit: each layer gathers its weights while it runs; all else is replicated."""
        decoder = model.model
        outer = dataclasses.replace(model, model=dataclasses.replace(decoder, layers=()))
        layers = tuple(Gathered(layer, self) for layer in decoder.layers)
        return eqx.tree_at(lambda m: m.model.layers, self.whole(outer), layers)


class Gathered(eqx.Module):
    """A layer whose weights are sharded, and gathered only while it runs.

    The forward pass saves the products with weights; the backward pass recomputes the rest of the layer.
    """

    layer: DecoderLayer
    cut: Fsdp = eqx.field(static=True)

    @property
    def attention(self) -> Mixer | None:
        """The attention of the layer, whose weights are sharded."""
        return self.layer.attention

    def __call__(
        self, x: Float[Array, "batch seq *streams hidden"], state: State | None, span: Span
    ) -> tuple[Float[Array, "batch seq *streams hidden"], State | None]:
        """The layer's output and its new state."""

        @eqx.filter_checkpoint(policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        def run(layer, x, state, span):
            x = lax.with_sharding_constraint(x, NamedSharding(self.cut.mesh, PartitionSpec(self.cut.axis)))
            return self.cut.whole(layer)(x, state, span)

        return run(self.layer, x, state, span)
