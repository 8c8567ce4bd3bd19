"""The limits of the AFD operators, and the checks of arguments against them.

Each check raises a ValueError that names the argument or field, also under tracing. The public operators are therefore
`no_type_check`: otherwise the package's type checker would raise a TypeCheckError first.
"""

import operator
from collections.abc import Sequence
from typing import Any, no_type_check

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

SESSIONS = 1024
MICRO_BATCHES = 64
TOP_K = 64
SLOTS = TOP_K + 1
"""Slots of a token: its top-k and the shared experts."""
EXPERTS = 8192
"""Experts of a card, over all layers."""
LARGEST = 2**31 - 1
"""The largest int32."""
ALIGNMENT = 512
"""The bytes of a slot are a multiple of this."""


@no_type_check
def integer(name, value, least, most=LARGEST) -> int:
    """`value` as a static int; raises ValueError unless it is in [least, most]."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(f"{name} is traced, expected a static int: name it in jax.jit's static_argnames")
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        found = _shown(value) if number is None else number
        raise ValueError(f"{name} is {found}, expected a whole number in [{least}, {most}]")
    return number


@no_type_check
def scalar(name, value, least=-LARGEST - 1, most=LARGEST) -> jax.Array | np.ndarray | np.generic:
    """`value`, which may be a Python int, as an int32 scalar; unless traced, it must be in [least, most]."""
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return np.int32(integer(name, value, least, most))
    # A Python int becomes a weakly typed int64 under jit in 64-bit mode.
    weak = getattr(value, "weak_type", False) and jnp.issubdtype(value.dtype, jnp.integer)
    array(name, value, value.dtype if weak else jnp.int32, ())
    if not isinstance(value, jax.core.Tracer) and (least, most) != (-LARGEST - 1, LARGEST):
        integer(name, value, least, most)
    return jax.lax.convert_element_type(value, jnp.int32) if weak else value


@no_type_check
def array(name, value, dtype, shape: Sequence[int | str], why: str = "") -> jax.Array | np.ndarray | np.generic:
    """`value`, if it has this shape and dtype: one dtype, any of a tuple, or for None any floating one of full bytes.

    A str in `shape` names a dimension of any size.
    """
    axes = ", ".join(map(str, shape))
    dtypes = () if dtype is None else tuple(map(jnp.dtype, dtype if isinstance(dtype, tuple) else (dtype,)))
    expected = f"{' or '.join(one.name for one in dtypes) or 'floating numbers'} [{axes}]"
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        raise ValueError(f"{name} is {_shown(value)}, expected an array, {expected}")
    if not dtypes:
        float_dtype(name, value.dtype)
    elif value.dtype not in dtypes:
        raise ValueError(f"{name} has the dtype {value.dtype}, expected {expected}")
    if len(value.shape) != len(shape) or any(
        found != size for found, size in zip(value.shape, shape) if not isinstance(size, str)
    ):
        raise ValueError(f"{name} has the shape {tuple(value.shape)}, expected [{axes}]{why}")
    return value


@no_type_check
def float_dtype(name, dtype) -> np.dtype:
    """`dtype`, if it is a floating one of at least 8 bits; float64 in 64-bit mode only."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating) or jnp.finfo(found).bits < 8:
        raise ValueError(f"{name} has the dtype {dtype}, expected a floating one of at least 8 bits")
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(
            f"{name} has the dtype {found}, which needs 64-bit mode: jax.config.update('jax_enable_x64', True)"
        )
    return found


def _shown(value: Any) -> str:
    return f"a {type(value).__name__}" if hasattr(value, "__dict__") else repr(value)[:80]
