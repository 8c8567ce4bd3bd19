"""The KDA recurrence on a CPU, by a C++ kernel (`kda.cc`) that updates each state in place.

XLA reads a state twice per token and writes a new copy, even for rows without a token. Chunk by chunk it does one and a
half times the work, in small products.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ling3.ops import kda, kda_chunks
from ling3.ops.forms import form_of, runs
from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 2**14
"""Bytes of a row's state below which compiling the kernel takes longer than it saves; nano's has as many."""


def unsuited(state: Float[Array, "batch heads key value"]) -> str | None:
    """Why the kernel does not run, or None: it is missing, or the state is small or not float32."""
    if state.dtype != jnp.float32:
        return f"the state is {state.dtype}, and the kernel's float32"
    if state.size * 4 < LEAST * state.shape[0]:
        return f"a row's state has less than {LEAST:,} bytes"
    return native.missing(SOURCE)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@form_of(kda.KDAInTurn)
def _run(options: tuple[tuple[str, Any], ...], q, k, v, g, beta, state):
    """`kda.recurrent_kda`, with the derivative of `kda_chunks.chunk_kda`.

    A head skips a token whose q, g and beta are 0, such as padding: the output is 0, and the state is not touched. A
    row's result depends bitwise only on the row and its state, and not on how its tokens are split into calls.
    """
    shapes = (jax.ShapeDtypeStruct(v.shape, jnp.float32), jax.ShapeDtypeStruct(state.shape, jnp.float32))
    target = native.target(SOURCE, "kda_run")
    call = jax.ffi.ffi_call(target, shapes, vmap_method="sequential", input_output_aliases={5: 1})
    o, after = call(q, k, v, jnp.broadcast_to(g, k.shape), beta, state)
    return o, after


@_run.defjvp
def _derivative(options: Any, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Any, Any]:
    return jax.jvp(functools.partial(kda_chunks.chunk_kda, **dict(options)), primals, tangents)


@form_of(kda.ChunkKDA)
def chunk_kda(q, k, v, g, beta, state, *, lower_bound, chunk_size=16, resets=False):
    """`kda_chunks.chunk_kda` with the kernel, where it suits: token by token, so prefill equals decode bit for bit."""
    options = {"lower_bound": lower_bound, "chunk_size": chunk_size, "resets": resets}
    if not runs("chunk_kda", unsuited(state)):
        return kda_chunks.chunk_kda(q, k, v, g, beta, state, **options)
    return _run(tuple(options.items()), q, k, v, g, beta, state)


@form_of(kda.KDAInTurn)
def in_turn(q, k, v, g, beta, state):
    """Computes `kda.KDAInTurn` with the C++ kernel. Raises ValueError if that does not run, and why."""
    _check(state)
    return _run((("lower_bound", None),), q, k, v, g, beta, state)


@form_of(kda.KDALook)
def look(q, k, v, g, beta, state):
    """Computes `kda.KDALook` with the C++ kernel, which writes no state: copies of some columns stay in the cache."""
    _check(state)
    call = jax.ffi.ffi_call(native.target(SOURCE, "kda_look"), jax.ShapeDtypeStruct(v.shape, jnp.float32))
    return call(q, k, v, jnp.broadcast_to(g, k.shape), beta, state)


def _check(state: Float[Array, "batch heads key value"]) -> None:
    if (why := unsuited(state)) is not None:
        raise ValueError(f"KDA keeps the bits of single steps only in its C++ kernel, which does not run: {why}")


@form_of(kda.KDAStep)
def kda_step(q, k, v, g, beta, state):
    """Computes `kda.kda_step` with the C++ kernel, where it suits."""
    if not runs("kda_step", unsuited(state)):
        return xla_kda_step(q, k, v, g, beta, state)
    q, k, v, g, beta = (x[:, None] for x in (q, k, v, g, beta))
    o, state = _run((("lower_bound", None),), q, k, v, g, beta, state)
    return o[:, 0], state


@form_of(kda.KDAStep)
def xla_kda_step(q, k, v, g, beta, state):
    """`kda.kda_step` with a fusion barrier, without which XLA would recompute the factors inside the outer product."""
    o, *factors = kda.output_and_factors(q, k, v, g, beta, state)
    return o, kda.written(state, *lax.optimization_barrier(factors))
