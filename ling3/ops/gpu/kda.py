"""One token of the KDA recurrence on a GPU: a kernel that reads each state once and writes it in place."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from ling3.ops import kda
from ling3.ops.forms import form_of, runs
from ling3.ops.gpu.triton import triton_params
from ling3.runtime.interpreted import interpreted

VALUES = 32
"""Columns of a state per program. Columns are independent, and splitting them lets a single row fill more of a GPU."""
WARPS = 4


@form_of(kda.KDAStep)
def kda_step(q, k, v, g, beta, state):
    """Computes `kda.kda_step` with the kernel if the key and value widths are powers of two."""
    odd = any(width & (width - 1) for width in state.shape[2:])
    if not runs("kda_step", "a head's width is no power of two" if odd else None):
        return kda.kda_step(q, k, v, g, beta, state)
    return fused_kda_step(q, k, v, g, beta, state, interpret=interpreted())


def fused_kda_step(
    q: Float[Array, "batch heads key"],
    k: Float[Array, "batch heads key"],
    v: Float[Array, "batch heads value"],
    g: Float[Array, "batch heads #key"],
    beta: Float[Array, "batch heads"],
    state: Float[Array, "batch heads key value"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "batch heads value"], Float[Array, "batch heads key value"]]:
    """`kda.kda_step` with one program per row, head and VALUES columns of the state. Not differentiable.

        S <- exp(g) S;    u = beta (v - S^T k);    S <- S + k u^T;    o = S^T q

    The new state reuses the old one's buffer if the caller donates it. One program computes each sum in a fixed order,
    so a row's result is bitwise independent of the other rows. On a GPU `key` and `value` must be powers of two; raises
    ValueError if `value` is larger than VALUES and no multiple of it.
    """
    batch, heads, key, value = state.shape
    width = min(VALUES, value)
    if value % width:
        raise ValueError(f"a state has {value} value channels, expected a multiple of {width}")
    channels = pl.BlockSpec((None, None, key), lambda b, h, i: (b, h, 0))
    columns = pl.BlockSpec((None, None, width), lambda b, h, i: (b, h, i))
    matrix = pl.BlockSpec((None, None, key, width), lambda b, h, i: (b, h, 0, i))
    strength = pl.BlockSpec((None, None, 1), lambda b, h, i: (b, h, 0))
    o, new = pl.pallas_call(
        _kernel,
        out_shape=(jax.ShapeDtypeStruct(v.shape, state.dtype), jax.ShapeDtypeStruct(state.shape, state.dtype)),
        grid=(batch, heads, value // width),
        in_specs=[channels, channels, columns, channels, strength, matrix],
        out_specs=(columns, matrix),
        input_output_aliases={5: 1},
        interpret=interpret,
        name="kda_step",
        compiler_params=None if interpret else triton_params(warps=WARPS),
    )(q, k, v, jnp.broadcast_to(g, k.shape), beta[..., None], state)
    return o, new


def _kernel(q, k, v, g, beta, state, o, new):
    """One head's columns: q, k, g [key]; v, o [width]; beta [1]; state, new [key, width]."""
    write = k[...][:, None]
    decayed = jnp.exp(g[...])[:, None] * state[...]
    u = beta[...] * (v[...] - jnp.sum(write * decayed, axis=0))
    written = decayed + write * u[None]
    new[...] = written
    o[...] = jnp.sum(q[...][:, None] * written, axis=0)
