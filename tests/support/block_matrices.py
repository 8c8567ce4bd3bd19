"""Random matrices in ggml's block types, with scales of ordinary size or any bytes at all."""

import jax.numpy as jnp
import numpy as np

from ling3.formats import GgufBlocks
from ling3.formats.gguf_blocks import BLOCKS


def drawn(block, outer, blocks, *stack, seed=0, extreme=False):
    """A matrix of `blocks` blocks a row. `extreme`: its scales are any bytes, infinities and NaN among them."""
    draw, own = np.random.default_rng(seed), BLOCKS[block]
    stored = draw.integers(0, 256, (*stack, outer, blocks, own.bytes), np.uint8)
    if not extreme:
        for place, value in own.scales.items():
            scales = draw.uniform(0.5, 2, (*stack, outer, blocks, 1)) * value * 0.02 / own.rms
            stored[..., place : place + 2] = scales.astype(np.float16).view(np.uint8)
        if not own.scales:
            stored[..., 0] = draw.integers(118, 124, stored.shape[:-1])
    return GgufBlocks(jnp.asarray(stored.reshape(*stack, outer, -1)), block)
