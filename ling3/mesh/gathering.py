"""Gathering a sharded array into the memory of one host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int32, Shaped

from ling3.mesh.sharding import processes
from ling3.mesh.share import Share

CHUNK = 2**28
"""The most bytes of an array that the devices gather at once."""


def gathered(value: jax.Array, share: Share, mesh: Mesh) -> Shaped[np.ndarray, "..."]:
    """The unsharded array, in the first process of the mesh; an empty array in the other processes.

    All processes of the mesh call this together. If the first process's devices have all parts, it copies them from
    there; otherwise all devices gather some rows of every part at a time, at most `CHUNK` bytes.
    """
    first = processes(mesh)[0]
    keeps = jax.process_index() == first
    if share.axis is None:
        return _on_host(value.addressable_data(0)) if keeps else np.empty(0, value.dtype)
    whole = np.empty(share.unstored(value.shape) if keeps else 0, value.dtype)
    places = value.sharding.devices_indices_map(value.shape)
    there = {share.spans[share.number(index)] for device, index in places.items() if device.process_index == first}
    if there == set(share.spans):
        for shard in value.addressable_shards if keeps else ():
            part = _on_host(shard.data)
            for at, begin, end in share.runs(share.number(shard.index)):
                whole[share.rows(begin, end)] = part[share.rows(at, at + end - begin)]
        return whole
    size = min(share.width, max(1, share.width * CHUNK // value.nbytes))
    for start in range(0, share.width, size):
        at = min(start, share.width - size)  # all chunks have one size, so that one program gathers them
        every = jax.block_until_ready(_everyones(value, mesh, share, np.int32(at), size))
        for number, part in enumerate(_on_host(every.addressable_data(0))) if keeps else ():
            for place, begin, end in share.runs(number):
                low, high = max(at, place), min(at + size, place + end - begin)
                if low < high:
                    whole[share.rows(begin + low - place, begin + high - place)] = part[share.rows(low - at, high - at)]
    return whole


def _on_host(value: jax.Array) -> Shaped[np.ndarray, "..."]:
    """The array on the host, read from a temporary copy: a JAX array that is read caches its value on the host."""
    return np.asarray(jnp.array(value, copy=True))


@functools.partial(jax.jit, static_argnums=(1, 2, 4))
def _everyones(
    value: Shaped[Array, "..."], mesh: Mesh, share: Share, at: Int32[Array, ""], size: int
) -> Shaped[Array, "..."]:
    """All-gathers `size` rows of each part, from row `at` on: [parts, …] on every device."""

    def rows(part: Shaped[Array, "..."], at: Int32[Array, ""]) -> Shaped[Array, "..."]:
        return lax.all_gather(lax.dynamic_slice_in_dim(part, at, size, share.axis or 0), share.over)

    specs = (share.spec, PartitionSpec())
    return jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(value, at)
