"""The likeliest token of each row of logits z and log Σ e^z on a CPU, by a C++ kernel (`logits.cc`).

The kernel reads each active row once, on all threads. XLA reads a row several times, and copies it.
"""

import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, PyTree

from ling3.ops import logits as plain
from ling3.ops.forms import form_of, runs
from ling3.runtime import native

T = TypeVar("T")
SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 2**14
"""The size of vocabulary below which a kernel, or a branch for each row, costs more than it saves."""


def unsuited(logits: Float32[Array, "batch vocab"]) -> str | None:
    """Why the kernel does not run, or None: it is missing, or the vocabulary has less than `LEAST` tokens."""
    if logits.shape[1] < LEAST:
        return f"the vocabulary has less than {LEAST:,} tokens"
    return native.missing(SOURCE)


@form_of(plain.Likeliest)
def likeliest(logits, active):
    """Computes `logits.likeliest` with the C++ kernel, where it suits. A row's bits do not depend on the threads."""
    if not runs("likeliest", unsuited(logits)):
        return xla_likeliest(logits, active)
    shapes = [jax.ShapeDtypeStruct(active.shape, dtype) for dtype in (jnp.int32, jnp.float32)]
    kernel = jax.ffi.ffi_call(native.target(SOURCE, "likeliest"), shapes, vmap_method="sequential")
    token, total = kernel(logits, active)
    return token, total


@form_of(plain.Likeliest)
def xla_likeliest(logits, active):
    """`logits.likeliest` by XLA alone, one row after another: rows that are not active cost nothing."""
    return for_active_rows(plain.likeliest, logits, active)


def for_active_rows(form: Callable[..., T], logits: Float32[Array, "batch vocab"], *rows: PyTree) -> T:
    """`form(logits, active, …)` for one row after another, and zeros for rows that are not `active`.

    Vocabularies of less than `LEAST` tokens are computed at once.
    """
    if logits.shape[1] < LEAST:
        return form(logits, *rows)

    def of(own: Any) -> T:
        own = jax.tree.map(lambda x: x[None], own)
        none = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), jax.eval_shape(form, *own))
        found = lax.cond(own[1][0], lambda: form(*own), lambda: none)
        return jax.tree.map(lambda y: y[0], found)

    return lax.map(of, (logits, *rows))
