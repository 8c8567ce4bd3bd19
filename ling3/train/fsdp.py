"""Training over several devices (FSDP): each has a part of the weights, of the optimizer's state and of the batch.

The step stays the program of one device, over arrays that are cut; XLA divides the work and finds what the devices
exchange (GSPMD, arXiv 2105.04663). What is fixed here is where arrays lie, and that the weights of a layer are whole
only while the layer runs: gathered for its forward pass, dropped, and gathered again for its backward pass (ZeRO stage
3, arXiv 1910.02054).
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
"""How the step runs on a mesh: on forms that XLA can divide by the rows of a batch, and no kernel in C++.

Every expert runs on every token, as in the gradient of other forms too; to sort tokens by expert, each device would
need the tokens of all.
"""


@dataclasses.dataclass(frozen=True)
class Fsdp:
    """A mesh, and the `axis` of it along which arrays are cut; along others, devices have the same.

    The rule: an array is cut along the largest of its dimensions that the axis's size divides (the first of equals),
    and lies whole on every device if there is none. So the optimizer's state lies as the weights that it is of.
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
        """Among how many devices an array is divided."""
        return self.mesh.shape[self.axis]

    def spec(self, shape: tuple[int, ...]) -> PartitionSpec:
        """Where an array of this shape is cut."""
        fits = [axis for axis, size in enumerate(shape) if size % self.devices == 0]
        if not fits:
            return PartitionSpec()
        return PartitionSpec(*[None] * max(fits, key=lambda axis: shape[axis]), self.axis)

    def sharding(self, shape: tuple[int, ...]) -> NamedSharding:
        """Where an array of this shape lies, by the rule."""
        return NamedSharding(self.mesh, self.spec(shape))

    def place(self, tree: _Tree) -> _Tree:
        """A copy of a tree, its arrays cut by the rule."""
        arrays, statics = eqx.partition(tree, eqx.is_array)
        return eqx.combine(jax.device_put(arrays, self._shardings(arrays), may_alias=False), statics)

    def rows(self, batch: _Tree) -> _Tree:
        """The arrays of a batch, their rows dealt to the devices. ValueError if they cannot be dealt evenly."""
        count = jax.tree.leaves(batch)[0].shape[0]
        if count % self.devices:
            raise ValueError(
                f"the batch has {count} rows, which the {self.devices} devices along {self.axis!r} cannot share "
                f"evenly: expected a multiple of {self.devices}"
            )
        return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec(self.axis)))

    def settled(self, tree: _Tree) -> _Tree:
        """A program's arrays, which lie by the rule from now on."""
        arrays, statics = eqx.partition(tree, eqx.is_array)
        return eqx.combine(lax.with_sharding_constraint(arrays, self._shardings(arrays)), statics)

    def whole(self, tree: _Tree) -> _Tree:
        """A program's arrays, whole on every device."""
        arrays, statics = eqx.partition(tree, eqx.is_array)
        return eqx.combine(lax.with_sharding_constraint(arrays, NamedSharding(self.mesh, PartitionSpec())), statics)

    def _shardings(self, arrays: _Tree) -> _Tree:
        return jax.tree.map(lambda x: self.sharding(x.shape), arrays)

    def gathering(self, model: CausalLM) -> CausalLM:
        """A model of the same logits, for a program: each layer gathers its weights while it runs."""
        decoder = model.model
        outer = dataclasses.replace(model, model=dataclasses.replace(decoder, layers=()))
        layers = tuple(Gathered(layer, self) for layer in decoder.layers)
        return eqx.tree_at(lambda m: m.model.layers, self.whole(outer), layers)


class Gathered(eqx.Module):
    """A layer whose weights are cut, and whole only while it runs.

    From the forward pass its products with weights are kept; the backward pass computes the rest of the layer anew.
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
        """The layer's output."""

        @eqx.filter_checkpoint(policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
        def run(layer, x, state, span):
            x = lax.with_sharding_constraint(x, NamedSharding(self.cut.mesh, PartitionSpec(self.cut.axis)))
            return self.cut.whole(layer)(x, state, span)

        return run(self.layer, x, state, span)
