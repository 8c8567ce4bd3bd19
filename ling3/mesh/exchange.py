"""The collectives around a matmul with a sharded weight, inside `jax.shard_map`."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How y = x Wᵀ is sharded in `parts` along an `axis` of the mesh; by default not at all.

    A device has all of W [out, in], some of its rows, or some of its columns. Each part is on `repeats` neighbouring
    devices. The last parts may be padded with zeros; gathered outputs keep that padding.
    """

    axis: str = ""
    parts: int = 1
    repeats: int = 1
    x: Literal["here", "gathered"] = "here"
    """gathered: the inputs are sharded and W has all columns, so an all-gather precedes the product."""
    y: Literal["here", "gathered", "summed", "sliced"] = "here"
    """How the outputs that a device has computed are exchanged.

    here: they stay, as their reader (the heads of attention, the channels of a feed-forward) is sharded the same way;
    gathered: W has some rows, and every device needs all outputs; summed: inputs and columns are sharded alike, so the
    partial products are added (psum); sliced: W is complete, and each device keeps its part of the outputs.
    """
    packed: tuple[int, ...] = ()
    """The sizes of the kinds of sliced outputs that follow each other, each of which is sliced for itself."""
    fenced: bool = False
    """Put a fusion barrier after the product: XLA may round fused operations differently."""

    def inputs_of(self, columns: int) -> int:
        """The width of a device's input before the exchange, given its W's columns."""
        return -(-columns // self.parts) if self.x == "gathered" else columns

    def outputs_of(self, rows: int) -> int:
        """The width of a device's output after the exchange, given its W's rows."""
        return {"gathered": rows * self.parts, "sliced": -(-rows // self.parts)}.get(self.y, rows)

    def before(self, x: Float[Array, "*batch part"], columns: int) -> Float[Array, "*batch {columns}"]:
        """The inputs of the product with a W of `columns` columns."""
        return self._together(x)[..., :columns] if self.x == "gathered" else x

    def summed(self, y: Float[Array, "*batch outer"]) -> Float[Array, "*batch outer"]:
        """The psum of `y` if it is "summed"; if `fenced`, `y` behind a fusion barrier and not summed; else `y`."""
        if self.fenced:
            return self.fence(y)
        if self.y != "summed":
            return y
        first = lax.axis_index(self.axis) % self.repeats == 0
        return lax.psum(y if self.repeats == 1 else jnp.where(first, y, 0), self.axis)

    def fence(self, y: Float[Array, "*batch outer"]) -> Float[Array, "*batch outer"]:
        """`y` behind a fusion barrier: an all-gather of each device with itself, which sends nothing."""
        alone = [[device] for device in range(lax.axis_size(self.axis))]
        return lax.all_gather(y, self.axis, axis_index_groups=alone, tiled=True)

    def after(self, y: Float[Array, "*batch part"]) -> Float[Array, "*batch outer"]:
        """The outputs that a device has after the exchange."""
        if self.y == "gathered":
            return self._together(y)
        if self.y != "sliced":
            return y
        kinds = jnp.split(y, tuple(itertools.accumulate(self.packed[:-1])), axis=-1)
        sliced = [self._slice(own) for own in kinds]
        return sliced[0] if len(sliced) == 1 else jnp.concatenate(sliced, axis=-1)

    def _slice(self, y: Float[Array, "*batch outer"]) -> Float[Array, "*batch part"]:
        width, last = -(-y.shape[-1] // self.parts), y.ndim - 1
        filled = jnp.pad(y, [(0, 0)] * last + [(0, width * self.parts - y.shape[-1])])
        part = lax.axis_index(self.axis) // self.repeats
        return lax.dynamic_slice_in_dim(filled, part * width, width, axis=last)

    def _together(self, x: Float[Array, "*batch part"]) -> Float[Array, "*batch all"]:
        every = lax.all_gather(x, self.axis, axis=x.ndim - 1)
        return every[..., :: self.repeats, :].reshape(*x.shape[:-1], -1)

    def row(
        self,
        read: Callable[[Int[Array, "*batch"]], Float[Array, "*batch inner"]],
        index: Int[Array, "*batch"],
        rows: int,
    ) -> Float[Array, "*batch inner"]:
        """W[index]; `read` takes row numbers of this device's part.

        With gathered outputs a device has only `rows` of W's rows: a psum adds zeros from the others, which is exact.
        """
        if self.y != "gathered":
            return self.summed(read(index)) if self.fenced else read(index)
        own = index - lax.axis_index(self.axis) * rows
        here = (own >= 0) & (own < rows)
        found = jnp.where(here[..., None], read(jnp.clip(own, 0, rows - 1)), 0)
        return lax.psum(found, self.axis)


LOCAL = Exchange()
"""No communication."""
