"""Whole arrays in the memory of a host, from their parts on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Int32, Shaped

from ling3.mesh.rules import Share
from ling3.mesh.sharding import processes

CHUNK = 2**28
"""The most bytes of an array that devices gather at a time."""


def gathered(value: jax.Array, share: Share, mesh: Mesh) -> Shaped[np.ndarray, "..."]:
    """The whole of an array in the first process of a mesh, which copies it there part by part; nothing in the others.

    All processes of the mesh call this at once. Parts that the first process has on its own devices come from there;
    else all devices gather some rows of all parts at a time, at most `CHUNK` bytes.
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
            begin, end = share.spans[share.number(shard.index)]
            whole[_rows(share, begin, end)] = _on_host(shard.data)[_rows(share, 0, end - begin)]
        return whole
    size = min(share.width, max(1, share.width * CHUNK // value.nbytes))
    for start in range(0, share.width, size):
        at = min(start, share.width - size)  # all chunks have one size, so that one program gathers them
        every = jax.block_until_ready(_everyones(value, mesh, share, np.int32(at), size))
        for (begin, end), part in zip(share.spans, _on_host(every.addressable_data(0))) if keeps else ():
            until = min(at + size, end - begin)
            if until > at:
                whole[_rows(share, begin + at, begin + until)] = part[_rows(share, 0, until - at)]
    return whole


def _rows(share: Share, begin: int, end: int) -> tuple[slice, ...]:
    return (slice(None),) * (share.axis or 0) + (slice(begin, end),)


def _on_host(value: jax.Array) -> Shaped[np.ndarray, "..."]:
    """The numbers of a copy, as a JAX array keeps the host's version of itself once it was asked for it."""
    return np.asarray(jnp.array(value, copy=True))


@functools.partial(jax.jit, static_argnums=(1, 2, 4))
def _everyones(
    value: Shaped[Array, "..."], mesh: Mesh, share: Share, at: Int32[Array, ""], size: int
) -> Shaped[Array, "..."]:
    """On every device, `size` rows of each part, from `at` on: [parts, …]."""

    def rows(part: Shaped[Array, "..."], at: Int32[Array, ""]) -> Shaped[Array, "..."]:
        return lax.all_gather(lax.dynamic_slice_in_dim(part, at, size, share.axis or 0), share.over)

    specs = (share.spec, PartitionSpec())
    return jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False)(value, at)
