"""The exam of a skill: finds the right answers without generating them token by token."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32

from ling3.model import CausalLM
from ling3.text.tokenizer import Tokenizer
from ling3.train.nano.skills.skill import Text

TOKENS = 4096
"""Approximate number of tokens in a batch."""


def padded(length: int) -> int:
    """The row length for a text of `length` tokens: 128, 256, or a multiple of 512, so that few shapes compile."""
    return next((size for size in (128, 256) if length <= size), -(-length // 512) * 512)


@eqx.filter_jit
def _right(
    model: CausalLM, tokens: Int32[Array, "batch seq"], answers: Bool[Array, "batch seq"]
) -> Bool[Array, " batch"]:
    """For each row, True if every token of its answer is the likeliest after those before it."""
    best = jnp.argmax(model(tokens)[:, :-1], axis=-1)
    return jnp.all((best == tokens[:, 1:]) | ~answers[:, 1:], axis=1)


def right_answers(model: CausalLM, tokenizer: Tokenizer, texts: Sequence[Text]) -> list[bool]:
    """For each text, True if its answer is the greedy continuation of its prompt.

    One pass over prompt and answer is enough: as long as every token so far is the likeliest, greedy decoding has read
    the same text. Prompt and answer are tokenized separately, as in generation.
    """
    encoded = [(tokenizer.encode(t.prompt), tokenizer.encode(t.answer, add_special_tokens=False)) for t in texts]
    lengths = [padded(len(prompt) + len(answer)) for prompt, answer in encoded]
    right: dict[int, bool] = {}
    for length in sorted(set(lengths)):
        own, rows = [i for i in range(len(texts)) if lengths[i] == length], -(-TOKENS // length)
        for first in range(0, len(own), rows):
            chosen = own[first : first + rows]
            tokens, answers = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
            for row, i in enumerate(chosen):
                prompt, answer = encoded[i]
                end = len(prompt) + len(answer)
                tokens[row, :end], answers[row, len(prompt) : end] = prompt + answer, True
            found = np.asarray(_right(model, jnp.asarray(tokens), jnp.asarray(answers)))
            right.update(zip(chosen, found.tolist()))
    return [right[i] for i in range(len(texts))]
