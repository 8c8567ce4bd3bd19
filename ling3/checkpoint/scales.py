"""The scales of quantized matrices in a checkpoint: which tensors they are, and whether scales of 0 are harmless."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ling3.checkpoint.safetensors_file import StoredTensors
from ling3.formats import QuantizedMatrix
from ling3.leaves import ArrayLeaf


def is_scale(leaf: ArrayLeaf) -> bool:
    """True if the leaf holds the scales of a quantized matrix or of a stack of them."""
    return isinstance(leaf.module, QuantizedMatrix) and "scale" in leaf.field and leaf.field in leaf.module.STORED


def is_of_zeros(leaf: ArrayLeaf, name: str, source: StoredTensors) -> bool:
    """True if scales of 0 in the tensor `name` multiply only zeros, as after pruning."""
    module = name.rpartition(".")[0]
    names = {field: f"{module}.{field}" for field in leaf.module.STORED if field != "weight_shape"} | {leaf.field: name}
    fields = [field for field, own in names.items() if own in source]
    stored = {field: source[names[field]].array() for field in fields}
    scales = stored[leaf.field]
    stored[leaf.field] = (scales.astype(np.float32) == 0).astype(scales.dtype)
    arrays = [jnp.asarray(stored[field]) for field in fields]
    matrix = eqx.tree_at(lambda own: [getattr(own, field) for field in fields], leaf.module, arrays)
    return not bool(jnp.any(matrix.decoded()))
