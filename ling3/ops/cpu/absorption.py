"""MLA's absorbed products on a CPU, by the C++ kernels in `attention.cc`, and for quantized halves by `products.cc`.

They copy no weights, a row's result is bitwise independent of the other rows, and rows of zeros cost nothing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float, Float32

from ling3.ops import absorption
from ling3.ops.absorption import LatentHalves
from ling3.ops.cpu import attention, matmul
from ling3.ops.forms import form_of, runs
from ling3.ops.precision import Accumulation, Wide
from ling3.ops.quantized import Quantized
from ling3.runtime import native


def unsuited(
    x: Float[Array, "batch heads inner"], weight: Float[Array, "channels latent"], sums: Accumulation = "float32"
) -> str | None:
    """Why the kernels do not run, or None: they are missing, or the dtypes do not suit, or the latent is small."""
    if x.dtype != weight.dtype or x.dtype not in (jnp.float32, jnp.bfloat16) or sums != "float32":
        return (
            f"x is {x.dtype}, the matrix {weight.dtype} and sums {sums}; the kernel sums float32 or bfloat16 in float32"
        )
    if x.size == 0 or weight.shape[1] < attention.LEAST:
        return f"there is no row, or a latent has less than {attention.LEAST} numbers"
    return native.missing(attention.SOURCE)


@form_of(absorption.LatentQueries)
def latent_queries(q, weight, sums: Accumulation = "float32"):
    """Computes `absorption.latent_queries` with the C++ kernel, where it suits."""
    if isinstance(weight, LatentHalves):
        return _stacked(q, weight.keys, sums)
    if not runs("latent_queries", unsuited(q, weight, sums)):
        return absorption.latent_queries(q, weight, sums)
    return _queries(q, weight)


@form_of(absorption.LatentValues)
def latent_values(summed, weight, value, sums: Accumulation = "float32"):
    """Computes `absorption.latent_values` with the C++ kernel, where it suits."""
    if isinstance(weight, LatentHalves):
        return _stacked(summed, weight.values, sums)
    if not runs("latent_values", unsuited(summed, weight, sums)):
        return absorption.latent_values(summed, weight, value, sums)
    return _values(value, summed, weight)


def _stacked(
    x: Float[Array, "batch heads inner"], half: Quantized, sums: Accumulation
) -> Wide[Array, "batch heads outer"]:
    """The product of each head's rows with its matrix of a half."""
    return rearrange(matmul.product(rearrange(x, "b h i -> h b i"), half, sums), "h b o -> b h o")


@jax.custom_jvp
def _queries(
    q: Float[Array, "batch heads nope"], weight: Float[Array, "channels latent"]
) -> Float32[Array, "batch heads latent"]:
    return _per_head("absorb_keys", q, weight, 0, q.shape[2], weight.shape[1])


@_queries.defjvp
def _derivative_of_queries(primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    return _queries(*primals), jax.jvp(absorption.latent_queries, primals, tangents)[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _values(
    value: int, summed: Float[Array, "batch heads latent"], weight: Float[Array, "channels latent"]
) -> Float32[Array, "batch heads {value}"]:
    return _per_head("expand_values", summed, weight, weight.shape[0] // summed.shape[1] - value, value, value)


@_values.defjvp
def _derivative_of_values(value: int, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> tuple[Array, Array]:
    plain = lambda summed, weight: absorption.latent_values(summed, weight, value)  # noqa: E731
    return _values(value, *primals), jax.jvp(plain, primals, tangents)[1]


def _per_head(
    handler: str,
    x: Float[Array, "batch heads inner"],
    weight: Float[Array, "channels latent"],
    first: int,
    count: int,
    outer: int,
) -> Float32[Array, "batch heads {outer}"]:
    """Calls the kernel `handler`, which uses rows [first, first + count) of each head's part of `weight`."""
    shape = jax.ShapeDtypeStruct((*x.shape[:2], outer), jnp.float32)
    call = jax.ffi.ffi_call(native.target(attention.SOURCE, handler), shape, vmap_method="sequential")
    return call(x, weight, first=np.int64(first), count=np.int64(count))
