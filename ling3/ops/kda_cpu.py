"""The KDA recurrence on a CPU, by a kernel in C++ (`kda_cpu.cc`) that updates each state where it lies.

XLA reads a state twice for every token and writes a new one beside it, also for rows of a call that have no token; by
chunks it computes half as much again, in small products.
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
    return native.ffi_target(SOURCE, "kda_run") is not None


def run(
    q: Float32[Array, "batch seq heads key"],
    k: Float32[Array, "batch seq heads key"],
    v: Float32[Array, "batch seq heads value"],
    g: Float32[Array, "batch seq heads key"],
    beta: Float32[Array, "batch seq heads"],
    state: Float32[Array, "batch heads key value"],
) -> tuple[Float32[Array, "batch seq heads value"], Float32[Array, "batch heads key value"]]:
    """`ops.kda.recurrent_kda` where it `suits`.

    A head whose token has q, g and beta 0 reads nothing and changes nothing: its output is 0, and its state is not
    touched. Bits of a row depend only on the row and its state, and not on how its tokens are cut into calls.
    """
    name = native.ffi_target(SOURCE, "kda_run")
    assert name is not None, "`suits` said so"
    shapes = (jax.ShapeDtypeStruct(v.shape, jnp.float32), jax.ShapeDtypeStruct(state.shape, jnp.float32))
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential", input_output_aliases={5: 1})
    o, after = call(q, k, v, jnp.exp(g), beta, state)
    return o, after
