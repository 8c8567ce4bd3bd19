"""What devices exchange around a product with a matrix that is cut over them, inside `jax.shard_map`."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Exchange:
    """How the devices along an axis of the mesh share a matrix W [out, in] of which each has a part; y = x Wᵀ.

    Each field names that axis, or is None. With none of them every device has the whole matrix, or rows whose outputs
    stay where they are computed: whatever reads them (the heads of attention, the channels of a feed-forward) is cut in
    the same way.
    """

    gather_inputs: str | None = None
    """The inputs are cut and the matrix has all columns: the devices' inputs are put together first."""
    gather_outputs: str | None = None
    """The matrix has some rows, and everybody needs all outputs: they are put together."""
    sum_outputs: str | None = None
    """Inputs and columns are cut alike: the devices' products are summed."""
    slice_outputs: str | None = None
    """The matrix is whole, and each device keeps its own part of the outputs."""
    rows: str | None = None
    """The matrix has some rows, and `W[index]` is asked for: the device that has a row gives it."""

    def before(self, x: Float[Array, "*batch part"]) -> Float[Array, "*batch inner"]:
        """The inputs of the product."""
        return x if self.gather_inputs is None else lax.all_gather(x, self.gather_inputs, axis=x.ndim - 1, tiled=True)

    def summed(self, y: Float[Array, "*batch outer"]) -> Float[Array, "*batch outer"]:
        """The product, where each device has computed a part of each sum."""
        return y if self.sum_outputs is None else lax.psum(y, self.sum_outputs)

    def after(self, y: Float[Array, "*batch part"]) -> Float[Array, "*batch outer"]:
        """What comes out of it."""
        last = y.ndim - 1
        if self.gather_outputs is not None:
            return lax.all_gather(y, self.gather_outputs, axis=last, tiled=True)
        if self.slice_outputs is not None:
            width = y.shape[last] // lax.axis_size(self.slice_outputs)
            return lax.dynamic_slice_in_dim(y, lax.axis_index(self.slice_outputs) * width, width, axis=last)
        return y

    def row(
        self, read: Callable[[Int[Array, "*batch"]], Float[Array, "*batch inner"]], index: Int[Array, "*batch"], rows: int
    ) -> Float[Array, "*batch inner"]:
        """`read(index)` of a matrix of which each device has `rows` rows. A sum with zeros changes no number."""
        if self.rows is None:
            return read(index)
        own = index - lax.axis_index(self.rows) * rows
        here = (own >= 0) & (own < rows)
        found = jnp.where(here[..., None], read(jnp.clip(own, 0, rows - 1)), 0)
        return lax.psum(found, self.rows)


LOCAL = Exchange()
"""Nothing."""
