"""One token of KDA on a CPU, by a kernel in C++ (`kda_cpu.cc`) that updates each state where it lies.

XLA reads a state twice and writes a new one beside it, also for rows of a call that have no token.
"""

import pathlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 2**18
"""Bytes of a row's state below which compiling the kernel takes longer than it saves."""


def suits(state: Float[Array, "batch heads key value"]) -> bool:
    """True if the kernel is there and faster: for large states in float32."""
    if state.dtype != jnp.float32 or state.size * 4 < LEAST * state.shape[0]:
        return False
    return native.target(SOURCE, "kda_step") is not None


def step(
    q: Float32[Array, "batch heads key"],
    k: Float32[Array, "batch heads key"],
    v: Float32[Array, "batch heads value"],
    g: Float32[Array, "batch heads key"],
    beta: Float32[Array, "batch heads"],
    state: Float32[Array, "batch heads key value"],
) -> tuple[Float32[Array, "batch heads value"], Float32[Array, "batch heads key value"]]:
    """`ops.kda.kda_step` where it `suits`.

    A head with q, g and beta 0 reads nothing and changes nothing: its output is 0, and its state is not touched. Bits
    of a row depend only on the row and its state.
    """
    name = native.target(SOURCE, "kda_step")
    assert name is not None, "`suits` said so"
    shapes = (jax.ShapeDtypeStruct(v.shape, jnp.float32), jax.ShapeDtypeStruct(state.shape, jnp.float32))
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential", input_output_aliases={5: 1})
    o, after = call(q, k, v, jnp.exp(g), beta, state)
    return o, after
