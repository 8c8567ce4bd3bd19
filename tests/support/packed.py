"""Packed integers as a product's operand, of their words and scales alone."""

import jax.numpy as jnp

from ling3.formats import PackedIntegers


def packed_integers(words, scale, bits, padding=0, zeros=None):
    """The matrix, or stack, whose rows end `padding` numbers before their last words do; `zeros` are packed too."""
    *stack, outer, across = words.shape
    shape = jnp.broadcast_to(jnp.asarray([outer, across * 32 // bits - padding], jnp.int32), (*stack, 2))
    own = {"weight_packed": words, "weight_scale": scale, "weight_shape": shape, "weight_zero_point": zeros}
    return PackedIntegers(**own, bits=bits, padding=padding)
