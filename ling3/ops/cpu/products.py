"""x Wᵀ and the experts' rows on a CPU, with matrices in any format, by kernels in C++ (`products.cc`).

They read a matrix once, as it is stored, and decode it in registers: a product with few rows takes little longer than
reading so many bytes. XLA reads a bfloat16 matrix at a third of that pace, packs one anew for each call with more
than 32 rows, writes and reads the numbers of 8 and 4 bits in float32 first, and copies an expert's weights before it
multiplies by them.
"""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from ling3.ops.swiglu import SwiGLU
from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = {"dense": 2**21, "quantized": 2**18, "experts": 2**24}
"""Bytes of a matrix, or of a stack, below which a call costs more than it saves, or compiling the kernels takes longer.

Of a matrix in floats, of any in fewer bits, and of a layer's experts in floats."""
STEP, APART = 128, 16
"""The kernels lay out a row of x in a multiple of so many numbers, and so many numbers from the next one."""
FLOATS = (jnp.float32, jnp.bfloat16)

Arrays = tuple[Shaped[Array, "..."], Shaped[Array, "..."] | None]
"""A matrix's numbers `[*stack, outer, stored]`, in float32, bfloat16, float8_e4m3fn, packed int32 or packed uint8.

And its scales; floats have none."""


def unsuited(
    x: Float[Array, "rows width"],
    numbers: Shaped[Array, "*stack outer stored"],
    scale: Shaped[Array, "*stack scales groups"] | None,
    inner: int,
    least: int,
) -> str | None:
    """Why the kernels do not run: they are missing, or cannot read the matrix, or it has less than `least` bytes.

    x is float32 or bfloat16, and has the dtype of a matrix in floats; groups are of 32, 64, 128, … numbers or whole
    rows. `inner` is how many numbers a row of the matrix has. x need not have as many: of experts' three stacks the
    last is multiplied with what the others give.
    """
    if x.dtype not in FLOATS:
        return f"x is {x.dtype}, and the kernel takes float32 and bfloat16"
    if x.size == 0 or numbers.size == 0 or numbers.size * numbers.dtype.itemsize < least:
        return f"a side is empty, or the matrix has less than {least:,} bytes"
    if scale is None and x.dtype != numbers.dtype:
        return f"x is {x.dtype} and the matrix {numbers.dtype}"
    if scale is not None and not _is_readable(numbers, scale, inner):
        return "the kernel does not read such groups, or such scales"
    return native.missing(SOURCE, _macro(scale))


def _is_readable(
    numbers: Shaped[Array, "*stack outer stored"], scale: Shaped[Array, "*stack scales groups"], inner: int
) -> bool:
    """True for groups that the kernels know."""
    if numbers.dtype != jnp.int32:  # FP8 and MXFP4 have one size of block each
        return True
    groups = scale.shape[-1]
    group, rest = divmod(inner, groups)
    # A word has all numbers of a shorter row, and its size does not tell 4 bits from 8.
    known = inner >= 8 and scale.dtype in (*FLOATS, jnp.float16)
    return known and (groups == 1 or (rest == 0 and group >= 32 and group & (group - 1) == 0))


def product(
    x: Float[Array, "rows inner"],
    numbers: Shaped[Array, "outer stored"],
    scale: Shaped[Array, "scales groups"] | None = None,
) -> Float32[Array, "rows outer"]:
    """x Wᵀ where it is not `unsuited`, summed in float32. A row's bits depend only on its own values and the matrix.

    Rows of zeros, as padding is, have zeros and cost nothing; the numbers of W are finite.
    """
    name = native.target(SOURCE, "product", _macro(scale))
    rows, inner = x.shape
    shapes = (jax.ShapeDtypeStruct((rows, numbers.shape[0]), jnp.float32), _laid(rows, inner))
    return jax.ffi.ffi_call(name, shapes, vmap_method="sequential")(x, numbers, _bytes(scale))[0]


def expert_rows(
    x: Float[Array, "tokens hidden"],
    order: Int32[Array, " rows"],
    starts: Int32[Array, " experts"],
    counts: Int32[Array, " experts"],
    gate: Arrays,
    up: Arrays,
    down: Arrays,
    swiglu: SwiGLU,
) -> Float32[Array, "rows hidden"]:
    """down(swiglu(gate x, up x)) of each row `token · top_k + j` by its expert, where no stack is `unsuited` and all
    have one format; zeros for no expert.

    `order` has the rows sorted by expert, rows without one last; expert e has `counts[e]` rows from `starts[e]` on.
    Sums are in float32; between the two products a row has x's dtype. A row's bits depend only on its own values and
    its expert's weights.
    """
    name = native.target(SOURCE, "experts", _macro(gate[1]))
    (tokens, hidden), rows, intermediate = x.shape, order.shape[0], gate[0].shape[1]
    shapes = (jax.ShapeDtypeStruct((rows, hidden), jnp.float32), _laid(tokens, hidden), _laid(rows, intermediate))
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    arrays = (a for numbers, scale in (gate, up, down) for a in (numbers, _bytes(scale)))
    limits = {"limit": np.float32(swiglu.limit), "limit_first": swiglu.limit_first}
    return call(x, order, starts, counts, *arrays, **limits)[0]


def _macro(scale: Array | None) -> str:
    """The compiler's flags for kernels of matrices with such scales; none for floats."""
    return "" if scale is None else "QUANTIZED"


def _laid(rows: int, inner: int) -> jax.ShapeDtypeStruct:
    """The kernel's copy of rows, in the order in which it decodes."""
    return jax.ShapeDtypeStruct((rows, -(-inner // STEP) * STEP + APART), jnp.float32)


def _bytes(scale: Shaped[Array, "*stack scales groups"] | None) -> Shaped[Array, "..."]:
    """Scales, powers of two as the bytes that they are, and nothing for none."""
    if scale is None:
        return jnp.zeros(0, jnp.uint8)
    return lax.bitcast_convert_type(scale, jnp.uint8) if scale.dtype == jnp.float8_e8m0fnu else scale
