"""x Wᵀ and the experts' rows on a CPU, with matrices in any format, by C++ kernels (`products.cc`).

They read a matrix once, as it is stored, and decode it in registers: a product with few rows takes little longer than
reading the matrix from memory. XLA reads a bfloat16 matrix at a third of that speed, repacks it in each call with more
than 32 rows, first writes 8-bit and 4-bit weights to memory in float32, and copies an expert's weights before it
multiplies by them.
"""

import math
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from ling3.ops.swiglu import SwiGLU
from ling3.runtime import native

SOURCE = pathlib.Path(__file__).with_suffix(".cc")
LEAST = {"dense": 2**16, "quantized": 2**13, "experts": 2**24}
"""Bytes below which calling or compiling the kernels costs more than it saves.

Of a float matrix, of a quantized matrix or stack, and of a float stack of experts."""
STEP, APART = 128, 16
"""The kernels pad a row of x to a multiple of STEP numbers, and leave APART more before the next row."""
FLOATS = (jnp.float32, jnp.bfloat16)
LAYOUTS = ("channels", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4")
"""The layouts that the kernels read: a scale for each row (`formats/channels.py`), and ggml's blocks (`blocks.h`)."""


class StoredMatrix(NamedTuple):
    """A matrix as the kernels read it, or a stack of them.

    Its numbers are float32, bfloat16, float8_e4m3fn, int8, packed int32 or packed uint8.
    """

    numbers: Shaped[Array, "*stack outer stored"]
    scale: Shaped[Array, "*stack scales groups"] | None = None
    """The scales; None for float32 and bfloat16."""
    zero_points: Int32[Array, "*stack words groups"] | None = None
    layout: str = ""
    """Its `Quantized.layout`."""

    @property
    def macro(self) -> str:
        """The macro that compiles the kernels for such matrices; empty for floats."""
        if self.layout:
            return "CHANNELS" if self.layout == "channels" else "BLOCKS"
        if self.zero_points is not None:
            return "ZEROS"
        return "" if self.scale is None else "QUANTIZED"

    @property
    def operands(self) -> tuple[Shaped[Array, "..."], ...]:
        """The arrays as the kernels take them: powers of two (E8M0) as bytes, and an empty array for None."""
        none = jnp.zeros(0, jnp.uint8)
        scale = none if self.scale is None else self.scale
        if scale.dtype == jnp.float8_e8m0fnu:
            scale = lax.bitcast_convert_type(scale, jnp.uint8)
        return self.numbers, scale, none if self.zero_points is None else self.zero_points


def unsuited(x: Float[Array, "*rows width"], matrix: StoredMatrix, inner: int, least: int) -> str | None:
    """Why the kernels do not run, or None: they are missing, cannot read the matrix, or it has less than `least` bytes.

    x must be float32 or bfloat16, and in the matrix's dtype if that is not quantized; a scale must cover 32, 64, 128, …
    numbers or a full row; a layout must be one of `LAYOUTS`. `inner` is the number of columns of W, which may differ
    from x's: the last of the experts' three stacks is multiplied by the result of the others, not by x.
    """
    numbers, scale, layout = matrix.numbers, matrix.scale, matrix.layout
    if x.dtype not in FLOATS:
        return f"x is {x.dtype}, and the kernel takes float32 and bfloat16"
    if x.size == 0 or numbers.size == 0 or numbers.size * numbers.dtype.itemsize < least:
        return f"a side is empty, or the matrix has less than {least:,} bytes"
    if scale is None and x.dtype != numbers.dtype:
        return f"x is {x.dtype} and the matrix {numbers.dtype}"
    if layout and layout not in LAYOUTS:
        return f"the kernel does not read {layout}"
    if scale is not None and not layout and not _is_readable(numbers, scale, inner):
        return "the kernel does not read such groups, or such scales"
    return native.missing(SOURCE, matrix.macro)


def _is_readable(
    numbers: Shaped[Array, "*stack outer stored"], scale: Shaped[Array, "*stack scales groups"], inner: int
) -> bool:
    """True if the kernels support the scales' groups and dtype."""
    if numbers.dtype != jnp.int32:  # FP8 and MXFP4 have one block size each
        return True
    groups = scale.shape[-1]
    group, rest = divmod(inner, groups)
    # The kernels tell 4 bits from 8 by the bytes of a row, which are ambiguous for fewer than 8 numbers.
    known = inner >= 8 and scale.dtype in (*FLOATS, jnp.float16)
    return known and (groups == 1 or (rest == 0 and group >= 32 and group & (group - 1) == 0))


def product(x: Float[Array, "*stack rows inner"], matrix: StoredMatrix) -> Float32[Array, "*stack rows outer"]:
    """x Wᵀ, summed in float32, for inputs that are not `unsuited`. A row's result is bitwise independent of the others.

    Rows of zeros, such as padding, give zeros at almost no cost; W must be finite.
    """
    name = native.target(SOURCE, "product", matrix.macro)
    *every, inner = x.shape
    shapes = (jax.ShapeDtypeStruct((*every, matrix.numbers.shape[-2]), jnp.float32), _laid(math.prod(every), inner))
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    return call(x, *matrix.operands, block=matrix.layout)[0]


def expert_rows(
    x: Float[Array, "tokens hidden"],
    order: Int32[Array, " rows"],
    starts: Int32[Array, " experts"],
    counts: Int32[Array, " experts"],
    gate: StoredMatrix,
    up: StoredMatrix,
    down: StoredMatrix,
    swiglu: SwiGLU,
) -> Float32[Array, "rows hidden"]:
    """down(swiglu(gate x, up x)) of each row `token · top_k + j` by its expert; zeros for rows without one.

    No stack may be `unsuited`. All must have one macro, and `gate` and `up` one format; but types of blocks may differ.
    `order` has the rows sorted by expert, rows without one last; expert e has `counts[e]` rows from `starts[e]` on.
    Sums are in float32; between the two products a row has x's dtype. A row's result is bitwise independent of the
    other rows.
    """
    name = native.target(SOURCE, "experts", gate.macro)
    (tokens, hidden), rows, intermediate = x.shape, order.shape[0], gate.numbers.shape[1]
    shapes = (jax.ShapeDtypeStruct((rows, hidden), jnp.float32), _laid(tokens, hidden), _laid(rows, intermediate))
    call = jax.ffi.ffi_call(name, shapes, vmap_method="sequential")
    limits = {"limit": np.float32(swiglu.limit), "limit_first": swiglu.limit_first}
    layouts = {"gate_block": gate.layout, "up_block": up.layout, "down_block": down.layout}
    return call(x, order, starts, counts, *gate.operands, *up.operands, *down.operands, **limits, **layouts)[0]


def _laid(rows: int, inner: int) -> jax.ShapeDtypeStruct:
    """The shape of the kernel's copy of x's rows, which it lays out in the order in which it decodes W."""
    return jax.ShapeDtypeStruct((rows, -(-inner // STEP) * STEP + APART), jnp.float32)
