"""Exchanges between devices around the product with a matrix that they share, inside `jax.shard_map`."""

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the devices along an `axis` of the mesh share the product y = x Wᵀ in `parts`; by default they share nothing.

    Each has the whole of W [out, in], or some of its rows, or some of its columns. Where there are fewer parts than
    devices, `repeats` neighbours have the same one. The last parts may be filled up with zeros.
    """

    axis: str = ""
    parts: int = 1
    repeats: int = 1
    x: Literal["here", "gathered"] = "here"
    """gathered: the inputs are cut and W has all columns, so the devices' inputs are put together first."""
    y: Literal["here", "gathered", "summed", "sliced"] = "here"
    """What becomes of the outputs that a device has computed.

    here: they stay, since whatever reads them (the heads of attention, the channels of a feed-forward) is cut likewise;
    gathered: W has some rows, and everybody needs all outputs; summed: inputs and columns are cut alike, and each
    device has a part of every sum; sliced: W is whole, and each device keeps its own part of the outputs.
    """
    fenced: bool = False
    """The product is a result of its own in the program, however W is cut: what XLA fuses, it may round otherwise."""

    def inputs_of(self, columns: int) -> int:
        """Inputs that a device has before the exchange, where its W has so many columns."""
        return -(-columns // self.parts) if self.x == "gathered" else columns

    def outputs_of(self, rows: int) -> int:
        """Outputs that a device has after the exchange, where its W has so many rows."""
        return {"gathered": rows * self.parts, "sliced": -(-rows // self.parts)}.get(self.y, rows)

    def before(self, x: Float[Array, "*batch part"], columns: int) -> Float[Array, "*batch {columns}"]:
        """The inputs of the product with a W of so many columns."""
        return self._together(x)[..., :columns] if self.x == "gathered" else x

    def summed(self, y: Float[Array, "*batch outer"]) -> Float[Array, "*batch outer"]:
        """The product, where each device has computed a part of each sum, or where it is `fenced`."""
        if self.fenced:  # an all-gather of each device with itself: a fusion barrier, which sends nothing
            alone = [[device] for device in range(lax.axis_size(self.axis))]
            return lax.all_gather(y, self.axis, axis_index_groups=alone, tiled=True)
        if self.y != "summed":
            return y
        first = lax.axis_index(self.axis) % self.repeats == 0
        return lax.psum(y if self.repeats == 1 else jnp.where(first, y, 0), self.axis)

    def after(self, y: Float[Array, "*batch part"]) -> Float[Array, "*batch outer"]:
        """The outputs that a device has after the exchange."""
        if self.y == "gathered":
            return self._together(y)
        if self.y == "sliced":
            width, last = self.outputs_of(y.shape[-1]), y.ndim - 1
            filled = jnp.pad(y, [(0, 0)] * last + [(0, width * self.parts - y.shape[-1])])
            part = lax.axis_index(self.axis) // self.repeats
            return lax.dynamic_slice_in_dim(filled, part * width, width, axis=last)
        return y

    def _together(self, x: Float[Array, "*batch part"]) -> Float[Array, "*batch all"]:
        every = lax.all_gather(x, self.axis, axis=x.ndim - 1)
        return every[..., :: self.repeats, :].reshape(*x.shape[:-1], -1)

    def row(
        self,
        read: Callable[[Int[Array, "*batch"]], Float[Array, "*batch inner"]],
        index: Int[Array, "*batch"],
        rows: int,
    ) -> Float[Array, "*batch inner"]:
        """`read(index)` of a matrix of which each device has `rows` rows. A sum with zeros changes no number."""
        if self.y != "gathered":
            return self.summed(read(index)) if self.fenced else read(index)
        own = index - lax.axis_index(self.axis) * rows
        here = (own >= 0) & (own < rows)
        found = jnp.where(here[..., None], read(jnp.clip(own, 0, rows - 1)), 0)
        return lax.psum(found, self.axis)


LOCAL = Exchange()
"""No communication."""
