"""The scales of quantized matrices in a checkpoint: which tensors they are, and what those at 0 multiply."""

from collections.abc import Mapping

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from ling3.checkpoint.names import Leaf
from ling3.checkpoint.safetensors_file import DTYPES, SafetensorsFile
from ling3.layers.quantized import QuantizedMatrix


def is_scale(leaf: Leaf) -> bool:
    """True for the scales of a quantized matrix, or of a stack."""
    return isinstance(leaf.module, QuantizedMatrix) and "scale" in leaf.field and leaf.field in leaf.module.STORED


def is_of_zeros(leaf: Leaf, name: str, files: Mapping[str, SafetensorsFile]) -> bool:
    """True if what the zeros of the scales `name` multiply is 0 too, as where weights were pruned."""
    codes, scale = (field for field in leaf.module.STORED if field != "weight_shape")
    stored, scales = (_read(f"{name.rpartition('.')[0]}.{field}", files) for field in (codes, scale))
    zeros = jnp.asarray((scales.astype(np.float32) == 0).astype(scales.dtype))
    matrix = eqx.tree_at(
        lambda own: [getattr(own, codes), getattr(own, scale)], leaf.module, [jnp.asarray(stored), zeros]
    )
    return not bool(jnp.any(matrix.operand.decoded()))


def _read(name: str, files: Mapping[str, SafetensorsFile]) -> Shaped[np.ndarray, "rows columns"]:
    info = files[name].tensors[name]
    array = np.empty(info.shape, DTYPES[info.dtype])
    files[name].read(name, 0, array.reshape(1, -1), array.size)
    return array
