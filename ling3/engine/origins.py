"""The origin of an engine's snapshots: its model, and the settings on which the last bits depend."""

import hashlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped, UInt32

from ling3.adapters.adapter import Adapter, scales
from ling3.engine.settings import EngineSettings
from ling3.engine.shapes import Shapes
from ling3.execution import Execution
from ling3.model import CausalLM


def origin(model: CausalLM, settings: EngineSettings, shapes: Shapes, execution: Execution) -> Mapping[str, Any]:
    """Everything that a snapshot's bits depend on: the weights, and the settings that may change last bits."""
    names = ("page_size", "chunked_prefill_size", "token_paddings", "decode_rows", "decode_steps", "batch_invariant")
    found = {"model": checksum(model), "cache_dtype": settings.cache_dtype, "execution": execution}
    if shapes.window is not None:  # the pages kept for a window are rounded to steps of the known prefixes
        found["prefix_step"] = None if shapes.grid is None else shapes.grid.step
    if settings.speculation == "mtp":  # whose layer has pages too
        found["speculation"] = "mtp"
    return found | {name: getattr(settings, name) for name in names}


def checksum(model: CausalLM) -> str:
    """A hash of a model's config, of a checksum of each array of its weights, which reads them once, and of scales.

    Leaves out multi-token-prediction layers, on which no answer depends.
    """
    parts = checksums((model.model, model.lm_head))
    return hashlib.sha256(repr((model.config, parts, *scales(model))).encode()).hexdigest()


def checksum_of_adapter(adapter: Adapter) -> str:
    """A hash of an adapter's modules, of a checksum of each array of its updates, and of their scales."""
    known = [(name, adapter.scale(name)) for name in sorted(adapter.modules)]
    return hashlib.sha256(repr((known, checksums(adapter))).encode()).hexdigest()


def checksums(tree: Any) -> list[tuple[tuple[int, ...], str, int]]:
    """The shape, the dtype and a checksum of each array of a tree, which has no other leaves."""
    leaves = jax.tree.leaves(tree)
    sums = jax.device_get([_sum(leaf) for leaf in leaves])
    return [(leaf.shape, str(leaf.dtype), int(one)) for leaf, one in zip(leaves, sums, strict=True)]


@jax.jit
def _sum(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """Σ_i (2i + 1) · word_i modulo 2^32, which changes if any one number changes."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(8 * x.dtype.itemsize, 32)}"))
    words = x.reshape(-1).astype(jnp.uint32)
    return jnp.sum(words * (2 * lax.iota(jnp.uint32, words.shape[0]) + 1), dtype=jnp.uint32)
