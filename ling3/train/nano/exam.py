"""Nano's exams: held-out word problems, asked alone, after four worked examples, and in a chat; and other skills."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from ling3.generate import generate
from ling3.model import CausalLM
from ling3.text.tokenizer import Tokenizer
from ling3.train.loop import Batch
from ling3.train.nano.problems import ask, chat_prompt, exam, last_number, worked_examples
from ling3.train.nano.skills.skill import Text


def exact_answers(
    model: CausalLM, tokenizer: Tokenizer, prompts: Sequence[str], answers: Sequence[int], batch: int = 50
) -> list[bool]:
    """For each prompt, True if its greedy continuation ends with the right number."""
    given = []
    for first in range(0, len(prompts), batch):
        ids = [tokenizer.encode(prompt) for prompt in prompts[first : first + batch]]
        replies = generate(model, ids, max_tokens=64, temperature=0.0)
        given += [last_number(tokenizer.decode(reply)) for reply in replies]
    return [number == answer for number, answer in zip(given, answers, strict=True)]


def examine(model: CausalLM, tokenizer: Tokenizer, count: int) -> dict[str, float]:
    """The share of exact answers to `count` held-out problems: alone, after four worked examples, and in a chat."""
    asked = exam(count)
    answers = [problem.answer for problem in asked]
    prompts = {
        "alone": [ask(problem) for problem in asked],
        "after_four_examples": [ask(p, shown) for p, shown in zip(asked, worked_examples(count), strict=True)],
        "chat": [chat_prompt(problem) for problem in asked],
    }
    return {name: float(np.mean(exact_answers(model, tokenizer, text, answers))) for name, text in prompts.items()}


@eqx.filter_jit
def solved(model: CausalLM, batch: Batch) -> Bool[Array, " batch"]:
    """For each row, True if every learned token is the likeliest one: greedy decoding would reproduce the solution."""
    best = jnp.argmax(model(batch.tokens)[:, :-1], axis=-1)
    return jnp.all((best == batch.tokens[:, 1:]) | (batch.weights[:, 1:] == 0), axis=1)


PADDING, TOKENS = 128, 4096
"""Rows of an exam have a multiple of PADDING tokens, and a batch about TOKENS of them: few shapes to compile."""


def right_answers(model: CausalLM, tokenizer: Tokenizer, texts: Sequence[Text]) -> list[bool]:
    """For each text, True if its answer is the greedy continuation of its prompt, in one pass over the whole text."""
    answers: dict[int, bool] = {}
    encoded = [(tokenizer.encode(t.prompt), tokenizer.encode(t.answer, add_special_tokens=False)) for t in texts]
    lengths = [-(-(len(prompt) + len(answer)) // PADDING) * PADDING for prompt, answer in encoded]
    for length in sorted(set(lengths)):
        own, rows = [i for i in range(len(texts)) if lengths[i] == length], -(-TOKENS // length)
        for first in range(0, len(own), rows):
            chosen = own[first : first + rows]
            tokens, weights = np.zeros((2, rows, length))
            for row, i in enumerate(chosen):
                prompt, answer = encoded[i]
                end = len(prompt) + len(answer)
                tokens[row, :end], weights[row, len(prompt) : end] = prompt + answer, 1
            right = solved(model, Batch(jnp.asarray(tokens, jnp.int32), jnp.asarray(weights, jnp.float32)))
            answers.update(zip(chosen, np.asarray(right).tolist()))
    return [answers[i] for i in range(len(texts))]
