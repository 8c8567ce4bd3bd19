"""The short convolution on a CPU, by a C++ kernel (`conv.cc`) that moves the tail on where it lies.

XLA joins tail and inputs, gathers the new tail from them and copies those of all convolutions together, for every row
of a call: with one active row of 16, 2.1 of a decode step's 16.8 ms (INT4, four layers of Ling-3.0-tiny's width).
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ling3.ops import conv
from ling3.ops.forms import form_of, runs
from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = 512
"""The number of channels below which XLA runs: models of toy sizes are not worth the seconds that compiling takes."""
FLOATS = (jnp.float32, jnp.bfloat16)


def unsuited(
    x: Float[Array, "batch seq channels"], tail: Float[Array, "batch back all"], oldest: Array | None = None
) -> str | None:
    """Why the kernel does not run, or None: it is missing, or the inputs do not suit, or there are few channels."""
    if oldest is not None:
        return "rows hold several texts, and the kernel reads a row as one"
    if x.dtype not in FLOATS or tail.dtype not in FLOATS:
        return f"x is {x.dtype} and the tail {tail.dtype}; the kernel takes float32 and bfloat16"
    if x.shape[2] < LEAST:
        return f"there are less than {LEAST} channels"
    return native.missing(SOURCE)


@form_of(conv.ShortConvolution)
def short_conv(x, weight, tail, length, first, oldest=None):
    """Computes `conv.short_conv` with the C++ kernel, where it suits. The outputs of padding are zeros.

    A token's bits depend on its own inputs alone, and not on how a row's tokens are split into calls.
    """
    if not runs("short_conv", unsuited(x, tail, oldest)):
        return conv.short_conv(x, weight, tail, length, first, oldest)
    return _run(first, x, weight, tail, length)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
@form_of(conv.ShortConvolution)
def _run(first, x, weight, tail, length):
    shapes = (jax.ShapeDtypeStruct(x.shape, jnp.float32), jax.ShapeDtypeStruct(tail.shape, tail.dtype))
    target = native.target(SOURCE, "short_conv")
    call = jax.ffi.ffi_call(target, shapes, vmap_method="sequential", input_output_aliases={2: 1})
    y, after = call(x, weight.astype(jnp.float32), tail, length, first=np.int64(first))
    return y, after


@_run.defjvp
def _derivative(first: int, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Any, Any]:
    plain = lambda x, weight, tail, length: conv.short_conv(x, weight, tail, length, first)  # noqa: E731
    return _run(first, *primals), jax.jvp(plain, primals, tangents)[1]
