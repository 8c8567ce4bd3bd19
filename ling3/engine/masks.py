"""What a decode call is told of its rows' grammars: the tokens that must follow, and a mask for the one after these."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from ling3.engine.grammars import WORD, words
from ling3.engine.settings import DECODE_STEPS


class Masks(eqx.Module):
    """How each row of a call goes on, `count` tokens at most; a row with none is unused.

    Bit i of word w of a mask stands for token 32·w + i, as llguidance has it.
    """

    newest: Int32[Array, " rows"]  # the row's last token, not yet in the caches
    count: Int32[Array, " rows"]
    forced: Int32[Array, "rows steps"]  # the token of each step; -1 where it is chosen
    allowed: UInt32[Array, "rows words"]  # for a token that is chosen

    @staticmethod
    def build(
        rows: int,
        vocab: int,
        places: Sequence[int],
        plans: Sequence[tuple[int, Sequence[int], np.ndarray | None]],
        put: Callable[[Any], Any] = jax.device_put,
    ) -> "Masks":
        """For the rows at `places` one plan each: the newest token, what is forced, and the mask of one more, if any.

        `put` takes arrays of the host to the device.
        """
        newest, count = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        forced = np.full((rows, DECODE_STEPS), -1, np.int32)
        allowed = np.zeros((rows, words(vocab)), np.uint32)
        for row, (token, tokens, mask) in zip(places, plans, strict=True):
            newest[row], count[row] = token, len(tokens) + (mask is not None)
            forced[row, : len(tokens)] = tokens
            if mask is not None:
                allowed[row] = mask
        return Masks(*put((newest, count, forced, allowed)))

    def at(self, step: Int32[Array, ""]) -> UInt32[Array, "rows words"]:
        """The mask of each row's token of a step; one that is forced is the only one."""
        forced = jnp.take(self.forced, step, axis=1)[:, None]
        word = jnp.arange(self.allowed.shape[1], dtype=jnp.int32)[None]
        bit = jnp.left_shift(jnp.uint32(1), (forced % WORD).astype(jnp.uint32))
        return jnp.where(forced < 0, self.allowed, jnp.where(word == forced // WORD, bit, jnp.uint32(0)))


def masked(
    logits: Float32[Array, "batch vocab"], allowed: UInt32[Array, "batch words"]
) -> Float32[Array, "batch vocab"]:
    """The logits of the tokens whose bits are set, and -inf for the others."""
    return jnp.where(bits(allowed, logits.shape[1]), logits, -jnp.inf)


def bits(allowed: UInt32[Array, "batch words"], vocab: int) -> Bool[Array, "batch vocab"]:
    """A mask's bits, one for each token."""
    shifted = allowed[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None]
    return (shifted & 1).astype(bool).reshape(allowed.shape[0], -1)[:, :vocab]
