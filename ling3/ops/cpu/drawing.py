"""Drawing a token of each row of logits on a CPU, by a C++ kernel (`drawing.cc`).

The kernel orders only the likeliest tokens, as many as the filters need, and makes noise only for tokens that it could
let win. XLA sorts the vocabulary twice for `top_k` or `top_p`, and makes noise for all of it.
"""

import pathlib

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from ling3.ops import drawing as plain
from ling3.ops.cpu.logits import LEAST, for_active_rows
from ling3.ops.drawing import Logits
from ling3.ops.forms import form_of, runs
from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")


def unsuited(logits: Logits, key: Key[Array, " batch"]) -> str | None:
    """Why the kernel does not run, or None: it is missing, the vocabulary small, or the random bits another kind's."""
    if logits.shape[1] < LEAST:
        return f"the vocabulary has less than {LEAST:,} tokens"
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if jax.random.key_impl(key) != "threefry2x32" or not partitionable:
        return "the kernel makes only JAX's default random bits, of a partitionable threefry2x32"
    return native.missing(SOURCE)


@form_of(plain.DrawToken)
def draw(logits, active, key, temperature, top_k, top_p, min_p):
    """Computes `drawing.draw` with the C++ kernel, where it suits.

    A row's id does not depend on the other rows or on threads. It is the plain form's, but where two ids are equally
    good within the last bits of a sum or a logarithm.
    """
    if not runs("draw", unsuited(logits, key)):
        return xla_draw(logits, active, key, temperature, top_k, top_p, min_p)
    shape = jax.ShapeDtypeStruct(active.shape, jnp.int32)
    call = jax.ffi.ffi_call(native.target(SOURCE, "draw"), shape, vmap_method="sequential")
    return call(logits, active, jax.random.key_data(key), temperature, top_k, top_p, min_p)


@form_of(plain.DrawToken)
def xla_draw(logits, active, key, temperature, top_k, top_p, min_p):
    """`drawing.draw` by XLA alone, one row after another: rows that are not active cost nothing."""
    return for_active_rows(plain.draw, logits, active, key, temperature, top_k, top_p, min_p)
