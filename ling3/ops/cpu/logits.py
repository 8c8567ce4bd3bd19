"""The likeliest token of each row of logits z and log Σ e^z on a CPU, by a C++ kernel (`logits.cc`).

The kernel reads each active row once, on all threads. XLA reads a row several times, and copies it.
"""

import pathlib

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from ling3.ops import logits as plain
from ling3.ops.forms import runs
from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 2**14
"""The size of vocabulary below which a kernel, or a branch for each row, costs more than it saves."""


def unsuited(logits: Float32[Array, "batch vocab"]) -> str | None:
    """Why the kernel does not run, or None: it is missing, or the vocabulary has less than `LEAST` tokens."""
    if logits.shape[1] < LEAST:
        return f"the vocabulary has less than {LEAST:,} tokens"
    return native.missing(SOURCE)


def likeliest(
    logits: Float32[Array, "batch vocab"], active: Bool[Array, " batch"]
) -> tuple[Int32[Array, " batch"], Float32[Array, " batch"]]:
    """Computes `logits.likeliest` with the C++ kernel, where it suits. A row's bits do not depend on the threads."""
    if not runs("likeliest", unsuited(logits)):
        return xla_likeliest(logits, active)
    shapes = [jax.ShapeDtypeStruct(active.shape, dtype) for dtype in (jnp.int32, jnp.float32)]
    kernel = jax.ffi.ffi_call(native.target(SOURCE, "likeliest"), shapes, vmap_method="sequential")
    token, total = kernel(logits, active)
    return token, total


def xla_likeliest(
    logits: Float32[Array, "batch vocab"], active: Bool[Array, " batch"]
) -> tuple[Int32[Array, " batch"], Float32[Array, " batch"]]:
    """`logits.likeliest` by XLA alone, one row after another: rows that are not active cost nothing."""
    if logits.shape[1] < LEAST:
        return plain.likeliest(logits, active)

    def of(row: tuple[Float32[Array, " vocab"], Bool[Array, ""]]) -> tuple[Int32[Array, ""], Float32[Array, ""]]:
        z, wanted = row
        none = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.float32)
        token, total = lax.cond(wanted, lambda: plain.likeliest(z[None], wanted[None]), lambda: none)
        return token[0], total[0]

    return lax.map(of, (logits, active))
