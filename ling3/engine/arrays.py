"""The type of fields that hold NumPy arrays on the host, and JAX arrays once they are put on the device."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

if TYPE_CHECKING:
    AnyArray = Any
else:
    AnyArray = jax.Array | np.ndarray
